//! Products of tensors through matrix products.
//!
//! Dimensions of an einsum are of four kinds: in both operands and the result (batch), in one operand and the result
//! (rows, columns), in both operands only (summed). Neighbours of a kind that are one stride apart merge; the largest
//! of each kind become one matrix product, what is left is looped over. A ragged dimension is one of the matrix, and its empty
//! rows, columns or terms are left out.

use ithaca_ir::boxes::Region;
use ithaca_ir::{Space, TensorType};

use super::product::{Matrix, multiply};
use super::view::View;
use crate::cpu::simd::Update;
use crate::cpu::threads::Threads;
use crate::error::RunError;
use crate::oracle::{Operand, products};
use crate::tensor::{Offsets, extents, strides};

/// A loop: its length and its strides in x, y and z.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Loop {
    n: usize,
    x: usize,
    y: usize,
    z: usize,
    /// Whether only the first of its indices are filled, by data.
    is_ragged: bool,
}

/// The loops of an einsum by kind, each from outer to inner.
#[derive(Debug, Default)]
struct Loops {
    batch: Vec<Loop>,
    rows: Vec<Loop>,
    columns: Vec<Loop>,
    sums: Vec<Loop>,
}

/// `z[…] = Σ x[…] · y[…]` over the dimensions that z lacks.
pub(in crate::cpu) fn einsum(
    space: &Space,
    (x, y): (&Operand<'_, f32>, &Operand<'_, f32>),
    ty: &TensorType,
    region: &Region,
    threads: Threads,
) -> Result<Vec<f32>, RunError> {
    let mut out = vec![0.0; extents(region).iter().product()];
    accumulate(space, (x, y), (ty, region), &mut out, threads)?;
    Ok(out)
}

/// `z[…] += Σ x[…] · y[…]` over the dimensions that z lacks.
pub(in crate::cpu) fn accumulate(
    space: &Space,
    (x, y): (&Operand<'_, f32>, &Operand<'_, f32>),
    (ty, region): (&TensorType, &Region),
    out: &mut [f32],
    threads: Threads,
) -> Result<(), RunError> {
    let Some(loops) = Loops::of(space, (x, y), ty, region) else {
        // A dimension of one operand alone that is summed is no matrix product: the oracle's loops do it.
        let product = products::einsum(x, y, ty, region)?;
        out.iter_mut().zip(product).for_each(|(z, product)| *z += product);
        return Ok(());
    };
    let (xs, ys) = (x.real()?, y.real()?);
    if out.is_empty() || loops.sums.iter().any(|l| l.n == 0) {
        return Ok(());
    }
    let Loops { batch, mut rows, mut columns, mut sums } = loops;
    let (m, n, k) = (take_inner(&mut rows), take_inner(&mut columns), take_inner(&mut sums));
    let outer: Vec<Loop> = batch.into_iter().chain(rows).chain(columns).collect();
    for (xo, yo, zo) in offsets(&outer) {
        for (xi, yi, _) in offsets(&sums) {
            let x = (xs, View { start: xo + xi, row: m.x, column: k.x });
            let y = (ys, View { start: yo + yi, row: k.y, column: n.y });
            let z = (&mut *out, View { start: zo, row: m.z, column: n.z });
            let filled = |of: Loop, matrix: Matrix<'_>, others: usize| {
                if of.is_ragged { filled_rows(matrix, of.n, others) } else { of.n }
            };
            let transposed = |(data, view): (_, View)| (data, view.transposed());
            let terms = filled(k, transposed(x), m.n).min(filled(k, y, n.n));
            let sizes = (filled(m, x, k.n), terms, filled(n, transposed(y), k.n));
            multiply(sizes, 1.0, x, y, z, Update::Accumulate, threads);
        }
    }
    Ok(())
}

impl Loops {
    /// `None` when a dimension is neither shared nor in the result, or ranges do not fit.
    fn of(
        space: &Space,
        (x, y): (&Operand<'_, f32>, &Operand<'_, f32>),
        ty: &TensorType,
        region: &Region,
    ) -> Option<Self> {
        let (x_strides, y_strides, z_strides) =
            (strides(&x.shape()), strides(&y.shape()), strides(&extents(region)));
        let mut loops = Loops::default();
        let summed = x.ty.dims.iter().filter(|&&d| !ty.has(d));
        for &d in ty.dims.iter().chain(summed) {
            let (i, j, o) = (x.ty.position(d), y.ty.position(d), ty.position(d));
            let ranges = [i.map(|i| &x.region[i]), j.map(|j| &y.region[j]), o.map(|o| &region[o])];
            let range = ranges.into_iter().flatten().next()?;
            if ranges.into_iter().flatten().any(|r| r != range) {
                return None;
            }
            let kind = match (i, j, o) {
                (Some(_), Some(_), Some(_)) => &mut loops.batch,
                (Some(_), None, Some(_)) => &mut loops.rows,
                (None, Some(_), Some(_)) => &mut loops.columns,
                (Some(_), Some(_), None) => &mut loops.sums,
                _ => return None,
            };
            let at = |position: Option<usize>, strides: &[usize]| position.map_or(0, |p| strides[p]);
            let next = Loop {
                n: crate::tensor::length(range),
                x: at(i, &x_strides),
                y: at(j, &y_strides),
                z: at(o, &z_strides),
                is_ragged: space.dims[d].ragged.is_some(),
            };
            push_merged(kind, next);
        }
        // Dimensions of y alone that are summed have not been seen.
        y.ty.dims.iter().all(|&d| ty.has(d) || x.ty.has(d)).then_some(loops)
    }
}

/// Adds an inner loop, as one with the loop around it where their strides allow.
fn push_merged(loops: &mut Vec<Loop>, inner: Loop) {
    if inner.n == 1 {
        return;
    }
    if let Some(outer) = loops.last_mut().filter(|outer| !outer.is_ragged && !inner.is_ragged) {
        let continues = |outer: usize, stride: usize| outer == inner.n * stride;
        if continues(outer.x, inner.x) && continues(outer.y, inner.y) && continues(outer.z, inner.z) {
            *outer = Loop { n: outer.n * inner.n, ..inner };
            return;
        }
    }
    loops.push(inner);
}

/// Removes and returns the loop over a ragged dimension, or the longest loop without one; a loop of length one if `loops` is empty.
fn take_inner(loops: &mut Vec<Loop>) -> Loop {
    let inner = (0..loops.len()).max_by_key(|&i| (loops[i].is_ragged, loops[i].n));
    inner.map_or(Loop { n: 1, x: 1, y: 1, z: 1, is_ragged: false }, |i| loops.remove(i))
}

/// The rows of a matrix up to the last one with an element that is not zero.
fn filled_rows((data, view): Matrix<'_>, rows: usize, columns: usize) -> usize {
    let is_filled = |row: usize| {
        (0..columns).any(|column| data[view.start + row * view.row + column * view.column] != 0.0)
    };
    (0..rows).rposition(is_filled).map_or(0, |last| last + 1)
}

/// The offsets in x, y and z of every combination of loops.
fn offsets(loops: &[Loop]) -> impl Iterator<Item = (usize, usize, usize)> + use<> {
    let shape: Vec<usize> = loops.iter().map(|l| l.n).collect();
    let along =
        |stride: fn(&Loop) -> usize| Offsets::new(shape.clone(), loops.iter().map(stride).collect(), 0);
    along(|l| l.x).zip(along(|l| l.y)).zip(along(|l| l.z)).map(|((x, y), z)| (x, y, z))
}
