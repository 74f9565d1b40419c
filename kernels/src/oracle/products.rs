//! Products, sums, look-ups and repetition: `einsum`, `sum`, `expand`, `select`, `embed`, `repeat`.

use ithaca_ir::boxes::Region;
use ithaca_ir::{DimId, Space, TensorType};

use super::value::{LocalOp, Operand, OperandRegion, ResultSpec, strides_in};
use crate::error::RunError;
use crate::real::{self, Real};
use crate::tensor::{Offsets, extents, index, length, strides};

/// `z[…] = Σ x[…] · y[…]` over the dimensions that z lacks.
pub(crate) fn einsum<T: Real>(
    x: &Operand<'_, T>,
    y: &Operand<'_, T>,
    ty: &TensorType,
    region: &Region,
) -> Result<Vec<T>, RunError> {
    let (xs, ys) = (x.real()?, y.real()?);
    // Summed dimensions in order of x, then of y, each once.
    let of_y = y.ty.dims.iter().filter(|&&d| !x.ty.has(d));
    let summed: Vec<DimId> = x.ty.dims.iter().chain(of_y).copied().filter(|&d| !ty.has(d)).collect();
    let mut shape = Vec::with_capacity(summed.len());
    for &d in &summed {
        let ranges = [x, y].map(|operand| operand.ty.position(d).map(|i| &operand.region[i]));
        match ranges {
            [Some(a), Some(b)] if a != b => {
                return Err(RunError::invalid("`einsum` sums a dimension over different ranges"));
            }
            [a, b] => shape.extend(a.or(b).map(length)),
        }
    }
    let [x_steps, y_steps] = [x, y].map(|operand| strides_in(operand.held(), &summed));
    let terms: Vec<(usize, usize)> =
        Offsets::new(shape.clone(), x_steps, 0).zip(Offsets::new(shape, y_steps, 0)).collect();
    let shape = extents(region);
    let rows = Offsets::new(shape.clone(), x.strides_in(ty), 0).zip(Offsets::new(shape, y.strides_in(ty), 0));
    let rows: Vec<(usize, usize)> = rows.collect();
    let mut sums = Vec::with_capacity(rows.len());
    let (together, rest) = rows.as_chunks::<TOGETHER>();
    for rows in together {
        sums.extend(sums_together(xs, ys, &terms, rows));
    }
    sums.extend(rest.iter().map(|&(i, j)| real::sum(terms.iter().map(|&(di, dj)| xs[i + di] * ys[j + dj]))));
    Ok(sums)
}

/// Sums that are taken at once: an addition waits for the one before it in its own sum only.
const TOGETHER: usize = 8;

/// For each of these rows the sum of its terms, each in order.
fn sums_together<T: Real>(
    xs: &[T],
    ys: &[T],
    terms: &[(usize, usize)],
    rows: &[(usize, usize); TOGETHER],
) -> [T; TOGETHER] {
    let mut sums = [T::ZERO; TOGETHER];
    let (i, j) = rows[0];
    let is_one_row = rows.iter().all(|row| row.0 == i);
    if is_one_row && rows.iter().enumerate().all(|(n, row)| row.1 == j + n) {
        for &(di, dj) in terms {
            let (x, ys) = (xs[i + di], &ys[j + dj..j + dj + TOGETHER]);
            for n in 0..TOGETHER {
                sums[n] += x * ys[n];
            }
        }
    } else if is_one_row {
        for &(di, dj) in terms {
            let x = xs[i + di];
            for n in 0..TOGETHER {
                sums[n] += x * ys[rows[n].1 + dj];
            }
        }
    } else {
        for &(di, dj) in terms {
            for n in 0..TOGETHER {
                sums[n] += xs[rows[n].0 + di] * ys[rows[n].1 + dj];
            }
        }
    }
    sums
}

/// Rows of `table [over, …]` at `ids`; rows that the rank does not hold are zero.
pub(super) fn embed<T: Real>(call: &LocalOp<'_, T>, over: DimId) -> Result<Vec<T>, RunError> {
    let (table, rows, ids) = (&call.operands[0], call.real(0)?, call.int(1)?);
    let held = &table.region[0];
    let width: usize = table.shape()[1..].iter().product();
    let mut out = Vec::with_capacity(ids.len() * width);
    for &id in ids {
        let id = known_row(call.space, over, id)?;
        if held.contains(&id) {
            out.extend_from_slice(&rows[index(id - held.start) * width..][..width]);
        } else {
            out.extend(std::iter::repeat_n(T::ZERO, width))
        }
    }
    Ok(out)
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
pub(super) fn sum<T: Real>(call: &LocalOp<'_, T>) -> Result<Vec<T>, RunError> {
    let x = &call.operands[0];
    let mut out = vec![T::ZERO; call.shape().iter().product()];
    for (at, &x) in Offsets::new(x.shape(), call.result().strides_in(x.ty), 0).zip(x.real()?) {
        out[at] += x;
    }
    Ok(out)
}

/// The elements at a position of `over`; zeros if the rank does not hold it.
pub(super) fn select<T: Real>(call: &LocalOp<'_, T>, over: DimId, position: u64) -> Result<Vec<T>, RunError> {
    let (x, data) = (&call.operands[0], call.real(0)?);
    let Some(at) = x.ty.position(over) else {
        return Err(RunError::invalid("`select` over a dimension that x lacks"));
    };
    let held = x.region[at].clone();
    let Some(found) = call.space.index_at(over, held.clone(), position) else {
        return Ok(vec![T::ZERO; call.shape().iter().product()]);
    };
    let start = index(found - held.start) * strides(&x.shape())[at];
    let places = Offsets::new(call.shape(), x.strides_in(call.result().ty), start);
    Ok(places.map(|i| data[i]).collect())
}

/// The copies of a dimension: where each copy that one side holds has its original on the other side.
struct Copies {
    /// For each copy held, the place of its original among those held.
    original: Vec<usize>,
    /// Originals held.
    held: usize,
    /// Combinations of the dimensions before.
    before: usize,
    /// Elements of the dimensions after.
    after: usize,
}

impl Copies {
    /// Element `i` of the dimension `copies` is element `i / (size(copies) / size(of))` of `of`.
    fn of<T: Real>(
        call: &LocalOp<'_, T>,
        (copies, copies_held): (DimId, OperandRegion<'_>),
        (of, held): (DimId, OperandRegion<'_>),
    ) -> Result<Self, RunError> {
        let (Some(i), Some(j)) = (held.0.position(of), copies_held.0.position(copies)) else {
            return Err(call.invalid("lacks its dimension"));
        };
        let times = (call.space.size(copies) / call.space.size(of).max(1)).max(1);
        let range = &held.1[i];
        let original = |copy: u64| match copy / times {
            original if range.contains(&original) => Ok(index(original - range.start)),
            original => {
                let name = &call.space.dims[of].name;
                Err(call
                    .invalid(&format!("needs element {original} of `{name}`, which the rank does not hold")))
            }
        };
        let original = copies_held.1[j].clone().map(original).collect::<Result<_, _>>()?;
        let shape = extents(held.1);
        let (before, after) = (shape[..i].iter().product(), shape[i + 1..].iter().product());
        Ok(Self { original, held: length(range), before, after })
    }

    /// For each row of copies, where the row of its original starts.
    fn rows(&self) -> impl Iterator<Item = usize> + '_ {
        let row = move |block: usize| self.original.iter().map(move |o| (block * self.held + o) * self.after);
        (0..self.before).flat_map(row)
    }
}

/// Element `i` of `to` is element `i / (size(to) / size(from))` of `from`.
pub(super) fn repeat<T: Real>(call: &LocalOp<'_, T>, from: DimId, to: DimId) -> Result<Vec<T>, RunError> {
    let ResultSpec { ty, region } = call.result();
    let data = call.real(0)?;
    let copies = Copies::of(call, (to, (ty, region)), (from, call.operands[0].held()))?;
    Ok(copies.rows().flat_map(|start| &data[start..][..copies.after]).copied().collect())
}

/// The adjoint of [`repeat`]: each element of `to` is the sum of those of its copies that the rank holds.
pub(super) fn sum_copies<T: Real>(call: &LocalOp<'_, T>, from: DimId, to: DimId) -> Result<Vec<T>, RunError> {
    let ResultSpec { ty, region } = call.result();
    let copies = Copies::of(call, (from, call.operands[0].held()), (to, (ty, region)))?;
    let mut out = vec![T::ZERO; call.shape().iter().product()];
    for (start, row) in copies.rows().zip(call.real(0)?.chunks_exact(copies.after.max(1))) {
        for (sum, &x) in out[start..][..copies.after].iter_mut().zip(row) {
            *sum += x;
        }
    }
    Ok(out)
}
