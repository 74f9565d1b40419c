//! Layouts: the placement of a value on the mesh.

use smallvec::{Array, SmallVec};

use crate::mesh::{AxisId, Mesh, Rank};

/// Mesh axes that split one dimension, major to minor.
pub type AxisList = SmallVec<[AxisId; 2]>;

/// Parts that have moved along an axis, as blocks of keys do around a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Move {
    /// The axis, one that splits a dimension.
    pub axis: AxisId,
    /// The rank at coordinate `c` holds the part of coordinate `c + by`, around the ring.
    pub by: u64,
    /// The coordinates, first and one past the last, that hold anything; all when absent.
    pub only: Option<(u64, u64)>,
}

/// The only ranks that hold a value: those with one coordinate along an axis, such as a stage of a pipeline.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct At {
    /// The axis.
    pub axis: AxisId,
    /// The coordinate of the ranks that hold the value.
    pub coordinate: u64,
}

impl At {
    /// Whether `rank` is one of the ranks.
    pub fn has(self, mesh: &Mesh, rank: Rank) -> bool {
        mesh.coordinate(rank, self.axis) == self.coordinate
    }
}

/// Which mesh axes split which dimension, and over which axes partial sums are pending.
///
/// An axis that appears nowhere replicates the value.
#[derive(Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Layout {
    /// For each dimension of the type, in its order, the axes that split it, major to minor.
    pub split: SmallVec<[AxisList; 4]>,
    /// Axes over which the value is a sum still to be taken, ascending.
    pub partial: AxisList,
    /// Axes along which parts are not where they belong, ascending.
    pub moved: SmallVec<[Move; 1]>,
    /// The ranks that hold the value; all of them when absent.
    pub at: Option<At>,
}

/// Types are cloned more often than anything else in planning, and lists of what can be copied as bytes are cloned several
/// times faster by `from_slice` than item by item.
impl Clone for Layout {
    fn clone(&self) -> Self {
        let Self { split, partial, moved, at } = self;
        Self {
            split: split.iter().map(|axes| copied(axes)).collect(),
            partial: copied(partial),
            moved: copied(moved),
            at: *at,
        }
    }
}

/// A copy of a list that is often empty.
fn copied<A: Array<Item: Copy>>(list: &[A::Item]) -> SmallVec<A> {
    if list.is_empty() { SmallVec::new() } else { SmallVec::from_slice(list) }
}

impl Layout {
    /// The layout of a value of `rank` dimensions that every rank holds whole.
    pub fn whole(n_dims: usize) -> Self {
        Self {
            split: (0..n_dims).map(|_| AxisList::new()).collect(),
            partial: AxisList::new(),
            moved: SmallVec::new(),
            at: None,
        }
    }

    /// Whether every rank holds the whole value.
    pub fn is_whole(&self) -> bool {
        self.partial.is_empty() && self.split.iter().all(|axes| axes.is_empty())
    }

    /// Every axis in use, in order of dimensions, pending sums last.
    pub fn axes(&self) -> impl Iterator<Item = AxisId> + '_ {
        self.split.iter().flatten().chain(&self.partial).copied()
    }

    /// The same layout with `axis` pending.
    pub fn with_partial(mut self, axis: AxisId) -> Self {
        self.partial.push(axis);
        self.partial.sort_unstable();
        self
    }

    /// The same layout with `axis` no longer pending.
    pub fn without_partial(mut self, axis: AxisId) -> Self {
        self.partial.retain(|a| *a != axis);
        self
    }

    /// The same layout with the parts along `axis` moved by `by`, modulo the `n` ranks of the axis, instead of as they
    /// were; only the ranks with coordinates `only` hold anything.
    pub fn moved(mut self, axis: AxisId, by: u64, n: u64, only: Option<(u64, u64)>) -> Self {
        self.moved.retain(|m| m.axis != axis);
        let by = by % n.max(1);
        if by != 0 || only.is_some() {
            self.moved.push(Move { axis, by, only });
            self.moved.sort_unstable();
        }
        self
    }

    /// The same layout on these ranks.
    pub fn located(mut self, at: Option<At>) -> Self {
        self.at = at;
        self
    }

    /// The same layout with every part where it belongs.
    pub fn at_home(mut self) -> Self {
        self.moved.clear();
        self
    }

    /// How parts along `axis` have moved.
    pub fn moved_along(&self, axis: AxisId) -> Option<&Move> {
        self.moved.iter().find(|m| m.axis == axis)
    }

    /// The rank whose part `rank` holds; none when it holds nothing.
    pub fn owner(&self, mesh: &Mesh, rank: Rank) -> Option<Rank> {
        self.moved.iter().try_fold(rank, |owner, m| {
            let c = mesh.coordinate(rank, m.axis);
            let holds = m.only.is_none_or(|(start, end)| (start..end).contains(&c));
            holds.then(|| mesh.with_coordinate(owner, m.axis, (c + m.by) % mesh.size(m.axis)))
        })
    }

    /// The rank that holds the part of `owner`: the inverse of [`owner`](Self::owner).
    pub fn holder(&self, mesh: &Mesh, owner: Rank) -> Option<Rank> {
        self.moved.iter().try_fold(owner, |holder, m| {
            let n = mesh.size(m.axis);
            let c = (mesh.coordinate(owner, m.axis) + n - m.by % n) % n;
            let holds = m.only.is_none_or(|(start, end)| (start..end).contains(&c));
            holds.then(|| mesh.with_coordinate(holder, m.axis, c))
        })
    }
}
