//! When the tasks of a step ran on its devices, as their streams came past the events before and behind each.

use ithaca_ir::schedule::{FrameId, Schedule, Stream as Queue};

use super::device::Event;
use super::error::CudaError;
use super::rank::Seat;
use crate::cpu::TaskSpan;

/// A task on a rank, between two events of its stream.
struct Moment {
    seat: usize,
    frame: FrameId,
    layer: u64,
    task: usize,
    start: Event,
    end: Event,
}

/// The tasks of one step, in order of issue.
#[derive(Default)]
pub(super) struct Moments {
    /// When each rank's step began.
    begun: Vec<Event>,
    tasks: Vec<Moment>,
}

impl Moments {
    /// A step that begins now; the streams of the ranks have nothing to do.
    pub(super) fn begin(seats: &[Seat<'_>]) -> Result<Self, CudaError> {
        let begun = seats.iter().map(|seat| now(seat, Queue::Compute)).collect::<Result<_, _>>()?;
        Ok(Self { begun, tasks: Vec::new() })
    }

    /// Notes a task that was issued between two events of its stream.
    pub(super) fn add(
        &mut self,
        (seat, frame, layer, task): (usize, FrameId, u64, usize),
        [start, end]: [Event; 2],
    ) {
        self.tasks.push(Moment { seat, frame, layer, task, start, end });
    }

    /// When a rank ran its tasks, once everything is done: those of the compute stream first.
    ///
    /// # Errors
    /// The device's.
    pub(super) fn spans(
        &self,
        schedule: &Schedule,
        seats: &[Seat<'_>],
        number: usize,
    ) -> Result<Vec<TaskSpan>, CudaError> {
        let span = |&Moment { seat, frame, layer, task, start, end }: &Moment| {
            let since = |event| seats[seat].device.elapsed(self.begun[seat], event);
            let stream = schedule.frames[frame].tasks[task].stream;
            Ok(TaskSpan { stream, frame, layer, task, start: since(start)?, end: since(end)? })
        };
        let own = self.tasks.iter().filter(|moment| moment.seat == number);
        let mut spans: Vec<TaskSpan> = own.map(span).collect::<Result<_, CudaError>>()?;
        spans.sort_by_key(|span| span.stream);
        Ok(spans)
    }
}

/// An event that keeps when a stream of a rank comes past this point.
pub(super) fn now(seat: &Seat<'_>, queue: Queue) -> Result<Event, CudaError> {
    let event = seat.device.timed_event()?;
    seat.device.record(seat.stream(queue), event)?;
    Ok(event)
}
