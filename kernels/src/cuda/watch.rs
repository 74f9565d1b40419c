//! Waiting for the streams of all ranks, by looking: whether they come past their tasks, whether a communicator failed in
//! the background, and how long nothing has gone on. Whatever goes wrong is put down to a rank and a task.
//!
//! Behind each task its stream has an event, so what a rank is at is known from what it has come past. Tasks wait only for
//! tasks that were issued before them; so of all that have not ended the one that was issued first is what the others wait
//! for. Before a collective there is another event, which tells ranks that have come to it from those that have not.
//!
//! A stream is never given more than some tasks before the first of them ends: a queue that is full is waited for by the
//! driver, and there nobody looks.

use std::collections::VecDeque;
use std::time::Duration;

use ithaca_ir::schedule::{FrameId, Stream as Queue};

use super::collectives::{Broken, Collectives};
use super::device::Event;
use super::error::CudaError;
use super::patience::Patience;
use super::rank::Seat;

/// Tasks of a stream that may be under way. A queue of the driver has room for about a thousand launches, and few tasks
/// are more than some kernels.
const AHEAD: usize = 128;

/// A run of a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Run {
    pub(super) frame: FrameId,
    pub(super) layer: u64,
    pub(super) task: usize,
}

/// What went wrong, on which seat, at which task.
#[derive(Debug)]
pub(super) struct Trouble {
    pub(super) seat: usize,
    /// None where a whole graph runs.
    pub(super) run: Option<Run>,
    pub(super) error: CudaError,
}

/// A task that was issued and is not known to have ended.
struct Mark {
    /// How many tasks were issued before; ranks have one number for a task that all of them run.
    number: u64,
    run: Option<Run>,
    /// Before it, where others wait for the rank to come to it.
    come: Option<Event>,
    /// Behind it.
    done: Event,
}

/// How far waiting goes.
#[derive(Clone, Copy)]
enum Until {
    /// Every stream has done all.
    AllIsDone,
    /// A stream has room.
    HasRoom(usize, Queue),
}

/// The tasks that are under way.
pub(super) struct Watch {
    longest: Option<Duration>,
    /// For each seat, of its compute and its communication stream, in order of issue.
    streams: Vec<[VecDeque<Mark>; 2]>,
    /// For each seat, events that are used no more.
    spare: Vec<Vec<Event>>,
    n_issued: u64,
}

impl Watch {
    /// Of so many seats; something has to go on at least every `longest`.
    pub(super) fn new(n_seats: usize, longest: Option<Duration>) -> Self {
        let streams = (0..n_seats).map(|_| Default::default()).collect();
        Self { longest, streams, spare: vec![Vec::new(); n_seats], n_issued: 0 }
    }

    /// The next task is issued now; its number.
    pub(super) fn next(&mut self) -> u64 {
        self.n_issued += 1;
        self.n_issued
    }

    /// An event on a stream before a task that others wait for the rank to come to.
    ///
    /// # Errors
    /// The device's.
    pub(super) fn comes(&mut self, of: &Seat<'_>, seat: usize, queue: Queue) -> Result<Event, CudaError> {
        let event = match self.spare[seat].pop() {
            Some(event) => event,
            None => of.device.event()?,
        };
        of.device.record(of.stream(queue), event)?;
        Ok(event)
    }

    /// Notes a task that was just issued to a stream, and waits where the stream has too many.
    ///
    /// # Errors
    /// [`Trouble`] of any rank.
    pub(super) fn issued(
        &mut self,
        (seats, collectives): (&[Seat<'_>], &dyn Collectives),
        (seat, queue): (usize, Queue),
        (number, run): (u64, Option<Run>),
        come: Option<Event>,
    ) -> Result<(), Trouble> {
        let done = self.comes(&seats[seat], seat, queue).map_err(|error| Trouble { seat, run, error })?;
        self.streams[seat][queue as usize].push_back(Mark { number, run, come, done });
        match self.has_room(seat, queue) {
            true => Ok(()),
            false => self.wait_until(seats, collectives, Until::HasRoom(seat, queue)),
        }
    }

    /// Waits until everything issued is done.
    ///
    /// # Errors
    /// [`Trouble`] of any rank.
    pub(super) fn wait(&mut self, seats: &[Seat<'_>], collectives: &dyn Collectives) -> Result<(), Trouble> {
        self.wait_until(seats, collectives, Until::AllIsDone)
    }

    fn has_room(&self, seat: usize, queue: Queue) -> bool {
        self.streams[seat][queue as usize].len() < AHEAD
    }

    fn wait_until(
        &mut self,
        seats: &[Seat<'_>],
        collectives: &dyn Collectives,
        until: Until,
    ) -> Result<(), Trouble> {
        let mut patience = Patience::new(self.longest);
        loop {
            let went_on = self.look(seats)?;
            collectives.check().map_err(|broken| self.trouble_of(seats, broken))?;
            let is_there = match until {
                Until::AllIsDone => self.streams.iter().flatten().all(VecDeque::is_empty),
                Until::HasRoom(seat, queue) => self.has_room(seat, queue),
            };
            if is_there {
                return Ok(());
            }
            match went_on {
                true => patience.renew(),
                false => patience.pause().map_err(|waited| self.late(seats, waited))?,
            }
        }
    }

    /// Forgets what streams have come past; whether that is anything.
    fn look(&mut self, seats: &[Seat<'_>]) -> Result<bool, Trouble> {
        let mut went_on = false;
        for (seat, streams) in self.streams.iter_mut().enumerate() {
            for stream in streams {
                while let Some(mark) = stream.front() {
                    match seats[seat].device.has_happened(mark.done) {
                        Ok(true) => {}
                        Ok(false) => break,
                        Err(error) => return Err(self.failed(seats, seat, error)),
                    }
                    if let Some(Mark { come, done, .. }) = stream.pop_front() {
                        self.spare[seat].extend(come.into_iter().chain([done]));
                        went_on = true;
                    }
                }
            }
        }
        Ok(went_on)
    }

    /// What the streams are at, with their seats.
    fn fronts(&self) -> impl Iterator<Item = (usize, &Mark)> {
        self.streams.iter().enumerate().flat_map(move |(seat, streams)| {
            streams.iter().filter_map(VecDeque::front).map(move |mark| (seat, mark))
        })
    }

    /// A device failed: of its ranks that which has what was issued first and has not ended.
    fn failed(&self, seats: &[Seat<'_>], seat: usize, error: CudaError) -> Trouble {
        let shares = |other: usize| std::ptr::addr_eq(seats[other].device, seats[seat].device);
        let first = self.fronts().filter(|(other, _)| shares(*other)).min_by_key(|(_, mark)| mark.number);
        match first {
            Some((seat, mark)) => Trouble { seat, run: mark.run, error },
            None => Trouble { seat, run: None, error },
        }
    }

    /// A communicator failed: at what its rank has not ended, what it communicates before what it computes.
    fn trouble_of(&self, seats: &[Seat<'_>], Broken { rank, error }: Broken) -> Trouble {
        let seat = seats.iter().position(|seat| seat.rank == rank).unwrap_or(0);
        let [compute, comm] = self.streams[seat].each_ref().map(VecDeque::front);
        Trouble { seat, run: comm.or(compute).and_then(|mark| mark.run), error }
    }

    /// Nothing goes on: what was issued first holds the others up, and of its ranks one that has not come to it.
    fn late(&self, seats: &[Seat<'_>], waited: Duration) -> Trouble {
        let first = self.fronts().map(|(_, mark)| mark.number).min();
        let at: Vec<(usize, &Mark)> = self.fronts().filter(|(_, mark)| Some(mark.number) == first).collect();
        let has_come = |(seat, mark): &(usize, &Mark)| {
            mark.come.is_none_or(|come| seats[*seat].device.has_happened(come).unwrap_or(false))
        };
        let absent = at.iter().find(|one| !has_come(one));
        let (seat, run) = absent.or(at.first()).map_or((0, None), |(seat, mark)| (*seat, mark.run));
        let others = at.iter().map(|(other, _)| *other).filter(|other| *other != seat);
        let waiting = others.map(|other| seats[other].rank.0).collect();
        Trouble { seat, run, error: CudaError::Late { waited, waiting } }
    }
}
