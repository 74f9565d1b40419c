//! Synchronisation of the streams of a rank: events, and barriers around frames that communicate.
//!
//! Every wait ends, by its event or when the rank stops: a task waits only for tasks issued before it (the executor
//! refuses others), so of the waiting streams one waits for an event that has happened.

use std::collections::BTreeMap;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use ithaca_ir::schedule::{Stream, Streams};

use super::claims::Clock;
use crate::error::RunError;

/// The events and barriers of one rank.
#[derive(Debug, Default)]
pub(super) struct StreamSync {
    state: Mutex<State>,
    wake: Condvar,
}

/// A run of a frame that several streams run: the task and the layer of each call that leads to it.
pub(super) type RunOfFrame = Vec<(usize, u64)>;

#[derive(Debug, Default)]
struct State {
    has_stopped: bool,
    /// For each event of a run of a frame, the tasks that have ended when it happens.
    events: BTreeMap<RunOfFrame, BTreeMap<usize, Clock>>,
    /// The barriers that not all have left.
    barriers: BTreeMap<(RunOfFrame, usize), Barrier>,
}

/// A barrier on its way.
#[derive(Debug, Default)]
struct Barrier {
    arrived: Streams,
    left: Streams,
    /// The tasks that have ended when all are there.
    ended: Clock,
}

impl StreamSync {
    /// Waits for other streams at barrier `number` of a frame; `ended` are the tasks that are known to have ended. Gives those
    /// that have ended when all are there.
    ///
    /// # Errors
    /// [`RunError::Stopped`].
    pub(super) fn barrier(
        &self,
        (frame, number): (&RunOfFrame, usize),
        (stream, streams): (Stream, Streams),
        ended: &Clock,
    ) -> Result<Clock, RunError> {
        let key = (frame.clone(), number);
        let mut state = self.state();
        let barrier = state.barriers.entry(key.clone()).or_default();
        barrier.arrived = barrier.arrived.and(Streams::only(stream));
        join(&mut barrier.ended, ended);
        self.wake.notify_all();
        let is_complete = |state: &State| state.barriers.get(&key).is_some_and(|b| b.arrived == streams);
        let mut state = self.wait_until(state, is_complete)?;
        let Some(barrier) = state.barriers.get_mut(&key) else { return Err(RunError::Stopped) };
        barrier.left = barrier.left.and(Streams::only(stream));
        let ended = barrier.ended;
        if barrier.left == streams {
            state.barriers.remove(&key);
        }
        Ok(ended)
    }

    /// Records an event; `ended` are the tasks that have ended.
    pub(super) fn record(&self, (frame, event): (&RunOfFrame, usize), ended: Clock) {
        let mut state = self.state();
        match state.events.get_mut(frame) {
            Some(events) => drop(events.insert(event, ended)),
            None => drop(state.events.insert(frame.clone(), BTreeMap::from([(event, ended)]))),
        }
        self.wake.notify_all();
    }

    /// Waits for an event; gives the tasks that have ended when it happens.
    ///
    /// # Errors
    /// [`RunError::Stopped`].
    pub(super) fn wait(&self, (frame, event): (&RunOfFrame, usize)) -> Result<Clock, RunError> {
        let find = |state: &State| state.events.get(frame).and_then(|events| events.get(&event)).copied();
        let state = self.wait_until(self.state(), |state| find(state).is_some())?;
        Ok(find(&state).unwrap_or_default())
    }

    /// Forgets the events of a frame that all its streams have left.
    pub(super) fn forget(&self, frame: &RunOfFrame) {
        self.state().events.remove(frame);
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

/// Adds the tasks that another clock knows to have ended.
pub(super) fn join(clock: &mut Clock, other: &Clock) {
    clock.iter_mut().zip(other).for_each(|(mine, theirs)| *mine = (*mine).max(*theirs));
}

#[cfg(test)]
mod tests {
    use super::*;

    fn clock(stream: Stream, n: u64) -> Clock {
        let mut clock = Clock::default();
        clock[stream as usize] = n;
        clock
    }

    #[test]
    fn barriers_can_be_repeated() {
        let sync = StreamSync::default();
        let frame = vec![(0, 0)];
        let streams = [Stream::Compute, Stream::Comm, Stream::BackwardOdd];
        let all = streams.map(Streams::only).into_iter().fold(Streams::default(), Streams::and);
        let walk = |stream: Stream| {
            for n in 0..300 {
                let ended = sync.barrier((&frame, n), (stream, all), &clock(stream, n as u64)).unwrap();
                assert!(streams.iter().all(|&s| ended[s as usize] == n as u64), "{n} {ended:?}");
            }
        };
        std::thread::scope(|scope| {
            streams.iter().for_each(|&stream| drop(scope.spawn(move || walk(stream))))
        });
        assert!(sync.state().barriers.is_empty());
    }

    #[test]
    fn a_wait_ends_by_its_event_or_by_a_stop() {
        let sync = StreamSync::default();
        let frame = RunOfFrame::new();
        let five = clock(Stream::Comm, 5);
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| (sync.wait((&frame, 1)), sync.wait((&vec![(1, 0)], 1))));
            sync.record((&frame, 0), clock(Stream::Comm, 4));
            sync.record((&frame, 1), five);
            sync.stop();
            let (first, second) = waits.join().unwrap();
            assert!(match first {
                Ok(ended) => ended == five,
                Err(error) => matches!(error, RunError::Stopped),
            });
            assert!(matches!(second, Err(RunError::Stopped)));
        });
        sync.forget(&frame);
        assert!(sync.wait((&frame, 1)).is_err());
        let both = Streams::only(Stream::Compute).and(Streams::only(Stream::Comm));
        assert!(sync.barrier((&frame, 0), (Stream::Comm, both), &five).is_err());
    }
}
