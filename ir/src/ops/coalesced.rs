//! Several collectives as one message.
//!
//! PyTorch calls a block of such collectives a coalescing manager, and a run of gradients a bucket.

use crate::boxes;
use crate::message;
use crate::ops::context::{Context, Types};
use crate::ops::error::{OpError, bail, ensure};
use crate::ops::table::op::Op;
use crate::space::Space;
use crate::types::TensorType;

impl Op {
    /// The name of the collective: that of its members where there are several.
    pub fn collective_name(&self) -> &'static str {
        match self {
            Op::Coalesced(members) => members.first().map_or(self.name(), Op::name),
            op => op.name(),
        }
    }
}

/// Member `i` acts on operand `i` and gives result `i`, as it does alone.
pub(super) fn infer(
    members: &[Op],
    cx: Context<'_>,
    operands: &[&TensorType],
    declared: &[TensorType],
) -> Result<Types, OpError> {
    ensure!(
        members.len() == operands.len(),
        "V34",
        "`coalesced` has {} members for {} operands",
        members.len(),
        operands.len()
    );
    let mut types = Types::new();
    for (i, (op, &x)) in members.iter().zip(operands).enumerate() {
        ensure!(op.may_coalesce(), "V34", "`coalesced` has `{}`, which travels alone", op.name());
        types.extend(op.infer(cx, &[x], declared.get(i..=i).unwrap_or_default())?);
    }
    let first = (&members[0], operands[0], &types[0]);
    for member in members.iter().zip(operands).zip(&types).skip(1) {
        let ((op, x), ty) = member;
        if let Some(difference) = differ(cx.space, first, (op, x, ty)) {
            bail!("V34", "members of `coalesced` differ in {difference}");
        }
    }
    Ok(types)
}

/// A collective with the types on both of its sides.
type Ends<'a> = (&'a Op, &'a TensorType, &'a TensorType);

/// Why two collectives cannot be one message; none where they can.
///
/// One message is of one kind, between the same ranks, of one element type. A permute must move parts along axes, and
/// by as much as the others: other permutes choose their sources by the tensor.
pub fn differ(space: &Space, (op, from, to): Ends<'_>, (other, x, y): Ends<'_>) -> Option<&'static str> {
    if op.name() != other.name() {
        return Some("their kind");
    }
    if from.dtype != x.dtype {
        return Some("their element type");
    }
    if message::counts_rows(space, op, from, to) || message::counts_rows(space, other, x, y) {
        return Some("the counts of their rows");
    }
    let axes = boxes::axes(space, op, from, to);
    if axes.is_empty()
        || axes != boxes::axes(space, other, x, y)
        || boxes::is_resplit(op, from, to)
        || (from.layout.at, to.layout.at) != (x.layout.at, y.layout.at)
    {
        return Some("the ranks between which they travel");
    }
    if matches!(op, Op::Permute)
        && (&from.layout.moved, &to.layout.moved) != (&x.layout.moved, &y.layout.moved)
    {
        return Some("how far parts move");
    }
    None
}
