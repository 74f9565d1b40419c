//! What ZeRO splits further: tensors that several ranks would hold whole.

use ithaca_ir::layout::AxisList;
use ithaca_ir::mesh::AxisId;
use ithaca_ir::ops::Op;
use ithaca_ir::{Module, Space, TensorType};

use super::placements::Placements;
use super::rewriter::Plan;
use super::zero::Zero;

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
    let mesh = &module.space.mesh;
    for (function, node) in nodes() {
        let Op::Param(binding) = &node.op else { continue };
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
