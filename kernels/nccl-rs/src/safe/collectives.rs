//! The collectives. Counts are in elements; a call returns when it is issued, and the stream does the work.

use std::ffi::c_int;

use crate::result::Error;
use crate::sys::{DataType, SUM};

use super::address::{DevicePointer, Stream};
use super::communicator::Communicator;

/// An operation of the ranks of a communicator, on `count` elements from `from` to `to`. Reductions are sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Collective {
    /// Reduces `count` elements into `to` on every rank; `from` and `to` may be the same.
    AllReduce,
    /// Reduces `count` elements into `to` on the root; the other ranks write nothing.
    Reduce {
        /// The rank that has the result.
        root: usize,
    },
    /// Gathers `count` elements of every rank, in order of ranks: `to` has room for `count · ranks`.
    AllGather,
    /// Reduces blocks of `count` elements, one per rank, and keeps the rank's own: `from` has `count · ranks`.
    ReduceScatter,
    /// Sends block `i` of `count` elements to rank `i` and receives a block from each rank: `from` and `to` have
    /// `count · ranks` and do not overlap. Uses `ncclAlltoAll` where the library has it (2.28), else sends and receives.
    AllToAll,
    /// Sends `from` to a rank; `to` is not used.
    Send {
        /// The receiving rank.
        peer: usize,
    },
    /// Receives `to` from a rank; `from` is not used.
    Receive {
        /// The sending rank.
        peer: usize,
    },
}

impl Communicator {
    /// Issues this rank's part of a collective.
    ///
    /// # Errors
    /// [`Error::Range`] for a root or peer that does not exist, else NCCL's status.
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
                Collective::AllReduce => ("ncclAllReduce", (f.all_reduce)(x, z, count, number, SUM, comm, s)),
                Collective::Reduce { root } => {
                    let root = self.peer("root", root)?;
                    ("ncclReduce", (f.reduce)(x, z, count, number, SUM, root, comm, s))
                }
                Collective::AllGather => ("ncclAllGather", (f.all_gather)(x, z, count, number, comm, s)),
                Collective::ReduceScatter => {
                    ("ncclReduceScatter", (f.reduce_scatter)(x, z, count, number, SUM, comm, s))
                }
                Collective::AllToAll => match f.all_to_all {
                    Some(all_to_all) => ("ncclAlltoAll", all_to_all(x, z, count, number, comm, s)),
                    None => return self.all_to_all_by_pairs(from, to, count, dtype, stream),
                },
                Collective::Send { peer } => {
                    ("ncclSend", (f.send)(x, count, number, self.peer("peer", peer)?, comm, s))
                }
                Collective::Receive { peer } => {
                    ("ncclRecv", (f.recv)(z, count, number, self.peer("peer", peer)?, comm, s))
                }
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
            for peer in 0..self.ranks {
                let [from, to] = [from, to].map(|at| at.offset(peer as u64 * bytes));
                for pair in [Collective::Send { peer }, Collective::Receive { peer }] {
                    // SAFETY: the caller vouches for as many blocks as there are ranks.
                    unsafe { self.collective(pair, from, to, count, dtype, stream)? };
                }
            }
            Ok(())
        })
    }
}
