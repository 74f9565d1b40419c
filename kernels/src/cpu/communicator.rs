//! How ranks exchange blocks: a trait, and mailboxes in memory.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use ithaca_ir::Rank;
use ithaca_ir::schedule::Stream;

use crate::error::RunError;
use crate::tensor::index;

/// The result of an exchange.
#[derive(Clone, Debug, PartialEq)]
pub struct Received {
    /// The block from each member of the group, in order.
    pub blocks: Vec<Vec<f32>>,
    /// Elements that were sent to others.
    pub elements_sent: u64,
}

/// Point-to-point messages between ranks, in order for each pair and stream.
pub trait Communicator: Sync {
    /// Sends `block` to the stream of `to` without waiting for its receipt.
    ///
    /// # Errors
    /// [`RunError::Stopped`] when another rank has failed.
    fn send(&self, stream: Stream, from: Rank, to: Rank, block: Vec<f32>) -> Result<(), RunError>;

    /// Waits for the next block from the stream of `from`.
    ///
    /// # Errors
    /// [`RunError::Stopped`] when another rank has failed, [`RunError::Deadlock`] when no block will come.
    fn receive(&self, stream: Stream, to: Rank, from: Rank) -> Result<Vec<f32>, RunError>;

    /// Checks for failures of other ranks.
    ///
    /// # Errors
    /// [`RunError::Stopped`] when another rank has failed.
    fn check(&self) -> Result<(), RunError>;

    /// Reports that `rank` has succeeded and sends no more blocks.
    fn finish(&self, rank: Rank);

    /// Reports that `rank` has failed: every other rank stops at its next message or task.
    fn fail(&self, rank: Rank, error: &RunError);

    /// Sends `blocks[i]` to `group[i]` and receives a block of `expected[i]` elements from it; the own block is kept.
    /// Empty blocks do not travel.
    ///
    /// # Errors
    /// As [`receive`](Self::receive); [`RunError::Invalid`] when a block of another size arrives.
    fn exchange(
        &self,
        (stream, rank): (Stream, Rank),
        group: &[Rank],
        blocks: Vec<Vec<f32>>,
        expected: &[usize],
    ) -> Result<Received, RunError> {
        let mut elements_sent = 0;
        let mut own = Vec::new();
        for (&peer, block) in group.iter().zip(blocks) {
            if peer == rank {
                own = block;
            } else if !block.is_empty() {
                elements_sent += block.len() as u64;
                self.send(stream, rank, peer, block)?;
            }
        }
        let mut received = Vec::with_capacity(group.len());
        for (&peer, &n) in group.iter().zip(expected) {
            let block = match (peer == rank, n) {
                (true, _) => std::mem::take(&mut own),
                (false, 0) => Vec::new(),
                (false, _) => self.receive(stream, rank, peer)?,
            };
            if block.len() != n {
                return Err(RunError::invalid(format!(
                    "rank {} sent {} elements where {n} were expected",
                    peer.0,
                    block.len()
                )));
            }
            received.push(block);
        }
        Ok(Received { blocks: received, elements_sent })
    }
}

/// Messages in memory, between threads.
#[derive(Debug)]
pub struct Mailboxes {
    state: Mutex<State>,
    /// One per rank, to wake it.
    wake: Vec<Condvar>,
    /// The streams of a rank that send.
    streams: usize,
    timeout: Option<Duration>,
}

#[derive(Debug, Default)]
struct State {
    /// Sent blocks, by stream, sender and receiver.
    mail: BTreeMap<(Stream, Rank, Rank), VecDeque<Vec<f32>>>,
    /// Waiting streams of ranks, each with the sender.
    waiting: BTreeMap<(Stream, Rank), Rank>,
    /// Ranks that have succeeded.
    finished: BTreeSet<Rank>,
    stopped: bool,
}

impl Mailboxes {
    /// Mailboxes of `n_ranks` ranks, each with so many streams that send.
    pub fn new(n_ranks: u64, streams: usize, timeout: Option<Duration>) -> Self {
        let wake = (0..n_ranks).map(|_| Condvar::new()).collect();
        Self { state: Mutex::new(State::default()), wake, streams, timeout }
    }

    /// Stops every rank at its next message or task.
    pub fn stop(&self) {
        self.state().stopped = true;
        self.wake.iter().for_each(Condvar::notify_all);
    }

    /// A panic while the lock is held leaves no change half done.
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Why a wait for `from` can never end, if so.
    fn deadlock(&self, from: Rank, n_ranks: usize, streams: usize) -> Option<&'static str> {
        if self.finished.contains(&from) {
            return Some("which has ended without sending");
        }
        let idle = |(&(stream, to), &from): (&(Stream, Rank), &Rank)| {
            self.mail.get(&(stream, from, to)).is_none_or(VecDeque::is_empty)
        };
        let running = n_ranks - self.finished.len();
        let all_wait = self.waiting.len() == running * streams && self.waiting.iter().all(idle);
        all_wait.then_some("and every other rank waits too")
    }
}

impl Communicator for Mailboxes {
    fn send(&self, stream: Stream, from: Rank, to: Rank, block: Vec<f32>) -> Result<(), RunError> {
        let mut state = self.state();
        if state.stopped {
            return Err(RunError::Stopped);
        }
        state.mail.entry((stream, from, to)).or_default().push_back(block);
        drop(state);
        self.wake[index(to.0)].notify_all();
        Ok(())
    }

    fn receive(&self, stream: Stream, to: Rank, from: Rank) -> Result<Vec<f32>, RunError> {
        let deadline = self.timeout.map(|t| Instant::now() + t);
        let mut state = self.state();
        state.waiting.insert((stream, to), from);
        let result = loop {
            if let Some(block) = state.mail.get_mut(&(stream, from, to)).and_then(VecDeque::pop_front) {
                break Ok(block);
            }
            if state.stopped {
                break Err(RunError::Stopped);
            }
            let why = state.deadlock(from, self.wake.len(), self.streams);
            let left = deadline.map(|d| d.saturating_duration_since(Instant::now()));
            let why = why.or((left == Some(Duration::ZERO)).then_some("longer than the timeout"));
            if let Some(why) = why {
                break Err(RunError::Deadlock { rank: to.0, from: from.0, why });
            }
            let wake = &self.wake[index(to.0)];
            state = match left {
                None => wake.wait(state).unwrap_or_else(PoisonError::into_inner),
                Some(left) => wake.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0,
            };
        };
        state.waiting.remove(&(stream, to));
        result
    }

    fn check(&self) -> Result<(), RunError> {
        if self.state().stopped { Err(RunError::Stopped) } else { Ok(()) }
    }

    fn finish(&self, rank: Rank) {
        self.state().finished.insert(rank);
        self.wake.iter().for_each(Condvar::notify_all);
    }

    fn fail(&self, _rank: Rank, _error: &RunError) {
        self.stop();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_arrive_in_order_and_the_own_one_stays() {
        let boxes = Mailboxes::new(2, 1, None);
        let group = [Rank(0), Rank(1)];
        std::thread::scope(|scope| {
            let other = scope.spawn(|| {
                let first = boxes.exchange(
                    (Stream::Comm, Rank(1)),
                    &group,
                    vec![vec![10.0], vec![11.0, 12.0]],
                    &[3, 2],
                );
                let second =
                    boxes.exchange((Stream::Comm, Rank(1)), &group, vec![vec![13.0], vec![]], &[0, 0]);
                (first.unwrap(), second.unwrap())
            });
            let first =
                boxes.exchange((Stream::Comm, Rank(0)), &group, vec![vec![], vec![1.0; 3]], &[0, 1]).unwrap();
            assert_eq!(first, Received { blocks: vec![vec![], vec![10.0]], elements_sent: 3 });
            let second =
                boxes.exchange((Stream::Comm, Rank(0)), &group, vec![vec![], vec![]], &[0, 1]).unwrap();
            assert_eq!(second.blocks[1], [13.0]);
            let (first, _) = other.join().unwrap();
            assert_eq!(first.blocks, [vec![1.0; 3], vec![11.0, 12.0]]);
        });
    }

    #[test]
    fn every_wait_ends() {
        let boxes = Mailboxes::new(2, 1, None);
        std::thread::scope(|scope| {
            let other = scope.spawn(|| {
                let result = boxes.receive(Stream::Comm, Rank(1), Rank(0));
                boxes.stop();
                result
            });
            let result = boxes.receive(Stream::Comm, Rank(0), Rank(1));
            boxes.stop();
            let results = [result.unwrap_err(), other.join().unwrap().unwrap_err()];
            assert!(results.iter().any(|e| matches!(e, RunError::Deadlock { .. })), "{results:?}");
        });
        let boxes = Mailboxes::new(2, 1, None);
        boxes.finish(Rank(1));
        assert!(matches!(boxes.receive(Stream::Comm, Rank(0), Rank(1)), Err(RunError::Deadlock { .. })));
        let boxes = Mailboxes::new(2, 1, Some(Duration::from_millis(1)));
        assert!(matches!(boxes.receive(Stream::Comm, Rank(0), Rank(1)), Err(RunError::Deadlock { .. })));
    }
}
