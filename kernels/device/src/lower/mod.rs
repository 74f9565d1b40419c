//! Lowers a schedule to its device program.
//!
//! A task is lowered rank by rank, but only along the axes that affect it: axes that split its tensors unevenly, and all axes
//! that split them if a record depends on the place of a rank's part, as positions of tokens do. So the time grows with the
//! kinds of ranks and not with their number.

mod axes;
mod buffers;
mod context;
pub mod options;
mod resident;
mod tasks;
mod transfer;

use ithaca_ir::boxes::Side;
use ithaca_ir::entity::{Arena, Entity};
use ithaca_ir::layout::At;
use ithaca_ir::schedule::{
    self, Content, FrameId, FrameOutput, Schedule, Stream, Streams, Task, Work as TaskWork, used_streams,
};
use ithaca_ir::timeline;

use crate::error::LowerError;
use crate::merge::Tables;
use crate::program::{DeviceProgram, Frame, Output, Step, Wait, Work};
use buffers::{Alignments, Sources};
use context::{In, Lowering};
pub use options::{Checks, Options};

/// The device program of a verified schedule.
///
/// # Errors
/// [`LowerError::Unsupported`] for an operation that no kernel computes, [`LowerError::Invalid`] for an inconsistent schedule;
/// both with their task.
pub fn lower(schedule: &Schedule, options: Options) -> Result<DeviceProgram, LowerError> {
    let runs = schedule.layers_by_place();
    if schedule.main().is_none() {
        return LowerError::invalid(format!("`{}` has no frames", schedule.name));
    }
    let mut n_events = 0;
    let mut first_events = Vec::with_capacity(schedule.frames.len());
    for (frame, runs) in schedule.frames.values().zip(&runs) {
        first_events.push(n_events);
        n_events += if runs.is_empty() { 0 } else { frame.n_events };
    }
    let mut lowering = Lowering {
        schedule,
        options,
        alignments: Alignments::of(schedule)?,
        sources: Sources::of(schedule, &runs)?,
        first_events,
        tables: Tables::default(),
        workspace: 0,
    };
    let both = Streams::only(Stream::Compute).and(Streams::only(Stream::Comm));
    let used = used_streams(&schedule.frames);
    let mut frames = Arena::new();
    for ((id, frame), runs) in schedule.frames.iter().zip(runs) {
        frames.push(Frame {
            name: frame.name.clone(),
            n_arguments: frame.n_arguments,
            n_results: frame.outputs.len(),
            bytes: frame.bytes,
            joined_streams: match used[id.index()] {
                streams if schedule.main() == Some(id) => streams.and(both),
                streams if streams.communicates() => streams,
                _ => Streams::default(),
            },
            steps: if runs.is_empty() { Vec::new() } else { lowering.frame(id)? },
            sources: lowering.sources.of_frame(id),
            runs,
        });
    }
    let outputs = lowering.outputs()?;
    let stages = schedule.stages();
    let arenas = if stages.is_empty() {
        vec![(None, schedule.arena_bytes())]
    } else {
        stages.into_iter().map(|at| (Some(at), schedule.arena_bytes_at(at))).collect()
    };
    Ok(DeviceProgram {
        name: schedule.name.clone(),
        mesh: schedule.space.mesh.clone(),
        frames,
        arenas,
        counts: transfer::bytes_of_counts(schedule),
        workspace: lowering.workspace.cast_unsigned(),
        n_events,
        sources: lowering.sources.into_program(schedule),
        tables: lowering.tables.all,
        outputs,
    })
}

impl<'a> Lowering<'a> {
    fn frame(&mut self, id: FrameId) -> Result<Vec<Step>, LowerError> {
        let frame = &self.schedule.frames[id];
        let of = In { id, frame };
        let mut steps = Vec::with_capacity(frame.tasks.len());
        for number in 0..frame.tasks.len() {
            steps.push(self.step(of, number).map_err(|cause| LowerError::Task {
                frame: frame.name.clone(),
                task: number,
                cause: Box::new(cause),
            })?);
        }
        Ok(steps)
    }

    fn step(&mut self, of: In<'a>, number: usize) -> Result<Step, LowerError> {
        let task = &of.frame.tasks[number];
        let (title, kind) = timeline::title(of.frame, number);
        let first_event = self.first_events[of.id.index()];
        let mut waits = Vec::with_capacity(task.waits.len());
        for &event in &task.waits {
            let recorded = of.frame.tasks[..number].iter().rfind(|t| t.records == Some(event));
            let Some(recorded) = recorded else {
                return LowerError::invalid(format!(
                    "it waits for event {event:?}, which no task before it records"
                ));
            };
            waits.push(Wait { event: first_event + event.index(), places: places(of.frame, recorded) });
        }
        if task.records.is_some_and(|event| event.index() >= of.frame.n_events) {
            return LowerError::invalid("a task records an event that is not declared");
        }
        let work = match &task.work {
            TaskWork::Call { .. } => Work::Call(self.call(of, task)?),
            TaskWork::Compute(op) => Work::Records(self.compute(of, task, op)?),
            TaskWork::Copy => Work::Records(self.copy(of, task)?),
            TaskWork::Pack(transfer) => Work::Records(self.pack(of, task, transfer, Side::Sent)?),
            TaskWork::Unpack(transfer) => Work::Records(self.pack(of, task, transfer, Side::Received)?),
            TaskWork::Exchange(transfer) => Work::Records(self.exchange(of, task, transfer)?),
        };
        Ok(Step {
            title,
            kind,
            stream: task.stream,
            places: places(of.frame, task),
            waits,
            work,
            records: task.records.map(|event| first_event + event.index()),
            checks: self.checks(of, task)?,
        })
    }

    /// The results of `main`.
    fn outputs(&self) -> Result<Vec<Output>, LowerError> {
        let Some(main) = self.schedule.main() else { return Ok(Vec::new()) };
        let frame = &self.schedule.frames[main];
        let of = In { id: main, frame };
        let output = |(i, output): (usize, &FrameOutput)| {
            let name = output.name.clone().unwrap_or_else(|| i.to_string());
            let Some(Content::Tensor(ty)) = frame.buffers.get(output.buffer).map(|b| &b.content) else {
                return LowerError::invalid(format!("output `{name}` is a wire buffer"));
            };
            let address = self.locate(of, output.buffer)?.address();
            Ok(Output {
                name,
                ty: ty.as_ref().clone(),
                address,
                resident: resident::of_output(self.space(), ty),
            })
        };
        frame.outputs.iter().enumerate().map(output).collect()
    }
}

/// The places whose ranks run a task; `None` for all ranks.
fn places(frame: &schedule::Frame, task: &Task) -> Option<Vec<At>> {
    let mut places = frame.places(task).into_iter().collect::<Option<Vec<At>>>()?;
    places.sort_unstable();
    places.dedup();
    Some(places)
}
