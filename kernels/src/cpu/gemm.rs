//! Products through a fast matrix product.
//!
//! Dimensions of an einsum are of four kinds: in both operands and the result (batch), in one operand and the result
//! (rows, columns), in both operands only (summed). Neighbours of a kind that are one stride apart merge; the largest
//! of each kind become one matrix product, what is left is looped over.

use ithaca_ir::TensorType;
use ithaca_ir::boxes::Region;

use crate::error::RunError;
use crate::oracle::{Operand, products};
use crate::tensor::{Offsets, extents, strides};

/// A matrix in a slice: where it starts, its stride from row to row and from column to column.
#[derive(Clone, Copy, Debug)]
pub(super) struct View {
    pub(super) start: usize,
    pub(super) row: usize,
    pub(super) column: usize,
}

/// What a product does with the elements that are there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Into {
    /// Replaces them.
    Replace,
    /// Adds to them.
    Add,
}

/// `c ← alpha · a b` or `c ← c + alpha · a b`, a being `m × k` and b `k × n`.
///
/// # Panics
/// When a view does not lie in its slice: a bug of the caller.
#[expect(clippy::too_many_arguments, reason = "a matrix product has three sizes and three matrices")]
pub(super) fn multiply(
    (m, k, n): (usize, usize, usize),
    alpha: f32,
    a: &[f32],
    a_view: View,
    b: &[f32],
    b_view: View,
    c: &mut [f32],
    c_view: View,
    into: Into,
) {
    let lies_in = |view: View, rows: usize, columns: usize, length: usize| {
        rows == 0 || columns == 0 || view.start + (rows - 1) * view.row + (columns - 1) * view.column < length
    };
    assert!(lies_in(a_view, m, k, a.len()), "the left matrix lies in its slice");
    assert!(lies_in(b_view, k, n, b.len()), "the right matrix lies in its slice");
    assert!(lies_in(c_view, m, n, c.len()), "the result lies in its slice");
    let beta = match into {
        Into::Replace => 0.0,
        Into::Add => 1.0,
    };
    let stride = |s: usize| isize::try_from(s).expect("strides are offsets in a slice");
    if m == 0 || n == 0 {
        return;
    }
    // SAFETY: the assertions above show that every element which the strides reach lies in its slice, and `c` is
    // borrowed alone; strides of `c` differ for different elements, as callers pass views of dense tensors.
    unsafe {
        matrixmultiply::sgemm(
            m,
            k,
            n,
            alpha,
            a.as_ptr().add(a_view.start.min(a.len())),
            stride(a_view.row),
            stride(a_view.column),
            b.as_ptr().add(b_view.start.min(b.len())),
            stride(b_view.row),
            stride(b_view.column),
            beta,
            c.as_mut_ptr().add(c_view.start),
            stride(c_view.row),
            stride(c_view.column),
        );
    }
}

/// A loop: its length and its strides in x, y and z.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Loop {
    n: usize,
    x: usize,
    y: usize,
    z: usize,
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
pub(super) fn einsum(
    x: &Operand<'_, f32>,
    y: &Operand<'_, f32>,
    ty: &TensorType,
    region: &Region,
) -> Result<Vec<f32>, RunError> {
    let Some(loops) = Loops::of(x, y, ty, region) else {
        // A dimension of one operand alone that is summed is no matrix product: the oracle's loops do it.
        return products::einsum(x, y, ty, region);
    };
    let (xs, ys) = (x.real()?, y.real()?);
    let mut out = vec![0.0; extents(region).iter().product()];
    if out.is_empty() || loops.sums.iter().any(|l| l.n == 0) {
        return Ok(out);
    }
    let Loops { batch, mut rows, mut columns, mut sums } = loops;
    let (m, n, k) = (take_largest(&mut rows), take_largest(&mut columns), take_largest(&mut sums));
    let outer: Vec<Loop> = batch.into_iter().chain(rows).chain(columns).collect();
    for (xo, yo, zo) in offsets(&outer) {
        let mut into = Into::Replace;
        for (xi, yi, _) in offsets(&sums) {
            multiply(
                (m.n, k.n, n.n),
                1.0,
                xs,
                View { start: xo + xi, row: m.x, column: k.x },
                ys,
                View { start: yo + yi, row: k.y, column: n.y },
                &mut out,
                View { start: zo, row: m.z, column: n.z },
                into,
            );
            into = Into::Add;
        }
    }
    Ok(out)
}

impl Loops {
    /// `None` when a dimension is neither shared nor in the result, or ranges do not fit.
    fn of(x: &Operand<'_, f32>, y: &Operand<'_, f32>, ty: &TensorType, region: &Region) -> Option<Self> {
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
    if let Some(outer) = loops.last_mut() {
        let continues = |outer: usize, stride: usize| outer == inner.n * stride;
        if continues(outer.x, inner.x) && continues(outer.y, inner.y) && continues(outer.z, inner.z) {
            *outer = Loop { n: outer.n * inner.n, ..inner };
            return;
        }
    }
    loops.push(inner);
}

/// The longest loop, taken out; one of length one when there is none.
fn take_largest(loops: &mut Vec<Loop>) -> Loop {
    let largest = (0..loops.len()).max_by_key(|&i| loops[i].n);
    largest.map_or(Loop { n: 1, x: 1, y: 1, z: 1 }, |i| loops.remove(i))
}

/// The offsets in x, y and z of every combination of loops.
fn offsets(loops: &[Loop]) -> impl Iterator<Item = (usize, usize, usize)> + use<> {
    let shape: Vec<usize> = loops.iter().map(|l| l.n).collect();
    let along =
        |stride: fn(&Loop) -> usize| Offsets::new(shape.clone(), loops.iter().map(stride).collect(), 0);
    along(|l| l.x).zip(along(|l| l.y)).zip(along(|l| l.z)).map(|((x, y), z)| (x, y, z))
}
