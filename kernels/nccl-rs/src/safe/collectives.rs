//! The collectives. Counts are in elements; a call returns when it is issued, and the stream does the work.

use crate::result::Error;
use crate::sys::{DataType, Reduction};

use super::communicator::Communicator;
use super::{DevicePointer, Stream, since};

use std::ffi::c_int;

/// Calls a function of the library, which takes the communicator and the stream last.
macro_rules! issue {
    ($of:ident, $name:literal, $f:expr, [$($argument:expr),*], $stream:ident) => {
        $of.library.issued($name, $f($($argument,)* $of.raw, $stream.raw()))
    };
}

impl Communicator {
    /// Reduces `count` elements over all ranks, into the same place on each; `from` and `to` may be one.
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
        // SAFETY: the caller vouches for the memory and the stream.
        unsafe {
            issue!(
                self,
                "ncclAllReduce",
                (self.library.functions.all_reduce),
                [from.read(), to.write(), count, dtype as c_int, reduction as c_int],
                stream
            )
        }
    }

    /// Reduces `count` elements over all ranks, into `to` on `root`; nothing is written on the others.
    ///
    /// # Errors
    /// [`Error::Range`] for a root that is not there, else NCCL's status.
    ///
    /// # Safety
    /// As [`all_reduce`](Self::all_reduce); `to` is used on `root` only.
    #[expect(clippy::too_many_arguments, reason = "the function of the library takes as many")]
    pub unsafe fn reduce(
        &self,
        from: DevicePointer,
        to: DevicePointer,
        count: usize,
        dtype: DataType,
        reduction: Reduction,
        root: usize,
        stream: Stream,
    ) -> Result<(), Error> {
        let root = self.peer("root", root)?;
        // SAFETY: the caller vouches for the memory and the stream.
        unsafe {
            issue!(
                self,
                "ncclReduce",
                (self.library.functions.reduce),
                [from.read(), to.write(), count, dtype as c_int, reduction as c_int, root],
                stream
            )
        }
    }

    /// Copies `count` elements of `root` to all ranks.
    ///
    /// # Errors
    /// As [`reduce`](Self::reduce).
    ///
    /// # Safety
    /// As [`all_reduce`](Self::all_reduce); `from` is used on `root` only.
    pub unsafe fn broadcast(
        &self,
        from: DevicePointer,
        to: DevicePointer,
        count: usize,
        dtype: DataType,
        root: usize,
        stream: Stream,
    ) -> Result<(), Error> {
        let root = self.peer("root", root)?;
        // SAFETY: the caller vouches for the memory and the stream.
        unsafe {
            issue!(
                self,
                "ncclBroadcast",
                (self.library.functions.broadcast),
                [from.read(), to.write(), count, dtype as c_int, root],
                stream
            )
        }
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
        // SAFETY: the caller vouches for the memory and the stream.
        unsafe {
            issue!(
                self,
                "ncclAllGather",
                (self.library.functions.all_gather),
                [from.read(), to.write(), count, dtype as c_int],
                stream
            )
        }
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
        // SAFETY: the caller vouches for the memory and the stream.
        unsafe {
            issue!(
                self,
                "ncclReduceScatter",
                (self.library.functions.reduce_scatter),
                [from.read(), to.write(), count, dtype as c_int, reduction as c_int],
                stream
            )
        }
    }

    /// Sends block `i` of `count` elements to rank `i`, and receives its block from each: by `ncclAlltoAll` where the
    /// library has it (2.28), else by a group of sends and receives.
    ///
    /// # Errors
    /// NCCL's status.
    ///
    /// # Safety
    /// As [`all_reduce`](Self::all_reduce), with `count · ranks` elements at `from` and at `to`, which do not overlap.
    pub unsafe fn all_to_all(
        &self,
        from: DevicePointer,
        to: DevicePointer,
        count: usize,
        dtype: DataType,
        stream: Stream,
    ) -> Result<(), Error> {
        if let Some(f) = self.library.functions.all_to_all {
            // SAFETY: the caller vouches for the memory and the stream.
            return unsafe {
                issue!(self, "ncclAlltoAll", f, [from.read(), to.write(), count, dtype as c_int], stream)
            };
        }
        // SAFETY: as above.
        unsafe { self.all_to_all_by_pairs(from, to, count, dtype, stream) }
    }

    /// As [`all_to_all`](Self::all_to_all), always by a group of sends and receives.
    ///
    /// # Errors
    /// NCCL's status.
    ///
    /// # Safety
    /// As [`all_to_all`](Self::all_to_all).
    pub unsafe fn all_to_all_by_pairs(
        &self,
        from: DevicePointer,
        to: DevicePointer,
        count: usize,
        dtype: DataType,
        stream: Stream,
    ) -> Result<(), Error> {
        let bytes = (count * dtype.bytes()) as u64;
        self.library.group(|| {
            for peer in 0..self.ranks {
                let distance = peer as u64 * bytes;
                // SAFETY: the caller vouches for as many blocks as there are ranks.
                unsafe {
                    self.send(from.offset(distance), count, dtype, peer, stream)?;
                    self.recv(to.offset(distance), count, dtype, peer, stream)?;
                }
            }
            Ok(())
        })
    }

    /// Gathers `count` elements of every rank on `root`, in order of ranks.
    ///
    /// # Errors
    /// [`Error::Missing`] before NCCL 2.28, else as [`reduce`](Self::reduce).
    ///
    /// # Safety
    /// As [`all_reduce`](Self::all_reduce), with room for `count · ranks` elements at `to` on `root`.
    pub unsafe fn gather(
        &self,
        from: DevicePointer,
        to: DevicePointer,
        count: usize,
        dtype: DataType,
        root: usize,
        stream: Stream,
    ) -> Result<(), Error> {
        let root = self.peer("root", root)?;
        let f = since(self.library.functions.gather, "ncclGather", (2, 28))?;
        // SAFETY: the caller vouches for the memory and the stream.
        unsafe {
            issue!(self, "ncclGather", f, [from.read(), to.write(), count, dtype as c_int, root], stream)
        }
    }

    /// Sends block `i` of `count` elements of `root` to rank `i`.
    ///
    /// # Errors
    /// As [`gather`](Self::gather).
    ///
    /// # Safety
    /// As [`all_reduce`](Self::all_reduce), with `count · ranks` elements at `from` on `root`.
    pub unsafe fn scatter(
        &self,
        from: DevicePointer,
        to: DevicePointer,
        count: usize,
        dtype: DataType,
        root: usize,
        stream: Stream,
    ) -> Result<(), Error> {
        let root = self.peer("root", root)?;
        let f = since(self.library.functions.scatter, "ncclScatter", (2, 28))?;
        // SAFETY: the caller vouches for the memory and the stream.
        unsafe {
            issue!(self, "ncclScatter", f, [from.read(), to.write(), count, dtype as c_int, root], stream)
        }
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
        let peer = self.peer("peer", peer)?;
        // SAFETY: the caller vouches for the memory and the stream.
        unsafe {
            issue!(
                self,
                "ncclSend",
                (self.library.functions.send),
                [from.read(), count, dtype as c_int, peer],
                stream
            )
        }
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
        let peer = self.peer("peer", peer)?;
        // SAFETY: the caller vouches for the memory and the stream.
        unsafe {
            issue!(
                self,
                "ncclRecv",
                (self.library.functions.recv),
                [to.write(), count, dtype as c_int, peer],
                stream
            )
        }
    }
}
