//! Several operations as one: the loops of the parts, one after another.

use ithaca_ir::ops::Fused;

use super::rows;
use super::unary::{slope, unary};
use super::value::{Elements, LocalOp, Operand};
use crate::error::RunError;
use crate::real::Real;

/// The results of a fused operation.
pub(super) fn fused<T: Real>(call: &LocalOp<'_, T>, fused: &Fused) -> Result<Vec<Vec<T>>, RunError> {
    let (x, y) = (call.real(0)?, call.real(1)?);
    let pairs = || x.iter().copied().zip(y.iter().copied());
    let sum = || pairs().map(|(x, y)| x + y).collect::<Vec<T>>();
    Ok(match *fused {
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
