//! Symbolic addresses.

use ithaca_ir::entity;

use crate::value::Int;

entity!(
    /// A stored tensor of a [`DeviceProgram`].
    SourceId, "source"
);
entity!(
    /// A table of numbers of a [`DeviceProgram`].
    TableId, "table"
);

/// A symbolic address in a device's memory.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Address {
    /// The region.
    pub region: Region,
    /// Bytes from the start of the region.
    pub offset: Int,
}

impl Address {
    /// The null pointer.
    pub const NULL: Address = Address { region: Region::Null, offset: Int::ZERO };
}

/// The base of an address.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Region {
    /// The null pointer.
    #[default]
    Null,
    /// The frame's part of the arena.
    Frame,
    /// The frame's argument of this number.
    Argument(usize),
    /// The frame's result of this number.
    Result(usize),
    /// This rank's part of a stored tensor, for the current layer.
    Source(SourceId),
    /// A table of numbers.
    Table(TableId),
    /// Eight bytes in which the kernel of a [check](crate::Check) leaves its finding.
    Finding,
    /// Eight bytes in which a run leaves the bound that its data exceed; zero before it, and after it where none is exceeded. Of
    /// the bound of an expert these are the most tokens of a group that chose one expert, times 2³², and the expert; of a cache
    /// the tokens of the longest sequence, times 2³², the capacity, and the highest bit.
    Overflow,
    /// Memory that the kernels of one task use, on the compute stream.
    Workspace,
    /// Counts of the filled rows that this rank sends in a collective, and of those that it receives.
    Counts,
}
