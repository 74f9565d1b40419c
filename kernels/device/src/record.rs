//! Records: what is issued to a stream.

use ithaca_ir::{AxisId, DType};

use crate::argument::Arg;
use crate::program::{SourceId, TableId};
use crate::value::Int;

/// One thing that is issued to a stream.
#[derive(Clone, Debug, PartialEq)]
pub enum Record {
    /// A kernel.
    Launch(Launch),
    /// A matrix product.
    Product(Product),
    /// A copy within the device's memory; the parts do not overlap.
    Copy {
        /// The first byte read.
        from: Address,
        /// The first byte written.
        to: Address,
        /// Bytes.
        bytes: Int,
    },
    /// This rank's part in a collective.
    Transfer(Transfer),
}

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
    /// Eight bytes in which the kernel of a [check](crate::program::Check) leaves its finding.
    Finding,
}

/// A kernel's launch.
#[derive(Clone, Debug, PartialEq)]
pub struct Launch {
    /// The C++ name within `ithaca::kernel`, template arguments included: `rms_norm<float>`.
    pub kernel: String,
    /// Its threads.
    pub grid: Grid,
    /// Its arguments.
    pub args: Vec<Arg>,
}

/// The threads that a kernel is launched on. Nothing is launched where the number is zero.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Grid {
    /// At least one thread for each of so many elements, in blocks as the device likes them; the kernel takes any grid.
    Threads(Int),
    /// Blocks of threads that work together. The kernel takes any number of blocks, but its threads and its shared memory
    /// have to be these.
    Blocks {
        /// Blocks to do.
        blocks: Int,
        /// Threads of each, a multiple of 32.
        threads: u32,
        /// Bytes of shared memory of each.
        shared_bytes: u32,
    },
}

/// `c[i] = a[i] b[i]` for matrices `rows × inner` and `inner × columns`, column-major, `batch` of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Product {
    /// Element type of all three; sums are taken in f64 for f64 and in f32 for the rest.
    pub dtype: DType,
    /// Rows of the result.
    pub rows: Int,
    /// Columns of the result.
    pub columns: Int,
    /// The dimension that is summed over.
    pub inner: Int,
    /// Products.
    pub batch: Int,
    /// The left operand.
    pub a: Matrix,
    /// The right operand.
    pub b: Matrix,
    /// The result; always plain.
    pub c: Matrix,
}

/// A matrix of a product, column-major.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Matrix {
    /// The first element.
    pub at: Address,
    /// Whether it is read as its transpose.
    pub form: Form,
    /// Elements between columns in memory.
    pub leading: Int,
    /// Elements between the matrices of a batch.
    pub step: Int,
}

/// How a matrix is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// As it is in memory.
    Plain,
    /// As its transpose.
    Transposed,
}

/// One rank's part in a collective.
#[derive(Clone, Debug, PartialEq)]
pub struct Transfer {
    /// The ranks that communicate.
    pub communicator: Communicator,
    /// Element type.
    pub dtype: DType,
    /// The collective.
    pub collective: Collective,
}

/// The ranks that communicate, and how they are numbered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Communicator {
    /// All ranks of the mesh, by rank.
    World,
    /// The ranks that differ along one axis only, by coordinate along it.
    Axis(AxisId),
}

/// A collective, as one rank issues it. Counts are elements.
#[derive(Clone, Debug, PartialEq)]
pub enum Collective {
    /// Blocks of any size between any members, in one group. A rank's own block is a [`Record::Copy`] before it.
    SendReceive {
        /// Blocks that this rank sends.
        sends: Vec<Block>,
        /// Blocks that this rank receives.
        receives: Vec<Block>,
    },
    /// `count` elements from each member to each, in order of members.
    AllToAll {
        /// Blocks for each member.
        from: Address,
        /// Blocks of each member.
        to: Address,
        /// Elements of a block.
        count: Int,
    },
    /// `count` elements of each member to all, in order of members.
    AllGather {
        /// This rank's elements.
        from: Address,
        /// The elements of all members.
        to: Address,
        /// Elements of one member.
        count: Int,
    },
    /// Sums, of which each member gets `count` elements, in order of members.
    ReduceScatter {
        /// Blocks for each member.
        from: Address,
        /// This rank's sum.
        to: Address,
        /// Elements of a block.
        count: Int,
    },
    /// A sum that each member gets whole.
    AllReduce {
        /// This rank's elements.
        from: Address,
        /// The sum.
        to: Address,
        /// Elements.
        count: Int,
    },
    /// Sums of blocks of different sizes: each block is summed to its peer. In one group.
    Reduce {
        /// For each member the block that is summed to it; empty blocks are left out.
        blocks: Vec<Block>,
        /// This rank's sum.
        to: Address,
    },
}

/// A block of a transfer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Block {
    /// The member that it goes to or comes from, by number in the communicator.
    pub peer: Int,
    /// The first element.
    pub at: Address,
    /// Elements; a block of none is not exchanged.
    pub count: Int,
}
