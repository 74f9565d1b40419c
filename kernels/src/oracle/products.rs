//! Products, sums, look-ups and repetition: `einsum`, `sum`, `expand`, `embed`, `repeat`.

use ithaca_ir::boxes::Region;
use ithaca_ir::{DimId, Space, TensorType};

use super::value::Operand;
use crate::error::RunError;
use crate::real::Real;
use crate::tensor::{Offsets, extents, index, strides};

/// `z[…] = Σ x[…] · y[…]` over the dimensions that z lacks.
pub(crate) fn einsum<T: Real>(
    x: &Operand<'_, T>,
    y: &Operand<'_, T>,
    ty: &TensorType,
    region: &Region,
) -> Result<Vec<T>, RunError> {
    let (xs, ys) = (x.real()?, y.real()?);
    // Summed dimensions in order of x, then of y, each once, and where they step in x and in y.
    let (mut sum_shape, mut x_sum, mut y_sum) = (Vec::new(), Vec::new(), Vec::new());
    let (x_strides, y_strides) = (strides(&x.shape()), strides(&y.shape()));
    for (i, &d) in x.ty.dims.iter().enumerate().filter(|&(_, &d)| !ty.has(d)) {
        sum_shape.push(x.shape()[i]);
        x_sum.push(x_strides[i]);
        let j = y.ty.position(d);
        if j.is_some_and(|j| y.region[j] != x.region[i]) {
            return Err(RunError::invalid("`einsum` sums a dimension over different ranges"));
        }
        y_sum.push(j.map_or(0, |j| y_strides[j]));
    }
    for (j, _) in y.ty.dims.iter().enumerate().filter(|&(_, &d)| !ty.has(d) && !x.ty.has(d)) {
        sum_shape.push(y.shape()[j]);
        x_sum.push(0);
        y_sum.push(y_strides[j]);
    }
    let terms: Vec<(usize, usize)> =
        Offsets::new(sum_shape.clone(), x_sum, 0).zip(Offsets::new(sum_shape, y_sum, 0)).collect();
    let shape = extents(region);
    let rows = Offsets::new(shape.clone(), x.strides_in(ty), 0).zip(Offsets::new(shape, y.strides_in(ty), 0));
    Ok(rows
        .map(|(i, j)| {
            let mut sum = T::ZERO;
            for &(di, dj) in &terms {
                sum += xs[i + di] * ys[j + dj];
            }
            sum
        })
        .collect())
}

/// Rows of `table [over, …]` at `ids`; rows that the rank does not hold are zero.
pub(super) fn embed<T: Real>(
    space: &Space,
    over: DimId,
    table: &Operand<'_, T>,
    ids: &Operand<'_, T>,
    ty: &TensorType,
    region: &Region,
) -> Result<Vec<T>, RunError> {
    let (rows, ids) = (table.real()?, ids.int()?);
    let held = &table.region[0];
    let width: usize = table.shape()[1..].iter().product();
    let mut out = Vec::with_capacity(ids.len() * width);
    for &id in ids {
        let id = known_row(space, over, id)?;
        if held.contains(&id) {
            let row = index(id - held.start) * width;
            out.extend_from_slice(&rows[row..row + width]);
        } else {
            out.extend(std::iter::repeat_n(T::ZERO, width))
        }
    }
    let wanted: usize = extents(region).iter().product();
    if out.len() == wanted && ty.dims.len() == region.len() {
        Ok(out)
    } else {
        Err(RunError::invalid("`embed` gives another shape than its type"))
    }
}

/// The row of a table that a token asks for.
pub(super) fn known_row(space: &Space, over: DimId, id: i32) -> Result<u64, RunError> {
    let known = space.dims[over].valid;
    match u64::try_from(id) {
        Ok(row) if row < known => Ok(row),
        _ => Err(RunError::TokenOutOfRange { value: id, rows: known, dim: space.dims[over].name.clone() }),
    }
}

/// The sum over the dimensions that the result lacks.
pub(super) fn sum<T: Real>(x: &Operand<'_, T>, ty: &TensorType, region: &Region) -> Result<Vec<T>, RunError> {
    let data = x.real()?;
    let shape = extents(region);
    let steps = strides(&shape);
    let at: Vec<usize> = x.ty.dims.iter().map(|&d| ty.position(d).map_or(0, |i| steps[i])).collect();
    let mut out = vec![T::ZERO; shape.iter().product()];
    for (at, &x) in Offsets::new(x.shape(), at, 0).zip(data) {
        out[at] += x;
    }
    Ok(out)
}

/// The same elements along the dimensions that x lacks.
pub(super) fn expand<T: Real>(
    x: &Operand<'_, T>,
    ty: &TensorType,
    region: &Region,
) -> Result<Vec<T>, RunError> {
    let data = x.real()?;
    Ok(Offsets::new(extents(region), x.strides_in(ty), 0).map(|i| data[i]).collect())
}

/// Element `i` of `to` is element `i / (size(to) / size(from))` of `from`.
pub(super) fn repeat<T: Real>(
    space: &Space,
    from: DimId,
    to: DimId,
    x: &Operand<'_, T>,
    ty: &TensorType,
    region: &Region,
) -> Result<Vec<T>, RunError> {
    let data = x.real()?;
    let (Some(i), Some(j)) = (x.ty.position(from), ty.position(to)) else {
        return Err(RunError::invalid("`repeat` lacks its dimension"));
    };
    let times = (space.size(to) / space.size(from).max(1)).max(1);
    let part: Vec<usize> = region[j]
        .clone()
        .map(|copy| {
            let original = copy / times;
            if x.region[i].contains(&original) {
                Ok(index(original - x.region[i].start))
            } else {
                Err(RunError::invalid(format!(
                    "`repeat` needs element {original} of `{}`, which the rank does not hold",
                    space.dims[from].name
                )))
            }
        })
        .collect::<Result<_, _>>()?;
    let shape = extents(region);
    let (before, after) = (shape[..j].iter().product::<usize>(), shape[j + 1..].iter().product::<usize>());
    let held = x.shape()[i];
    let mut out = Vec::with_capacity(before * part.len() * after);
    for block in 0..before {
        for &original in &part {
            let start = (block * held + original) * after;
            out.extend_from_slice(&data[start..start + after]);
        }
    }
    Ok(out)
}

/// The adjoint of [`repeat`]: each element of `to` is the sum of those of its copies that the rank holds.
pub(super) fn sum_copies<T: Real>(
    space: &Space,
    from: DimId,
    to: DimId,
    x: &Operand<'_, T>,
    ty: &TensorType,
    region: &Region,
) -> Result<Vec<T>, RunError> {
    let data = x.real()?;
    let (Some(i), Some(j)) = (x.ty.position(from), ty.position(to)) else {
        return Err(RunError::invalid("`sum_copies` lacks its dimension"));
    };
    let times = (space.size(from) / space.size(to).max(1)).max(1);
    let shape = extents(region);
    let after: usize = shape[j + 1..].iter().product();
    let mut out = vec![T::ZERO; shape.iter().product()];
    let (held, kept) = (x.shape()[i], shape[j]);
    for (row, block) in data.chunks_exact(after.max(1)).enumerate() {
        let original = (x.region[i].start + (row % held.max(1)) as u64) / times;
        if !region[j].contains(&original) {
            return Err(RunError::invalid(format!(
                "`sum_copies` has copies of element {original} of `{}`, which the rank is not to hold",
                space.dims[to].name
            )));
        }
        let at = (row / held.max(1)) * kept + index(original - region[j].start);
        for (sum, &x) in out[at * after..][..after].iter_mut().zip(block) {
            *sum += x;
        }
    }
    Ok(out)
}
