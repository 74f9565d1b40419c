//! Layouts: how a value lies over the mesh.

use smallvec::SmallVec;

use crate::mesh::AxisId;

/// Mesh axes that split one dimension, major to minor.
pub type AxisList = SmallVec<[AxisId; 2]>;

/// Which mesh axes split which dimension, and over which axes partial sums are pending.
///
/// An axis that appears nowhere replicates the value.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Layout {
    /// For each dimension of the type, in its order, the axes that split it, major to minor.
    pub split: SmallVec<[AxisList; 4]>,
    /// Axes over which the value is a sum still to be taken, ascending.
    pub partial: AxisList,
}

impl Layout {
    /// The layout of a value of `rank` dimensions that every rank holds whole.
    pub fn whole(n_dims: usize) -> Self {
        Self { split: (0..n_dims).map(|_| AxisList::new()).collect(), partial: AxisList::new() }
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
}
