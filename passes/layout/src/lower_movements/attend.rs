//! One attention on what a rank has, forward and backward.

use ithaca_ir::mesh::AxisId;
use ithaca_ir::ops::{Attention, OpError};
use ithaca_ir::{DimId, FunctionBuilder, Op, ValueId};

/// The results of an attention without a movement.
pub(super) fn attend(
    b: &mut FunctionBuilder<'_>,
    a: &Attention,
    qkv: [ValueId; 3],
    bias: &[ValueId],
) -> Result<Vec<ValueId>, OpError> {
    let operands: Vec<ValueId> = qkv.iter().chain(bias).copied().collect();
    Ok(b.node(Op::Attention(a.clone()), &operands, &[])?.to_vec())
}

/// `value` with `keys` whole on every rank.
pub(super) fn gathered(b: &mut FunctionBuilder<'_>, keys: DimId, value: ValueId) -> Result<ValueId, OpError> {
    split_by(b, keys, &[], value)
}

/// `value` with `keys` split by `axes` only.
pub(super) fn split_by(
    b: &mut FunctionBuilder<'_>,
    keys: DimId,
    axes: &[AxisId],
    value: ValueId,
) -> Result<ValueId, OpError> {
    let ty = b.ty(value).clone().split(keys, axes.iter().copied());
    if *b.ty(value) == ty {
        return Ok(value);
    }
    b.push_as(Op::Reshard, &[value], ty)
}

/// Its gradients; `rows` are q, d_o, lse and delta.
pub(super) fn gradients(
    b: &mut FunctionBuilder<'_>,
    a: &Attention,
    rows: &[ValueId],
    kv: &[ValueId],
    bias: &[ValueId],
) -> Result<Vec<ValueId>, OpError> {
    let operands: Vec<ValueId> = rows[..1].iter().chain(kv).chain(&rows[1..]).chain(bias).copied().collect();
    Ok(b.node(Op::AttentionBackward(a.clone()), &operands, &[])?.to_vec())
}
