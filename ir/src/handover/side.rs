//! Both sides of a handover, and the moves between two ranks.

use crate::layout::At;
use crate::mesh::Rank;
use crate::space::Space;
use crate::types::TensorType;

/// The sequences of one of several micro-batches: those whose number is `index`, modulo `of`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct MicroBatch {
    /// The number of the micro-batch.
    pub index: u64,
    /// Their number.
    pub of: u64,
}

/// A state as some ranks of a schedule hold it. A name may have several: ranks of each have their own type of it, and micro-batches
/// their own part.
#[derive(Clone, Debug)]
pub struct State<'a> {
    /// The name of the stored tensor.
    pub name: String,
    /// The micro-batch whose part it is, where there are several.
    pub micro_batch: Option<MicroBatch>,
    /// Its dimensions, element type and layout.
    pub ty: &'a TensorType,
    /// The places whose ranks have it; `None` means all ranks.
    pub places: Vec<Option<At>>,
}

/// One side of a handover.
#[derive(Clone, Debug)]
pub struct Side<'a> {
    /// Dimensions and mesh.
    pub space: &'a Space,
    /// The states.
    pub states: Vec<State<'a>>,
    /// The process of each rank.
    pub processes: Vec<u64>,
}

/// Elements side by side in the memory of both sides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// The first index in the part of the rank that sends.
    pub from: u64,
    /// The first index in the part of the rank that receives.
    pub to: u64,
    /// Their number.
    pub len: u64,
}

/// Equal pieces along a dimension, at equal distances.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pieces {
    /// The first one.
    pub first: Piece,
    /// Their number.
    pub count: u64,
    /// From one to the next in the part that sends, and in the part that receives; 0 where there is one.
    pub steps: [u64; 2],
}

impl Pieces {
    /// The pieces, in order.
    pub fn iter(self) -> impl Iterator<Item = Piece> {
        let Self { first, count, steps } = self;
        (0..count).map(move |i| Piece {
            from: first.from + i * steps[0],
            to: first.to + i * steps[1],
            ..first
        })
    }

    /// Adds the piece after them, if it is at the same distance.
    pub(super) fn add(&mut self, next: Piece) -> bool {
        let Self { first, count, steps } = self;
        let last = (*count - 1) * steps[0] + first.from;
        let end = first.to + (*count - 1) * steps[1];
        let (Some(from), Some(to)) = (next.from.checked_sub(last), next.to.checked_sub(end)) else {
            return false;
        };
        let fits = next.len == first.len && (*count == 1 || *steps == [from, to]);
        if fits {
            (*count, *steps) = (*count + 1, [from, to]);
        }
        fits
    }
}

/// The elements of a state that go from a rank of one side to a rank of the other: all combinations of `pieces`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Move {
    /// The rank that has them.
    pub from: Rank,
    /// The rank that reads them.
    pub to: Rank,
    /// For each dimension, in order of the elements.
    pub pieces: Vec<Vec<Pieces>>,
}

impl Move {
    /// Its elements.
    pub fn elements(&self) -> u64 {
        let along = |of_dim: &Vec<Pieces>| of_dim.iter().map(|p| p.count * p.first.len).sum::<u64>();
        self.pieces.iter().map(along).product()
    }

    /// Its elements in row-major order as pieces of the memory of both parts, which have these shapes.
    pub fn copies(&self, [from, to]: [&[u64]; 2]) -> Vec<Piece> {
        let mut all = vec![Piece { from: 0, to: 0, len: 1 }];
        for (dim, pieces) in self.pieces.iter().enumerate() {
            let is_last = dim + 1 == self.pieces.len();
            let one = |piece: Piece| {
                (0..piece.len).map(move |i| Piece { from: piece.from + i, to: piece.to + i, len: 1 })
            };
            let along = |before: &Piece| -> Vec<Piece> {
                let (from, to) = (before.from * from[dim], before.to * to[dim]);
                let at = |piece: Piece| Piece { from: from + piece.from, to: to + piece.to, len: piece.len };
                let pieces = pieces.iter().flat_map(|pieces| pieces.iter());
                if is_last { pieces.map(at).collect() } else { pieces.flat_map(one).map(at).collect() }
            };
            all = all.iter().flat_map(along).collect();
        }
        all
    }
}
