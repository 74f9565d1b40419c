//! A collective of the ranks of a process, and who does it.

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

/// One rank's end of a collective.
#[derive(Clone, Debug)]
pub struct End {
    /// The rank.
    pub rank: Rank,
    /// Where it is issued.
    pub stream: Stream,
    /// The ranks of its communicator, by their numbers in it.
    pub members: Vec<Rank>,
    /// What it issues.
    pub collective: Collective,
}

impl End {
    /// The ranks that take part in a transfer of a rank, by their numbers in the communicator.
    pub fn members(mesh: &Mesh, transfer: &Transfer, rank: Rank) -> Vec<Rank> {
        match transfer.communicator {
            Communicator::World => mesh.iter_ranks().collect(),
            Communicator::Axis(axis) => mesh.group(rank, axis),
        }
    }

    /// Its number in its communicator.
    pub(super) fn number(&self) -> u64 {
        self.members.iter().position(|&member| member == self.rank).unwrap_or(0) as u64
    }

    /// What went wrong here.
    pub(super) fn broken(&self, error: CudaError) -> Broken {
        Broken { rank: self.rank, error }
    }
}

/// A collective of all ranks that take part.
#[derive(Clone, Debug)]
pub struct Exchange {
    /// The element type.
    pub dtype: DType,
    /// The ranks that communicate.
    pub communicator: Communicator,
    /// The ends, in order of ranks.
    pub ends: Vec<End>,
}

impl Exchange {
    /// The end of a rank, if it takes part.
    pub(super) fn end(&self, rank: Rank) -> Option<&End> {
        self.ends.iter().find(|end| end.rank == rank)
    }
}

/// Who does collectives.
pub trait Collectives {
    /// Issues a collective to the streams of its ends.
    ///
    /// # Errors
    /// The device's, NCCL's.
    ///
    /// # Safety
    /// The memory of all ends is as large as their counts say, and is kept until their streams have come past it.
    unsafe fn exchange(&self, exchange: &Exchange) -> Result<(), Broken>;

    /// Looks whether something failed in the background.
    ///
    /// # Errors
    /// What did.
    fn check(&self) -> Result<(), Broken>;

    /// Ends what is under way on all ranks: streams that wait in it for others go on, with whatever their memory has then.
    /// Nothing is exchanged any more.
    fn abort(&self);
}

/// What went wrong with a collective, and on which rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Broken {
    /// The rank.
    pub rank: Rank,
    /// What went wrong.
    pub error: CudaError,
}
