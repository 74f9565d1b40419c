//! The times of the tasks of a step, from events of their streams before and after each task.

use ithaca_ir::schedule::{FrameId, Schedule, Stream as Queue};

use super::device::Event;
use super::error::CudaError;
use super::rank::LocalRank;
use crate::cpu::TaskSpan;

/// A task on a rank, between two events of its stream.
struct TimedTask {
    local: usize,
    frame: FrameId,
    layer: u64,
    task: usize,
    start: Event,
    end: Event,
}

/// The tasks of one step, in order of issue.
#[derive(Default)]
pub(super) struct Timestamps {
    /// The start of each rank's step.
    starts: Vec<Event>,
    tasks: Vec<TimedTask>,
}

impl Timestamps {
    /// Begins a step while the streams of all ranks are idle.
    pub(super) fn begin(locals: &[LocalRank<'_>]) -> Result<Self, CudaError> {
        let starts = locals.iter().map(|local| record(local, Queue::Compute)).collect::<Result<_, _>>()?;
        Ok(Self { starts, tasks: Vec::new() })
    }

    /// Adds a task that was issued between two events of its stream.
    pub(super) fn add(
        &mut self,
        (local, frame, layer, task): (usize, FrameId, u64, usize),
        [start, end]: [Event; 2],
    ) {
        self.tasks.push(TimedTask { local, frame, layer, task, start, end });
    }

    /// The spans of a rank's tasks after the step is done, those of the compute stream first.
    ///
    /// # Errors
    /// The device's.
    pub(super) fn spans(
        &self,
        schedule: &Schedule,
        locals: &[LocalRank<'_>],
        number: usize,
    ) -> Result<Vec<TaskSpan>, CudaError> {
        let span = |&TimedTask { local, frame, layer, task, start, end }: &TimedTask| {
            let since = |event| locals[local].device.elapsed(self.starts[local], event);
            let stream = schedule.frames[frame].tasks[task].stream;
            let (start, end) = (since(start)?, since(end)?);
            Ok(TaskSpan { stream, frame, layer, task, start, end, busy: end.saturating_sub(start) })
        };
        let tasks = self.tasks.iter().filter(|task| task.local == number);
        let mut spans: Vec<TaskSpan> = tasks.map(span).collect::<Result<_, CudaError>>()?;
        spans.sort_by_key(|span| span.stream);
        Ok(spans)
    }
}

/// Records an event with a timestamp on a stream of a rank.
pub(super) fn record(local: &LocalRank<'_>, queue: Queue) -> Result<Event, CudaError> {
    let event = local.device.timed_event()?;
    local.device.record(local.stream(queue), event)?;
    Ok(event)
}
