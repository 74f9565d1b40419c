//! The collectives. Counts are in elements; a call returns when it is issued, and the stream does the work.

use crate::result::Error;
use crate::sys::{DataType, Reduction};

use super::communicator::Communicator;
use super::{DevicePointer, Stream};

use std::ffi::c_int;

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
        let f = self.library.functions.all_reduce;
        // SAFETY: the caller vouches for the memory and the stream.
        let status = unsafe {
            f(from.read(), to.write(), count, dtype as c_int, reduction as c_int, self.raw, stream.raw())
        };
        self.library.issued("ncclAllReduce", status)
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
        let f = self.library.functions.reduce;
        // SAFETY: the caller vouches for the memory and the stream.
        let status = unsafe {
            f(
                from.read(),
                to.write(),
                count,
                dtype as c_int,
                reduction as c_int,
                root,
                self.raw,
                stream.raw(),
            )
        };
        self.library.issued("ncclReduce", status)
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
        let f = self.library.functions.broadcast;
        // SAFETY: the caller vouches for the memory and the stream.
        let status =
            unsafe { f(from.read(), to.write(), count, dtype as c_int, root, self.raw, stream.raw()) };
        self.library.issued("ncclBroadcast", status)
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
        self.library.issued("ncclAllGather", status)
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
        self.library.issued("ncclReduceScatter", status)
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
            let status = unsafe { f(from.read(), to.write(), count, dtype as c_int, self.raw, stream.raw()) };
            return self.library.issued("ncclAlltoAll", status);
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
        let missing = Error::Missing { call: "ncclGather", needs: (2, 28) };
        let f = self.library.functions.gather.ok_or(missing)?;
        // SAFETY: the caller vouches for the memory and the stream.
        let status =
            unsafe { f(from.read(), to.write(), count, dtype as c_int, root, self.raw, stream.raw()) };
        self.library.issued("ncclGather", status)
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
        let missing = Error::Missing { call: "ncclScatter", needs: (2, 28) };
        let f = self.library.functions.scatter.ok_or(missing)?;
        // SAFETY: the caller vouches for the memory and the stream.
        let status =
            unsafe { f(from.read(), to.write(), count, dtype as c_int, root, self.raw, stream.raw()) };
        self.library.issued("ncclScatter", status)
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
        let f = self.library.functions.send;
        // SAFETY: the caller vouches for the memory and the stream.
        let status = unsafe { f(from.read(), count, dtype as c_int, peer, self.raw, stream.raw()) };
        self.library.issued("ncclSend", status)
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
        let f = self.library.functions.recv;
        // SAFETY: the caller vouches for the memory and the stream.
        let status = unsafe { f(to.write(), count, dtype as c_int, peer, self.raw, stream.raw()) };
        self.library.issued("ncclRecv", status)
    }
}
