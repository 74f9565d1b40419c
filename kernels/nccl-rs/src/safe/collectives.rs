//! The collectives. Counts are in elements; a call returns when it is issued, and the stream does the work.

use std::ffi::c_int;

use crate::result::Error;
use crate::sys::{DataType, Reduction};

use super::address::{DevicePointer, Stream};
use super::communicator::Communicator;

/// An operation of all ranks of a communicator, on `count` elements from `from` to `to`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Collective {
    /// Reduces `count` elements into `to` on every rank; `from` and `to` may be the same.
    AllReduce(Reduction),
    /// Reduces `count` elements into `to` on the root; the other ranks write nothing.
    Reduce {
        /// The reduction.
        reduction: Reduction,
        /// The rank that has the result.
        root: usize,
    },
    /// Gathers `count` elements of every rank, in order of ranks: `to` has room for `count · ranks`.
    AllGather,
    /// Reduces blocks of `count` elements, one per rank, and keeps the rank's own: `from` has `count · ranks`.
    ReduceScatter(Reduction),
    /// Sends block `i` of `count` elements to rank `i` and receives a block from each rank: `from` and `to` have
    /// `count · ranks` and do not overlap. Uses `ncclAlltoAll` where the library has it (2.28), else sends and receives.
    AllToAll,
}

impl Communicator {
    /// Issues this rank's part of a collective.
    ///
    /// # Errors
    /// [`Error::Range`] for a root that does not exist, else NCCL's status.
    ///
    /// # Safety
    /// `from` and `to` must be device memory of as many elements as [`Collective`] says, alive until `stream` has passed
    /// the call.
    pub unsafe fn collective(
        &self,
        collective: Collective,
        from: DevicePointer,
        to: DevicePointer,
        count: usize,
        dtype: DataType,
        stream: Stream,
    ) -> Result<(), Error> {
        let f = &self.library.functions;
        let (x, z, comm, s) = (from.read(), to.write(), self.raw, stream.raw());
        let number = dtype as c_int;
        // SAFETY: the caller vouches for the memory and the stream, and the communicator is alive.
        let (call, status) = unsafe {
            match collective {
                Collective::AllReduce(reduction) => {
                    ("ncclAllReduce", (f.all_reduce)(x, z, count, number, reduction as c_int, comm, s))
                }
                Collective::Reduce { reduction, root } => {
                    let root = self.peer("root", root)?;
                    ("ncclReduce", (f.reduce)(x, z, count, number, reduction as c_int, root, comm, s))
                }
                Collective::AllGather => ("ncclAllGather", (f.all_gather)(x, z, count, number, comm, s)),
                Collective::ReduceScatter(reduction) => (
                    "ncclReduceScatter",
                    (f.reduce_scatter)(x, z, count, number, reduction as c_int, comm, s),
                ),
                Collective::AllToAll => match f.all_to_all {
                    Some(all_to_all) => ("ncclAlltoAll", all_to_all(x, z, count, number, comm, s)),
                    None => return self.all_to_all_by_pairs(from, to, count, dtype, stream),
                },
            }
        };
        self.library.issued(call, status)
    }

    /// [`Collective::AllToAll`] as a group of sends and receives.
    ///
    /// # Safety
    /// As [`collective`](Self::collective).
    unsafe fn all_to_all_by_pairs(
        &self,
        from: DevicePointer,
        to: DevicePointer,
        count: usize,
        dtype: DataType,
        stream: Stream,
    ) -> Result<(), Error> {
        let bytes = (count * dtype.bytes()) as u64;
        self.library.group(|| {
            for peer in 0..self.ranks() {
                let offset = peer as u64 * bytes;
                // SAFETY: the caller vouches for as many blocks as there are ranks.
                unsafe {
                    self.send(from.offset(offset), count, dtype, peer, stream)?;
                    self.recv(to.offset(offset), count, dtype, peer, stream)?;
                }
            }
            Ok(())
        })
    }

    /// Sends `count` elements to rank `peer`.
    ///
    /// # Errors
    /// [`Error::Range`] for a peer that does not exist, else NCCL's status.
    ///
    /// # Safety
    /// As [`collective`](Self::collective).
    pub unsafe fn send(
        &self,
        from: DevicePointer,
        count: usize,
        dtype: DataType,
        peer: usize,
        stream: Stream,
    ) -> Result<(), Error> {
        let peer = self.peer("peer", peer)?;
        let send = self.library.functions.send;
        // SAFETY: the caller vouches for the memory and the stream, and the communicator is alive.
        let status = unsafe { send(from.read(), count, dtype as c_int, peer, self.raw, stream.raw()) };
        self.library.issued("ncclSend", status)
    }

    /// Receives `count` elements from rank `peer`.
    ///
    /// # Errors
    /// As [`send`](Self::send).
    ///
    /// # Safety
    /// As [`collective`](Self::collective).
    pub unsafe fn recv(
        &self,
        to: DevicePointer,
        count: usize,
        dtype: DataType,
        peer: usize,
        stream: Stream,
    ) -> Result<(), Error> {
        let peer = self.peer("peer", peer)?;
        let recv = self.library.functions.recv;
        // SAFETY: the caller vouches for the memory and the stream, and the communicator is alive.
        let status = unsafe { recv(to.write(), count, dtype as c_int, peer, self.raw, stream.raw()) };
        self.library.issued("ncclRecv", status)
    }
}
