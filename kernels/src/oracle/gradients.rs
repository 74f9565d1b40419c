//! Gradients that are operations of their own: of functions of one element, look-ups and sinks.

use ithaca_ir::boxes::Region;
use ithaca_ir::ops::Unary;
use ithaca_ir::{DimId, Space, TensorType};

use super::products::known_row;
use super::value::Operand;
use crate::error::RunError;
use crate::real::Real;
use crate::tensor::{Offsets, extents, index, strides};

/// The derivative of a function of one element.
pub(crate) fn slope<T: Real>(f: Unary, x: T) -> T {
    let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
    match f {
        Unary::Silu => x.through(|x| sigmoid(x) * (1.0 + x * (1.0 - sigmoid(x)))),
        Unary::Gelu => x.through(|x| {
            let phi = (-0.5 * x * x).exp() / (2.0 * std::f64::consts::PI).sqrt();
            0.5 * (1.0 + libm::erf(x * std::f64::consts::FRAC_1_SQRT_2)) + x * phi
        }),
        Unary::GeluTanh => x.through(|x| {
            let root = (2.0 / std::f64::consts::PI).sqrt();
            let tanh = (root * (x + 0.044_715 * x * x * x)).tanh();
            let inner = root * (1.0 + 3.0 * 0.044_715 * x * x);
            0.5 * (1.0 + tanh) + 0.5 * x * (1.0 - tanh * tanh) * inner
        }),
        Unary::QuickGelu => x.through(|x| {
            let s = sigmoid(1.702 * x);
            s * (1.0 + 1.702 * x * (1.0 - s))
        }),
        // At zero, the subgradient that training frameworks take.
        Unary::Relu => {
            if x > T::ZERO {
                T::ONE
            } else {
                T::ZERO
            }
        }
        Unary::Tanh => x.through(|x| 1.0 - x.tanh() * x.tanh()),
    }
}

/// Each row of the table that the rank is to hold sums the gradients of the tokens held that looked it up.
pub(super) fn embed<T: Real>(
    space: &Space,
    (over, padding): (DimId, Option<u64>),
    operands: &[Operand<'_, T>],
    ty: &TensorType,
    region: &Region,
) -> Result<Vec<T>, RunError> {
    let [ids, d] = [&operands[0], &operands[1]];
    let (tokens, gradient) = (ids.int()?, d.real()?);
    let shape = extents(region);
    let width: usize = shape[1..].iter().product();
    let mut out = vec![T::ZERO; shape.iter().product()];
    // Each element of the gradient belongs to a token and to a place in the row.
    let token = Offsets::new(d.shape(), ids.strides_in(d.ty), 0);
    let steps = strides(&shape);
    let place: Vec<usize> = d.ty.dims.iter().map(|&dim| ty.position(dim).map_or(0, |i| steps[i])).collect();
    for &id in tokens {
        known_row(space, over, id)?;
    }
    for ((token, place), &x) in token.zip(Offsets::new(d.shape(), place, 0)).zip(gradient) {
        let row = known_row(space, over, tokens[token])?;
        if region[0].contains(&row) && padding != Some(row) {
            out[index(row - region[0].start) * width + place] += x;
        }
    }
    Ok(out)
}

/// Gradients of o, lse and the logits from `o', d_o', lse, lse'`: `exp(lse − lse')` of a row stays its own, and
/// `(1 − exp(lse − lse')) · Σ d_o' · o'` moves from the logit to lse.
pub(super) fn sink<T: Real>(
    operands: &[Operand<'_, T>],
    logits: &TensorType,
    region: &Region,
) -> Result<Vec<Vec<T>>, RunError> {
    let [o, d_o, before, after] = [0, 1, 2, 3].map(|i| operands[i].real());
    let (o, d_o, before, after) = (o?, d_o?, before?, after?);
    let width = super::merge::width(o, before)?;
    let rows = operands[2].shape();
    let steps = strides(&extents(region));
    let head: Vec<usize> =
        operands[2].ty.dims.iter().map(|&d| logits.position(d).map_or(0, |i| steps[i])).collect();
    let mut d_o_before = d_o.to_vec();
    let mut d_before = vec![T::ZERO; before.len()];
    let mut d_logits = vec![T::ZERO; extents(region).iter().product()];
    for (row, head) in Offsets::new(rows, head, 0).enumerate() {
        let share = super::merge::share(before[row], after[row]);
        let mut product = T::ZERO;
        for i in row * width..(row + 1) * width {
            product += d_o[i] * o[i];
            d_o_before[i] = share * d_o[i];
        }
        let taken = (T::ONE - share) * product;
        d_before[row] = taken;
        d_logits[head] += -taken;
    }
    Ok(vec![d_o_before, d_before, d_logits])
}
