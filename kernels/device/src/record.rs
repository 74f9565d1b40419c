//! Records, the units of work that are issued to a stream.
//!
//! Addresses `A` and integers `N` are symbolic in a program for all ranks, and numbers where a rank issues the record.

use std::collections::BTreeSet;

use ithaca_ir::message::{Parcel, RunPlaces, Runs};
use ithaca_ir::schedule::{Schedule, Stream};
use ithaca_ir::{Axes, DType, Mesh, Op, Rank, Space, boxes};

use crate::address::Address;
use crate::argument::Arg;
use crate::value::Int;

/// A unit of work that is issued to a stream.
#[derive(Clone, Debug, PartialEq)]
pub enum Record {
    /// A kernel.
    Launch(Launch),
    /// A matrix product.
    Product(Product),
    /// Two products of one shape, of one matrix each and without epilogues: a batch if both distances between their matrices have
    /// one sign, else one after the other.
    Pair(Box<[Product; 2]>),
    /// A copy within the device's memory; the ranges do not overlap.
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

/// A kernel's launch.
#[derive(Clone, Debug, PartialEq)]
pub struct Launch {
    /// The C++ name within `ithaca::kernel`, template arguments included: `softmax<float>`.
    pub kernel: String,
    /// Its threads.
    pub grid: Grid,
    /// Its arguments.
    pub args: Vec<Arg>,
}

/// The threads of a launch. A grid of zero is not launched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Grid<N = Int> {
    /// At least one thread per element, in blocks of the device's choice; the kernel takes any grid.
    Threads(N),
    /// Blocks of cooperating threads. The kernel takes any number of blocks, but requires these threads and this shared
    /// memory.
    Blocks {
        /// Blocks of work.
        blocks: N,
        /// Threads of each, a multiple of 32.
        threads: u32,
        /// Bytes of shared memory of each.
        shared_bytes: u32,
    },
}

/// `c[i] = f(before[i] + a[i] b[i] + bias[i])` for matrices `rows × inner` and `inner × columns`, column-major, `batch` of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Product<A = Address, N = Int> {
    /// Element type of the operands; sums are taken in f64 for f64 and in f32 for the rest.
    pub dtype: DType,
    /// Element type of the result: that of the operands, or the one in which products are summed.
    pub result: DType,
    /// Rows of the result.
    pub rows: N,
    /// Columns of the result.
    pub columns: N,
    /// The dimension that is summed over.
    pub inner: N,
    /// Products.
    pub batch: N,
    /// The left operand.
    pub a: Matrix<A, N>,
    /// The right operand.
    pub b: Matrix<A, N>,
    /// The first element of the matrices that are added, which have the shape of the result and may be its memory; the null
    /// pointer where none are.
    pub before: A,
    /// The first bias, a number for each row of the result; the null pointer where there is none.
    pub bias: A,
    /// Elements between the biases of a batch.
    pub bias_step: N,
    /// The function f.
    pub activation: Activation,
    /// The result; always plain.
    pub c: Matrix<A, N>,
}

/// A function of each element of a product with a bias.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Activation {
    /// None.
    Identity,
    /// `max(x, 0)`.
    Relu,
    /// GELU, by the tanh approximation.
    GeluTanh,
}

/// A matrix of a product, column-major.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Matrix<A = Address, N = Int> {
    /// The first element.
    pub at: A,
    /// Whether it is read as its transpose.
    pub form: Form,
    /// Elements between columns in memory.
    pub leading: N,
    /// Elements between the matrices of a batch.
    pub step: N,
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

/// The ranks that communicate, and the stream on which they do: streams share no communicator, so the order on each
/// communicator is that of one stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Communicator {
    /// The ranks.
    pub members: Members,
    /// The stream.
    pub stream: Stream,
}

impl Communicator {
    /// Whether a mesh has it anyway: of [`Stream::Comm`], for all ranks or along one axis.
    pub fn is_of_mesh(self) -> bool {
        let is_along_several = matches!(self.members, Members::Along(axes) if axes.len() > 1);
        self.stream == Stream::Comm && !is_along_several
    }

    /// The communicators of a schedule that its mesh does not have anyway, ascending.
    pub fn extra_communicators(schedule: &Schedule) -> Vec<Self> {
        let tasks = schedule.frames.values().flat_map(|frame| &frame.tasks);
        let used = tasks.filter_map(|task| {
            let members = Members::of(&schedule.space, task.work.exchange()?.first());
            Some(Communicator { members, stream: task.stream })
        });
        let all: BTreeSet<Self> = used.filter(|used| !used.is_of_mesh()).collect();
        all.into_iter().collect()
    }
}

/// The ranks that communicate, and how they are numbered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Members {
    /// All ranks of the mesh, by rank.
    World,
    /// The ranks that differ along these axes only, by coordinate along them.
    Along(Axes),
}

impl Members {
    /// The ranks among which a tensor is sent.
    pub fn of(space: &Space, parcel: &Parcel) -> Self {
        match (&parcel.op, boxes::axes(space, &parcel.op, &parcel.from, &parcel.to).as_slice()) {
            (_, [axis]) => Members::Along((*axis).into()),
            (Op::AllGather { axis, .. } | Op::ReduceScatter { axis, .. }, _) => Members::Along(*axis),
            (Op::AllReduce { axis }, _) if space.mesh.degree(axis) < space.mesh.ranks() => {
                // A sum is the same for any numbers: those that parts have by ZeRO, the innermost axis first.
                let mut axes = axis.to_vec();
                axes.sort_unstable_by(|a, b| b.cmp(a));
                Members::Along(Axes::new(&axes).unwrap_or(*axis))
            }
            _ => Members::World,
        }
    }

    /// How many they are.
    pub fn count(self, mesh: &Mesh) -> u64 {
        match self {
            Members::World => mesh.ranks(),
            Members::Along(axes) => mesh.degree(&axes),
        }
    }

    /// The number of one of them.
    pub fn number(self, mesh: &Mesh, rank: Rank) -> u64 {
        match self {
            Members::World => rank.0,
            Members::Along(axes) => mesh.coordinate_along(rank, &axes),
        }
    }

    /// Those of a rank, by number.
    pub fn of_rank(self, mesh: &Mesh, rank: Rank) -> Vec<Rank> {
        match self {
            Members::World => mesh.iter_ranks().collect(),
            Members::Along(axes) => mesh.group_along(rank, &axes),
        }
    }
}

/// A collective, as one rank issues it. Counts are elements.
#[derive(Clone, Debug, PartialEq)]
pub enum Collective<A = Address, N = Int> {
    /// Blocks of any size between any members, in one group. A rank's own block is a [`Record::Copy`] before it.
    SendReceive {
        /// Blocks that this rank sends.
        sends: Vec<Block<A, N>>,
        /// Blocks that this rank receives.
        receives: Vec<Block<A, N>>,
    },
    /// A collective with the same count on all members.
    Even {
        /// The collective.
        kind: Even,
        /// This rank's elements.
        from: A,
        /// This rank's result.
        to: A,
        /// The count that [`Even`] defines.
        count: N,
    },
    /// The filled rows of an all-to-all. Each member's block has runs of rows, of which the first are filled.
    /// Members have exchanged their counts, and rows that are not filled are zero where they are received. The host reads
    /// the counts; without them all rows are exchanged.
    Filled {
        /// This rank's elements.
        from: A,
        /// This rank's result.
        to: A,
        /// The number of filled rows of each run that this rank sends, `i32`.
        outgoing: A,
        /// The same of each run that it receives.
        incoming: A,
        /// The runs for each member.
        runs: Runs,
        /// Where they are in this rank's elements.
        sent: RunPlaces,
        /// Where they are in this rank's result.
        received: RunPlaces,
    },
    /// A reduce-scatter of blocks of different sizes, in one group: each block is summed to its peer.
    Reduce {
        /// The block for each member; empty blocks are left out.
        blocks: Vec<Block<A, N>>,
        /// This rank's sum.
        to: A,
    },
}

/// A collective of equal parts, in order of members.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Even {
    /// `count` elements from each member to each.
    AllToAll,
    /// `count` elements of each member to all.
    AllGather,
    /// Sums, `count` elements for each member.
    ReduceScatter,
    /// A sum of `count` elements on each member.
    AllReduce,
}

/// A block of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block<A = Address, N = Int> {
    /// The destination or source member, by number in the communicator.
    pub peer: N,
    /// The first element.
    pub at: A,
    /// Elements; an empty block is not exchanged.
    pub count: N,
}

impl<N> Grid<N> {
    /// The same grid with other integers.
    pub fn map<M>(&self, mut number: impl FnMut(&N) -> M) -> Grid<M> {
        match self {
            Grid::Threads(n) => Grid::Threads(number(n)),
            &Grid::Blocks { ref blocks, threads, shared_bytes } => {
                Grid::Blocks { blocks: number(blocks), threads, shared_bytes }
            }
        }
    }
}

impl Product {
    /// Two products as a pair; `None` if they differ in more than addresses, or are batches or have an epilogue.
    pub(crate) fn pair(first: &Product, second: &Product) -> Option<[Product; 2]> {
        let placed = |matrix: &Matrix, like: &Matrix| Matrix { at: like.at.clone(), ..matrix.clone() };
        let moved = Product {
            a: placed(&second.a, &first.a),
            b: placed(&second.b, &first.b),
            c: placed(&second.c, &first.c),
            ..second.clone()
        };
        let is_plain = first.before == Address::NULL && first.bias == Address::NULL;
        let is_one = first.batch == Int::Const(1) && is_plain;
        (is_one && moved == *first).then(|| [first.clone(), second.clone()])
    }
}

impl<A, N> Product<A, N> {
    /// The same product with other addresses and integers.
    pub fn map<B, M>(
        &self,
        mut address: impl FnMut(&A) -> B,
        mut number: impl FnMut(&N) -> M,
    ) -> Product<B, M> {
        let (before, bias) = (address(&self.before), address(&self.bias));
        let mut matrix = |Matrix { at, form, leading, step }: &Matrix<A, N>| Matrix {
            at: address(at),
            form: *form,
            leading: number(leading),
            step: number(step),
        };
        let [a, b, c] = [&self.a, &self.b, &self.c].map(&mut matrix);
        Product {
            dtype: self.dtype,
            result: self.result,
            rows: number(&self.rows),
            columns: number(&self.columns),
            inner: number(&self.inner),
            batch: number(&self.batch),
            a,
            b,
            before,
            bias,
            bias_step: number(&self.bias_step),
            activation: self.activation,
            c,
        }
    }
}

impl<A, N> Collective<A, N> {
    /// The same collective with other addresses and integers.
    pub fn map<B, M>(
        &self,
        mut address: impl FnMut(&A) -> B,
        mut number: impl FnMut(&N) -> M,
    ) -> Collective<B, M> {
        let mut blocks = |blocks: &[Block<A, N>], address: &mut dyn FnMut(&A) -> B| -> Vec<Block<B, M>> {
            let block = |Block { peer, at, count }: &Block<A, N>| Block {
                peer: number(peer),
                at: address(at),
                count: number(count),
            };
            blocks.iter().map(block).collect()
        };
        match self {
            Collective::SendReceive { sends, receives } => Collective::SendReceive {
                sends: blocks(sends, &mut address),
                receives: blocks(receives, &mut address),
            },
            Collective::Reduce { blocks: of, to } => {
                Collective::Reduce { blocks: blocks(of, &mut address), to: address(to) }
            }
            Collective::Filled { from, to, outgoing, incoming, runs, sent, received } => Collective::Filled {
                from: address(from),
                to: address(to),
                outgoing: address(outgoing),
                incoming: address(incoming),
                runs: *runs,
                sent: *sent,
                received: *received,
            },
            Collective::Even { kind, from, to, count } => {
                Collective::Even { kind: *kind, from: address(from), to: address(to), count: number(count) }
            }
        }
    }
}
