//! Operations on elements and rows that the oracle's loops, which take every function in double precision, would make the
//! longest of a step: functions of one element and their gradients, sums and products of tensors of one memory order, the loss,
//! the optimizer.
//!
//! Other operations and memory orders use the oracle's loops.

use std::borrow::Cow;
use std::f32::consts::LOG2_E;

use ithaca_ir::boxes::Region;
use ithaca_ir::ops::{AdamW, Binary, Fused, Gradient, Loss, Optimizer, Unary};
use ithaca_ir::{DimId, Op, Space, TensorType};

use super::simd::Simd;
use super::threads::Threads;
use crate::error::RunError;
use crate::oracle::loss::Rows;
use crate::oracle::unary::Gate;
use crate::oracle::{Operand, ResultSpec, unary as oracle};
use crate::tensor::{Offsets, extents};

/// The number of elements of one chunk, whose temporaries stay in the first cache.
const CHUNK: usize = 2048;

/// The results of `op`; `None` where the oracle's loops compute it.
///
/// # Errors
/// [`RunError`] as the oracle gives them.
pub(super) fn results(
    space: &Space,
    op: &Op,
    operands: &[Operand<'_, f32>],
    wanted: &[ResultSpec<'_>],
    threads: Threads,
) -> Result<Option<Vec<Vec<f32>>>, RunError> {
    let sizes_fit = operands.iter().all(|x| x.elements.n() == x.shape().iter().product::<usize>());
    let (true, Some(first)) = (sizes_fit, wanted.first()) else { return Ok(None) };
    let simd = Simd::of_machine();
    Ok(match op {
        Op::Unary(f) if is_alike(&operands[0], first) => {
            let x = operands[0].real()?;
            let step = |x: &[f32], out: &mut [f32]| unary(simd, *f, x, out);
            is_fast(*f).then(|| vec![in_chunks(threads, x, x, |x, _, out| step(x, out))])
        }
        Op::Gradient(Gradient::Unary(f)) if operands.iter().all(|x| is_alike(x, first)) => {
            let (x, d) = (operands[0].real()?, operands[1].real()?);
            is_fast(*f).then(|| {
                vec![in_chunks(threads, x, d, |x, d, out| {
                    slope(simd, *f, x, out);
                    out.iter_mut().zip(d).for_each(|(out, d)| *out *= d);
                })]
            })
        }
        Op::Fused(Fused::Gated { of, limit }) if operands[..2].iter().all(|x| is_alike(x, first)) => {
            let (x, y) = (operands[0].real()?, operands[1].real()?);
            let gate = gate(*limit, operands.get(2))?;
            is_fast(*of).then(|| {
                vec![in_chunks(threads, x, y, |x, y, out| {
                    unary(simd, *of, &inputs(gate, x), out);
                    out.iter_mut().zip(y).for_each(|(out, &y)| *out *= gate.factor(y));
                })]
            })
        }
        Op::Fused(Fused::GatedBackward { of, limit }) if operands[..3].iter().all(|x| is_alike(x, first)) => {
            let [x, y, dz] = [operands[0].real()?, operands[1].real()?, operands[2].real()?];
            let gate = gate(*limit, operands.get(3))?;
            let by = |out: &mut [f32], d: &[f32]| out.iter_mut().zip(d).for_each(|(out, d)| *out *= d);
            is_fast(*of).then(|| {
                let mut dx = in_chunks(threads, x, dz, |x, dz, out| {
                    slope(simd, *of, &inputs(gate, x), out);
                    by(out, dz);
                    let beyond = out.iter_mut().zip(x).filter(|(_, x)| !gate.has_input(**x));
                    beyond.for_each(|(out, _)| *out = 0.0);
                });
                dx.iter_mut().zip(y).for_each(|(dx, &y)| *dx *= gate.factor(y));
                let mut dy = in_chunks(threads, x, dz, |x, dz, out| {
                    unary(simd, *of, &inputs(gate, x), out);
                    by(out, dz);
                });
                let beyond = dy.iter_mut().zip(y).filter(|(_, y)| !gate.has_factor(**y));
                beyond.for_each(|(dy, _)| *dy = 0.0);
                vec![dx, dy]
            })
        }
        Op::Binary(f) if operands.iter().all(|x| is_alike(x, first)) => {
            let (x, y) = (operands[0].real()?, operands[1].real()?);
            let of = |f: fn(f32, f32) -> f32| {
                Some(vec![in_chunks(threads, x, y, |x, y, out| {
                    out.iter_mut().zip(x).zip(y).for_each(|((out, &x), &y)| *out = f(x, y));
                })])
            };
            match f {
                Binary::Add => of(|x, y| x + y),
                Binary::Sub => of(|x, y| x - y),
                Binary::Mul => of(|x, y| x * y),
                Binary::Div => of(|x, y| x / y),
                Binary::LogAddExp => None,
            }
        }
        Op::Loss(Loss::CrossEntropy { over, ignore }) if wanted.len() == 2 => {
            cross_entropy(simd, space, (*over, *ignore), operands, threads)?
        }
        Op::Gradient(Gradient::CrossEntropy { over, ignore }) if is_alike(&operands[0], first) => {
            cross_entropy_backward(simd, space, (*over, *ignore), operands, threads)?
        }
        Op::Optimizer(Optimizer::AdamW(adam)) => adamw(adam, operands, threads)?,
        _ => None,
    })
}

/// The gate of an activation, with the number c if there is one.
fn gate(limit: Option<f64>, c: Option<&Operand<'_, f32>>) -> Result<Gate<f32>, RunError> {
    Ok(Gate::new(limit, c.map(|c| c.real()).transpose()?))
}

/// The operands of the function of a gate.
fn inputs(gate: Gate<f32>, x: &[f32]) -> Cow<'_, [f32]> {
    if gate.is_bounded() { x.iter().map(|&x| gate.input(x)).collect() } else { x.into() }
}

/// A function of each element.
pub(super) fn applied(f: Unary, x: &[f32], threads: Threads) -> Vec<f32> {
    let simd = Simd::of_machine();
    in_chunks(threads, x, x, |x, _, out| unary(simd, f, x, out))
}

/// The sum of a bias, which may lack dimensions of the result, and of a tensor that has all of them, if there is one.
pub(super) fn summands(
    operands: &[Operand<'_, f32>],
    (ty, region): (&TensorType, &Region),
) -> Result<Vec<f32>, RunError> {
    let bias = operands[0].real()?;
    let places = Offsets::new(extents(region), operands[0].strides_in(ty), 0);
    let mut sum: Vec<f32> = places.map(|i| bias[i]).collect();
    if let Some(more) = operands.get(1) {
        sum.iter_mut().zip(more.real()?).for_each(|(sum, x)| *sum += x);
    }
    Ok(sum)
}

/// Whether an operand has the memory order of the result.
fn is_alike(x: &Operand<'_, f32>, ResultSpec { ty, region }: &ResultSpec<'_>) -> bool {
    x.ty.dims == ty.dims && x.region == *region
}

/// `f` of parts of two tensors of one memory order.
fn in_chunks(
    threads: Threads,
    x: &[f32],
    y: &[f32],
    f: impl Fn(&[f32], &[f32], &mut [f32]) + Sync,
) -> Vec<f32> {
    let mut out = vec![0.0; x.len()];
    // Each element is some tens of operations.
    let threads = threads.worth(x.len() * 32);
    let step = x.len().div_ceil(4 * threads.count()).next_multiple_of(CHUNK).max(CHUNK);
    let parts = x.chunks(step).zip(y.chunks(step)).zip(out.chunks_mut(step)).collect();
    threads.map(
        parts,
        || (),
        |(), ((x, y), out): ((&[f32], &[f32]), &mut [f32])| {
            for ((x, y), out) in x.chunks(CHUNK).zip(y.chunks(CHUNK)).zip(out.chunks_mut(CHUNK)) {
                f(x, y, out);
            }
        },
    );
    out
}

/// Whether a function is computed by the machine's vectors.
fn is_fast(f: Unary) -> bool {
    matches!(f, Unary::Silu | Unary::GeluTanh | Unary::QuickGelu | Unary::Tanh | Unary::Relu)
}

/// The factor in the sigmoid of a function.
fn steepness(f: Unary) -> f32 {
    if f == Unary::QuickGelu { 1.702 } else { 1.0 }
}

/// `1 / (1 + exp(−factor · x))`.
fn sigmoid(simd: &Simd, factor: f32, x: &[f32], out: &mut [f32]) {
    out.copy_from_slice(x);
    sigmoid_in_place(simd, factor, out);
}

fn sigmoid_in_place(simd: &Simd, factor: f32, out: &mut [f32]) {
    simd.exponentials(out, -factor * LOG2_E, 0.0);
    out.iter_mut().for_each(|e| *e = 1.0 / (1.0 + *e));
}

/// `2 √(2/π)` and the weight of the cube, of the approximation of GELU by a hyperbolic tangent:
/// `(1 + tanh(u)) / 2 = sigmoid(2 u)`, where nothing cancels.
const TWICE_ROOT: f32 = 1.595_769;
const CUBE: f32 = 0.044_715;

/// The factor that the approximation of GELU by a hyperbolic tangent gives its argument.
fn gelu_tanh(simd: &Simd, x: &[f32], out: &mut [f32]) {
    out.iter_mut().zip(x).for_each(|(out, &x)| *out = TWICE_ROOT * (x + CUBE * x * x * x));
    sigmoid_in_place(simd, 1.0, out);
}

fn unary(simd: &Simd, f: Unary, x: &[f32], out: &mut [f32]) {
    let weigh = |out: &mut [f32]| out.iter_mut().zip(x).for_each(|(out, x)| *out *= x);
    match f {
        Unary::Silu | Unary::QuickGelu => {
            sigmoid(simd, steepness(f), x, out);
            weigh(out);
        }
        Unary::GeluTanh => {
            gelu_tanh(simd, x, out);
            weigh(out);
        }
        Unary::Tanh => {
            out.copy_from_slice(x);
            simd.tanh(out, 1.0);
        }
        // The compiler makes vectors of the others, or they are computed one by one.
        _ => {
            out.iter_mut().zip(x).for_each(|(out, &x)| *out = oracle::unary(f, x));
        }
    }
}

/// The derivative of a function.
fn slope(simd: &Simd, f: Unary, x: &[f32], out: &mut [f32]) {
    match f {
        Unary::Silu | Unary::QuickGelu => {
            let factor = steepness(f);
            sigmoid(simd, factor, x, out);
            out.iter_mut().zip(x).for_each(|(s, &x)| *s = *s * (1.0 + factor * x * (1.0 - *s)));
        }
        Unary::GeluTanh => {
            gelu_tanh(simd, x, out);
            out.iter_mut().zip(x).for_each(|(s, &x)| {
                let inner = TWICE_ROOT * (1.0 + 3.0 * CUBE * x * x);
                *s = *s * (1.0 + x * (1.0 - *s) * inner);
            });
        }
        Unary::Tanh => {
            out.copy_from_slice(x);
            simd.tanh(out, 1.0);
            out.iter_mut().for_each(|t| *t = 1.0 - *t * *t);
        }
        // The compiler makes vectors of the others, or they are computed one by one.
        _ => {
            out.iter_mut().zip(x).for_each(|(out, &x)| *out = oracle::slope(f, x));
        }
    }
}

/// Contiguous rows of logits.
struct DenseRows<'a> {
    rows: Rows,
    logits: &'a [f32],
    width: usize,
    /// Columns that are no padding, the first of a row.
    columns: usize,
}

/// The rows of logits; `None` where they are not contiguous.
fn dense_rows<'a>(
    space: &Space,
    attrs: (DimId, i64),
    operands: &[Operand<'a, f32>],
) -> Result<Option<DenseRows<'a>>, RunError> {
    let logits = operands[0].real()?;
    let rows = Rows::of(space, attrs, &operands[0], &operands[1])?;
    let width = operands[0].shape().last().copied().unwrap_or(0);
    let is_last = operands[0].ty.dims.last() == Some(&attrs.0);
    let columns = rows.leading_columns().filter(|_| is_last && width > 0);
    Ok(columns.map(|columns| DenseRows { rows, logits, width, columns }))
}

/// The least rows that are worth being shared out, and how many a thread takes at a time.
const ROWS: usize = 16;

/// `nll` and `lse` of each row.
fn cross_entropy(
    simd: &Simd,
    space: &Space,
    attrs: (DimId, i64),
    operands: &[Operand<'_, f32>],
    threads: Threads,
) -> Result<Option<Vec<Vec<f32>>>, RunError> {
    let Some(DenseRows { rows, logits, width, columns }) = dense_rows(space, attrs, operands)? else {
        return Ok(None);
    };
    let mut lse = vec![0.0; logits.len() / width];
    let parts = logits.chunks(ROWS * width).zip(lse.chunks_mut(ROWS)).collect();
    threads.worth(logits.len() * 32).map(
        parts,
        Vec::new,
        |scratch: &mut Vec<f32>, (logits, lse): (&[f32], &mut [f32])| {
            for (row, lse) in logits.chunks(width).zip(lse) {
                let row = &row[..columns];
                let max = simd.max(row);
                let relative_to = if max == f32::NEG_INFINITY { 0.0 } else { max };
                scratch.clear();
                scratch.extend(row.iter().map(|x| x - relative_to));
                *lse = relative_to + simd.exponentials(scratch, LOG2_E, 0.0).ln();
            }
        },
    );
    let nll = lse.iter().enumerate();
    let nll = nll.map(|(row, lse)| rows.label(row).map_or(0.0, |i| lse - logits[i])).collect();
    Ok(Some(vec![nll, lse]))
}

/// `(exp(logit − lse) − [v = label]) · d_nll`, zero where the label is ignored and in padding.
fn cross_entropy_backward(
    simd: &Simd,
    space: &Space,
    attrs: (DimId, i64),
    operands: &[Operand<'_, f32>],
    threads: Threads,
) -> Result<Option<Vec<Vec<f32>>>, RunError> {
    let Some(DenseRows { rows, logits, width, columns }) = dense_rows(space, attrs, operands)? else {
        return Ok(None);
    };
    let (lse, d) = (operands[2].real()?, operands[3].real()?);
    if lse.len() * width != logits.len() || d.len() != lse.len() {
        return Ok(None);
    }
    let mut out = vec![0.0; logits.len()];
    let parts: Vec<(usize, &mut [f32])> = out.chunks_mut(ROWS * width).enumerate().collect();
    threads.worth(logits.len() * 32).map(
        parts,
        || (),
        |(), (part, out)| {
            for (i, out) in out.chunks_mut(width).enumerate() {
                let row = part * ROWS + i;
                if !rows.counts(row) {
                    continue;
                }
                let out = &mut out[..columns];
                let from = &logits[row * width..][..columns];
                out.iter_mut().zip(from).for_each(|(out, x)| *out = x - lse[row]);
                simd.exponentials(out, LOG2_E, 0.0);
                simd.multiply(out, d[row]);
                if let Some(label) = rows.label(row) {
                    out[label - row * width] -= d[row];
                }
            }
        },
    );
    Ok(Some(vec![out]))
}

/// A step of the optimizer; see the oracle's loops for the equations.
fn adamw(
    adamw: &AdamW,
    operands: &[Operand<'_, f32>],
    threads: Threads,
) -> Result<Option<Vec<Vec<f32>>>, RunError> {
    let [w, g, m, v] = [operands[0].real()?, operands[1].real()?, operands[2].real()?, operands[3].real()?];
    let scalars = (operands[4].real()?.first(), operands[5].real()?.first());
    let (Some(&step), Some(&clip)) = scalars else { return Ok(None) };
    if [g, m, v].iter().any(|x| x.len() != w.len()) {
        return Ok(None);
    }
    let &AdamW { lr, beta1, beta2, eps, weight_decay } = adamw;
    let step = f64::from(step);
    let bias1 = (1.0 - beta1.powf(step)) as f32;
    let bias2 = (1.0 - beta2.powf(step)).sqrt() as f32;
    let (stay1, stay2) = (beta1 as f32, beta2 as f32);
    let (new1, new2) = ((1.0 - beta1) as f32, (1.0 - beta2) as f32);
    let (keep, rate, eps) = ((1.0 - lr * weight_decay) as f32, lr as f32, eps as f32);
    let [mut new_w, mut new_m, mut new_v] = [w.to_vec(), m.to_vec(), v.to_vec()];
    let threads = threads.worth(w.len() * 32);
    let size = w.len().div_ceil(4 * threads.count()).max(CHUNK);
    let parts =
        new_w.chunks_mut(size).zip(new_m.chunks_mut(size)).zip(new_v.chunks_mut(size)).zip(g.chunks(size));
    type Part<'a> = (((&'a mut [f32], &'a mut [f32]), &'a mut [f32]), &'a [f32]);
    threads.map(
        parts.collect(),
        || (),
        |(), (((w, m), v), g): Part<'_>| {
            for (((w, m), v), g) in w.iter_mut().zip(m).zip(v).zip(g) {
                let g = g * clip;
                *m = stay1 * *m + new1 * g;
                *v = stay2 * *v + new2 * g * g;
                *w = *w * keep - rate * (*m / bias1) / (v.sqrt() / bias2 + eps);
            }
        },
    );
    Ok(Some(vec![new_w, new_m, new_v]))
}
