//! Collectives between the ranks of a run: what is asked of them, and who does it.
//!
//! One thread issues the tasks of all its ranks, task by task, so that a collective is asked for once, for all ranks that
//! take part: [`InProcess`] copies and sums on one device, [`Nccl`] has a communicator for each rank.

mod in_process;
mod nccl;

pub use in_process::InProcess;
pub use nccl::Nccl;
pub use nccl_rs::Library;

use ithaca_ir::boxes::Side;
use ithaca_ir::layout::AxisList;
use ithaca_ir::message::{self, Parcel};
use ithaca_ir::{DType, Op, Rank, Space, boxes};

use super::arguments::Address;
use super::device::Stream;
use super::error::CudaError;

/// What happens to the blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Each member gets a block of its own from each.
    Blocks,
    /// Each member gets the whole of what others have, where they have some for it.
    Whole,
    /// As [`Whole`](Self::Whole), of every member as much.
    Gather,
    /// Blocks for each member, which it gets summed.
    ReduceScatter,
    /// All get the sum.
    AllReduce,
}

impl Kind {
    /// That of a collective.
    ///
    /// # Errors
    /// [`CudaError::Unsupported`] for what is none.
    pub fn of(op: &Op) -> Result<Self, CudaError> {
        Ok(match op {
            Op::AllToAll { .. } | Op::Fetch { .. } | Op::FetchSum { .. } => Kind::Blocks,
            Op::Permute => Kind::Whole,
            Op::AllGather { .. } => Kind::Gather,
            Op::ReduceScatter { .. } => Kind::ReduceScatter,
            Op::AllReduce { .. } => Kind::AllReduce,
            other => return Err(CudaError::Unsupported(format!("`{}` as a collective", other.name()))),
        })
    }
}

/// One rank's end of a collective.
#[derive(Clone, Debug)]
pub struct End {
    /// The rank.
    pub rank: Rank,
    /// Where it is issued.
    pub stream: Stream,
    /// The ranks of its group, itself among them, in order.
    pub group: Vec<Rank>,
    /// Elements that it has for each of them; they lie one after another, but are one and the same where every member
    /// gets the whole.
    pub send: Vec<u64>,
    /// Elements that it gets from each, one after another.
    pub recv: Vec<u64>,
    /// Elements that it has.
    pub mine: u64,
    /// Elements that it will have.
    pub wanted: u64,
    /// Where what it has lies.
    pub from: Address,
    /// Where what it gets goes.
    pub to: Address,
}

impl End {
    /// That of `rank` in a message, its memory aside.
    pub fn of(space: &Space, parcels: &[Parcel], rank: Rank, stream: Stream) -> Self {
        let [sent, received] =
            [Side::Sent, Side::Received].map(|side| message::wire(space, parcels, side, rank));
        let held = |ty: &ithaca_ir::TensorType| boxes::elements(&space.local_box(ty, rank));
        let holds = |ty: &ithaca_ir::TensorType| space.holds(ty, rank);
        End {
            rank,
            stream,
            group: sent.group,
            send: sent.elements,
            recv: received.elements,
            mine: parcels.iter().map(|p| &p.from).filter(|ty| holds(ty)).map(held).sum(),
            wanted: parcels.iter().map(|p| &p.to).filter(|ty| holds(ty)).map(held).sum(),
            from: Address::NONE,
            to: Address::NONE,
        }
    }

    /// What went wrong here.
    fn broken(&self, error: CudaError) -> Broken {
        Broken { rank: self.rank, error }
    }

    /// The element at which the block for, or from, the `i`-th member starts.
    fn start(counts: &[u64], i: usize) -> u64 {
        counts[..i].iter().sum()
    }
}

/// A collective of all ranks that take part.
#[derive(Clone, Debug)]
pub struct Exchange {
    /// What happens.
    pub kind: Kind,
    /// The element type.
    pub dtype: DType,
    /// The axes along which ranks are grouped; none for a permute over the whole mesh.
    pub axes: AxisList,
    /// The ends, in order of ranks.
    pub ends: Vec<End>,
}

impl Exchange {
    /// The end of a rank, if it takes part.
    fn end(&self, rank: Rank) -> Option<&End> {
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
