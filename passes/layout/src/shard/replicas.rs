//! What ZeRO splits further: tensors that several ranks would hold whole.

use std::collections::{BTreeMap, BTreeSet};

use ithaca_ir::diagnostic::counted;
use ithaca_ir::layout::AxisList;
use ithaca_ir::mesh::AxisId;
use ithaca_ir::ops::{Op, OpError, Target};
use ithaca_ir::{Dim, DimId, Module, Space, TensorType};
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
/// them, else of the [`uneven`] dimensions that no axis splits the one that the program declares first, which is the same in a small
/// model. If there is none either, axis by axis the first dimension that divides by it, and by the other axes an uneven one.
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
    let uneven = |ty: &TensorType, axes: &AxisList| -> Option<usize> {
        let is_free = |&i: &usize| {
            let dim = ty.dims[i];
            ty.layout.split[i].is_empty() && space.dims[dim].uneven && space.can_split(dim, axes)
        };
        (0..ty.dims.len()).filter(is_free).min_by_key(|&i| ty.dims[i]).filter(|_| !axes.is_empty())
    };
    if let Some(i) = uneven(&ty, &axes) {
        ty.layout.split[i] = axes;
        return ty;
    }
    for &axis in &axes {
        if let Some((i, split)) = (0..ty.dims.len()).find_map(|i| Some((i, with(&ty, i, &[axis])?))) {
            ty.layout.split[i] = split;
        }
    }
    let left = left(&ty, &axes);
    if let Some(i) = uneven(&ty, &left) {
        ty.layout.split[i] = left;
    }
    ty
}

/// The axes that do not split a tensor.
fn left(ty: &TensorType, axes: &[AxisId]) -> AxisList {
    axes.iter().copied().filter(|&a| ty.layout.axes().all(|b| b != a)).collect()
}

/// Dimensions of weights to be declared uneven, so that ZeRO splits weights of which no dimension divides: of each such weight, among
/// those that nothing splits yet, the one that most weights have. A small model that proves a large one has the same.
pub(super) fn uneven(module: &Module, plan: &Plan) -> BTreeSet<DimId> {
    let mut uneven = BTreeSet::new();
    if plan.zero == Zero::Off {
        return uneven;
    }
    let space = &module.space;
    let nodes = || module.functions.values().flat_map(|f| f.nodes.iter().map(move |n| (f, n)));
    let mut weights: BTreeMap<DimId, usize> = BTreeMap::new();
    for (function, node) in nodes().filter(|(_, node)| matches!(node.op, Op::Param(_))) {
        for &dim in &function.ty(node.result()).dims {
            *weights.entry(dim).or_default() += 1;
        }
    }
    for (function, node) in nodes() {
        let is_split = match &node.op {
            Op::Param(binding) => plan.zero.splits(Target::Param, binding),
            Op::State(binding) => plan.zero.splits(Target::State, binding),
            _ => false,
        };
        if !is_split {
            continue;
        }
        let ty = plan.weight(&plan.placements.base, function.ty(node.result()));
        let split = split(space, &ty, &plan.replicas);
        let [all, left] = [&ty, &split].map(|ty| space.mesh.degree(&left(ty, &plan.replicas)));
        let free = |split: &TensorType, degree: u64| {
            let is_free = |&i: &usize| {
                let dim = &space.dims[ty.dims[i]];
                let is_plain = Dim { name: dim.name.clone(), ..Dim::new("", dim.size) } == *dim;
                split.layout.split[i].is_empty()
                    && is_plain
                    && !plan.is_head(ty.dims[i])
                    && dim.size >= degree
            };
            let count = |&i: &usize| weights.get(&ty.dims[i]).copied().unwrap_or_default();
            (0..ty.dims.len()).rev().filter(is_free).max_by_key(count).map(|i| ty.dims[i])
        };
        if left > 1 {
            uneven.extend(free(&ty, all).or_else(|| free(&split, left)));
        }
    }
    uneven
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
        let is_persistent = match cx.choose(Topic::Weights, name.as_str())? {
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
        let left = left(&split, &plan.replicas);
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
