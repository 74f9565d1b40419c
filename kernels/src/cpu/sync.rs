//! Synchronisation of the two streams of a rank: events, and barriers around frames that communicate.
//!
//! Every wait ends, by its event or when the rank stops: a task waits only for tasks issued before it (the executor
//! refuses others), so of two waiting streams one waits for an event that has happened.

use std::collections::BTreeMap;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use ithaca_ir::schedule::Stream;

use crate::error::RunError;

/// The events and barriers of one rank.
#[derive(Debug, Default)]
pub(super) struct StreamSync {
    state: Mutex<State>,
    wake: Condvar,
}

/// An event of the n-th frame that both streams run.
pub(super) type EventOf = (u64, usize);

#[derive(Debug, Default)]
struct State {
    has_stopped: bool,
    /// How many tasks the stream that recorded it had begun.
    events: BTreeMap<EventOf, u64>,
    /// For each stream, the number of barriers that it has reached.
    arrived: [u64; Stream::ALL.len()],
    /// For each stream, the tasks that it had begun at its last barrier and at the one before, by parity. A stream cannot
    /// reach a third barrier before the other has left the first.
    tasks: [[u64; 2]; Stream::ALL.len()],
}

impl StreamSync {
    /// Waits for the other stream, which comes to as many meetings; `tasks` were begun so far. Gives those of the other.
    ///
    /// # Errors
    /// [`RunError::Stopped`].
    pub(super) fn barrier(&self, stream: Stream, tasks: u64) -> Result<u64, RunError> {
        let mut state = self.state();
        let (own, other) = (stream as usize, other(stream) as usize);
        let parity = usize::from(state.arrived[own] % 2 == 1);
        state.arrived[own] += 1;
        state.tasks[own][parity] = tasks;
        let arrived = state.arrived[own];
        self.wake.notify_all();
        let state = self.wait_until(state, |state| state.arrived[other] >= arrived)?;
        Ok(state.tasks[other][parity])
    }

    /// Records an event.
    pub(super) fn record(&self, event: EventOf, tasks: u64) {
        self.state().events.insert(event, tasks);
        self.wake.notify_all();
    }

    /// Waits for an event; gives how many tasks the stream that recorded it had begun.
    ///
    /// # Errors
    /// [`RunError::Stopped`].
    pub(super) fn wait(&self, event: EventOf) -> Result<u64, RunError> {
        let state = self.wait_until(self.state(), |state| state.events.contains_key(&event))?;
        Ok(state.events.get(&event).copied().unwrap_or_default())
    }

    /// Forgets the events of a frame that both streams have left.
    pub(super) fn forget(&self, frame: u64) {
        self.state().events.retain(|&(of, _), _| of != frame);
    }

    /// Stops all waits.
    pub(super) fn stop(&self) {
        self.state().has_stopped = true;
        self.wake.notify_all();
    }

    /// Whether the rank has stopped.
    pub(super) fn has_stopped(&self) -> bool {
        self.state().has_stopped
    }

    fn wait_until<'s>(
        &self,
        mut state: MutexGuard<'s, State>,
        is_done: impl Fn(&State) -> bool,
    ) -> Result<MutexGuard<'s, State>, RunError> {
        loop {
            if is_done(&state) {
                return Ok(state);
            }
            if state.has_stopped {
                return Err(RunError::Stopped);
            }
            state = self.wake.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// No panic can separate two related changes.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn other(stream: Stream) -> Stream {
    match stream {
        Stream::Compute => Stream::Comm,
        Stream::Comm => Stream::Compute,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn barriers_can_be_repeated() {
        let sync = StreamSync::default();
        let walk = |stream: Stream, step: u64| -> Vec<u64> {
            (0..1000).map(|n| sync.barrier(stream, n * step).unwrap()).collect()
        };
        std::thread::scope(|scope| {
            let comm = scope.spawn(|| walk(Stream::Comm, 3));
            assert_eq!(walk(Stream::Compute, 2), (0..1000).map(|n| 3 * n).collect::<Vec<_>>());
            assert_eq!(comm.join().unwrap(), (0..1000).map(|n| 2 * n).collect::<Vec<_>>());
        });
    }

    #[test]
    fn a_wait_ends_by_its_event_or_by_a_stop() {
        let sync = StreamSync::default();
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| (sync.wait((0, 1)), sync.wait((1, 1))));
            sync.record((0, 0), 4);
            sync.record((0, 1), 5);
            sync.stop();
            let (first, second) = waits.join().unwrap();
            assert!(matches!(first, Ok(5) | Err(RunError::Stopped)));
            assert!(matches!(second, Err(RunError::Stopped)));
        });
        sync.forget(0);
        assert!(sync.wait((0, 1)).is_err());
        assert!(sync.barrier(Stream::Comm, 0).is_err());
    }
}
