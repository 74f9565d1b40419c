//! What ZeRO splits further: tensors that several ranks would hold whole.

use std::collections::BTreeSet;

use ithaca_ir::diagnostic::counted;
use ithaca_ir::layout::AxisList;
use ithaca_ir::mesh::AxisId;
use ithaca_ir::ops::{Op, OpError};
use ithaca_ir::{Module, Space, TensorType};
use ithaca_pass::Context;
use ithaca_pass::choices::{Choice, Topic, impossible};

use super::placements::Placements;
use super::rewriter::Plan;
use super::zero::{WeightSize, Zero};

/// The axes along which ranks hold the same weights and other tokens, the innermost of the mesh first.
///
/// A gather goes along the last axis first, so the slow links between nodes carry the smallest parts.
pub(super) fn axes(placements: &Placements, space: &Space) -> AxisList {
    let base = &placements.base;
    let own = |a: &AxisId| placements.sequences.values().any(|axes| axes.contains(a));
    let is_replica = |a: &AxisId| base.holds_same_weights(*a) || own(a) && !base.weights.contains(a);
    space.mesh.axes.ids().rev().filter(|a| is_replica(a) && space.mesh.size(*a) > 1).collect()
}

/// `ty`, split as tensor parallelism does, with one dimension split further by `axes`: the first that divides by all of
/// them. Where none does, axis by axis the first that divides by it.
pub(super) fn split(space: &Space, ty: &TensorType, axes: &[AxisId]) -> TensorType {
    let with = |ty: &TensorType, i: usize, more: &[AxisId]| -> Option<AxisList> {
        let split: AxisList = ty.layout.split[i].iter().chain(more).copied().collect();
        let dim = &space.dims[ty.dims[i]];
        dim.divides_evenly(space.mesh.degree(&split)).then_some(split)
    };
    let mut ty = ty.clone();
    // Experts lie apart along axes that split tokens, so along these no rank has another's.
    let axes: AxisList = axes.iter().copied().filter(|&a| ty.layout.axes().all(|b| b != a)).collect();
    if let Some((i, split)) = (0..ty.dims.len()).find_map(|i| Some((i, with(&ty, i, &axes)?))) {
        ty.layout.split[i] = split;
        return ty;
    }
    for axis in axes {
        if let Some((i, split)) = (0..ty.dims.len()).find_map(|i| Some((i, with(&ty, i, &[axis])?))) {
            ty.layout.split[i] = split;
        }
    }
    ty
}

/// The weights that stay whole at a stage with persistent weights.
///
/// # Errors
/// `P05` for a choice that the record does not have.
pub(super) fn persistent(
    module: &Module,
    zero: Zero,
    cx: &mut Context<'_>,
) -> Result<BTreeSet<String>, OpError> {
    let mut persistent = BTreeSet::new();
    if zero == zero.without_persistent() {
        return Ok(persistent);
    }
    for (name, size) in WeightSize::all(module) {
        let is_persistent = match cx.ask(Topic::Weights, name.as_str())? {
            Choice::ByPrice(_) => {
                let is_persistent = zero.keeps(size);
                cx.record(if is_persistent { WHOLE } else { SPLIT }.to_owned());
                is_persistent
            }
            Choice::Recorded(WHOLE) => true,
            Choice::Recorded(SPLIT) => false,
            Choice::Recorded(text) => {
                return Err(impossible(Topic::Weights, &name, text, "a weight is `whole` or `split`"));
            }
        };
        if is_persistent {
            persistent.insert(name);
        }
    }
    Ok(persistent)
}

/// A weight that every rank with the same weights has.
const WHOLE: &str = "whole";

/// A weight of which these ranks have parts.
const SPLIT: &str = "split";

/// Notes to the user: tensors of which a whole copy stays on several ranks.
pub(super) fn notes(module: &Module, plan: &Plan) -> Vec<String> {
    if plan.zero == Zero::Off {
        return Vec::new();
    }
    let stage = plan.zero.stage();
    let nodes = || module.functions.values().flat_map(|f| f.nodes.iter().map(move |n| (f, n)));
    let splits_weights = plan.zero >= Zero::Parameters;
    if !splits_weights && !nodes().any(|(_, n)| matches!(n.op, Op::Assign { .. })) {
        return vec![format!("ZeRO stage {stage} has no effect: the program keeps no gradients")];
    }
    if plan.replicas.is_empty() {
        return vec![format!(
            "ZeRO stage {stage} has no effect: no ranks hold the same weights and other tokens"
        )];
    }
    let mut notes = Vec::new();
    if !plan.persistent.is_empty() {
        let n = counted(plan.persistent.len() as u64, "weight");
        let all = WeightSize::all(module).len();
        notes.push(format!("`--zero {}`: {n} of {all} stay whole, gathered once a step", plan.zero));
    }
    let mesh = &module.space.mesh;
    for (function, node) in nodes() {
        let Op::Param(binding) = &node.op else { continue };
        if plan.persistent.contains(&binding.name) {
            continue;
        }
        let ty = plan.weight(&plan.placements.base, function.ty(node.result()));
        let split = split(&module.space, &ty, &plan.replicas);
        let left = plan.replicas.iter().copied().filter(|&a| split.layout.axes().all(|b| b != a));
        let left: AxisList = left.collect();
        if !left.is_empty() {
            let shape: Vec<String> = module.space.shape(&ty).iter().map(u64::to_string).collect();
            notes.push(format!(
                "`{}` [{}] is kept whole over {}: no dimension divides",
                binding.name,
                shape.join(", "),
                mesh.degrees_text(&left)
            ));
        }
    }
    notes
}
