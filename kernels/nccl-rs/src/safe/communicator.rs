//! A rank's end of a communicator: how it comes to be, how it stands, how it ends.

use std::ffi::c_int;
use std::mem::ManuallyDrop;
use std::time::{Duration, Instant};

use crate::result::{Error, Status};
use crate::sys::{NO_COLOR, RawCommunicator};

use super::config::Config;
use super::library::{Library, UniqueId};
use super::{int, since};

/// How long to sleep between two looks at a state.
const LOOK: Duration = Duration::from_millis(1);

/// A rank's end of a communicator.
///
/// Dropped, it is destroyed where it is ready, and aborted where it has failed or is still under way, so that dropping
/// never waits for ranks that do not come.
#[derive(Debug)]
pub struct Communicator {
    pub(super) library: Library,
    pub(super) raw: RawCommunicator,
    pub(super) ranks: usize,
    rank: usize,
}

// SAFETY: NCCL keeps no state of a communicator in threads; one thread at a time uses it, as it is not `Sync`.
unsafe impl Send for Communicator {}

/// How a communicator stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Everything that was asked of it was issued.
    Ready,
    /// Something goes on in the background.
    InProgress,
    /// Something failed in the background; the communicator can only be aborted.
    Failed(Status),
}

impl Library {
    /// Joins `ranks` processes that share `id`, as `rank`; blocks until all have come. The current CUDA device is the
    /// rank's.
    ///
    /// # Errors
    /// [`Error::Range`] when `rank` is not below `ranks`, else NCCL's status.
    pub fn init_rank(&self, ranks: usize, id: &UniqueId, rank: usize) -> Result<Communicator, Error> {
        let (size, number) = place(ranks, rank)?;
        let mut raw: RawCommunicator = std::ptr::null_mut();
        // SAFETY: the pointer is to a live handle, and the id has NCCL's layout.
        let status = unsafe { (self.functions.comm_init_rank)(&mut raw, size, id.raw(), number) };
        self.issued("ncclCommInitRank", status)?;
        Ok(Communicator { library: self.clone(), raw, ranks, rank })
    }

    /// As [`init_rank`](Self::init_rank), made as `config` says; one that does not block is not ready yet.
    ///
    /// # Errors
    /// As [`init_rank`](Self::init_rank); [`Error::Missing`] before NCCL 2.14.
    pub fn init_rank_config(
        &self,
        ranks: usize,
        id: &UniqueId,
        rank: usize,
        config: &Config,
    ) -> Result<Communicator, Error> {
        let (size, number) = place(ranks, rank)?;
        let f = since(self.functions.comm_init_rank_config, "ncclCommInitRankConfig", (2, 14))?;
        let mut config = config.raw()?;
        let mut raw: RawCommunicator = std::ptr::null_mut();
        // SAFETY: the pointers are to a live handle and a configuration of the size that it states.
        let status = unsafe { f(&mut raw, size, id.raw(), number, &mut config) };
        self.issued("ncclCommInitRankConfig", status)?;
        Ok(Communicator { library: self.clone(), raw, ranks, rank })
    }
}

fn place(ranks: usize, rank: usize) -> Result<(c_int, c_int), Error> {
    let size = int("ranks", ranks)?;
    match rank < ranks {
        true => Ok((size, int("rank", rank)?)),
        false => Err(Error::Range { what: "rank", value: rank, bound: ranks }),
    }
}

impl Communicator {
    /// Number of ranks.
    pub fn ranks(&self) -> usize {
        self.ranks
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// The library it belongs to.
    pub fn library(&self) -> &Library {
        &self.library
    }

    /// How it stands.
    ///
    /// # Errors
    /// NCCL's status of the question itself.
    pub fn state(&self) -> Result<State, Error> {
        let mut code: c_int = 0;
        // SAFETY: the communicator is alive and the pointer is to a live integer.
        let status = unsafe { (self.library.functions.comm_get_async_error)(self.raw, &mut code) };
        self.library.check("ncclCommGetAsyncError", status)?;
        Ok(match Status::of(code) {
            None => State::Ready,
            Some(Status::InProgress) => State::InProgress,
            Some(status) => State::Failed(status),
        })
    }

    /// Waits until everything that was asked of it was issued, looking every millisecond.
    ///
    /// # Errors
    /// [`Error::NotReady`] after `longest`; NCCL's status where something failed in the background.
    pub fn wait_ready(&self, longest: Duration) -> Result<(), Error> {
        let since = Instant::now();
        loop {
            match self.state()? {
                State::Ready => return Ok(()),
                State::InProgress if since.elapsed() >= longest => {
                    return Err(Error::NotReady { call: "the communicator", waited: longest });
                }
                State::InProgress => std::thread::sleep(LOOK),
                State::Failed(status) => {
                    let detail = "found in the background".to_owned();
                    return Err(Error::Failed { call: "ncclCommGetAsyncError", status, detail });
                }
            }
        }
    }

    /// Begins to split it: ranks of one color become a communicator, in order of their keys; a rank without a color is in
    /// none. Every rank calls it. Where this one does not block the call returns at once, and the part is there when this one
    /// is ready again.
    ///
    /// # Errors
    /// [`Error::Missing`] before NCCL 2.18, else NCCL's status.
    pub fn begin_split(&self, color: Option<usize>, key: usize, config: &Config) -> Result<Split<'_>, Error> {
        let f = since(self.library.functions.comm_split, "ncclCommSplit", (2, 18))?;
        let number = color.map_or(Ok(NO_COLOR), |color| int("color", color))?;
        let (key, mut config) = (int("key", key)?, config.raw()?);
        let part: *mut RawCommunicator = Box::into_raw(Box::new(std::ptr::null_mut()));
        // SAFETY: the communicator is alive, and the pointers are to a live handle and configuration; the handle lives
        // until the split is known to be done.
        let status = unsafe { f(self.raw, number, key, part, &mut config) };
        let split = Split { of: self, part };
        self.library.issued("ncclCommSplit", status)?;
        Ok(split)
    }

    /// Splits it and waits for both communicators to be ready, at most `longest` for each.
    ///
    /// # Errors
    /// As [`begin_split`](Self::begin_split) and [`wait_ready`](Self::wait_ready).
    pub fn split(
        &self,
        color: Option<usize>,
        key: usize,
        config: &Config,
        longest: Duration,
    ) -> Result<Option<Communicator>, Error> {
        let split = self.begin_split(color, key, config)?;
        self.wait_ready(longest)?;
        let Some(mut part) = split.part()? else { return Ok(None) };
        part.wait_ready(longest)?;
        part.learn()?;
        Ok(Some(part))
    }

    /// Asks how many ranks it has, and which of them this is: what a [part](Split::part) does not know until it is ready.
    ///
    /// # Errors
    /// NCCL's status.
    pub fn learn(&mut self) -> Result<(), Error> {
        let (mut ranks, mut rank): (c_int, c_int) = (0, 0);
        // SAFETY: the communicator is alive, the pointer is to a live integer.
        let counted = unsafe { (self.library.functions.comm_count)(self.raw, &mut ranks) };
        self.library.check("ncclCommCount", counted)?;
        // SAFETY: as above.
        let numbered = unsafe { (self.library.functions.comm_user_rank)(self.raw, &mut rank) };
        self.library.check("ncclCommUserRank", numbered)?;
        self.ranks = usize::try_from(ranks).unwrap_or(0);
        self.rank = usize::try_from(rank).unwrap_or(0);
        Ok(())
    }

    /// Ends what was issued: nothing is to be issued any more, and the communicator is ready when all is done.
    ///
    /// # Errors
    /// [`Error::Missing`] before NCCL 2.14, else NCCL's status.
    pub fn finalize(&mut self) -> Result<(), Error> {
        let f = since(self.library.functions.comm_finalize, "ncclCommFinalize", (2, 14))?;
        // SAFETY: the communicator is alive.
        self.library.issued("ncclCommFinalize", unsafe { f(self.raw) })
    }

    /// Ends the communicator at once, without waiting for what is under way; peers see an error.
    ///
    /// # Errors
    /// NCCL's status.
    pub fn abort(self) -> Result<(), Error> {
        let mut this = ManuallyDrop::new(self);
        // SAFETY: the communicator is alive, and is not destroyed a second time.
        let status = unsafe { (this.library.functions.comm_abort)(this.raw) };
        let aborted = this.library.issued("ncclCommAbort", status);
        // SAFETY: nobody sees the handle to the library after this.
        unsafe { std::ptr::drop_in_place(&raw mut this.library) };
        aborted
    }

    pub(super) fn peer(&self, what: &'static str, peer: usize) -> Result<c_int, Error> {
        match peer < self.ranks {
            true => int(what, peer),
            false => Err(Error::Range { what, value: peer, bound: self.ranks }),
        }
    }
}

/// A part of a communicator that is being made.
///
/// NCCL writes the handle when it likes, from a thread of its own, so where the split never comes to its end the place of
/// the handle is never given back.
#[derive(Debug)]
pub struct Split<'c> {
    of: &'c Communicator,
    part: *mut RawCommunicator,
}

impl Split<'_> {
    /// The part; none where the rank is in none. It may not be ready itself, and [learns](Communicator::learn) of its ranks
    /// when it is.
    ///
    /// # Errors
    /// [`Error::NotReady`] where the communicator that is split is not ready again; NCCL's status.
    pub fn part(self) -> Result<Option<Communicator>, Error> {
        self.of.wait_ready(Duration::ZERO)?;
        // SAFETY: it was made by `Box::into_raw`, and NCCL does not write it any more, as the split is done.
        let raw = *unsafe { Box::from_raw(self.part) };
        let library = self.of.library.clone();
        Ok((!raw.is_null()).then(|| Communicator { library, raw, ranks: 0, rank: 0 }))
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        if self.raw.is_null() {
            return;
        }
        let end = match self.state() {
            Ok(State::Ready) => self.library.functions.comm_destroy,
            Ok(State::InProgress | State::Failed(_)) | Err(_) => self.library.functions.comm_abort,
        };
        // SAFETY: the communicator is alive; there is no one to tell of a failure.
        unsafe { end(self.raw) };
    }
}
