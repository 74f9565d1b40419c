//! Several operations as one: the loops of the parts, one after another.

use ithaca_ir::ops::{Fused, Unary};

use super::unary::{slope, unary};
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
        Fused::Gated { of } => vec![pairs().map(|(x, y)| unary(of, x) * y).collect()],
        Fused::GatedBackward { of } => {
            let gradient = call.real(2)?;
            let each = || pairs().zip(gradient.iter().copied());
            let dx = each().map(|((x, y), dz)| dz * y * slope(of, x)).collect();
            vec![dx, each().map(|((x, _), dz)| dz * unary(of, x)).collect()]
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
