//! Gradients of attention on their way back.

use crate::builder::FunctionBuilder;
use crate::dtype::DType;
use crate::handles::ValueId;
use crate::ops::check::sums_in;
use crate::ops::error::OpError;
use crate::ops::gradients::{Gradients, cast};
use crate::ops::table::attention::{Attention, Returns};
use crate::ops::table::elementwise::Binary;
use crate::ops::table::op::Op;
use crate::types::TensorType;

/// Gradients of q, k, v and the bias, from those of the output and of lse.
///
/// The softmax has `ds = p · (d_o·v − delta)` with `delta = d_o·o`; a gradient of lse adds itself to every `ds` in
/// proportion to p, and so is taken from delta.
pub(in crate::ops) fn adjoint(
    a: &Attention,
    b: &mut FunctionBuilder<'_>,
    operands: &[ValueId],
    results: &[ValueId],
    gradients: &[Option<ValueId>],
) -> Result<Gradients, OpError> {
    let (&[o, lse], Returns::WithLse, None) = (results, a.returns, &a.movement) else {
        let message =
            "a gradient reaches `attention`, whose adjoint needs `returns=with_lse` and no movement";
        return Err(OpError::new("V32", message));
    };
    let [o_ty, rows] = [b.ty(o).clone(), b.ty(lse).clone()];
    let d_o = match gradients[0] {
        Some(d_o) => d_o,
        None => b.push_as(Op::Fill { value: 0.0 }, &[], o_ty.clone())?,
    };
    let wide = sums_in(o_ty.dtype);
    let mut delta = match gradients[0] {
        Some(_) => {
            let (d_o, o) = (cast(b, d_o, wide)?, cast(b, o, wide)?);
            b.einsum(d_o, o, &rows.dims)?
        }
        None => b.push_as(Op::Fill { value: 0.0 }, &[], TensorType::new(wide, rows.dims.iter().copied()))?,
    };
    if let Some(d_lse) = gradients.get(1).copied().flatten() {
        let d_lse = cast(b, d_lse, wide)?;
        delta = b.push(Op::Binary(Binary::Sub), &[delta, d_lse])?;
    }
    let backward = Attention { returns: Returns::Output, parts: None, ..a.clone() };
    let mut all: Vec<ValueId> = operands[..3].to_vec();
    all.extend([d_o, lse, delta]);
    all.extend(&operands[3..]);
    let found = b.node(Op::AttentionBackward(backward), &all, &[])?;
    let mut out: Gradients = found.iter().copied().map(Some).collect();
    if let (Some(&bias), Some(&d_bias)) = (operands.get(3), found.get(3)) {
        let narrow: DType = b.ty(bias).dtype;
        out[3] = Some(cast(b, d_bias, narrow)?);
    }
    // A key has none.
    out.resize(operands.len(), None);
    Ok(out)
}
