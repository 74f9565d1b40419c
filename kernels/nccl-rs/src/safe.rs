//! The library, unique ids and communicators.
//!
//! Device memory and streams belong to whoever made them, so the collectives, which take both by address, are `unsafe`;
//! everything else is checked here.

use std::ffi::{CStr, c_int};
use std::fmt;
use std::mem::ManuallyDrop;
use std::sync::Arc;

use crate::result::{Error, Status, Unavailable};
use crate::sys::{DataType, Functions, RawCommunicator, RawStream, RawUniqueId, Reduction, UNIQUE_ID_BYTES};

/// The environment variable that names the library; where it is set, nothing else is tried.
pub const LIBRARY_VARIABLE: &str = "NCCL_LIBRARY";

/// Names under which the system's loader may know the library.
const NAMES: [&str; 2] = ["libnccl.so.2", "libnccl.so"];

/// An opened libnccl. It stays loaded until the process ends, as its threads may outlive any handle.
#[derive(Clone)]
pub struct Library {
    functions: Arc<Functions>,
    name: String,
}

/// An address in device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DevicePointer(pub u64);

/// A CUDA stream, as its address; zero is the default stream.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stream(pub u64);

impl Library {
    /// Opens the library that [`LIBRARY_VARIABLE`] names, or the one that the system's loader finds.
    ///
    /// # Errors
    /// [`Unavailable`] with everything that was tried.
    pub fn open() -> Result<Self, Unavailable> {
        match std::env::var_os(LIBRARY_VARIABLE).filter(|name| !name.is_empty()) {
            Some(name) => Self::open_first(&[&name.to_string_lossy()]),
            None => Self::open_first(&NAMES),
        }
    }

    /// Opens the first of `names`, paths or file names, that is NCCL.
    ///
    /// # Errors
    /// [`Unavailable`] with everything that was tried.
    pub fn open_first(names: &[&str]) -> Result<Self, Unavailable> {
        let mut tried = Vec::new();
        for &name in names {
            match load(name) {
                Ok(functions) => return Ok(Self { functions: Arc::new(functions), name: name.to_owned() }),
                Err(error) => tried.push(format!("{name}: {error}")),
            }
        }
        Err(Unavailable { tried })
    }

    /// The name it was opened by.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Major, minor and patch of the library's version.
    ///
    /// # Errors
    /// NCCL's status.
    pub fn version(&self) -> Result<(u32, u32, u32), Error> {
        let mut code: c_int = 0;
        // SAFETY: the pointer is to a live integer.
        self.check("ncclGetVersion", unsafe { (self.functions.get_version)(&mut code) })?;
        let code = u32::try_from(code).unwrap_or(0);
        // Since 2.9 the code is major·10000 + minor·100 + patch; before, major·1000.
        let unit = if code < 10_000 { 1000 } else { 10_000 };
        Ok((code / unit, code % unit / 100, code % 100))
    }

    /// A new id, for one rank to make and all to join by.
    ///
    /// # Errors
    /// NCCL's status.
    pub fn unique_id(&self) -> Result<UniqueId, Error> {
        let mut raw = RawUniqueId { internal: [0; UNIQUE_ID_BYTES] };
        // SAFETY: the pointer is to a live id.
        self.check("ncclGetUniqueId", unsafe { (self.functions.get_unique_id)(&mut raw) })?;
        Ok(UniqueId { bytes: raw.internal.map(|c| c.to_ne_bytes()[0]) })
    }

    /// Joins `ranks` processes that share `id`, as `rank`; blocks until all have come. The current CUDA device is the
    /// rank's.
    ///
    /// # Errors
    /// [`Error::Range`] when `rank` is not below `ranks`, else NCCL's status.
    pub fn init_rank(&self, ranks: usize, id: &UniqueId, rank: usize) -> Result<Communicator, Error> {
        let size = int("ranks", ranks)?;
        if rank >= ranks {
            return Err(Error::Range { what: "rank", value: rank, bound: ranks });
        }
        let internal = id.bytes.map(|b| std::ffi::c_char::from_ne_bytes([b]));
        let mut raw: RawCommunicator = std::ptr::null_mut();
        // SAFETY: the pointer is to a live handle, and the id has NCCL's layout.
        let status = unsafe {
            (self.functions.comm_init_rank)(&mut raw, size, RawUniqueId { internal }, int("rank", rank)?)
        };
        self.check("ncclCommInitRank", status)?;
        Ok(Communicator { library: self.clone(), raw, ranks, rank })
    }

    /// Runs `calls` as one group: sends and receives in it make progress together.
    ///
    /// # Errors
    /// The first error of `calls`, else that of the group; the group is ended in any case.
    pub fn group<R>(&self, calls: impl FnOnce() -> Result<R, Error>) -> Result<R, Error> {
        // SAFETY: the functions take nothing.
        self.check("ncclGroupStart", unsafe { (self.functions.group_start)() })?;
        let result = calls();
        // SAFETY: as above; the group was started.
        let ended = self.check("ncclGroupEnd", unsafe { (self.functions.group_end)() });
        result.and_then(|value| ended.map(|()| value))
    }

    fn check(&self, call: &'static str, code: c_int) -> Result<(), Error> {
        let Some(status) = Status::of(code) else { return Ok(()) };
        // SAFETY: NCCL returns a static string for every code; null is guarded against.
        let detail = unsafe {
            let text = (self.functions.get_error_string)(code);
            if text.is_null() { String::new() } else { CStr::from_ptr(text).to_string_lossy().into_owned() }
        };
        Err(Error::Failed { call, status, detail })
    }
}

impl fmt::Debug for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Library").field("name", &self.name).finish_non_exhaustive()
    }
}

/// Loads and never unloads.
fn load(name: &str) -> Result<Functions, libloading::Error> {
    // SAFETY: loading runs the library's initialisers; the name is NCCL's or one that the user gave for it.
    let library = ManuallyDrop::new(unsafe { libloading::Library::new(name)? });
    // SAFETY: a library that has all of these symbols is taken to be NCCL, and it stays loaded.
    unsafe { Functions::load(&library) }
}

fn int(what: &'static str, value: usize) -> Result<c_int, Error> {
    let bound = usize::try_from(c_int::MAX).unwrap_or(usize::MAX);
    c_int::try_from(value).map_err(|_| Error::Range { what, value, bound })
}

/// What ranks join by.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct UniqueId {
    bytes: [u8; UNIQUE_ID_BYTES],
}

impl UniqueId {
    /// The id that another rank sent as bytes.
    pub fn from_bytes(bytes: [u8; UNIQUE_ID_BYTES]) -> Self {
        Self { bytes }
    }

    /// The bytes to send to other ranks.
    pub fn bytes(&self) -> &[u8; UNIQUE_ID_BYTES] {
        &self.bytes
    }
}

impl fmt::Debug for UniqueId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("UniqueId")
    }
}

/// A rank's end of a communicator.
#[derive(Debug)]
pub struct Communicator {
    library: Library,
    raw: RawCommunicator,
    ranks: usize,
    rank: usize,
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

    /// Sums (or maximises) `count` elements over all ranks, into the same place on each.
    ///
    /// # Errors
    /// NCCL's status.
    ///
    /// # Safety
    /// `from` and `to` must be device memory of `count` elements that lives until `stream` has come past the call.
    pub unsafe fn all_reduce(
        &self,
        from: DevicePointer,
        to: DevicePointer,
        count: usize,
        dtype: DataType,
        reduction: Reduction,
        stream: Stream,
    ) -> Result<(), Error> {
        let f = self.library.functions.all_reduce;
        // SAFETY: the caller vouches for the memory and the stream.
        let status = unsafe {
            f(from.read(), to.write(), count, dtype as c_int, reduction as c_int, self.raw, stream.raw())
        };
        self.library.check("ncclAllReduce", status)
    }

    /// Gathers `count` elements of every rank, in order of ranks.
    ///
    /// # Errors
    /// NCCL's status.
    ///
    /// # Safety
    /// As [`all_reduce`](Self::all_reduce), with room for `count · ranks` elements at `to`.
    pub unsafe fn all_gather(
        &self,
        from: DevicePointer,
        to: DevicePointer,
        count: usize,
        dtype: DataType,
        stream: Stream,
    ) -> Result<(), Error> {
        let f = self.library.functions.all_gather;
        // SAFETY: the caller vouches for the memory and the stream.
        let status = unsafe { f(from.read(), to.write(), count, dtype as c_int, self.raw, stream.raw()) };
        self.library.check("ncclAllGather", status)
    }

    /// Reduces blocks of `count` elements, one per rank, and keeps the own one.
    ///
    /// # Errors
    /// NCCL's status.
    ///
    /// # Safety
    /// As [`all_reduce`](Self::all_reduce), with `count · ranks` elements at `from`.
    pub unsafe fn reduce_scatter(
        &self,
        from: DevicePointer,
        to: DevicePointer,
        count: usize,
        dtype: DataType,
        reduction: Reduction,
        stream: Stream,
    ) -> Result<(), Error> {
        let f = self.library.functions.reduce_scatter;
        // SAFETY: the caller vouches for the memory and the stream.
        let status = unsafe {
            f(from.read(), to.write(), count, dtype as c_int, reduction as c_int, self.raw, stream.raw())
        };
        self.library.check("ncclReduceScatter", status)
    }

    /// Sends `count` elements to rank `peer`.
    ///
    /// # Errors
    /// [`Error::Range`] for a peer that is not there, else NCCL's status.
    ///
    /// # Safety
    /// As [`all_reduce`](Self::all_reduce).
    pub unsafe fn send(
        &self,
        from: DevicePointer,
        count: usize,
        dtype: DataType,
        peer: usize,
        stream: Stream,
    ) -> Result<(), Error> {
        let peer = self.peer(peer)?;
        let f = self.library.functions.send;
        // SAFETY: the caller vouches for the memory and the stream.
        let status = unsafe { f(from.read(), count, dtype as c_int, peer, self.raw, stream.raw()) };
        self.library.check("ncclSend", status)
    }

    /// Receives `count` elements from rank `peer`.
    ///
    /// # Errors
    /// As [`send`](Self::send).
    ///
    /// # Safety
    /// As [`all_reduce`](Self::all_reduce).
    pub unsafe fn recv(
        &self,
        to: DevicePointer,
        count: usize,
        dtype: DataType,
        peer: usize,
        stream: Stream,
    ) -> Result<(), Error> {
        let peer = self.peer(peer)?;
        let f = self.library.functions.recv;
        // SAFETY: the caller vouches for the memory and the stream.
        let status = unsafe { f(to.write(), count, dtype as c_int, peer, self.raw, stream.raw()) };
        self.library.check("ncclRecv", status)
    }

    /// What went wrong in the background since the communicator was made, if anything did.
    ///
    /// # Errors
    /// NCCL's status of the question itself.
    pub fn async_error(&self) -> Result<Option<Status>, Error> {
        let mut code: c_int = 0;
        // SAFETY: the communicator is alive and the pointer is to a live integer.
        let status = unsafe { (self.library.functions.comm_get_async_error)(self.raw, &mut code) };
        self.library.check("ncclCommGetAsyncError", status)?;
        Ok(Status::of(code))
    }

    /// Ends the communicator at once, without waiting for what is under way; peers see an error.
    ///
    /// # Errors
    /// NCCL's status.
    pub fn abort(self) -> Result<(), Error> {
        let this = ManuallyDrop::new(self);
        // SAFETY: the communicator is alive, and is not destroyed a second time.
        let status = unsafe { (this.library.functions.comm_abort)(this.raw) };
        this.library.check("ncclCommAbort", status)
    }

    fn peer(&self, peer: usize) -> Result<c_int, Error> {
        match peer < self.ranks {
            true => int("peer", peer),
            false => Err(Error::Range { what: "peer", value: peer, bound: self.ranks }),
        }
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        // SAFETY: the communicator is alive; there is no one to tell of a failure.
        unsafe { (self.library.functions.comm_destroy)(self.raw) };
    }
}

impl DevicePointer {
    fn read(self) -> *const std::ffi::c_void {
        self.write().cast_const()
    }

    fn write(self) -> *mut std::ffi::c_void {
        std::ptr::without_provenance_mut(usize::try_from(self.0).unwrap_or(0))
    }
}

impl Stream {
    fn raw(self) -> RawStream {
        std::ptr::without_provenance_mut(usize::try_from(self.0).unwrap_or(0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_library_it_says_what_was_tried() {
        let error =
            Library::open_first(&["libnccl-that-is-not-there.so.2", "neither-is-this.so"]).unwrap_err();
        assert_eq!(error.tried.len(), 2);
        assert!(error.to_string().contains("libnccl-that-is-not-there.so.2"), "{error}");
    }

    #[test]
    fn a_library_that_is_not_nccl_is_refused() {
        let error = Library::open_first(&["libc.so.6"]).unwrap_err();
        assert!(error.to_string().contains("libc.so.6"), "{error}");
    }

    #[test]
    #[expect(clippy::print_stderr, reason = "a test that needs a library says why it did nothing")]
    fn the_library_says_its_version() {
        let library = match Library::open() {
            Ok(library) => library,
            Err(error) => {
                eprintln!("skipped: {error}");
                return;
            }
        };
        let (major, minor, _) = library.version().unwrap();
        assert!((major, minor) >= (2, 10), "NCCL {major}.{minor}");
        let id = UniqueId::from_bytes([0; UNIQUE_ID_BYTES]);
        let error = library.init_rank(2, &id, 2).unwrap_err();
        assert_eq!(error, Error::Range { what: "rank", value: 2, bound: 2 });
    }
}
