//! From a schedule to its device program.
//!
//! A task is lowered for one rank at a time, for the ranks along the axes that matter to it alone: those by which its tensors
//! are split unevenly, and where a record depends on the place of a rank's part, as positions of tokens do, those by which they
//! are split at all. So the time does not grow with the ranks of a mesh, but with the kinds of ranks.

mod buffers;
mod held;
mod transfer;

use ithaca_ir::boxes::{self, Side};
use ithaca_ir::entity::{Arena, Entity};
use ithaca_ir::layout::At;
use ithaca_ir::message;
use ithaca_ir::ops::{Op, ScanOrder, Stage};
use ithaca_ir::schedule::{
    self, BufferId, Content, FrameId, Schedule, Task, Transfer, Work as TaskWork, communicating,
};
use ithaca_ir::strided::Strided;
use ithaca_ir::{AxisId, Rank, Space, TensorType, timeline};

use crate::argument::Pointer;
use crate::error::LowerError;
use crate::merge::{self, Span, Tables, Traced};
use crate::ops::view::{Cx, Shared, Trace, signed};
use crate::program::{Call, Check, DeviceProgram, Frame, Operand, Step, Wait, Work};
use crate::record::{Record, Region};
use crate::value::{Choice, Int};
use buffers::{Alignments, Sources};

/// How a schedule is lowered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Options {
    /// Whether steps have searches for NaN.
    pub checks: Checks,
}

/// Whether steps have searches for NaN.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Checks {
    /// They have none.
    #[default]
    None,
    /// One for each buffer of real numbers that a step writes.
    OfWrittenBuffers,
}

/// The device program of a verified schedule.
///
/// # Errors
/// [`LowerError::Unsupported`] for an operation that no kernel computes, [`LowerError::Invalid`] for a schedule that contradicts
/// itself; both with their task.
pub fn lower(schedule: &Schedule, options: Options) -> Result<DeviceProgram, LowerError> {
    let mut runs = schedule.layers_by_place();
    match schedule.main() {
        None => return LowerError::invalid(format!("`{}` has no frames", schedule.name)),
        Some(main) => runs[main.index()].push((0..1, None)),
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
        communicates: communicating(&schedule.frames),
        first_events,
        tables: Tables::default(),
    };
    let mut frames = Arena::new();
    for ((id, frame), runs) in schedule.frames.iter().zip(runs) {
        frames.push(Frame {
            name: frame.name.clone(),
            n_arguments: frame.n_arguments,
            n_results: frame.outputs.len(),
            bytes: frame.bytes,
            meets: schedule.main() == Some(id) || lowering.communicates[id.index()],
            steps: if runs.is_empty() { Vec::new() } else { lowering.frame(id)? },
            runs,
        });
    }
    let outputs = lowering.outputs()?;
    let stages = schedule.stages();
    let arenas = match stages.is_empty() {
        true => vec![(None, schedule.arena_bytes())],
        false => stages.into_iter().map(|at| (Some(at), schedule.arena_bytes_at(at))).collect(),
    };
    Ok(DeviceProgram {
        name: schedule.name.clone(),
        mesh: schedule.space.mesh.clone(),
        frames,
        arenas,
        n_events,
        sources: lowering.sources.into_program(schedule),
        tables: lowering.tables.all,
        outputs,
    })
}

/// The state of a lowering.
struct Lowering<'a> {
    schedule: &'a Schedule,
    options: Options,
    alignments: Alignments,
    sources: Sources,
    /// For each frame.
    communicates: Vec<bool>,
    /// For each frame the number of its first event.
    first_events: Vec<usize>,
    tables: Tables,
}

/// A frame while it is lowered.
#[derive(Clone, Copy)]
struct In<'a> {
    id: FrameId,
    frame: &'a schedule::Frame,
}

/// The work of a task, for one rank.
type OnRank<'f> = &'f dyn Fn(Cx<'_>) -> Result<(), LowerError>;

impl<'a> Lowering<'a> {
    fn space(&self) -> &'a Space {
        &self.schedule.space
    }

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

    fn call(&self, of: In<'a>, task: &Task) -> Result<Call, LowerError> {
        let TaskWork::Call { callee, layers, stride, scan, stage, base } = &task.work else {
            return LowerError::invalid("a task that calls nothing");
        };
        let operand = |(buffer, slice): (&BufferId, Int)| -> Result<Operand, LowerError> {
            let address = self.locate(of, *buffer)?.address();
            Ok(Operand { address, slice, at: of.frame.at(*buffer) })
        };
        let slices = buffers::slices(self.schedule, of.frame, task);
        Ok(Call {
            frame: *callee,
            layers: layers.clone(),
            stride: *stride,
            order: scan.as_ref().map_or(ScanOrder::Ascending, |scan| scan.order),
            base: *base,
            at: stage.and_then(Stage::at),
            arguments: task.reads.iter().zip(slices.arguments).map(operand).collect::<Result<_, _>>()?,
            results: task.writes.iter().zip(slices.results).map(operand).collect::<Result<_, _>>()?,
            carried: scan.as_ref().map_or(task.writes.len(), |scan| scan.carried),
        })
    }

    fn compute(&mut self, of: In<'a>, task: &'a Task, op: &Op) -> Result<Choice<Vec<Record>>, LowerError> {
        let strided = |buffers: &[BufferId]| -> Vec<Option<Strided>> {
            buffers.iter().map(|&b| of.frame.strided(self.space(), b)).collect()
        };
        let (in_wires, out_wires) = (strided(&task.reads), strided(&task.writes));
        let reads = self.views(of, &task.reads, &in_wires)?;
        let writes = self.views(of, &task.writes, &out_wires)?;
        let types: Vec<&TensorType> = reads.iter().chain(&writes).map(|view| view.ty).collect();
        let at = of.frame.places(task)[0];
        self.by_size_or_place(of, at, &types, &|cx| cx.compute(op, &reads, &writes))
    }

    fn copy(&mut self, of: In<'a>, task: &'a Task) -> Result<Choice<Vec<Record>>, LowerError> {
        let (from, to) = (only(&task.reads)?, only(&task.writes)?);
        let (source, target) = (self.locate(of, from)?, self.locate(of, to)?);
        let at = of.frame.places(task)[0];
        match &of.frame.buffers[from].content {
            Content::Wire { dtype, elements } => {
                let bytes = dtype.bytes() * elements;
                self.by_size_or_place(of, at, &[], &|cx| cx.copy(bytes, source, target))
            }
            Content::Tensor(ty) => self.by_size_or_place(of, at, &[ty], &|cx| {
                let bytes = boxes::elements(&cx.space.local_box(ty, cx.rank)) * ty.dtype.bytes();
                cx.copy(bytes, source, target)
            }),
        }
    }

    /// Packs a wire, or unpacks it.
    fn pack(
        &mut self,
        of: In<'a>,
        task: &'a Task,
        transfer: &Transfer,
        side: Side,
    ) -> Result<Choice<Vec<Record>>, LowerError> {
        let (wire, buffers, first) = match side {
            Side::Sent => (only(&task.writes)?, &task.reads, &transfer.first().from),
            Side::Received => (only(&task.reads)?, &task.writes, &transfer.first().to),
        };
        let parcels = transfer.parcels();
        if buffers.len() != parcels.len() {
            return LowerError::invalid(format!("it has {} tensors", buffers.len()));
        }
        // Tensors in the wire stay there.
        let tensor = |&b: &BufferId| match b != wire && of.frame.holder(b) == wire {
            true => Ok(Pointer::NONE),
            false => self.locate(of, b),
        };
        let tensors: Vec<Pointer> = buffers.iter().map(tensor).collect::<Result<_, _>>()?;
        let wire = self.locate(of, wire)?;
        let places = of.frame.places(task);
        let span = self.span_of(places, transfer);
        self.traced(of, places, &span, &|cx| match side {
            _ if !cx.space.holds(first, cx.rank) => Ok(()),
            Side::Sent => cx.pack(parcels, &tensors, wire),
            Side::Received => cx.unpack(parcels, wire, &tensors),
        })
    }

    /// Searches for NaN in the buffers that a task wrote.
    fn checks(&mut self, of: In<'a>, task: &'a Task) -> Result<Vec<Check>, LowerError> {
        let calls = matches!(task.work, TaskWork::Call { .. });
        if self.options.checks == Checks::None || calls {
            return Ok(Vec::new());
        }
        let space = self.space();
        let finding = Pointer { region: Region::Finding, bytes: 0 };
        let places = of.frame.places(task);
        let mut checks = Vec::new();
        for &buffer in &task.writes {
            if !of.frame.buffers[buffer].dtype().is_float() {
                continue;
            }
            let (n, records) = match &of.frame.buffers[buffer].content {
                Content::Tensor(ty) => {
                    let strided = [of.frame.strided(space, buffer)];
                    let views = self.views(of, &[buffer], &strided)?;
                    let span = Span::of(&space.mesh, uneven_axes(space, ty));
                    let at = ty.layout.at;
                    let from = merge::rank_at(&space.mesh, at);
                    let held = |rank| signed(boxes::elements(&space.local_box(ty, rank)));
                    let n = merge::integer(&span, span.ranks(&space.mesh, from).map(held));
                    let search = |cx: Cx<'_>| cx.find_nan(views[0], finding);
                    (n, self.traced(of, [at; 2], &span, &search)?)
                }
                Content::Wire { dtype, .. } => {
                    let Some((transfer, side)) = written_side(&task.work) else { continue };
                    let at = self.locate(of, buffer)?;
                    let span = self.span_of(places, transfer);
                    let from = self.start_of(places, &span);
                    let elements = |rank| {
                        let wire = message::wire(space, transfer.parcels(), side, rank);
                        signed(wire.blocks.iter().flatten().map(|p| boxes::elements(&p.region)).sum())
                    };
                    let n = merge::integer(&span, span.ranks(&space.mesh, from).map(elements));
                    let search = |cx: Cx<'_>| cx.find_nan_in_wire((at, *dtype), elements(cx.rank), finding);
                    (n, self.traced(of, places, &span, &search)?)
                }
            };
            checks.push(Check { buffer, n, records });
        }
        Ok(checks)
    }

    /// The records of work on tensors of these types, which all ranks of a place do.
    fn by_size_or_place(
        &mut self,
        of: In<'a>,
        at: Option<At>,
        types: &[&TensorType],
        work: OnRank<'_>,
    ) -> Result<Choice<Vec<Record>>, LowerError> {
        let (space, mesh) = (self.space(), &self.space().mesh);
        let narrow = Span::of(mesh, types.iter().flat_map(|ty| uneven_axes(space, ty)));
        let wide = Span::of(mesh, types.iter().flat_map(|ty| splitting_axes(ty)));
        if narrow != wide {
            let shared = Shared::default();
            let traces = self.traces(of, [at; 2], &narrow, &shared, work)?;
            if !traces.iter().flatten().any(Trace::depends_on_place) {
                return Ok(self.merged(&narrow, traces));
            }
        }
        self.traced(of, [at; 2], &wide, work)
    }

    /// The records of work for the ranks of a span.
    fn traced(
        &mut self,
        of: In<'a>,
        places: [Option<At>; 2],
        span: &Span,
        work: OnRank<'_>,
    ) -> Result<Choice<Vec<Record>>, LowerError> {
        let shared = Shared::default();
        let traces = self.traces(of, places, span, &shared, work)?;
        Ok(self.merged(span, traces))
    }

    /// What each rank of a span does; nothing for ranks of other places.
    fn traces(
        &self,
        of: In<'a>,
        places: [Option<At>; 2],
        span: &Span,
        shared: &Shared,
        work: OnRank<'_>,
    ) -> Result<Vec<Option<Trace>>, LowerError> {
        let space = self.space();
        let [arguments_aligned, results_aligned] = self.alignments.of_frame(of.id);
        let on_rank = |rank: Rank| -> Result<Option<Trace>, LowerError> {
            let runs = places.iter().any(|place| place.is_none_or(|at| at.has(&space.mesh, rank)));
            if !runs {
                return Ok(None);
            }
            let trace = Trace::default();
            work(Cx { space, rank, trace: &trace, shared, arguments_aligned, results_aligned })?;
            Ok(Some(trace))
        };
        span.ranks(&space.mesh, self.start_of(places, span)).map(on_rank).collect()
    }

    fn merged(&mut self, span: &Span, traces: Vec<Option<Trace>>) -> Choice<Vec<Record>> {
        let traced = |trace: Trace| {
            let (records, lists) = trace.into_parts();
            Traced { records, lists }
        };
        merge::records(span, traces.into_iter().map(|trace| trace.map(traced)), &mut self.tables)
    }

    /// The rank from which a span starts.
    fn start_of(&self, places: [Option<At>; 2], span: &Span) -> Rank {
        let at = places[0].filter(|at| !span.axes().contains(&at.axis));
        merge::rank_at(&self.space().mesh, at)
    }
}

/// The ranks that run a task, as places; none where all do.
fn places(frame: &schedule::Frame, task: &Task) -> Option<Vec<At>> {
    let mut places = frame.places(task).into_iter().collect::<Option<Vec<At>>>()?;
    places.sort_unstable();
    places.dedup();
    Some(places)
}

/// The axes along which ranks have parts of different places, or travelled parts.
fn splitting_axes(ty: &TensorType) -> impl Iterator<Item = AxisId> + '_ {
    ty.layout.split.iter().flatten().copied().chain(ty.layout.moved.iter().map(|moved| moved.axis))
}

/// The axes along which ranks may have parts of different sizes.
fn uneven_axes<'t>(space: &'t Space, ty: &'t TensorType) -> impl Iterator<Item = AxisId> + 't {
    let everywhere = ty.layout.moved.iter().all(|moved| moved.only.is_none());
    let uneven = move |(dim, axes): (&ithaca_ir::DimId, &ithaca_ir::layout::AxisList)| {
        let dim = &space.dims[*dim];
        dim.fetched.is_some() || !dim.divides_evenly(space.mesh.degree(axes))
    };
    let dims = ty.dims.iter().zip(&ty.layout.split);
    let uneven_dims = dims.filter(move |&part| uneven(part)).flat_map(|(_, axes)| axes).copied();
    let any = ty.dims.iter().zip(&ty.layout.split).any(uneven);
    let moved = ty.layout.moved.iter().filter(move |_| any || !everywhere);
    let split = ty.layout.split.iter().flatten().copied().filter(move |_| !everywhere);
    uneven_dims.chain(moved.map(|moved| moved.axis)).chain(split)
}

/// The side of the wire that a task writes, of the transfer that it is of.
fn written_side(work: &TaskWork) -> Option<(&Transfer, Side)> {
    match work {
        TaskWork::Pack(transfer) => Some((transfer, Side::Sent)),
        TaskWork::Exchange(transfer) => Some(match transfer.first().op {
            // It is summed where it is.
            Op::AllReduce { .. } => (transfer, Side::Sent),
            _ => (transfer, Side::Received),
        }),
        // A copy's content was looked at before.
        TaskWork::Copy | TaskWork::Compute(_) | TaskWork::Unpack(_) | TaskWork::Call { .. } => None,
    }
}

fn only(buffers: &[BufferId]) -> Result<BufferId, LowerError> {
    match buffers {
        [buffer] => Ok(*buffer),
        _ => LowerError::invalid(format!("it has {} buffers instead of one", buffers.len())),
    }
}
