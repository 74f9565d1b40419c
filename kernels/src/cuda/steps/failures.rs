//! What becomes of a step when a rank fails: where it was, and how the others end.

use std::time::Duration;

use ithaca_ir::Rank;
use ithaca_ir::schedule::Stream as Queue;

use super::state::{Recording, Steps};
use crate::cpu::FaultKind;
use crate::cpu::describe;
use crate::cuda::device::Event;
use crate::cuda::patience::Patience;
use crate::cuda::watch::{Run, Trouble};
use crate::error::RunError;

/// How long streams may take to end what they do once a run has failed.
const GRACE: Duration = Duration::from_secs(1);

impl Steps<'_> {
    /// Waits until everything issued is done, and looks meanwhile whether all is well.
    ///
    /// # Errors
    /// [`RunError::Rank`] for the rank and the task that failed, or that others wait for longer than was allowed.
    pub(in crate::cuda) fn wait(&mut self) -> Result<(), RunError> {
        let waited = self.watch.wait(&self.seats, self.collectives);
        waited.map_err(|trouble| self.troubled(trouble))?;
        self.here = None;
        Ok(())
    }

    /// Ends a run that failed: nobody waits for who will not come. What does not end all the same is left as it is.
    pub(in crate::cuda) fn stop(&self) {
        self.collectives.abort();
        let mut events = Vec::new();
        for seat in &self.seats {
            // A device that fails at this does nothing more, so there is nothing to wait for.
            if seat.device.let_go().is_ok() {
                events.extend(Queue::ALL.iter().filter_map(|&queue| {
                    let event = seat.device.event().ok()?;
                    seat.device.record(seat.stream(queue), event).ok()?;
                    Some((seat, event))
                }));
            }
        }
        let patience = Patience::new(Some(GRACE));
        loop {
            events.retain(|(seat, event)| matches!(seat.device.has_happened(*event), Ok(false)));
            if events.is_empty() {
                return;
            }
            if patience.pause().is_err() {
                events.iter().for_each(|(seat, _)| seat.device.abandon());
                return;
            }
        }
    }

    /// The error of a rank at a task.
    pub(super) fn failed(&self, rank: Rank, run: Run, cause: RunError) -> RunError {
        let frame = &self.schedule.frames[run.frame];
        RunError::Rank {
            rank: rank.0,
            frame: frame.name.clone(),
            layer: run.layer,
            task: run.task,
            work: frame
                .tasks
                .get(run.task)
                .map(|task| describe(self.schedule, &task.work))
                .unwrap_or_default(),
            cause: Box::new(cause),
        }
    }

    fn troubled(&self, Trouble { seat, run, error }: Trouble) -> RunError {
        match (self.seats.get(seat), run) {
            (Some(seat), Some(run)) => self.failed(seat.rank, run, error.into()),
            (Some(_), None) | (None, _) => error.into(),
        }
    }

    /// The error of where the issue is.
    pub(in crate::cuda) fn failed_here(&self, cause: RunError) -> RunError {
        match (cause, self.here) {
            // It has been placed.
            (placed @ RunError::Rank { .. }, _) => placed,
            (cause, Some((rank, run))) => self.failed(rank, run, cause),
            (cause, None) => cause,
        }
    }

    /// The issue has come to a task of a rank.
    pub(super) fn enter(&mut self, seat: usize, run: Run) {
        self.here = Some((self.rank(seat), run));
    }

    /// Notes what was issued to a stream, unless it is only recorded.
    pub(super) fn note(
        &mut self,
        seat: usize,
        queue: Queue,
        (issue, run): (u64, Option<Run>),
        come: Option<Event>,
    ) -> Result<(), RunError> {
        match self.recording {
            Recording::On => Ok(()),
            Recording::Off => {
                let around = (self.seats.as_slice(), self.collectives);
                let noted = self.watch.issued(around, (seat, queue), (issue, run), come);
                noted.map_err(|trouble| self.troubled(trouble))
            }
        }
    }

    /// Lets a task go wrong, if that was asked for.
    pub(super) fn faults(&mut self, run: Run, seats: &[usize]) -> Result<(), RunError> {
        let schedule = self.schedule;
        let Some(fault) = &self.fault else { return Ok(()) };
        let (name, kind) = (&schedule.frames[run.frame].name, fault.kind);
        let is_here = |seat: &&usize| fault.is_at(self.rank(**seat), name, run.layer, run.task);
        let Some(&seat) = seats.iter().find(is_here) else { return Ok(()) };
        self.enter(seat, run);
        match kind {
            FaultKind::Error => Err(RunError::Injected),
            // As a panic unwinds, without the report of one that nobody asked for.
            FaultKind::Panic => std::panic::resume_unwind(Box::new(RunError::Injected.to_string())),
            FaultKind::Hang => {
                let stream = schedule.frames[run.frame].tasks[run.task].stream;
                Ok(self.seats[seat].device.hold(self.seats[seat].stream(stream))?)
            }
        }
    }
}
