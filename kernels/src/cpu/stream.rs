//! The execution of one stream of a rank.
//!
//! The streams of a rank run the same frames. In a frame that communicates, each stream that the frame uses runs its own
//! tasks in order of issue, waits for the events of the others, and meets them in a barrier where the frame starts and ends.
//! Other streams pass over such a frame. A frame that does not communicate runs on the stream of its call alone.

use std::time::{Duration, Instant};

use ithaca_ir::entity::Entity;
use ithaca_ir::layers;
use ithaca_ir::ops::{ScanOrder, Stage};
use ithaca_ir::schedule::{BufferId, EventId, Frame, Stream, Streams, Task, Work};

use super::buffers::{Buffers, Scope};
use super::claims::{Clock, Memory};
use super::context::RunContext;
use super::describe::describe;
use super::fault::{Fault, FaultKind};
use super::memory::Location;
use super::options::Trace;
use super::panics::guarded;
use super::sync::{RunOfFrame, StreamSync, join};
use super::task::{Running, StreamPosition};
use super::timings::{Timings, busy};
use super::trace::TaskSpan;
use crate::error::RunError;
use crate::tensor::index;

/// The time beyond the timeout of the other ranks for which a task hangs.
const HANG: Duration = Duration::from_secs(60);

/// Executes one stream of a rank.
pub(super) struct StreamExecutor<'a> {
    buffers: Buffers<'a>,
    stream: Stream,
    memory: &'a Memory,
    sync: &'a StreamSync,
    /// Tasks of each stream that are known to have ended, the last of its own included.
    seen: Clock,
    /// Whether it runs with other streams.
    is_joined: bool,
    result: StreamResult,
}

/// The measurements of a stream.
#[derive(Debug, Default)]
pub(super) struct StreamResult {
    /// The end of the arena as far as it was written, bytes of the schedule.
    pub(super) arena_used: u64,
    /// How long tasks took.
    pub(super) timings: Timings,
    /// When tasks ran, if requested.
    pub(super) spans: Vec<TaskSpan>,
}

impl<'a> StreamExecutor<'a> {
    pub(super) fn new(
        buffers: Buffers<'a>,
        stream: Stream,
        (memory, sync): (&'a Memory, &'a StreamSync),
    ) -> Self {
        let result = StreamResult::default();
        Self { buffers, stream, memory, sync, seen: Clock::default(), is_joined: false, result }
    }

    /// Runs the tasks of `main` that are this stream's.
    pub(super) fn main(mut self, scope: &Scope<'_>) -> Result<StreamResult, RunError> {
        self.is_joined = self.context().used[scope.frame.index()].communicates();
        let run = RunOfFrame::new();
        self.frame(scope, self.is_joined.then_some(&run))?;
        self.memory.leave(self.stream);
        Ok(self.result)
    }

    fn context(&self) -> RunContext<'a> {
        self.buffers.context
    }

    /// Runs the tasks of a frame that are this stream's: all of them where it is no joint frame.
    fn frame(&mut self, scope: &Scope<'_>, joint_frame: Option<&RunOfFrame>) -> Result<(), RunError> {
        let schedule = self.context().schedule;
        let frame = &schedule.frames[scope.frame];
        let recorders = recorders(frame);
        for (i, task) in frame.tasks.iter().enumerate() {
            self.step(scope, joint_frame, &recorders, i).map_err(|error| match error {
                // A task in a callee has placed its error already.
                RunError::Rank { .. } => error,
                error => RunError::Rank {
                    rank: self.buffers.rank.0,
                    frame: frame.name.clone(),
                    layer: scope.layer,
                    task: i,
                    work: describe(schedule, &task.work),
                    cause: Box::new(error),
                },
            })?;
        }
        Ok(())
    }

    /// Runs a task, if it is this stream's and this rank's.
    fn step(
        &mut self,
        scope: &Scope<'_>,
        joint_frame: Option<&RunOfFrame>,
        recorders: &[Option<usize>],
        number: usize,
    ) -> Result<(), RunError> {
        let RunContext { schedule, communicator, .. } = self.context();
        let frame = &schedule.frames[scope.frame];
        let task = &frame.tasks[number];
        let meets = joint_frame.and_then(|run| Some((run, self.meets(task)?)));
        let is_mine = match meets {
            Some((_, streams)) => streams.has(self.stream),
            None => joint_frame.is_none() || task.stream == self.stream,
        };
        // Tasks of other streams and ranks.
        if !is_mine || !frame.runs(&schedule.space, task, self.buffers.rank) {
            return Ok(());
        }
        for &event in &task.waits {
            let recorder = self.recorder(frame, (number, event), recorders)?;
            let recorded = &frame.tasks[recorder];
            let is_due = frame.runs(&schedule.space, recorded, self.buffers.rank)
                && recorded.stream != self.stream
                && !self.meets(recorded).is_some_and(|streams| streams.has(self.stream));
            if let Some(run) = joint_frame.filter(|_| is_due) {
                join(&mut self.seen, &self.sync.wait((run, event.index()))?);
            }
        }
        communicator.check()?;
        if task.stream == self.stream || joint_frame.is_none() {
            guarded(|| self.fault(scope, number))?;
        }
        match &task.work {
            Work::Call { .. } => self.call(scope, number, meets)?,
            Work::Compute(_) | Work::Pack(_) | Work::Exchange(_) | Work::Unpack(_) | Work::Copy => {
                self.task(scope, number)?;
            }
        }
        if let Some(event) = task.records {
            if event.index() >= frame.n_events {
                return Err(RunError::invalid("a task records an event that is not declared"));
            }
            if let Some(run) = joint_frame {
                self.sync.record((run, event.index()), self.seen);
            }
        }
        Ok(())
    }

    /// The streams that meet at a task: those that its callee uses, if it communicates.
    fn meets(&self, task: &Task) -> Option<Streams> {
        let used = task.work.callee().map(|callee| self.context().used[callee.index()]);
        used.filter(|used| used.communicates())
    }

    /// The task that records the event of a wait. It must be issued before the wait.
    fn recorder(
        &self,
        frame: &Frame,
        (number, event): (usize, EventId),
        recorders: &[Option<usize>],
    ) -> Result<usize, RunError> {
        let waits = format!("it waits for event {event:?}");
        match recorders.get(event.index()).copied().flatten() {
            Some(recorder) if recorder < number => Ok(recorder),
            Some(recorder) => Err(RunError::invalid(format!(
                "{waits}, which task {recorder} ({}) records only later",
                describe(self.context().schedule, &frame.tasks[recorder].work)
            ))),
            None => Err(RunError::invalid(format!("{waits}, which no task before it records"))),
        }
    }

    /// Runs a task that is no call.
    fn task(&mut self, scope: &Scope<'_>, number: usize) -> Result<(), RunError> {
        let RunContext { schedule, options, begun, .. } = self.context();
        let frame = &schedule.frames[scope.frame];
        let task = &frame.tasks[number];
        if matches!(task.work, Work::Exchange(_)) && self.stream == Stream::Compute && self.is_joined {
            return Err(RunError::invalid("a collective is on the stream `compute`"));
        }
        let (start, before) = (Instant::now(), busy(Duration::default));
        let position = StreamPosition { memory: self.memory, stream: self.stream, seen: self.seen };
        let running = Running::begin(self.buffers, scope, number, position)?;
        self.seen[self.stream as usize] = running.along();
        let arena_used = guarded(|| running.run())?;
        let end = Instant::now();
        let busy = busy(|| end - start).saturating_sub(before);
        self.result.arena_used = self.result.arena_used.max(arena_used);
        self.result.timings.add(&describe(schedule, &task.work), end - start, busy);
        if options.trace == Trace::Spans {
            self.result.spans.push(TaskSpan {
                stream: self.stream,
                frame: scope.frame,
                layer: scope.layer,
                task: number,
                start: start.duration_since(begun),
                end: end.duration_since(begun),
                busy,
            });
        }
        Ok(())
    }

    /// Runs a frame for each layer: carried values pass from layer to layer, and each layer has its slice of a stack.
    fn call(
        &mut self,
        scope: &Scope<'_>,
        number: usize,
        meets: Option<(&RunOfFrame, Streams)>,
    ) -> Result<(), RunError> {
        let RunContext { schedule, shape, .. } = self.context();
        let task = &schedule.frames[scope.frame].tasks[number];
        let Work::Call { callee, layers, stride, scan, stage, base } = &task.work else {
            return Err(RunError::invalid("it is no call"));
        };
        let (callee, scan) = (*callee, scan.as_ref());
        let base = scope.base + shape.slot(*base)?;
        let at = stage.and_then(Stage::at).or(scope.at);
        let layers = layers::shifted(layers, *stride, scope.layer);
        let locate = |buffers: &[BufferId]| -> Result<Vec<Location>, RunError> {
            buffers.iter().map(|&b| self.buffers.locate(scope, b)).collect()
        };
        let (arguments, results) = (locate(&task.reads)?, locate(&task.writes)?);
        let n_carried = scan.map_or(results.len(), |scan| scan.carried);
        let strides = self.buffers.strides(scope, task, callee, scan)?;
        let place = |location: &Location, stride: &Option<usize>, k: usize| match stride {
            Some(stride) => location.further(k * stride),
            None => *location,
        };
        let order = scan.map_or(ScanOrder::Ascending, |scan| scan.order);
        let inner_run = |layer| {
            meets.map(|(run, streams)| {
                let mut run = run.clone();
                run.push((number, layer));
                (run, streams)
            })
        };
        if let Some((run, streams)) = inner_run(layers.start) {
            self.barrier((&run, 0), streams)?;
        }
        for (done, layer) in order.layers(&layers).enumerate() {
            let k = index(layer - layers.start);
            let mut own: Vec<Location> =
                arguments.iter().zip(&strides.reads).map(|(l, stride)| place(l, stride, k)).collect();
            // A carried value is an argument of the first layer, and a result of the previous layer for the others.
            if done > 0 {
                for (argument, result) in own.iter_mut().zip(&results).take(n_carried) {
                    *argument = *result;
                }
            }
            let own_results: Vec<Location> =
                results.iter().zip(&strides.writes).map(|(l, stride)| place(l, stride, k)).collect();
            let inner = Scope { frame: callee, base, layer, at, arguments: &own, results: &own_results };
            let Some((run, streams)) = inner_run(layer) else {
                self.frame(&inner, None)?;
                continue;
            };
            self.frame(&inner, Some(&run))?;
            self.barrier((&run, 1), streams)?;
            if self.stream == Stream::Compute {
                self.sync.forget(&run);
            }
        }
        Ok(())
    }

    /// Waits for other streams.
    fn barrier(&mut self, at: (&RunOfFrame, usize), streams: Streams) -> Result<(), RunError> {
        self.seen = self.sync.barrier(at, (self.stream, streams), &self.seen)?;
        Ok(())
    }

    /// Injects the requested fault.
    fn fault(&self, scope: &Scope<'_>, number: usize) -> Result<(), RunError> {
        let RunContext { schedule, communicator, options, .. } = self.context();
        let name = &schedule.frames[scope.frame].name;
        let is_here = |fault: &&Fault| fault.is_at(self.buffers.rank, name, scope.layer, number);
        let Some(fault) = options.fault.as_ref().filter(is_here) else { return Ok(()) };
        match fault.kind {
            FaultKind::Error => Err(RunError::Injected),
            // Unwinds as a panic does, without the report of the panic hook.
            FaultKind::Panic => std::panic::resume_unwind(Box::new(RunError::Injected.to_string())),
            FaultKind::Hang => {
                // Waiting ranks time out first.
                let patience = options.timeout.map(|timeout| timeout.saturating_add(HANG));
                let end = patience.and_then(|patience| Instant::now().checked_add(patience));
                while end.is_none_or(|end| Instant::now() < end) {
                    communicator.check()?;
                    if self.sync.has_stopped() {
                        return Err(RunError::Stopped);
                    }
                    std::thread::sleep(Duration::from_millis(5));
                }
                Err(RunError::Injected)
            }
        }
    }
}

/// For each event of a frame the first task that records it.
fn recorders(frame: &Frame) -> Vec<Option<usize>> {
    let mut recorders = vec![None; frame.n_events];
    for (i, task) in frame.tasks.iter().enumerate() {
        if let Some(recorder) = task.records.and_then(|event| recorders.get_mut(event.index())) {
            recorder.get_or_insert(i);
        }
    }
    recorders
}
