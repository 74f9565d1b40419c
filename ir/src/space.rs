//! The space a module lives in: its named dimensions and its mesh.
//!
//! Everything that depends on sizes is asked here: extents, local ranges, element counts. Local extents are always
//! derived from (dimension, axes, rank), never stored.

use std::ops::Range;

use crate::dim::{Dim, DimId};
use crate::entity::Arena;
use crate::layout::AxisList;
use crate::mesh::{AxisId, Mesh, Rank};
use crate::order::{Run, StridedRun};
use crate::types::TensorType;

/// Named dimensions and the mesh.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Space {
    /// Dimensions, in order of declaration.
    pub dims: Arena<DimId, Dim>,
    /// The mesh; one device on the program level.
    pub mesh: Mesh,
}

impl Space {
    /// The dimension called `name`.
    pub fn dim(&self, name: &str) -> Option<DimId> {
        self.dims.iter().find(|(_, d)| d.name == name).map(|(id, _)| id)
    }

    /// `name`, with underscores appended until no dimension has it.
    pub fn free_name(&self, name: impl Into<String>) -> String {
        let mut name = name.into();
        while self.dim(&name).is_some() {
            name.push('_');
        }
        name
    }

    /// Elements of `dim` over all ranks.
    pub fn size(&self, dim: DimId) -> u64 {
        self.dims[dim].size
    }

    /// The elements of `dim` that `rank` holds when `axes` split it, major to minor.
    ///
    /// Each axis deals whole granules of what the axes before it left, the first ranks getting one more when the
    /// count does not divide; so seven heads on four ranks are 2, 2, 2, 1.
    pub fn range(&self, dim: DimId, axes: &[AxisId], rank: Rank) -> Range<u64> {
        let Dim { size, granule, .. } = self.dims[dim];
        if let Some(fetched) = self.dims[dim].fetched.as_ref().filter(|_| !axes.is_empty()) {
            let i = usize::try_from(self.mesh.coordinate_along(rank, axes))
                .expect("a coordinate is below the degree");
            return fetched.part(i);
        }
        let mut units = 0..size.div_ceil(granule);
        for &axis in axes {
            let (n, i) = (self.mesh.size(axis), self.mesh.coordinate(rank, axis));
            let len = units.end - units.start;
            let (each, more) = (len / n, len % n);
            let start = units.start + i * each + i.min(more);
            units = start..start + each + u64::from(i < more);
        }
        units.start * granule..(units.end * granule).min(size)
    }

    /// The largest number of elements of `dim` that a rank holds when `axes` split it.
    pub fn max_extent(&self, dim: DimId, axes: &[AxisId]) -> u64 {
        let Dim { size, granule, .. } = self.dims[dim];
        if let Some(fetched) = self.dims[dim].fetched.as_ref().filter(|_| !axes.is_empty()) {
            return (0..fetched.parts().len()).map(|i| fetched.len(i)).max().unwrap_or(0);
        }
        let mut units = size.div_ceil(granule);
        for &axis in axes {
            units = units.div_ceil(self.mesh.size(axis));
        }
        (units * granule).min(size)
    }

    /// The share of a tensor's elements that are expected to be filled; the rest of its ragged dimensions is zero.
    pub fn expected_share(&self, ty: &TensorType) -> f64 {
        let share = |&dim: &DimId| {
            let Dim { size, ragged, .. } = self.dims[dim];
            ragged.map_or(1.0, |expected| expected as f64 / size.max(1) as f64)
        };
        ty.dims.iter().map(share).product()
    }

    /// Whether `axes` may split `dim`: evenly, or where it is declared uneven, leaving no rank without a granule.
    pub fn can_split(&self, dim: DimId, axes: &[AxisId]) -> bool {
        let Dim { size, granule, uneven, .. } = self.dims[dim];
        let degree = self.mesh.degree(axes);
        if let Some(fetched) = &self.dims[dim].fetched {
            return axes.is_empty() || fetched.parts().len() as u64 == degree;
        }
        if let Some(part) = &self.dims[dim].part {
            return degree != 0 && part.runs.is_multiple_of(degree);
        }
        degree == 1 || self.dims[dim].divides_evenly(degree) || (uneven && size / granule >= degree)
    }

    /// Whether `rank` is one of the ranks that hold `ty`; of a scalar its box does not tell.
    pub fn holds(&self, ty: &TensorType, rank: Rank) -> bool {
        ty.layout.at.is_none_or(|at| at.has(&self.mesh, rank))
    }

    /// Whether no dimension of `ty` that is declared uneven is split so that ranks have parts of different lengths.
    pub fn deals_evenly(&self, ty: &TensorType) -> bool {
        let even = |(&d, axes): (&DimId, &AxisList)| {
            !self.dims[d].uneven || self.dims[d].divides_evenly(self.mesh.degree(axes))
        };
        ty.dims.iter().zip(&ty.layout.split).all(even)
    }

    /// Whether every rank holds as many elements of `ty` as any other.
    pub fn is_even(&self, ty: &TensorType) -> bool {
        let everywhere = ty.layout.at.is_none() && ty.layout.moved.iter().all(|m| m.only.is_none());
        let even = |(&d, axes): (&DimId, &AxisList)| {
            let dim = &self.dims[d];
            axes.is_empty() || dim.fetched.is_none() && dim.divides_evenly(self.mesh.degree(axes))
        };
        everywhere && ty.dims.iter().zip(&ty.layout.split).all(even)
    }

    /// The number of elements of `ty` that `rank` holds.
    pub fn local_elements(&self, ty: &TensorType, rank: Rank) -> u64 {
        if self.is_even(ty) {
            self.max_local_elements(ty)
        } else {
            self.local_box(ty, rank).iter().map(|range| range.end.saturating_sub(range.start)).product()
        }
    }

    /// For each dimension of `ty`, the global indices that `rank` holds.
    pub fn local_box(&self, ty: &TensorType, rank: Rank) -> Vec<Range<u64>> {
        if !self.holds(ty, rank) {
            return vec![0..0; ty.dims.len()];
        }
        let owner = self.owner(ty, rank);
        (0..ty.dims.len()).map(|i| self.owned(ty, i, rank, owner)).collect()
    }

    /// The global indices that `rank` holds along the `i`-th dimension of `ty`.
    pub fn local_range(&self, ty: &TensorType, i: usize, rank: Rank) -> Range<u64> {
        if !self.holds(ty, rank) {
            return 0..0;
        }
        self.owned(ty, i, rank, self.owner(ty, rank))
    }

    /// The rank whose part of `ty` `rank` holds.
    fn owner(&self, ty: &TensorType, rank: Rank) -> Option<Rank> {
        if ty.layout.moved.is_empty() { Some(rank) } else { ty.layout.owner(&self.mesh, rank) }
    }

    /// The indices along the `i`-th dimension of the part of `owner`, which `rank` holds.
    fn owned(&self, ty: &TensorType, i: usize, rank: Rank, owner: Option<Rank>) -> Range<u64> {
        let (dim, axes) = (ty.dims[i], &ty.layout.split[i]);
        let travels = || axes.iter().any(|&a| ty.layout.moved_along(a).is_some());
        match owner {
            Some(owner) => self.range(dim, axes, owner),
            // Parts that have moved away are absent along the dimension that the axis splits.
            None if travels() => 0..0,
            None => self.range(dim, axes, rank),
        }
    }

    /// The positions of `indices` of `dim`, as runs in order of index.
    ///
    /// Fetched elements keep their positions.
    pub fn position_runs(&self, dim: DimId, indices: Range<u64>) -> Vec<Run> {
        let Some(fetched) = &self.dims[dim].fetched else {
            return self.dims[dim].order.runs(self.dims[dim].size, indices);
        };
        let mut runs = Vec::new();
        for (first, of) in fetched.sources(indices) {
            for run in self.position_runs(fetched.of, of.clone()) {
                runs.push(Run { index: first + (run.index - of.start), ..run });
            }
        }
        runs
    }

    /// The strided runs of positions of `indices` of `dim`.
    pub(crate) fn strided_runs(&self, dim: DimId, indices: Range<u64>) -> Vec<StridedRun> {
        let mut strided_runs = Vec::new();
        let mut of = vec![(dim, indices)];
        while let Some((dim, indices)) = of.pop() {
            match &self.dims[dim].fetched {
                Some(fetched) => of.extend(fetched.sources(indices).map(|(_, from)| (fetched.of, from))),
                None => self.dims[dim].order.strided_runs(self.dims[dim].size, indices, &mut strided_runs),
            }
        }
        strided_runs
    }

    /// The indices of the sequence that `indices` of a dimension are fetched from, in their order; the same where it is not
    /// fetched.
    pub fn sources(&self, dim: DimId, indices: Range<u64>) -> Vec<Range<u64>> {
        let Some(fetched) = &self.dims[dim].fetched else { return vec![indices] };
        fetched.sources(indices).map(|(_, range)| range).collect()
    }

    /// The index in `indices` of `dim` that has `position`.
    pub fn index_at(&self, dim: DimId, indices: Range<u64>, position: u64) -> Option<u64> {
        let runs = self.position_runs(dim, indices);
        let run = runs.iter().find(|run| run.positions().contains(&position))?;
        Some(run.index + (position - run.position))
    }

    /// The dimension whose positions `dim` has: the one it is fetched from, or itself.
    pub fn sequence(&self, dim: DimId) -> DimId {
        self.dims[dim].fetched.as_ref().map_or(dim, |f| f.of)
    }

    /// The index of the dimension that `dim` is a part of which is its `index`; the same where it is no part.
    pub fn origin(&self, dim: DimId, index: u64) -> u64 {
        match self.dims[dim].part {
            None => index,
            Some(part) => {
                let each = (self.dims[dim].size / part.runs).max(1);
                (index / each * part.count + part.index) * each + index % each
            }
        }
    }

    /// The local shape on `rank`.
    pub fn local_shape(&self, ty: &TensorType, rank: Rank) -> Vec<u64> {
        self.local_box(ty, rank).into_iter().map(|r| r.end - r.start).collect()
    }

    /// The global shape.
    pub fn shape(&self, ty: &TensorType) -> Vec<u64> {
        ty.dims.iter().map(|&d| self.size(d)).collect()
    }

    /// The shape that bounds every rank's local shape.
    pub fn max_local_shape(&self, ty: &TensorType) -> Vec<u64> {
        ty.dims.iter().zip(&ty.layout.split).map(|(&d, axes)| self.max_extent(d, axes)).collect()
    }

    /// The largest number of elements that a rank holds of `ty`.
    pub fn max_local_elements(&self, ty: &TensorType) -> u64 {
        ty.dims.iter().zip(&ty.layout.split).map(|(&d, axes)| self.max_extent(d, axes)).product()
    }

    /// The largest number of bytes that a rank holds of `ty`.
    pub fn max_local_bytes(&self, ty: &TensorType) -> u64 {
        self.max_local_elements(ty) * ty.dtype.bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seven_heads_on_four_ranks_leave_none_without() {
        let mut space = Space { mesh: Mesh::new([("u", 4)]), ..Space::default() };
        let h = space.dims.push(Dim { granule: 7, uneven: true, ..Dim::new("h", 49) });
        let u = space.mesh.axis("u").unwrap();
        let held: Vec<u64> =
            space.mesh.iter_ranks().map(|r| space.range(h, &[u], r)).map(|r| (r.end - r.start) / 7).collect();
        assert_eq!(held, [2, 2, 2, 1]);
        assert_eq!(space.max_extent(h, &[u]), 14);
    }

    #[test]
    fn nested_axes_refine_major_to_minor() {
        let mut space = Space { mesh: Mesh::new([("r", 2), ("u", 3)]), ..Space::default() };
        let s = space.dims.push(Dim { uneven: true, ..Dim::new("s", 9) });
        let (r, u) = (space.mesh.axis("r").unwrap(), space.mesh.axis("u").unwrap());
        for rank in space.mesh.iter_ranks() {
            let (outer, inner) = (space.range(s, &[r], rank), space.range(s, &[r, u], rank));
            assert!(outer.start <= inner.start && inner.end <= outer.end, "{inner:?} lies in {outer:?}");
        }
        assert_eq!(space.range(s, &[r, u], Rank(5)), 8..9);
    }
}
