//! A collective of the ranks of a process, and the interface of its implementations.

pub use ithaca_device::Even;
use ithaca_device::{Communicator, Transfer};
use ithaca_ir::{DType, Mesh, Rank};

use crate::cuda::arguments::Address;
use crate::cuda::device::Stream;
use crate::cuda::error::CudaError;

/// A collective as one rank issues it.
pub type Collective = ithaca_device::Collective<Address, u64>;

/// A block of a collective of one rank.
pub type Block = ithaca_device::Block<Address, u64>;

/// One rank's part in a collective.
#[derive(Clone, Debug)]
pub struct End {
    /// The rank.
    pub rank: Rank,
    /// The stream it is issued to.
    pub stream: Stream,
    /// The ranks of its communicator, by their numbers in it.
    pub members: Vec<Rank>,
    /// The collective, with this rank's addresses.
    pub collective: Collective,
}

impl End {
    /// The ranks that take part in a transfer of a rank, by their numbers in the communicator.
    pub fn members(mesh: &Mesh, transfer: &Transfer, rank: Rank) -> Vec<Rank> {
        transfer.communicator.members.of_rank(mesh, rank)
    }

    /// Its number in its communicator.
    pub(super) fn number(&self) -> u64 {
        self.members.iter().position(|&member| member == self.rank).unwrap_or(0) as u64
    }

    /// The failure of this end.
    pub(super) fn failure(&self, error: CudaError) -> CollectiveFailure {
        CollectiveFailure { rank: self.rank, error }
    }
}

/// A collective of all ranks that take part.
#[derive(Clone, Debug)]
pub struct Exchange {
    /// The element type.
    pub dtype: DType,
    /// The ranks that communicate.
    pub communicator: Communicator,
    /// The ends, by rank.
    pub ends: Vec<End>,
}

impl Exchange {
    /// The end of a rank, if it takes part.
    pub(super) fn end(&self, rank: Rank) -> Option<&End> {
        self.ends.iter().find(|end| end.rank == rank)
    }
}

/// An implementation of collectives.
pub trait Collectives {
    /// Issues a collective to the streams of its ends.
    ///
    /// # Errors
    /// The device's, NCCL's.
    ///
    /// # Safety
    /// The memory of all ends has the size of their counts and lives until their streams have run the collective.
    unsafe fn exchange(&self, exchange: &Exchange) -> Result<(), CollectiveFailure>;

    /// Polls for failures in the background.
    ///
    /// # Errors
    /// The failure.
    fn check(&self) -> Result<(), CollectiveFailure>;

    /// Aborts the collectives of all ranks: waiting streams resume with undefined contents, and no later collective runs.
    fn abort(&self);
}

/// The failure of a collective, with its rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CollectiveFailure {
    /// The rank.
    pub rank: Rank,
    /// The error.
    pub error: CudaError,
}
