//! The attention of a rank, forward and backward, on values that it has.

use ithaca_ir::mesh::AxisId;
use ithaca_ir::ops::{Attention, OpError};
use ithaca_ir::{DimId, FunctionBuilder, Op, ValueId};

use super::plan::Plan;

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

/// The keys and values that each rank attends to at once by a plan; gathered, where the plan moves them step by step.
pub(super) fn arrived(
    b: &mut FunctionBuilder<'_>,
    a: &mut Attention,
    plan: &Plan,
    kv: [ValueId; 2],
) -> Result<[ValueId; 2], OpError> {
    let (axes, fetched): (&[AxisId], _) = match plan {
        Plan::Fetch(to) => (&[], Some(*to)),
        Plan::Reduce { axes, .. } => (axes, None),
        Plan::Gather | Plan::Groups { .. } | Plan::Steps(_) | Plan::TwoPass { .. } => (&[], None),
    };
    let arrive = |value| match fetched {
        Some(to) => b.push(Op::Fetch { to }, &[value]),
        None => split_by(b, a.keys, axes, value),
    };
    let kv = both(a, kv, arrive)?;
    a.keys = fetched.unwrap_or(a.keys);
    Ok(kv)
}

/// What `f` makes of keys and of values; of latents, which are both, once.
pub(super) fn both(
    a: &Attention,
    [k, v]: [ValueId; 2],
    mut f: impl FnMut(ValueId) -> Result<ValueId, OpError>,
) -> Result<[ValueId; 2], OpError> {
    let k = f(k)?;
    Ok([k, if a.latent { k } else { f(v)? }])
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

/// The gradients of an attention; `rows` are q, d_o, lse and delta.
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
