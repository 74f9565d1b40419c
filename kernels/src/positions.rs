//! The positions of a rank's elements in a stored tensor: ranks hold indices, files hold positions.
//!
//! A dimension with an order deals its positions to indices; inputs and weights are loaded so, and outputs put back.
//! A dimension that is fetched has no positions of its own, and is stored as it is: its indices in a row.

use std::ops::Range;

use ithaca_ir::ops::source;
use ithaca_ir::{DimId, Space};

use crate::tensor::{Offsets, index, strides};

/// For each of `indices`, where a file that is read has its element; `None` is padding.
///
/// A dimension that copies another reads that one.
pub(crate) fn loaded_from(space: &Space, dim: DimId, indices: Range<u64>) -> Vec<Option<usize>> {
    let size = source::stored_size(space, dim);
    let stored = |position: u64| (position < size).then(|| index(position));
    match space.dims[dim].copies {
        Some(of) => {
            let times = (space.size(dim) / space.size(of).max(1)).max(1);
            indices.map(|i| stored(space.dims[of].position(i / times))).collect()
        }
        None => own_positions(space, dim, indices).into_iter().map(stored).collect(),
    }
}

/// For each of `indices`, where an output has its element; `None` is padding, which is cut off.
pub(crate) fn stored_at(space: &Space, dim: DimId, indices: Range<u64>) -> Vec<Option<usize>> {
    let valid = space.dims[dim].valid.min(space.size(dim));
    let positions = own_positions(space, dim, indices);
    positions.into_iter().map(|p| (p < valid).then(|| index(p))).collect()
}

/// The positions of `indices` in the sequence that they are of; a fetched token keeps that of where it comes from.
pub(crate) fn sequence_positions(space: &Space, dim: DimId, indices: Range<u64>) -> Vec<u64> {
    space.position_runs(dim, indices).iter().flat_map(ithaca_ir::order::Run::positions).collect()
}

/// Which of `indices` carry data; the others are padding.
pub(crate) fn carries_data(space: &Space, dim: DimId, indices: Range<u64>) -> Vec<bool> {
    let valid = space.dims[space.sequence(dim)].valid;
    sequence_positions(space, dim, indices).into_iter().map(|position| position < valid).collect()
}

/// Positions by the dimension's own order.
fn own_positions(space: &Space, dim: DimId, indices: Range<u64>) -> Vec<u64> {
    let dim = &space.dims[dim];
    dim.order.runs(dim.size, indices).iter().flat_map(ithaca_ir::order::Run::positions).collect()
}

/// Places of a rank's part, dimension by dimension, as rows: the offset at which each row of the last dimension starts
/// in the stored tensor, in row-major order of the part, and the places within a row. A row of padding has no offset.
pub(crate) fn rows(
    mut places: Vec<Vec<Option<usize>>>,
    stored_shape: &[usize],
) -> (impl Iterator<Item = Option<usize>>, Vec<Option<usize>>) {
    // A tensor without dimensions is one row of one element.
    let last = places.pop().unwrap_or_else(|| vec![Some(0)]);
    let stored_strides = strides(stored_shape);
    let shape: Vec<usize> = places.iter().map(Vec::len).collect();
    let row_strides = strides(&shape);
    let start = move |row: usize| {
        (0..places.len())
            .map(|d| places[d][row / row_strides[d] % places[d].len()].map(|i| i * stored_strides[d]))
            .sum()
    };
    let in_a_row = strides(&shape);
    (Offsets::new(shape, in_a_row, 0).map(start), last)
}
