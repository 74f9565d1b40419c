//! Waits for the streams of all ranks by polling: completed tasks, communicators that failed in the background, and the time
//! without progress. Every failure is attributed to a rank and a task.
//!
//! An event after each task shows the progress of its stream. Tasks wait only for tasks that were issued earlier, so the
//! unfinished task that was issued first blocks the others. An event before each collective tells the ranks that arrived
//! from those that did not.
//!
//! A stream has a bounded number of tasks in flight: issuing to a full queue blocks inside the driver, without polling.

use std::collections::VecDeque;
use std::time::Duration;

use ithaca_ir::schedule::{FrameId, Stream as Queue};

use super::collectives::{CollectiveFailure, Collectives};
use super::deadline::Deadline;
use super::device::Event;
use super::error::CudaError;
use super::rank::LocalRank;

/// The most tasks in flight on a stream. A queue of the driver takes about a thousand launches, and few tasks have more
/// than some kernels.
const AHEAD: usize = 128;

/// A run of a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Run {
    pub(super) frame: FrameId,
    pub(super) layer: u64,
    pub(super) task: usize,
}

/// An error with its local rank and its task.
#[derive(Debug)]
pub(super) struct TaskFailure {
    pub(super) local: usize,
    /// The task; `None` while a graph runs.
    pub(super) run: Option<Run>,
    pub(super) error: CudaError,
}

/// A task in flight.
struct Mark {
    /// The issue number, which a task has on all its ranks.
    number: u64,
    run: Option<Run>,
    /// The event before a collective.
    arrived: Option<Event>,
    /// The event after the task.
    done: Event,
}

/// The tasks in flight.
pub(super) struct Watch {
    timeout: Option<Duration>,
    /// For each local rank the tasks of each stream, in order of issue.
    streams: Vec<[VecDeque<Mark>; Queue::COUNT]>,
    /// For each local rank events to reuse.
    spare: Vec<Vec<Event>>,
    n_issued: u64,
}

impl Watch {
    /// For `n_locals` local ranks. A wait fails after `timeout` without progress.
    pub(super) fn new(n_locals: usize, timeout: Option<Duration>) -> Self {
        let streams = (0..n_locals).map(|_| Default::default()).collect();
        Self { timeout, streams, spare: vec![Vec::new(); n_locals], n_issued: 0 }
    }

    /// Returns the issue number of the next task.
    pub(super) fn next(&mut self) -> u64 {
        self.n_issued += 1;
        self.n_issued
    }

    /// Records an event on a stream of a local rank.
    ///
    /// # Errors
    /// The device's.
    pub(super) fn record_event(
        &mut self,
        of: &LocalRank<'_>,
        local: usize,
        queue: Queue,
    ) -> Result<Event, CudaError> {
        let event = match self.spare[local].pop() {
            Some(event) => event,
            None => of.device.event()?,
        };
        of.device.record(of.stream(queue), event)?;
        Ok(event)
    }

    /// Adds a task that was just issued, and waits while the stream has too many in flight.
    ///
    /// # Errors
    /// The [`TaskFailure`] of any rank.
    pub(super) fn issued(
        &mut self,
        (locals, collectives): (&[LocalRank<'_>], &dyn Collectives),
        (local, queue): (usize, Queue),
        (number, run): (u64, Option<Run>),
        arrived: Option<Event>,
    ) -> Result<(), TaskFailure> {
        let done = self.record_event(&locals[local], local, queue).map_err(|error| TaskFailure {
            local,
            run,
            error,
        })?;
        self.streams[local][queue as usize].push_back(Mark { number, run, arrived, done });
        let has_room = |watch: &Self| watch.streams[local][queue as usize].len() < AHEAD;
        if has_room(self) { Ok(()) } else { self.wait_until(locals, collectives, has_room) }
    }

    /// Waits until all issued work is done.
    ///
    /// # Errors
    /// The [`TaskFailure`] of any rank.
    pub(super) fn wait(
        &mut self,
        locals: &[LocalRank<'_>],
        collectives: &dyn Collectives,
    ) -> Result<(), TaskFailure> {
        let is_idle = |watch: &Self| watch.streams.iter().flatten().all(VecDeque::is_empty);
        self.wait_until(locals, collectives, is_idle)
    }

    /// Waits until the work issued to a stream of each local rank is done.
    ///
    /// # Errors
    /// The [`TaskFailure`] of any rank.
    pub(super) fn wait_for(
        &mut self,
        locals: &[LocalRank<'_>],
        collectives: &dyn Collectives,
        queue: Queue,
    ) -> Result<(), TaskFailure> {
        let is_idle = |watch: &Self| watch.streams.iter().all(|streams| streams[queue as usize].is_empty());
        self.wait_until(locals, collectives, is_idle)
    }

    fn wait_until(
        &mut self,
        locals: &[LocalRank<'_>],
        collectives: &dyn Collectives,
        is_reached: impl Fn(&Self) -> bool,
    ) -> Result<(), TaskFailure> {
        let mut deadline = Deadline::new(self.timeout);
        loop {
            let has_progressed = self.poll(locals)?;
            collectives.check().map_err(|failure| self.of_collective(locals, failure))?;
            if is_reached(self) {
                return Ok(());
            }
            if has_progressed {
                deadline.extend();
            } else {
                deadline.pause().map_err(|waited| self.timed_out(locals, waited))?;
            }
        }
    }

    /// Removes completed tasks; returns whether there were any.
    fn poll(&mut self, locals: &[LocalRank<'_>]) -> Result<bool, TaskFailure> {
        let mut has_progressed = false;
        for (local, streams) in self.streams.iter_mut().enumerate() {
            for stream in streams {
                while let Some(mark) = stream.front() {
                    match locals[local].device.is_complete(mark.done) {
                        Ok(true) => {}
                        Ok(false) => break,
                        Err(error) => return Err(self.failed(locals, local, error)),
                    }
                    if let Some(Mark { arrived, done, .. }) = stream.pop_front() {
                        self.spare[local].extend(arrived.into_iter().chain([done]));
                        has_progressed = true;
                    }
                }
            }
        }
        Ok(has_progressed)
    }

    /// The first task in flight of each stream, with its local rank.
    fn fronts(&self) -> impl Iterator<Item = (usize, &Mark)> {
        self.streams.iter().enumerate().flat_map(move |(local, streams)| {
            streams.iter().filter_map(VecDeque::front).map(move |mark| (local, mark))
        })
    }

    /// Attributes an error of a device to the earliest task in flight on that device.
    fn failed(&self, locals: &[LocalRank<'_>], local: usize, error: CudaError) -> TaskFailure {
        let shares = |other: usize| std::ptr::addr_eq(locals[other].device, locals[local].device);
        let first = self.fronts().filter(|(other, _)| shares(*other)).min_by_key(|(_, mark)| mark.number);
        match first {
            Some((local, mark)) => TaskFailure { local, run: mark.run, error },
            None => TaskFailure { local, run: None, error },
        }
    }

    /// Attributes the failure of a communicator to its rank's first task in flight, on a stream that communicates if it has one.
    fn of_collective(
        &self,
        locals: &[LocalRank<'_>],
        CollectiveFailure { rank, error }: CollectiveFailure,
    ) -> TaskFailure {
        let local = locals.iter().position(|local| local.rank == rank).unwrap_or(0);
        let [compute, others @ ..] = self.streams[local].each_ref().map(VecDeque::front);
        let first = others.into_iter().flatten().min_by_key(|mark| mark.number);
        TaskFailure { local, run: first.or(compute).and_then(|mark| mark.run), error }
    }

    /// Attributes a timeout to the earliest task in flight, on a rank that has not arrived if there is one.
    fn timed_out(&self, locals: &[LocalRank<'_>], waited: Duration) -> TaskFailure {
        let first = self.fronts().map(|(_, mark)| mark.number).min();
        let at: Vec<(usize, &Mark)> = self.fronts().filter(|(_, mark)| Some(mark.number) == first).collect();
        let has_arrived = |(local, mark): &(usize, &Mark)| {
            mark.arrived.is_none_or(|arrived| locals[*local].device.is_complete(arrived).unwrap_or(false))
        };
        let absent = at.iter().find(|one| !has_arrived(one));
        let (local, run) = absent.or(at.first()).map_or((0, None), |(local, mark)| (*local, mark.run));
        let others = at.iter().map(|(other, _)| *other).filter(|other| *other != local);
        let waiting = others.map(|other| locals[other].rank.0).collect();
        TaskFailure { local, run, error: CudaError::Timeout { waited, waiting } }
    }
}
