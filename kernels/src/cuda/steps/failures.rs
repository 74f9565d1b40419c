//! Failures of a step: the rank and task of the error, and the end of the other ranks.

use std::time::Duration;

use ithaca_ir::Rank;
use ithaca_ir::schedule::Stream as Queue;

use super::state::{Recording, Steps};
use crate::cpu::FaultKind;
use crate::cpu::describe;
use crate::cuda::deadline::Deadline;
use crate::cuda::device::Event;
use crate::cuda::watch::{Run, TaskFailure};
use crate::error::RunError;

/// The time that streams have to end their work after a run has failed.
const GRACE: Duration = Duration::from_secs(1);

impl Steps<'_> {
    /// Waits until all issued work is done.
    ///
    /// # Errors
    /// [`RunError::Rank`] for the rank and the task that failed or timed out.
    pub(in crate::cuda) fn wait(&mut self) -> Result<(), RunError> {
        let waited = self.watch.wait(&self.locals, self.collectives);
        waited.map_err(|failure| self.rank_error(failure))?;
        self.here = None;
        Ok(())
    }

    /// Waits until the work issued to a stream of every local rank is done.
    pub(super) fn wait_for(&mut self, queue: Queue) -> Result<(), RunError> {
        let waited = self.watch.wait_for(&self.locals, self.collectives, queue);
        waited.map_err(|failure| self.rank_error(failure))
    }

    /// Ends a failed run: aborts collectives, resumes streams, and abandons devices whose work does not end.
    pub(in crate::cuda) fn stop(&self) {
        self.collectives.abort();
        let mut events = Vec::new();
        for local in &self.locals {
            // A device that fails here runs no more work.
            if local.device.resume().is_ok() {
                events.extend(Queue::ALL.iter().filter_map(|&queue| {
                    let event = local.device.event().ok()?;
                    local.device.record(local.stream(queue), event).ok()?;
                    Some((local, event))
                }));
            }
        }
        let deadline = Deadline::new(Some(GRACE));
        loop {
            events.retain(|(local, event)| matches!(local.device.is_complete(*event), Ok(false)));
            if events.is_empty() {
                return;
            }
            if deadline.pause().is_err() {
                events.iter().for_each(|(local, _)| local.device.abandon());
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

    fn rank_error(&self, TaskFailure { local, run, error }: TaskFailure) -> RunError {
        match (self.locals.get(local), run) {
            (Some(local), Some(run)) => self.failed(local.rank, run, error.into()),
            (Some(_), None) | (None, _) => error.into(),
        }
    }

    /// Places an error at the current position of the issue, unless it is placed already.
    pub(in crate::cuda) fn failed_here(&self, cause: RunError) -> RunError {
        match (cause, self.here) {
            (placed @ RunError::Rank { .. }, _) => placed,
            (cause, Some((rank, run))) => self.failed(rank, run, cause),
            (cause, None) => cause,
        }
    }

    /// Sets the current position of the issue.
    pub(super) fn enter(&mut self, local: usize, run: Run) {
        self.here = Some((self.rank(local), run));
    }

    /// Adds a task that was issued to the tasks in flight, unless a graph records it.
    pub(super) fn note(
        &mut self,
        local: usize,
        queue: Queue,
        (issue, run): (u64, Option<Run>),
        arrived: Option<Event>,
    ) -> Result<(), RunError> {
        match self.recording {
            Recording::On => Ok(()),
            Recording::Off => {
                let around = (self.locals.as_slice(), self.collectives);
                let noted = self.watch.issued(around, (local, queue), (issue, run), arrived);
                noted.map_err(|failure| self.rank_error(failure))
            }
        }
    }

    /// Injects the fault of the options, if this is its task.
    pub(super) fn faults(&mut self, run: Run, locals: &[usize]) -> Result<(), RunError> {
        let schedule = self.schedule;
        let Some(fault) = &self.fault else { return Ok(()) };
        let (name, kind) = (&schedule.frames[run.frame].name, fault.kind);
        let is_here = |local: &&usize| fault.is_at(self.rank(**local), name, run.layer, run.task);
        let Some(&local) = locals.iter().find(is_here) else { return Ok(()) };
        self.enter(local, run);
        match kind {
            FaultKind::Error => Err(RunError::Injected),
            // Unwinds like a panic, but without the report of the panic hook.
            FaultKind::Panic => std::panic::resume_unwind(Box::new(RunError::Injected.to_string())),
            FaultKind::Hang => {
                let stream = schedule.frames[run.frame].tasks[run.task].stream;
                Ok(self.locals[local].device.hold(self.locals[local].stream(stream))?)
            }
        }
    }
}
