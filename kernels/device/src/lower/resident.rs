//! A rank's part of a stored tensor.

use std::ops::Range;

use ithaca_ir::layout::At;
use ithaca_ir::ops::source;
use ithaca_ir::order::Run;
use ithaca_ir::{DimId, Order, Space, TensorType};

use super::axes::splitting_axes;
use crate::merge::{self, Span};
use crate::ops::view::signed;
use crate::program::{ResidentDim, ResidentTensor};
use crate::value::Choice;

/// A dimension of a stored tensor.
struct Stored {
    /// Elements in the file.
    size: u64,
    copies: u64,
    /// The dimension that has the positions.
    of: DimId,
}

/// A rank's part of a stored tensor.
pub(super) fn of_source(space: &Space, ty: &TensorType) -> ResidentTensor {
    resident(space, ty, None, |dim| {
        let size = source::stored_size(space, dim);
        let (copies, of) = match space.dims[dim].copies {
            Some(of) => ((space.size(dim) / space.size(of).max(1)).max(1), of),
            None => (1, dim),
        };
        Stored { size, copies, of }
    })
}

/// A rank's part of an output.
pub(super) fn of_output(space: &Space, ty: &TensorType) -> ResidentTensor {
    resident(space, ty, ty.layout.at, |dim| {
        let size = space.dims[dim].valid.min(space.size(dim));
        Stored { size, copies: 1, of: dim }
    })
}

fn resident(
    space: &Space,
    ty: &TensorType,
    at: Option<At>,
    stored: impl Fn(DimId) -> Stored,
) -> ResidentTensor {
    let span = Span::of(&space.mesh, splitting_axes(ty));
    let from = merge::rank_at(&space.mesh, at);
    let boxes: Vec<_> = span.ranks(&space.mesh, from).map(|rank| space.local_box(ty, rank)).collect();
    let dim = |(place, &dim): (usize, &DimId)| {
        let Stored { size, copies, of } = stored(dim);
        let ranges: Vec<&Range<u64>> = boxes.iter().map(|region| &region[place]).collect();
        ResidentDim {
            name: space.dims[dim].name.clone(),
            size: space.size(dim),
            stored: size,
            copies,
            start: merge::integer(&span, ranges.iter().map(|r| signed(r.start))),
            end: merge::integer(&span, ranges.iter().map(|r| signed(r.end))),
            runs: match space.dims[of].order {
                Order::Contiguous => Choice::only(Vec::new()),
                Order::Zigzag { .. } | Order::Striped { .. } | Order::Table(_) => {
                    let lists: Vec<Vec<i64>> = ranges.iter().map(|r| runs(space, of, copies, r)).collect();
                    let lists: Vec<Option<&[i64]>> = lists.iter().map(|list| Some(list.as_slice())).collect();
                    merge::lists(&span, &lists)
                }
            },
        }
    };
    ResidentTensor { dtype: ty.dtype, at, dims: ty.dims.iter().enumerate().map(dim).collect() }
}

/// Index, position and length of each run of the indices that a range repeats.
fn runs(space: &Space, of: DimId, copies: u64, range: &Range<u64>) -> Vec<i64> {
    if range.is_empty() {
        return Vec::new();
    }
    let dim = &space.dims[of];
    let runs = dim.order.runs(dim.size, range.start / copies..(range.end - 1) / copies + 1);
    runs.iter().flat_map(|&Run { index, position, len }| [index, position, len].map(signed)).collect()
}
