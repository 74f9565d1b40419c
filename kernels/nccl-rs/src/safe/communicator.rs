//! A rank's handle of a communicator: creation, state, split, finalize and abort.

use std::ffi::c_int;

use crate::result::{Error, Status};
use crate::sys::{RawCommunicator, RawConfig, UniqueId};

use super::library::Library;

/// A rank's handle of a communicator.
///
/// Dropping destroys one that is ready and aborts one that has failed or is still in progress, so that it never waits
/// for ranks that are missing.
#[derive(Debug)]
pub struct Communicator {
    pub(super) library: Library,
    pub(super) raw: RawCommunicator,
    pub(super) ranks: usize,
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
        let status = unsafe { f(&mut raw, size, *id, number, &mut config) };
        self.issued("ncclCommInitRankConfig", status)?;
        Ok(Communicator { library: self.clone(), raw, ranks })
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
            Some(Status::IN_PROGRESS) => State::InProgress,
            Some(status) => State::Failed(status),
        })
    }

    /// Starts a split: the `ranks` ranks of one color form a communicator, in order of their keys. Every rank must call it.
    /// The call returns at once; the new communicator exists when this one is ready again.
    ///
    /// # Errors
    /// [`Error::Missing`] before NCCL 2.18, else NCCL's status.
    pub fn begin_split(&self, color: usize, key: usize, ranks: usize) -> Result<Split<'_>, Error> {
        let f = since(self.library.functions.comm_split, "ncclCommSplit", (2, 18))?;
        let (color, key, mut config) = (int("color", color)?, int("key", key)?, RawConfig::default());
        let part: *mut RawCommunicator = Box::into_raw(Box::new(std::ptr::null_mut()));
        // SAFETY: the communicator is alive, and the pointers are to a live handle and configuration; the handle lives
        // until the split is known to be done.
        let status = unsafe { f(self.raw, color, key, part, &mut config) };
        let split = Split { of: self, part, ranks };
        self.library.issued("ncclCommSplit", status)?;
        Ok(split)
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
    pub fn abort(mut self) -> Result<(), Error> {
        let raw = std::mem::replace(&mut self.raw, std::ptr::null_mut());
        // SAFETY: the communicator is alive, and is not destroyed a second time, since its handle is null now.
        self.library.issued("ncclCommAbort", unsafe { (self.library.functions.comm_abort)(raw) })
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
    ranks: usize,
}

impl Split<'_> {
    /// The new communicator, which may not be ready yet.
    ///
    /// # Errors
    /// [`Error::NotReady`] where the communicator that is split is not ready again; NCCL's status.
    pub fn part(self) -> Result<Communicator, Error> {
        match self.of.state()? {
            State::Ready => {}
            State::InProgress => return Err(Error::NotReady { call: "the communicator" }),
            State::Failed(status) => return Err(Error::background(status)),
        }
        // SAFETY: it was made by `Box::into_raw`, and NCCL does not write it any more, as the split is done.
        let raw = *unsafe { Box::from_raw(self.part) };
        Ok(Communicator { library: self.of.library.clone(), raw, ranks: self.ranks })
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
