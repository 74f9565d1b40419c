//! Numbers that depend on the rank and the layer, and alternatives that depend on the rank.

use ithaca_ir::entity::Entity;
use ithaca_ir::{AxisId, Mesh, Rank};

/// An integer, as a function of a rank's mesh coordinates and of the layer that runs.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Int {
    /// The same everywhere.
    Const(i64),
    /// Different by rank or layer.
    Varying(Box<Varying>),
}

/// The sum of a constant, a multiple of the layer, multiples of coordinates, and an entry of a table.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Varying {
    /// The constant.
    pub base: i64,
    /// The factor of the layer.
    pub per_layer: i64,
    /// The factors of coordinates, by ascending axis; none is zero.
    pub per_axis: Vec<(AxisId, i64)>,
    /// The axes that index the table, ascending, the last fastest; no axes where there is no table.
    pub axes: Vec<AxisId>,
    /// The table, one entry for each combination of coordinates along `axes`.
    pub values: Vec<i64>,
}

impl Int {
    /// Zero.
    pub const ZERO: Int = Int::Const(0);

    /// The value, if it is the same everywhere.
    pub fn constant(&self) -> Option<i64> {
        match self {
            Int::Const(value) => Some(*value),
            Int::Varying(_) => None,
        }
    }

    /// The value for a rank and a layer.
    pub fn at(&self, at: &Coordinates, layer: u64) -> i64 {
        match self {
            Int::Const(value) => *value,
            Int::Varying(v) => {
                let layers = v.per_layer.wrapping_mul(layer.cast_signed());
                let affine =
                    v.per_axis.iter().map(|&(axis, by)| by.wrapping_mul(at.along(axis).cast_signed()));
                let entry = if v.axes.is_empty() { 0 } else { v.values[at.index(&v.axes)] };
                affine.fold(v.base.wrapping_add(layers).wrapping_add(entry), i64::wrapping_add)
            }
        }
    }

    /// The integer plus `by`.
    #[must_use]
    pub fn plus(self, by: i64) -> Self {
        match self {
            Int::Const(value) => Int::Const(value.wrapping_add(by)),
            Int::Varying(mut v) => {
                v.base = v.base.wrapping_add(by);
                Int::Varying(v)
            }
        }
    }

    /// As a count; negative counts are zero.
    pub fn count_at(&self, at: &Coordinates, layer: u64) -> u64 {
        u64::try_from(self.at(at, layer)).unwrap_or(0)
    }
}

impl From<i64> for Int {
    fn from(value: i64) -> Self {
        Int::Const(value)
    }
}

impl Varying {
    /// The value, as an [`Int`] that is constant where nothing varies.
    pub fn into_int(mut self) -> Int {
        self.per_axis.retain(|&(_, by)| by != 0);
        if self.per_layer == 0 && self.per_axis.is_empty() && self.axes.is_empty() {
            Int::Const(self.base)
        } else {
            Int::Varying(Box::new(self))
        }
    }
}

/// A rank's coordinates along the axes of a mesh.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Coordinates {
    sizes: Vec<u64>,
    along: Vec<u64>,
}

impl Coordinates {
    /// The coordinates of a rank.
    pub fn of(mesh: &Mesh, rank: Rank) -> Self {
        Self {
            sizes: mesh.axes.values().map(|axis| axis.size).collect(),
            along: mesh.axes.ids().map(|axis| mesh.coordinate(rank, axis)).collect(),
        }
    }

    /// The coordinate along an axis.
    pub fn along(&self, axis: AxisId) -> u64 {
        self.along[axis.index()]
    }

    /// The number of the combination of coordinates along some axes, the last axis fastest.
    pub fn index(&self, axes: &[AxisId]) -> usize {
        let number = axes.iter().fold(0, |n, &axis| n * self.sizes[axis.index()] + self.along(axis));
        usize::try_from(number).expect("a mesh has at most 2^20 ranks")
    }
}

/// Alternatives, one of which each rank uses.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Choice<T> {
    /// The axes whose coordinates decide, ascending; none where all ranks have the same.
    pub axes: Vec<AxisId>,
    /// For each combination of coordinates along `axes`, the last fastest, the number of its alternative.
    pub chosen: Vec<usize>,
    /// The alternatives, all different.
    pub alternatives: Vec<T>,
}

impl<T> Choice<T> {
    /// The same for all ranks.
    pub fn only(value: T) -> Self {
        Self { axes: Vec::new(), chosen: vec![0], alternatives: vec![value] }
    }

    /// The alternative of a rank.
    pub fn at(&self, at: &Coordinates) -> &T {
        &self.alternatives[self.chosen[at.index(&self.axes)]]
    }
}
