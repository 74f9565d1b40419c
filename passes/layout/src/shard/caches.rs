//! Lays out steps that continue sequences: caches, and the choice of a token from a split vocabulary.

use std::collections::BTreeSet;

use ithaca_ir::layout::Layout;
use ithaca_ir::module::{Node, ValueId};
use ithaca_ir::ops::{Cache, OpError};
use ithaca_ir::{DimId, Op, Space, TensorType};
use ithaca_pass::roles::Roles;

use super::rewriter::{Plan, Rewriter, settled};
use super::strategy::Placement;

/// A cache where attention reads it; integers as inputs are.
pub(super) fn kept(plan: &Plan, placement: &Placement, ty: &TensorType) -> TensorType {
    let mut ty = ty.with_layout(Layout::whole(ty.dims.len()));
    let in_pages = |i: usize, dim: &DimId| plan.roles.pages.values().any(|of| of[i] == *dim);
    for (split, dim) in ty.layout.split.iter_mut().zip(&ty.dims) {
        if plan.roles.caches.contains(dim) || in_pages(1, dim) {
            *split = placement.attention_sequence();
            split.extend(placement.cache.iter().copied());
        } else if plan.is_head(*dim) && !plan.copies.contains_key(dim) {
            *split = placement.attention_heads();
        } else if plan.roles.batches.contains(dim) || in_pages(0, dim) || plan.roles.host_pages.contains(dim)
        {
            split.clone_from(&placement.batch);
        }
    }
    ty
}

/// The heads of weights that axes of the cache do not split: key/value heads, so that nothing is sent to append them, and query
/// heads that do not divide.
pub(super) fn heads_as_inside(placement: &Placement, roles: &Roles, space: &Space) -> BTreeSet<DimId> {
    if !placement.cache.iter().any(|a| placement.weights.contains(a)) {
        return BTreeSet::new();
    }
    let own = |&(queries, keys): &(DimId, DimId)| {
        let whole = (!space.can_split(queries, &placement.weights)).then_some(queries);
        whole.into_iter().chain((keys != queries).then_some(keys))
    };
    roles.heads.iter().flat_map(own).collect()
}

impl Rewriter<'_, '_> {
    /// The largest of all elements: where a vocabulary is split, each rank finds its largest, and all ranks compare these.
    pub(super) fn argmax(
        &mut self,
        node: &Node,
        over: DimId,
        operands: &[ValueId],
    ) -> Result<Vec<ValueId>, OpError> {
        let x = settled(self.b.ty(operands[0]));
        let degree = self.b.space().mesh.degree(x.axes_of(over));
        let parts = self.plan.parts.get(&over).copied();
        let Some(parts) = parts.filter(|&p| degree > 1 && self.b.space().size(p) == degree) else {
            return self.by_rule(node, operands);
        };
        let logits = self.reshard(operands[0], x.layout.clone())?;
        let of_parts =
            self.b.node(Op::Cache(Cache::Argmax { over, parts: Some(parts) }), &[logits], &[])?.to_vec();
        let mut compared = Vec::with_capacity(2);
        for value in of_parts {
            let mut whole = self.b.ty(value).layout.clone();
            whole.split[0].clear();
            compared.push(self.reshard(value, whole)?);
        }
        let [places, values] = [compared[0], compared[1]];
        let op = Op::Cache(Cache::Argmax { over: parts, parts: None });
        Ok(self.b.node(op, &[values, places], &[])?.to_vec())
    }
}
