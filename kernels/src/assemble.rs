//! Whole tensors from the parts that ranks hold.

use std::borrow::Cow;
use std::ops::Range;

use ithaca_ir::{DimId, Rank, Space, TensorType};

use crate::error::RunError;
use crate::positions;
use crate::real::Real;
use crate::tensor::{Tensor, extents, index, unravel};

/// An output from the parts of all ranks: every element at its position, cut to the valid part.
///
/// # Errors
/// [`RunError::ReplicasDiffer`] when two ranks hold different numbers (bit for bit) for one element;
/// [`RunError::Invalid`] for a pending sum, and for elements that no rank holds.
pub fn assemble<'a, T: Real>(
    space: &Space,
    name: &str,
    ty: &TensorType,
    local: impl FnMut(Rank) -> Result<Cow<'a, [T]>, RunError>,
) -> Result<Tensor<T>, RunError> {
    let shape: Vec<usize> = ty.dims.iter().map(|&d| index(space.dims[d].valid.min(space.size(d)))).collect();
    let whole = put_together(space, name, ty, &shape, positions::stored_at, local)?;
    let data: Option<Vec<T>> = whole.into_iter().collect();
    let data = data.ok_or_else(|| RunError::invalid(format!("no rank holds a part of `{name}`")))?;
    Ok(Tensor::new(shape, data))
}

/// The parts of all ranks in a tensor of `shape`; `places` maps the indices along each dimension.
///
/// # Errors
/// As [`assemble`]; an element that no rank holds is `None`.
pub(crate) fn put_together<'a, T: Real>(
    space: &Space,
    name: &str,
    ty: &TensorType,
    shape: &[usize],
    places: fn(&Space, DimId, Range<u64>) -> Vec<Option<usize>>,
    mut local: impl FnMut(Rank) -> Result<Cow<'a, [T]>, RunError>,
) -> Result<Vec<Option<T>>, RunError> {
    if !ty.layout.partial.is_empty() {
        return Err(RunError::invalid(format!("`{name}` is a pending sum")));
    }
    let mut whole: Vec<Option<T>> = vec![None; shape.iter().product()];
    for rank in space.mesh.iter_ranks().filter(|&rank| space.holds(ty, rank)) {
        let held = space.local_box(ty, rank);
        let along = |(&d, range): (_, &Range<u64>)| places(space, d, range.clone());
        let data = local(rank)?;
        if data.len() != extents(&held).iter().product::<usize>() {
            return Err(RunError::invalid(format!("`{name}` has another size than its type")));
        }
        let mut differs = None;
        positions::each_place(ty.dims.iter().zip(&held).map(along).collect(), shape, |n, place| {
            let Some(i) = place else { return };
            let (found, before) = (data[n].to_f64(), whole[i].replace(data[n]).map(T::to_f64));
            if let Some(expected) = before.filter(|expected| expected.to_bits() != found.to_bits()) {
                differs.get_or_insert((i, found, expected));
            }
        });
        if let Some((i, found, expected)) = differs {
            let sizes: Vec<u64> = shape.iter().map(|&n| n as u64).collect();
            let (output, at) = (name.to_owned(), unravel(&sizes, i as u64));
            return Err(RunError::ReplicasDiffer { output, rank: rank.0, at, found, expected });
        }
    }
    Ok(whole)
}
