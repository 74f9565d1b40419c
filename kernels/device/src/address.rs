//! Symbolic addresses.

use ithaca_ir::entity;

use crate::value::Int;

entity!(
    /// A stored tensor of a [`DeviceProgram`].
    SourceId, "source"
);
entity!(
    /// A list of numbers of a [`DeviceProgram`].
    TableId, "table"
);

/// A place in a device's memory.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Address {
    /// From where the offset counts.
    pub region: Region,
    /// Bytes.
    pub offset: Int,
}

impl Address {
    /// The null pointer.
    pub const NULL: Address = Address { region: Region::Null, offset: Int::ZERO };
}

/// From where the offset of an address counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Region {
    /// Nowhere: the null pointer, or the pointer of a kernel that has nothing to read.
    #[default]
    Null,
    /// The frame's part of the arena.
    Frame,
    /// The frame's argument of this number.
    Argument(usize),
    /// The frame's result of this number.
    Result(usize),
    /// The part that this rank has of a stored tensor, of the layer that runs.
    Source(SourceId),
    /// A list of numbers.
    Table(TableId),
    /// Eight bytes in which the kernel of a [check](crate::Check) leaves its finding.
    Finding,
}
