//! Parts of a dimension: taken one by one, and joined again.
//!
//! The declaration of a dimension says which part it is ([`Part`](crate::dim::Part)): every rank takes it from its own
//! elements, and nothing is sent.

use smallvec::{SmallVec, smallvec};

use crate::builder::FunctionBuilder;
use crate::dim::DimId;
use crate::handles::ValueId;
use crate::layout::AxisList;
use crate::ops::error::{OpError, bail, ensure};
use crate::ops::table::op::Op;
use crate::rule::{FactorKind, FactorRule, Factors};
use crate::space::Space;
use crate::types::TensorType;

/// The type of the part `to` of `x`, laid out whole.
pub(super) fn infer_take(space: &Space, to: DimId, x: &TensorType) -> Result<TensorType, OpError> {
    let name = &space.dims[to].name;
    let Some(part) = space.dims[to].part else {
        bail!("V05", "`take`: `{name}` is not declared to be a part");
    };
    if !x.has(part.of) || x.has(to) {
        let of = &space.dims[part.of].name;
        bail!("V05", "`take` of part `{name}` needs `{of}` in x, and no `{name}`");
    }
    let dims = x.dims.iter().map(|&d| if d == part.of { to } else { d });
    Ok(TensorType::new(x.dtype, dims.collect::<Vec<_>>()))
}

/// Each operand's part of the gradient.
pub(super) fn adjoint_join(
    b: &mut FunctionBuilder<'_>,
    whole: DimId,
    operands: &[ValueId],
    d: ValueId,
) -> Result<Vec<Option<ValueId>>, OpError> {
    let mut gradients = Vec::with_capacity(operands.len());
    for &operand in operands {
        let at = b.ty(d).position(whole).expect("the result of a join has the dimension");
        let to = b.ty(operand).dims[at];
        gradients.push(Some(b.push(Op::Take { to }, &[d])?));
    }
    Ok(gradients)
}

/// The type of the parts of `to` joined, laid out whole.
pub(super) fn infer_join(space: &Space, to: DimId, parts: &[&TensorType]) -> Result<TensorType, OpError> {
    let wrong = |what: String| Err(OpError::new("V05", format!("`join`: {what}")));
    let name = &space.dims[to].name;
    let first = parts[0];
    let is_part = |&d: &DimId| space.dims[d].part.is_some_and(|part| part.of == to);
    let Some(at) = first.dims.iter().position(is_part).filter(|_| !first.has(to)) else {
        return wrong(format!("the first operand has no part of `{name}`, or `{name}` itself"));
    };
    let runs = space.dims[first.dims[at]].part.map_or(1, |part| part.runs);
    for (i, ty) in parts.iter().enumerate() {
        let is_next = ty.dims.get(at).and_then(|&d| space.dims[d].part).is_some_and(|part| {
            (part.of, part.index, part.count, part.runs) == (to, i as u64, parts.len() as u64, runs)
        });
        if !is_next {
            return wrong(format!(
                "operand {i} is not part {i} of {} of `{name}` in {runs} runs",
                parts.len()
            ));
        }
        let alike = ty.dims.len() == first.dims.len()
            && ty.dims.iter().zip(&first.dims).enumerate().all(|(j, (a, b))| j == at || a == b);
        if !alike {
            return wrong(format!("operand {i} has other dimensions than the first"));
        }
        ensure!(ty.dtype == first.dtype, "V04", "`join` of {} and {}", first.dtype, ty.dtype);
    }
    let dims = first.dims.iter().enumerate().map(|(i, &d)| if i == at { to } else { d });
    Ok(TensorType::new(first.dtype, dims.collect::<Vec<_>>()))
}

/// Every dimension is parallel; a dimension and its parts, or its copies, are the same factor.
pub(super) fn rule(operands: &[&TensorType]) -> FactorRule {
    let factors: Factors = (0..operands[0].dims.len()).collect();
    FactorRule {
        factors: factors.iter().map(|_| FactorKind::Parallel).collect(),
        operands: operands.iter().map(|_| factors.clone()).collect(),
        results: smallvec![factors],
    }
}

/// Operands that are pending sums over the same axes, as if these were taken, and the axes: parts of a pending sum make
/// one that is as pending.
pub(super) fn without_pending(operands: &[&TensorType]) -> (SmallVec<[TensorType; 4]>, Option<AxisList>) {
    let pending = &operands[0].layout.partial;
    if operands.iter().any(|ty| ty.layout.partial != *pending) {
        return (SmallVec::new(), None);
    }
    taken(operands, pending)
}

/// As [`without_pending`], where only operand `i` may be pending: the result is linear in it.
pub(super) fn without_pending_of(
    operands: &[&TensorType],
    i: usize,
) -> (SmallVec<[TensorType; 4]>, Option<AxisList>) {
    let others = || operands.iter().enumerate().filter(|(j, _)| *j != i);
    if others().any(|(_, ty)| !ty.layout.partial.is_empty()) {
        return (SmallVec::new(), None);
    }
    taken(operands, &operands[i].layout.partial)
}

fn taken(operands: &[&TensorType], pending: &AxisList) -> (SmallVec<[TensorType; 4]>, Option<AxisList>) {
    if pending.is_empty() {
        return (SmallVec::new(), None);
    }
    let taken = |ty: &&TensorType| {
        let mut ty = (*ty).clone();
        ty.layout.partial.clear();
        ty
    };
    (operands.iter().map(taken).collect(), Some(pending.clone()))
}
