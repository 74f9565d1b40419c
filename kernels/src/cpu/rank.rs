//! One rank: its memory, and a thread for each of its streams.

use std::panic::AssertUnwindSafe;
use std::sync::Mutex;
use std::time::Instant;

use ithaca_ir::Rank;
use ithaca_ir::entity::Entity;
use ithaca_ir::schedule::{Schedule, Stream, Work, communicates};
use ithaca_ir::traffic::Ledger;

use super::communicator::Communicator;
use super::locate::{Area, Buffers, Scope};
use super::meeting::Meeting;
use super::memory::{ArenaShape, Own, Sources, to_int};
use super::shared::{ARENA, Memory, TaskRun};
use super::timings::Timings;
use super::walk::{Walked, Walker, panic_message};
use super::{Options, RanTask};
use crate::error::RunError;
use crate::tensor::index;

/// What a rank runs in.
#[derive(Clone, Copy)]
pub(super) struct World<'a> {
    pub(super) schedule: &'a Schedule,
    pub(super) shape: &'a ArenaShape,
    pub(super) sources: &'a Sources,
    pub(super) communicator: &'a dyn Communicator,
    pub(super) ledger: &'a Mutex<Ledger>,
    pub(super) options: &'a Options,
    /// Whether each frame communicates, as [`communicating`] says.
    pub(super) communicates: &'a [bool],
    /// When the ranks began.
    pub(super) begun: Instant,
}

/// What a rank has when it is done.
pub(super) struct Done {
    /// Its part of each output of `main`; integers are returned as numbers.
    pub(super) outputs: Vec<Vec<f32>>,
    /// Its part of each weight and state that is written.
    pub(super) lasting: Own,
    /// The end of the arena as far as it was written, bytes of the schedule.
    pub(super) reached: u64,
    /// How long its tasks took.
    pub(super) timings: Timings,
    /// When they ran, if that was asked for.
    pub(super) spans: Vec<RanTask>,
}

/// Whether each frame of a schedule has tasks on the communication stream, its callees' included.
pub(super) fn communicating(schedule: &Schedule) -> Vec<bool> {
    schedule.frames.ids().map(|id| communicates(&schedule.frames, id)).collect()
}

/// Runs `main` on `rank`, which starts with `lasting` of what is written.
pub(super) fn run(world: World<'_>, rank: Rank, lasting: Own) -> Result<Done, RunError> {
    let World { schedule, shape, communicator, .. } = world;
    let main = schedule.main().ok_or_else(|| RunError::NoMain(schedule.name.clone()))?;
    // What was never written is not a number, so that it cannot pass for a result.
    let memory = Memory::new(vec![f32::NAN; index(shape.slots)], lasting);
    let meeting = Meeting::default();
    let buffers = Buffers { world, rank };
    let scope = Scope { frame: main, base: 0, layer: 0, at: None, arguments: &[], results: &[] };
    let walk = |stream: Stream| {
        let walker = Walker::new(buffers, stream, (&memory, &meeting));
        let result = std::panic::catch_unwind(AssertUnwindSafe(|| walker.main(&scope)))
            .unwrap_or_else(|panic| Err(RunError::Panicked(panic_message(&*panic))));
        if let Err(error) = &result {
            // The other stream may wait for this one, or compute for long while other ranks wait.
            meeting.stop();
            if !error.is_stopped() {
                communicator.fail(rank, error);
            }
        }
        result
    };
    let (compute, comm) = match world.communicates[main.index()] {
        true => std::thread::scope(|threads| {
            let builder = std::thread::Builder::new().name(format!("rank {} {}", rank.0, Stream::Comm));
            let comm = builder.spawn_scoped(threads, || walk(Stream::Comm)).map_err(|source| {
                meeting.stop();
                RunError::Thread { rank: rank.0, source }
            });
            let compute = walk(Stream::Compute);
            let join = |thread: std::thread::ScopedJoinHandle<'_, _>| {
                thread.join().unwrap_or_else(|panic| Err(RunError::Panicked(panic_message(&*panic))))
            };
            (compute, comm.and_then(join))
        }),
        false => {
            memory.leave(Stream::Comm);
            (walk(Stream::Compute), Ok(Walked::default()))
        }
    };
    let (compute, comm) = match (compute, comm) {
        (Ok(compute), Ok(comm)) => (compute, comm),
        (Err(a), Err(b)) => return Err(if b.outranks(&a) { b } else { a }),
        (Err(error), Ok(_)) | (Ok(_), Err(error)) => return Err(error),
    };
    let (arena, lasting) = memory.into_parts();
    let outputs = schedule.frames[main].outputs.iter().map(|output| {
        if !buffers.holds(&scope, output.buffer) {
            return Ok(Vec::new());
        }
        let data = match buffers.area(&scope, output.buffer)? {
            Area::Loaded(data) => Some(data),
            Area::Own(extent) if extent.part == ARENA => arena.get(extent.range),
            Area::Own(extent) => lasting.get(extent.part - 1).and_then(|data| data.get(extent.range)),
        };
        let data = data.ok_or_else(|| buffers.outside(&scope, output.buffer))?;
        Ok(match schedule.frames[main].buffers[output.buffer].dtype().is_float() {
            true => data.to_vec(),
            false => data.iter().map(|&x| to_int(x) as f32).collect(),
        })
    });
    let outputs = outputs.collect::<Result<_, RunError>>()?;
    let reached = compute.reached.max(comm.reached);
    let mut timings = compute.timings;
    timings.merge(&comm.timings);
    let spans = [compute.spans, comm.spans].concat();
    Ok(Done { outputs, lasting, reached, timings, spans })
}

/// What a task does, for messages and tables.
pub(crate) fn describe(schedule: &Schedule, work: &Work) -> String {
    match work {
        Work::Compute(op) => op.name().to_owned(),
        Work::Pack(t) => format!("pack of {}", t.first().op.name()),
        Work::Exchange(t) => t.first().op.name().to_owned(),
        Work::Unpack(t) => format!("unpack of {}", t.first().op.name()),
        Work::Copy => "copy".to_owned(),
        Work::Call { callee, .. } => {
            format!("call of {}", schedule.frames.get(*callee).map_or("?", |f| f.name.as_str()))
        }
    }
}

/// A run of a task, for messages.
pub(super) fn name(schedule: &Schedule, run: TaskRun) -> String {
    let TaskRun { frame, layer, task } = run;
    let frame = &schedule.frames[frame];
    let work = describe(schedule, &frame.tasks[task].work);
    format!("task {task} of `{}` at layer {layer} ({work})", frame.name)
}
