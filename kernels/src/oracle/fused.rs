//! Several operations as one: the loops of the parts, one after another.

use ithaca_ir::ops::{Fused, Unary};

use super::unary::{Gate, slope, unary};
use super::value::{Elements, LocalOp, Operand, ResultSpec};
use super::{products, rows};
use crate::error::RunError;
use crate::real::Real;
use crate::tensor::Offsets;

/// The results of a fused operation.
pub(super) fn fused<T: Real>(call: &LocalOp<'_, T>, fused: &Fused) -> Result<Vec<Vec<T>>, RunError> {
    let (x, y) = (call.real(0)?, call.real(1)?);
    let pairs = || x.iter().copied().zip(y.iter().copied());
    let sum = || pairs().map(|(x, y)| x + y).collect::<Vec<T>>();
    Ok(match *fused {
        Fused::BiasProduct { of } => vec![bias_product(call, of)?],
        Fused::ProductPair => {
            let ResultSpec { ty, region } = call.result();
            let [x, y, w] = [0, 1, 2].map(|i| &call.operands[i]);
            vec![products::einsum(x, y, ty, region)?, products::einsum(x, w, ty, region)?]
        }
        Fused::Gated { of, limit } => {
            let gate = gate(call, limit, 2)?;
            vec![pairs().map(|(x, y)| unary(of, gate.input(x)) * gate.factor(y)).collect()]
        }
        Fused::GatedBackward { of, limit } => {
            let (gate, gradient) = (gate(call, limit, 3)?, call.real(2)?);
            let each = || pairs().zip(gradient.iter().copied());
            let of_x = |((x, y), dz)| {
                if gate.has_input(x) { dz * gate.factor(y) * slope(of, x) } else { T::ZERO }
            };
            let of_y = |((x, y), dz)| {
                if gate.has_factor(y) { dz * unary(of, gate.input(x)) } else { T::ZERO }
            };
            vec![each().map(of_x).collect(), each().map(of_y).collect()]
        }
        Fused::AddRmsNorm { over, eps, offset } => {
            let sum = sum();
            let normed = of_sum(call, &sum, |norm| rows::rms_norm(norm, over, eps, offset))?;
            vec![sum, normed]
        }
        Fused::AddLayerNorm { over, eps } => {
            let sum = sum();
            let normed = of_sum(call, &sum, |norm| rows::layer_norm(norm, over, eps))?;
            vec![sum, normed]
        }
    })
}

/// The gate of an activation; operand `i` is the number c, if there is one.
fn gate<T: Real>(call: &LocalOp<'_, T>, limit: Option<f64>, i: usize) -> Result<Gate<T>, RunError> {
    let c = if call.operands.len() > i { Some(call.real(i)?) } else { None };
    Ok(Gate::new(limit, c))
}

/// A norm of the sum of the first two operands; its weights are the other operands.
fn of_sum<T: Real>(
    call: &LocalOp<'_, T>,
    sum: &[T],
    norm: impl FnOnce(&LocalOp<'_, T>) -> Result<Vec<T>, RunError>,
) -> Result<Vec<T>, RunError> {
    let sum = Operand { elements: Elements::Real(sum), ..call.operands[0].clone() };
    let operands: Vec<Operand<'_, T>> = [sum].into_iter().chain(call.operands[2..].iter().cloned()).collect();
    norm(&LocalOp { operands: &operands, space: call.space, op: call.op, results: &call.results[..1] })
}

fn bias_product<T: Real>(call: &LocalOp<'_, T>, of: Option<Unary>) -> Result<Vec<T>, RunError> {
    let ResultSpec { ty, region } = call.result();
    let mut out = products::einsum(&call.operands[0], &call.operands[1], ty, region)?;
    let bias = call.real(2)?;
    let places = Offsets::new(call.shape(), call.operands[2].strides_in(ty), 0);
    out.iter_mut().zip(places).for_each(|(out, i)| *out += bias[i]);
    if call.operands.len() > 3 {
        out.iter_mut().zip(call.real(3)?).for_each(|(out, &z)| *out += z);
    }
    if let Some(f) = of {
        out.iter_mut().for_each(|out| *out = unary(f, *out));
    }
    Ok(out)
}
