//! Sums of gradients: where a gradient that is a sum over ranks is reduced, and where it is added to others before.

use ithaca_ir::AxisId;
use ithaca_ir::layout::{AxisList, Layout};
use ithaca_ir::module::{Node, ValueId};
use ithaca_ir::ops::{Binary, Op, OpError, cast, state};

use super::rewriter::Rewriter;

/// The place of a value in a sum of gradients.
pub(super) enum PlaceInSum {
    /// It is added, in a wider type perhaps, to the sum of this gradient.
    Contribution(String),
    /// It is the sum so far.
    Before,
    /// It is the sum with all contributions, perhaps, of this gradient.
    Complete(String),
}

impl Rewriter<'_, '_> {
    /// A gradient whose sum is pending is reduced as soon as it is made, into the layout in which it is kept; unless it is
    /// added to another, so that both are reduced at once. A contribution to a sum stays pending as the sum does.
    pub(super) fn reduced(&mut self, old: ValueId, new: ValueId) -> Result<ValueId, OpError> {
        let Some(layout) = self.wanted.get(&old).cloned() else { return Ok(new) };
        let partial = &self.b.ty(new).layout.partial;
        match self.place_in_sum(old) {
            Some(PlaceInSum::Contribution(gradient)) => match self.plan.pending.get(&gradient) {
                Some(axes) if !axes.is_empty() => {
                    let mut layout = self.plan.weight(self.placement, self.source.ty(old)).layout;
                    layout.partial.clone_from(axes);
                    return self.reshard(new, layout);
                }
                Some(_) => {}
                None if self.plan.zero.keeps_sums() => {
                    // Where the weight is split, a sum over the same axis is scattered at once.
                    let weight = self.plan.weight(self.placement, self.source.ty(old)).layout;
                    let own = |axis: &&AxisId| weight.axes().all(|split| split != **axis);
                    let pending: AxisList = partial.iter().filter(own).copied().collect();
                    let all = self.contributions.entry(gradient).or_insert_with(|| pending.clone());
                    all.retain(|axis| pending.contains(axis));
                    return Ok(new);
                }
                None => {}
            },
            Some(PlaceInSum::Before) => return Ok(new),
            Some(PlaceInSum::Complete(gradient)) if *partial != layout.partial => {
                return self.narrow_and_reduce(&gradient, new, layout);
            }
            Some(PlaceInSum::Complete(_)) | None => {}
        }
        if self.b.ty(new).layout.partial.is_empty() || self.is_added(old) {
            return Ok(new);
        }
        self.reshard(new, layout)
    }

    /// Whether `d`, which is wanted in the layout `taken` for the gradient `old` of a weight, may stay a sum over replicas, as
    /// the sum over micro-batches does to which that gradient is added.
    pub(super) fn stays_pending(&self, old: ValueId, d: ValueId, taken: &Layout) -> bool {
        let found = &self.b.ty(d).layout;
        if !self.plan.zero.keeps_sums() || found.split != taken.split {
            return false;
        }
        let Some(PlaceInSum::Contribution(gradient)) = self.place_in_sum(old) else { return false };
        // Once all contributions are known, those over which the sum is pending.
        let axes = self.plan.pending.get(&gradient).unwrap_or(&self.plan.replicas);
        found.partial.iter().all(|axis| axes.contains(axis))
    }

    /// A complete sum of gradients, reduced to `layout` in the type of the weight.
    fn narrow_and_reduce(
        &mut self,
        gradient: &str,
        sum: ValueId,
        layout: Layout,
    ) -> Result<ValueId, OpError> {
        let weight = gradient.split_once(state::GRADIENT).map(|(_, weight)| weight);
        let narrow = weight.and_then(|weight| self.plan.sent_as.get(weight)).copied();
        let narrow = narrow.unwrap_or(self.b.ty(sum).dtype);
        let sum = cast(&mut self.b, sum, narrow)?;
        self.reshard(sum, layout)
    }

    /// The place of a value in a sum of gradients, if it has one.
    pub(super) fn place_in_sum(&self, old: ValueId) -> Option<PlaceInSum> {
        let mut readers = self.source.nodes.iter().filter(|n| n.operands.contains(&old));
        let (Some(reader), None) = (readers.next(), readers.next()) else { return None };
        match reader.op {
            Op::Cast { .. } => match self.place_in_sum(reader.result())? {
                PlaceInSum::Contribution(gradient) => Some(PlaceInSum::Contribution(gradient)),
                PlaceInSum::Before | PlaceInSum::Complete(_) => None,
            },
            Op::Binary(Binary::Add) => {
                let gradient = self.summed_by(reader)?;
                let is_before = reader.operands[0] == old;
                Some(if is_before { PlaceInSum::Before } else { PlaceInSum::Contribution(gradient) })
            }
            Op::Assign { .. } => {
                let maker = self.source.nodes.iter().find(|n| n.results.contains(&old))?;
                self.summed_by(maker).map(PlaceInSum::Complete)
            }
            _ => None,
        }
    }

    /// The gradient whose sum `node` reads, or adds to.
    fn summed_by(&self, node: &Node) -> Option<String> {
        match &node.op {
            Op::State(binding) => state::gradient_of_sum(&binding.name).map(str::to_owned),
            Op::Binary(Binary::Add) => {
                let before = node.operands[0];
                let state = self.source.nodes.iter().find(|n| n.results.contains(&before))?;
                if matches!(state.op, Op::State(_)) { self.summed_by(state) } else { None }
            }
            _ => None,
        }
    }

    /// Whether all that becomes of a value, in a wider type perhaps, is a summand of another that is made here.
    pub(super) fn is_added(&self, old: ValueId) -> bool {
        let mut readers = self.source.nodes.iter().filter(|n| n.operands.contains(&old));
        let (Some(reader), None) = (readers.next(), readers.next()) else { return false };
        let is_state = |v: &ValueId| {
            let mut nodes = self.source.nodes.iter();
            nodes.any(|n| matches!(n.op, Op::State(_)) && n.results.contains(v))
        };
        match reader.op {
            Op::Binary(Binary::Add) => !reader.operands.iter().any(is_state),
            Op::Cast { to } => {
                to.bytes() >= self.source.ty(old).dtype.bytes() && self.is_added(reader.result())
            }
            _ => false,
        }
    }
}
