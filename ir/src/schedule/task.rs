//! Tasks, the steps of a stream, and the collectives among them.

use serde::{Deserialize, Serialize};

use super::buffer::BufferId;
use super::streams::Stream;
use crate::entity;
use crate::handles::Layers;
use crate::message::Parcel;
use crate::ops::table::op::Op;
use crate::ops::table::structure::{Scan, Stage};
use crate::types::TensorType;

entity!(
    /// A frame of a [`Schedule`](super::Schedule).
    #[derive(Serialize, Deserialize)]
    FrameId, "@"
);

entity!(
    /// An event of a [`Frame`](super::Frame).
    EventId, "e"
);

/// One step of a stream.
#[derive(Clone, Debug, PartialEq)]
pub struct Task {
    /// The queue.
    pub stream: Stream,
    /// The work.
    pub work: Work,
    /// Buffers read, in the order of operands.
    pub reads: Vec<BufferId>,
    /// Buffers written, in the order of results.
    pub writes: Vec<BufferId>,
    /// Events that must have happened before it starts.
    pub waits: Vec<EventId>,
    /// The event that happens when it ends.
    pub records: Option<EventId>,
}

/// The work of a task.
#[derive(Clone, Debug, PartialEq)]
pub enum Work {
    /// Runs an operation on local tensors: anything but sources, calls and communication.
    Compute(Op),
    /// Gathers the blocks that the collective sends into a wire buffer, in order of peers; tensors that lie in the wire are
    /// there.
    Pack(Transfer),
    /// Communicates: reads the tensor or the packed blocks, writes the blocks received or the tensor itself. The
    /// content of its buffers says which.
    Exchange(Transfer),
    /// Puts received blocks, in order of peers, where they belong in the tensor; tensors that lie in the wire stay there.
    Unpack(Transfer),
    /// Copies a buffer to another of the same content.
    Copy,
    /// Runs a frame once for each layer; reads are its arguments, writes its results. Over several layers the buffer
    /// of carried result `i` is that of argument `i`; a layer's slice of a stack has the number of the layer in the call.
    Call {
        /// The frame.
        callee: FrameId,
        /// The layers.
        layers: Layers,
        /// How much further the layers are for each layer of the caller.
        stride: u64,
        /// The results that each layer returns by itself.
        scan: Option<Scan>,
        /// The stage of a pipeline that runs it; all ranks when absent.
        stage: Option<Stage>,
        /// Where the callee's frame starts, bytes from the start of this one.
        base: u64,
    },
}

impl Work {
    /// The word of the text form; of a computation its operation's.
    pub fn name(&self) -> &'static str {
        match self {
            Work::Compute(op) => op.name(),
            Work::Pack(_) => "pack",
            Work::Exchange(_) => "exchange",
            Work::Unpack(_) => "unpack",
            Work::Copy => "copy",
            Work::Call { .. } => "call",
        }
    }

    /// The frame that it calls.
    pub fn callee(&self) -> Option<FrameId> {
        match self {
            Work::Call { callee, .. } => Some(*callee),
            Work::Compute(_) | Work::Pack(_) | Work::Exchange(_) | Work::Unpack(_) | Work::Copy => None,
        }
    }

    /// The collective that it carries out.
    pub fn exchange(&self) -> Option<&Transfer> {
        match self {
            Work::Exchange(transfer) => Some(transfer),
            Work::Compute(_) | Work::Pack(_) | Work::Unpack(_) | Work::Copy | Work::Call { .. } => None,
        }
    }
}

/// A collective: the tensors that it carries, at least one; several where they were coalesced.
///
/// Of several, `Pack` reads all and writes one wire, `Unpack` reads one wire and writes all, and the exchange is from
/// wire to wire, laid out as [`message::wire`](crate::message::wire) says.
#[derive(Clone, Debug, PartialEq)]
pub struct Transfer {
    /// All by collectives of one kind between the same ranks; never empty.
    parcels: Vec<Parcel>,
}

impl Transfer {
    /// The transfer of one tensor.
    pub fn one(op: Op, from: TensorType, to: TensorType) -> Self {
        Self { parcels: vec![Parcel { op, from, to }] }
    }

    /// The transfer of some tensors; none where there are none.
    pub fn of(parcels: Vec<Parcel>) -> Option<Self> {
        (!parcels.is_empty()).then_some(Self { parcels })
    }

    /// The tensors, in the order in which they are packed and unpacked.
    pub fn parcels(&self) -> &[Parcel] {
        &self.parcels
    }

    /// The first of them: kind, element type and ranks are those of all.
    pub fn first(&self) -> &Parcel {
        self.parcels.first().expect("a transfer is made of at least one tensor")
    }

    /// Whether each tensor is sent from its buffer and received in its buffer, without a wire: permutes move whole shards.
    pub fn is_direct(&self) -> bool {
        matches!(self.first().op, Op::Permute)
    }

    /// The tensor, where it is the only one.
    pub fn only(&self) -> Option<&Parcel> {
        match self.parcels.as_slice() {
            [one] => Some(one),
            _ => None,
        }
    }
}
