//! The work of experts whose products skip slots without tokens (`Runtime::experts`), and of products of few slots, which
//! skip weights in every runtime.
//!
//! Of a tensor with slots the filled rows are read, written and multiplied; of the weights those of experts that some token
//! chose. With `top` of `experts` chosen evenly by `tokens` tokens an expert has `tokens · top / experts` of them, the busiest
//! rank `EXPECTED_LOAD` times as many, and some with the chance `1 − (1 − top / experts)^tokens`.

use std::collections::BTreeMap;

use ithaca_ir::ops::experts::{Deal, EXPECTED_LOAD, Experts, FEW_SLOTS};
use ithaca_ir::ops::{Cost, Unit};
use ithaca_ir::schedule::{Schedule, Work};
use ithaca_ir::{DimId, Op, Space, TensorType};

use crate::cluster::{Cluster, ExpertProducts};

/// The slots of which only filled ones count; by default none, so that all count.
#[derive(Clone, Debug, Default)]
pub(crate) struct FilledSlots {
    deals: BTreeMap<DimId, Deal>,
    runtime: ExpertProducts,
}

impl FilledSlots {
    /// The slots of a schedule, if steps run so.
    pub(crate) fn of(cluster: &Cluster, schedule: &Schedule) -> Self {
        let tasks = schedule.frames.values().flat_map(|frame| &frame.tasks);
        let deals = tasks.filter_map(|task| match &task.work {
            Work::Compute(Op::Experts(Experts::Deal(deal))) => Some((deal.shared.slots, *deal)),
            _ => None,
        });
        Self { deals: deals.collect(), runtime: cluster.runtime.experts }
    }

    /// The cost of `op` on the busiest rank.
    pub(super) fn cost(
        &self,
        space: &Space,
        op: &Op,
        operands: &[&TensorType],
        results: &[&TensorType],
    ) -> Cost {
        let whole = op.cost(space, operands, results);
        let types = || operands.iter().chain(results).copied();
        let Some((tokens, deal)) = types().find_map(|ty| self.slots_of(space, ty)) else { return whole };
        let is_product = op.info().unit == Unit::Matmul;
        let share = match self.runtime {
            ExpertProducts::FilledSlots => self.share(space, deal),
            ExpertProducts::AllSlots if is_product && skips_weights(space, deal, operands, results) => 1.0,
            ExpertProducts::AllSlots => return whole,
        };
        let bytes = types().map(|ty| {
            let part = if ty.has(deal.shared.slots) {
                share
            } else if is_product {
                used(space, deal, tokens, ty)
            } else {
                1.0
            };
            space.max_local_bytes(ty) as f64 * part
        });
        Cost { flops: (whole.flops as f64 * share) as u128, bytes: bytes.sum::<f64>() as u128 }
    }

    /// The part of the weights of a product that is read: those of experts that some token chose. `types` are its operands and
    /// results.
    pub(super) fn weights(&self, space: &Space, weight: &TensorType, types: &[&TensorType]) -> f64 {
        let slots = types.iter().find_map(|ty| self.slots_of(space, ty));
        let slots = slots.filter(|(_, deal)| {
            self.runtime == ExpertProducts::FilledSlots || skips_weights(space, deal, types, &[])
        });
        slots.map_or(1.0, |(tokens, deal)| used(space, deal, tokens, weight))
    }

    /// The slots of a tensor, and the tokens whose choices its groups on a rank have.
    fn slots_of(&self, space: &Space, ty: &TensorType) -> Option<(f64, &Deal)> {
        let deal = ty.dims.iter().find_map(|dim| self.deals.get(dim))?;
        let groups = [deal.shared.batches, deal.shared.groups];
        let held =
            groups.iter().filter(|&&dim| ty.has(dim)).map(|&dim| space.max_extent(dim, ty.axes_of(dim)));
        Some(((deal.share(space).0 * held.product::<u64>()) as f64, deal))
    }

    /// The part of the slots that is filled.
    fn share(&self, space: &Space, deal: &Deal) -> f64 {
        let (_, even) = deal.share(space);
        (EXPECTED_LOAD * even / space.size(deal.shared.slots).max(1) as f64).min(1.0)
    }
}

/// Whether a product has so few slots that devices read the weights of experts with a filled one only.
fn skips_weights(space: &Space, deal: &Deal, operands: &[&TensorType], results: &[&TensorType]) -> bool {
    let mut types = operands.iter().chain(results).copied();
    let sums_slots = results.iter().any(|ty| !ty.has(deal.shared.slots));
    types.find(|ty| ty.has(deal.shared.slots)).is_some_and(|ty| {
        let of_expert = [deal.shared.batches, deal.shared.groups, deal.shared.slots].into_iter();
        let held = of_expert.filter(|&dim| ty.has(dim)).map(|dim| space.max_extent(dim, ty.axes_of(dim)));
        !sums_slots && ty.dtype.bytes() == 2 && held.product::<u64>() <= FEW_SLOTS
    })
}

/// The part of a weight of experts that is read: of those that one of so many tokens chose.
fn used(space: &Space, deal: &Deal, tokens: f64, weight: &TensorType) -> f64 {
    if !weight.has(deal.experts) {
        return 1.0;
    }
    let chance = space.size(deal.top) as f64 / space.size(deal.experts).max(1) as f64;
    1.0 - (1.0 - chance.min(1.0)).powf(tokens)
}
