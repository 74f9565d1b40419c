//! Gradients of a learned logit in the denominator of the softmax.

use crate::builder::FunctionBuilder;
use crate::handles::ValueId;
use crate::ops::elementwise;
use crate::ops::error::OpError;
use crate::ops::gradients::{Gradients, cast};
use crate::ops::table::elementwise::Binary;
use crate::ops::table::op::Op;
use crate::ops::table::training::Gradient;

/// With `o' = o · exp(lse − lse')` and `lse' = log(exp(lse) + exp(logit))`: gradients of o, lse and the logits, each from
/// those of o' and lse' that there are.
pub(super) fn adjoint(
    b: &mut FunctionBuilder<'_>,
    operands: &[ValueId],
    results: &[ValueId],
    gradients: &[Option<ValueId>],
) -> Result<Gradients, OpError> {
    let [lse, logits] = [operands[1], operands[2]];
    let (wide, narrow) = (b.ty(lse).dtype, b.ty(logits).dtype);
    let mut out: Gradients = vec![None; 3];
    if let Some(d_o) = gradients[0] {
        let found = b.node(Op::Gradient(Gradient::Sink), &[results[0], d_o, lse, results[1]], &[])?;
        out = found.into_iter().map(Some).collect();
    }
    if let Some(d_lse) = gradients[1] {
        let logits = cast(b, logits, wide)?;
        let more = elementwise::adjoint_binary(Binary::LogAddExp, b, &[lse, logits], results[1], d_lse)?;
        for (sum, more) in out[1..].iter_mut().zip(more.into_iter().flatten()) {
            *sum = Some(match *sum {
                Some(sum) => b.add(sum, more)?,
                None => more,
            });
        }
    }
    if let Some(d_logits) = out[2] {
        out[2] = Some(cast(b, d_logits, narrow)?);
    }
    Ok(out)
}
