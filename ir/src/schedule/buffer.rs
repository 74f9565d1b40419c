//! Buffers of a frame: their content and their place.

use std::sync::Arc;

use crate::dtype::DType;
use crate::entity;
use crate::ops::table::source::{Binding, Target};
use crate::space::Space;
use crate::types::TensorType;

entity!(
    /// A buffer of a [`Frame`](super::Frame).
    BufferId, "$"
);

/// A region of memory with a meaning.
#[derive(Clone, Debug, PartialEq)]
pub struct Buffer {
    /// The name without the `$`, unique in its frame.
    pub name: String,
    /// Its content.
    pub content: Content,
    /// Its place.
    pub place: Place,
}

/// The content of a buffer.
#[derive(Clone, Debug, PartialEq)]
pub enum Content {
    /// A rank's part of a tensor, dense, row-major, unless it is in a wire.
    Tensor(Arc<TensorType>),
    /// Blocks as they are sent, one after another in order of peers.
    Wire {
        /// Element type.
        dtype: DType,
        /// Elements, on the busiest rank.
        elements: u64,
    },
}

impl Buffer {
    /// The type of the tensor that it is for; nothing for a wire.
    pub fn tensor(&self) -> Option<&TensorType> {
        match &self.content {
            Content::Tensor(ty) => Some(ty),
            Content::Wire { .. } => None,
        }
    }

    /// Bytes on the busiest rank, unaligned.
    pub fn bytes(&self, space: &Space) -> u64 {
        match &self.content {
            Content::Tensor(ty) => space.max_local_bytes(ty),
            Content::Wire { dtype, elements } => dtype.bytes() * elements,
        }
    }

    /// Whether it is a state of the layer after that of the frame.
    pub fn place_is_of_next_layer(&self) -> bool {
        self.place.home().is_some_and(|(_, binding)| binding.is_of_next_layer())
    }

    /// Whether it is a state in the memory of the host.
    pub fn is_in_host_memory(&self) -> bool {
        matches!(&self.place, Place::State(binding) if binding.host)
    }

    /// Element type.
    pub fn dtype(&self) -> DType {
        match &self.content {
            Content::Tensor(ty) => ty.dtype,
            Content::Wire { dtype, .. } => *dtype,
        }
    }
}

/// The place of a buffer.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Place {
    /// At an offset from the start of the frame, bytes.
    Frame(u64),
    /// Where the caller has the argument.
    Argument(usize),
    /// Where the caller wants the result. It may be where the caller has the argument of the same number: a frame
    /// writes it only when that argument has been read for the last time.
    Result(usize),
    /// In another buffer ([`Frame::strided`](super::Frame::strided)): in a wire, where the transfer wants or brought it, so that
    /// nothing packs or unpacks it; or in a tensor of which it is a part, so that nothing takes it from there or joins it.
    Inside {
        /// The wire or the tensor.
        whole: BufferId,
        /// Which tensor of the message it is, or which part of the tensor.
        part: usize,
    },
    /// Loaded from the file of parameters before the run, one for each layer where the name has `{layer}`; outside the arena.
    Weight(Binding),
    /// Loaded from the file of inputs before the run; outside the arena.
    Input(Binding),
    /// Kept from step to step, zero before the first; outside the arena.
    State(Binding),
}

impl Place {
    /// The weight or the state that is there.
    pub(crate) fn home(&self) -> Option<(Target, &Binding)> {
        match self {
            Place::Weight(binding) => Some((Target::Param, binding)),
            Place::State(binding) => Some((Target::State, binding)),
            Place::Frame(_)
            | Place::Inside { .. }
            | Place::Argument(_)
            | Place::Result(_)
            | Place::Input(_) => None,
        }
    }
}
