//! When the tasks of a step ran on its devices, as their streams came past the events before and behind each.

use std::time::Duration;

use ithaca_ir::schedule::{FrameId, Schedule, Stream as Queue};
use ithaca_ir::timeline::{self, Span};

use super::device::Event;
use super::error::CudaError;
use super::rank::Seat;

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

    /// What ran when, once everything is done.
    ///
    /// # Errors
    /// The device's.
    pub(super) fn spans(&self, schedule: &Schedule, seats: &[Seat<'_>]) -> Result<Vec<Span>, CudaError> {
        let span = |moment: &Moment| {
            let &Moment { seat, frame, layer, task, start, end } = moment;
            let (begun, frame, seat) = (self.begun[seat], &schedule.frames[frame], &seats[seat]);
            let since = |event| {
                seat.device.elapsed(begun, event).as_ref().map(Duration::as_secs_f64).map_err(Clone::clone)
            };
            let (name, kind) = timeline::title(frame, task);
            Ok(Span {
                rank: seat.rank,
                stream: frame.tasks[task].stream,
                frame: frame.name.clone(),
                layer,
                task,
                name,
                kind,
                start: since(start)?,
                end: since(end)?,
            })
        };
        let is_shown = |moment: &&Moment| {
            let task = &schedule.frames[moment.frame].tasks[moment.task];
            !timeline::is_alone(&schedule.space, &task.work)
        };
        self.tasks.iter().filter(is_shown).map(span).collect()
    }
}

/// An event that keeps when a stream of a rank comes past this point.
pub(super) fn now(seat: &Seat<'_>, queue: Queue) -> Result<Event, CudaError> {
    let event = seat.device.timed_event()?;
    seat.device.record(seat.stream(queue), event)?;
    Ok(event)
}
