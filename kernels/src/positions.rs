//! The positions of a rank's elements in a stored tensor: ranks hold indices, files hold positions.
//!
//! A dimension with an order deals its positions to indices; inputs and weights are loaded so, and outputs put back.
//! A dimension that is fetched has no positions of its own, and is stored as it is: its indices in a row.

use std::ops::Range;

use ithaca_ir::ops::source;
use ithaca_ir::{DimId, Space};

use crate::tensor::{index, strides};

/// For each of `indices`, where a file that is read has its element; `None` is padding.
///
/// A dimension that copies another reads that one.
pub(crate) fn loaded_from(space: &Space, dim: DimId, indices: Range<u64>) -> Vec<Option<usize>> {
    let mut places = vec![None; index(indices.end - indices.start)];
    for run in source::stored_runs(space, dim, indices) {
        (index(run.index)..).zip(run.positions()).for_each(|(i, position)| places[i] = Some(index(position)));
    }
    places
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

/// Calls `f` for each element of a rank's part, in row-major order: with its number in the part, and its offset in the stored
/// tensor, `None` for padding. `places` are those of the part along each dimension.
pub(crate) fn each_place(
    mut places: Vec<Vec<Option<usize>>>,
    stored_shape: &[usize],
    mut f: impl FnMut(usize, Option<usize>),
) {
    // A tensor without dimensions is one row of one element.
    let last = places.pop().unwrap_or_else(|| vec![Some(0)]);
    let steps = strides(stored_shape);
    let shape: Vec<usize> = places.iter().map(Vec::len).collect();
    let row_steps = strides(&shape);
    for row in 0..shape.iter().product() {
        let along = |(d, places): (usize, &Vec<Option<usize>>)| {
            places[row / row_steps[d] % places.len()].map(|i| i * steps[d])
        };
        let start: Option<usize> = places.iter().enumerate().map(along).sum();
        for (i, place) in last.iter().enumerate() {
            f(row * last.len() + i, start.and_then(|start| Some(start + (*place)?)));
        }
    }
}
