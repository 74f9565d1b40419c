//! The device mesh: named axes, major to minor, and the ranks they number.

use std::fmt;
use std::ops::Deref;

use serde::{Deserialize, Serialize};

use crate::entity;
use crate::entity::{Arena, Entity};

entity!(
    /// An axis of a [`Mesh`].
    AxisId, "axis"
);

/// A device, numbered row-major over the mesh: the last axis varies fastest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Rank(pub u64);

impl fmt::Display for Rank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// A mesh axis.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Axis {
    /// The name, for example `ulysses`.
    pub name: String,
    /// Ranks along the axis.
    pub size: u64,
}

/// The axes along which ranks communicate together: one, or several that number them jointly, the first counting most.
///
/// Parts of a dimension that several axes split are numbered in the same way.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Axes {
    n: u8,
    /// Those beyond `n` are the first axis of the mesh.
    ids: [AxisId; Self::MOST],
}

impl Axes {
    /// The most axes along which a collective communicates.
    pub const MOST: usize = 6;

    /// These axes; `None` for no axis, too many, and for an axis that is named twice.
    pub fn new(axes: &[AxisId]) -> Option<Self> {
        let is_named_once = |i: usize| !axes[..i].contains(&axes[i]);
        if axes.is_empty() || axes.len() > Self::MOST || !(0..axes.len()).all(is_named_once) {
            return None;
        }
        let mut ids = [AxisId::new(0); Self::MOST];
        ids[..axes.len()].copy_from_slice(axes);
        Some(Self { n: axes.len() as u8, ids })
    }

    /// The same with each axis replaced.
    pub fn map(self, mut new: impl FnMut(AxisId) -> AxisId) -> Self {
        let mut mapped = self;
        mapped.ids[..self.len()].iter_mut().for_each(|axis| *axis = new(*axis));
        mapped
    }
}

impl From<AxisId> for Axes {
    fn from(axis: AxisId) -> Self {
        let mut ids = [AxisId::new(0); Self::MOST];
        ids[0] = axis;
        Self { n: 1, ids }
    }
}

impl Deref for Axes {
    type Target = [AxisId];

    fn deref(&self) -> &[AxisId] {
        &self.ids[..usize::from(self.n)]
    }
}

impl fmt::Debug for Axes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&**self, f)
    }
}

/// Named axes, major to minor; ranks that differ in the last axis only are nearest neighbours.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Mesh {
    /// The axes, major to minor.
    pub axes: Arena<AxisId, Axis>,
}

impl Mesh {
    /// The mesh of one device.
    pub fn single() -> Self {
        Self::default()
    }

    /// A mesh with these axes, major to minor.
    pub fn new<S: Into<String>>(axes: impl IntoIterator<Item = (S, u64)>) -> Self {
        Self { axes: axes.into_iter().map(|(name, size)| Axis { name: name.into(), size }).collect() }
    }

    /// Number of ranks.
    pub fn ranks(&self) -> u64 {
        self.axes.values().map(|a| a.size).product()
    }

    /// All ranks, in order.
    pub fn iter_ranks(&self) -> impl Iterator<Item = Rank> + use<> {
        (0..self.ranks()).map(Rank)
    }

    /// The axis called `name`.
    pub fn axis(&self, name: &str) -> Option<AxisId> {
        self.axes.iter().find(|(_, a)| a.name == name).map(|(id, _)| id)
    }

    /// Ranks along `axis`.
    #[inline]
    pub fn size(&self, axis: AxisId) -> u64 {
        self.axes[axis].size
    }

    /// Number of combinations of coordinates along `axes`.
    #[inline]
    pub fn degree(&self, axes: &[AxisId]) -> u64 {
        axes.iter().map(|&a| self.size(a)).product()
    }

    /// The axes with their sizes, for messages: `outer=2 × ring=4`.
    pub fn degrees_text(&self, axes: &[AxisId]) -> String {
        let axes: Vec<String> =
            axes.iter().map(|&a| format!("{}={}", self.axes[a].name, self.size(a))).collect();
        axes.join(" × ")
    }

    /// Distance in rank numbers between neighbours along `axis`.
    #[inline]
    pub fn stride(&self, axis: AxisId) -> u64 {
        self.axes.values().skip(axis.index() + 1).map(|a| a.size).product()
    }

    /// The coordinate of `rank` along `axis`.
    #[inline]
    pub fn coordinate(&self, rank: Rank, axis: AxisId) -> u64 {
        rank.0 / self.stride(axis) % self.size(axis)
    }

    /// The rank that differs from `rank` in having `coordinate` along `axis`.
    #[inline]
    pub fn with_coordinate(&self, rank: Rank, axis: AxisId, coordinate: u64) -> Rank {
        let stride = self.stride(axis);
        Rank(rank.0 - self.coordinate(rank, axis) * stride + coordinate * stride)
    }

    /// The coordinate of `rank` along `axes` together, the first counting most.
    pub fn coordinate_along(&self, rank: Rank, axes: &[AxisId]) -> u64 {
        axes.iter().fold(0, |c, &a| c * self.size(a) + self.coordinate(rank, a))
    }

    /// The ranks that differ from `rank` along `axes` only, by coordinate along them; an axis named twice counts once.
    pub fn group_along(&self, rank: Rank, axes: &[AxisId]) -> Vec<Rank> {
        let once = |i: &usize| !axes[..*i].contains(&axes[*i]);
        let axes = (0..axes.len()).filter(once).map(|i| axes[i]);
        axes.fold(vec![rank], |group, axis| {
            let (stride, n) = (self.stride(axis), self.size(axis));
            let first = |rank: &Rank| rank.0 - rank.0 / stride % n * stride;
            group.iter().map(first).flat_map(|first| (0..n).map(move |c| Rank(first + c * stride))).collect()
        })
    }

    /// The ranks that differ from `rank` along `axis` only, by coordinate; `rank` is among them.
    pub fn group(&self, rank: Rank, axis: AxisId) -> Vec<Rank> {
        let stride = self.stride(axis);
        let first = rank.0 - self.coordinate(rank, axis) * stride;
        (0..self.size(axis)).map(|i| Rank(first + i * stride)).collect()
    }
}

impl fmt::Display for Mesh {
    /// `ulysses=4,tp=2`, as on the command line.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, axis) in self.axes.values().enumerate() {
            write!(f, "{}{}={}", if i == 0 { "" } else { "," }, axis.name, axis.size)?;
        }
        Ok(())
    }
}
