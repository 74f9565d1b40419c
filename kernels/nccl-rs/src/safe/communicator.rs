//! A rank's handle of a communicator: creation, state, split, finalize and abort.

use std::ffi::c_int;
use std::mem::ManuallyDrop;
use std::time::{Duration, Instant};

use crate::result::{Error, Status};
use crate::sys::{NO_COLOR, RawCommunicator, RawConfig};

use super::library::{Library, UniqueId};

/// The pause between two queries of a state.
const POLL: Duration = Duration::from_millis(1);

/// A rank's handle of a communicator.
///
/// Dropping destroys one that is ready and aborts one that has failed or is still in progress, so that it never waits
/// for ranks that are missing.
#[derive(Debug)]
pub struct Communicator {
    pub(super) library: Library,
    pub(super) raw: RawCommunicator,
    ranks: usize,
    rank: usize,
}

// SAFETY: NCCL keeps no state of a communicator in threads; one thread at a time uses it, as it is not `Sync`.
unsafe impl Send for Communicator {}

/// The state of a communicator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// Every call was issued.
    Ready,
    /// A call is still in progress in the background.
    InProgress,
    /// A call failed in the background; the communicator can only be aborted.
    Failed(Status),
}

impl Library {
    /// Joins `ranks` processes that share `id`, as `rank`; the current CUDA device is the rank's. The communicator does
    /// not block, and is not ready yet.
    ///
    /// # Errors
    /// [`Error::Range`] when `rank` is not below `ranks`; [`Error::Missing`] before NCCL 2.14; else NCCL's status.
    pub fn init_rank(&self, ranks: usize, id: &UniqueId, rank: usize) -> Result<Communicator, Error> {
        let size = int("ranks", ranks)?;
        let number = below("rank", rank, ranks)?;
        let f = since(self.functions.comm_init_rank_config, "ncclCommInitRankConfig", (2, 14))?;
        let mut config = RawConfig::default();
        let mut raw: RawCommunicator = std::ptr::null_mut();
        // SAFETY: the pointers are to a live handle and a configuration of the size that it states.
        let status = unsafe { f(&mut raw, size, id.raw(), number, &mut config) };
        self.issued("ncclCommInitRankConfig", status)?;
        Ok(Communicator { library: self.clone(), raw, ranks, rank })
    }
}

/// A number as NCCL takes it.
fn int(what: &'static str, value: usize) -> Result<c_int, Error> {
    let bound = usize::try_from(c_int::MAX).unwrap_or(usize::MAX);
    c_int::try_from(value).map_err(|_| Error::Range { what, value, bound })
}

/// A rank, which must be below `bound`.
fn below(what: &'static str, value: usize, bound: usize) -> Result<c_int, Error> {
    if value >= bound {
        return Err(Error::Range { what, value, bound });
    }
    int(what, value)
}

/// A function that older libraries do not have.
fn since<F>(found: Option<F>, call: &'static str, needs: (u32, u32)) -> Result<F, Error> {
    found.ok_or(Error::Missing { call, needs })
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

    /// Its state.
    ///
    /// # Errors
    /// NCCL's status of the query itself.
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

    /// Waits until every call was issued; queries the state every millisecond.
    ///
    /// # Errors
    /// [`Error::NotReady`] after `longest`; NCCL's status where a call failed in the background.
    pub fn wait_ready(&self, longest: Duration) -> Result<(), Error> {
        let since = Instant::now();
        loop {
            match self.state()? {
                State::Ready => return Ok(()),
                State::InProgress if since.elapsed() >= longest => {
                    return Err(Error::NotReady { call: "the communicator", waited: longest });
                }
                State::InProgress => std::thread::sleep(POLL),
                State::Failed(status) => {
                    let detail = "found in the background".to_owned();
                    return Err(Error::Failed { call: "ncclCommGetAsyncError", status, detail });
                }
            }
        }
    }

    /// Starts a split: ranks of one color form a communicator, in order of their keys; a rank without a color joins none.
    /// Every rank must call it. The call returns at once; the new communicator exists when this one is ready again.
    ///
    /// # Errors
    /// [`Error::Missing`] before NCCL 2.18, else NCCL's status.
    pub fn begin_split(&self, color: Option<usize>, key: usize) -> Result<Split<'_>, Error> {
        let f = since(self.library.functions.comm_split, "ncclCommSplit", (2, 18))?;
        let number = color.map_or(Ok(NO_COLOR), |color| int("color", color))?;
        let (key, mut config) = (int("key", key)?, RawConfig::default());
        let part: *mut RawCommunicator = Box::into_raw(Box::new(std::ptr::null_mut()));
        // SAFETY: the communicator is alive, and the pointers are to a live handle and configuration; the handle lives
        // until the split is known to be done.
        let status = unsafe { f(self.raw, number, key, part, &mut config) };
        let split = Split { of: self, part };
        self.library.issued("ncclCommSplit", status)?;
        Ok(split)
    }

    /// Queries the number of ranks and this rank, which a [part](Split::part) does not know until it is ready.
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

    /// Completes the calls that were issued. No call may follow, and the communicator is ready when all are done.
    ///
    /// # Errors
    /// [`Error::Missing`] before NCCL 2.14, else NCCL's status.
    pub fn finalize(&mut self) -> Result<(), Error> {
        let f = since(self.library.functions.comm_finalize, "ncclCommFinalize", (2, 14))?;
        // SAFETY: the communicator is alive.
        self.library.issued("ncclCommFinalize", unsafe { f(self.raw) })
    }

    /// Ends the communicator at once, without waiting for calls in progress; peers see an error.
    ///
    /// # Errors
    /// NCCL's status.
    pub fn abort(self) -> Result<(), Error> {
        let mut this = ManuallyDrop::new(self);
        // SAFETY: the communicator is alive, and is not destroyed a second time.
        let status = unsafe { (this.library.functions.comm_abort)(this.raw) };
        let aborted = this.library.issued("ncclCommAbort", status);
        // SAFETY: the handle to the library is not used after this.
        unsafe { std::ptr::drop_in_place(&raw mut this.library) };
        aborted
    }

    pub(super) fn peer(&self, what: &'static str, peer: usize) -> Result<c_int, Error> {
        below(what, peer, self.ranks)
    }
}

/// A split in progress.
///
/// NCCL writes the handle from a thread of its own at any time, so the memory of the handle is leaked where the split
/// never ends.
#[derive(Debug)]
pub struct Split<'c> {
    of: &'c Communicator,
    part: *mut RawCommunicator,
}

impl Split<'_> {
    /// The new communicator; none where the rank joins none. It may not be ready yet; call
    /// [`learn`](Communicator::learn) when it is.
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
        // SAFETY: the communicator is alive; a failure here cannot be reported.
        unsafe { end(self.raw) };
    }
}
