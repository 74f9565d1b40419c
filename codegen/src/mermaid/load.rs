//! The content of a rank's memory before a step begins.

use std::collections::{BTreeMap, BTreeSet};

use ithaca_ir::entity::Entity;
use ithaca_ir::layout::At;
use ithaca_ir::ops::Op;
use ithaca_ir::ops::state::Target;
use ithaca_ir::{Module, text};

/// The tensors that are loaded.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub(super) struct Load {
    /// Inputs by name, with their types.
    pub(super) inputs: Vec<(String, String)>,
    /// Bytes of weights on the busiest rank.
    pub(super) weights: u64,
    /// Bytes of gradients and of the optimizer's states on the same rank.
    pub(super) states: u64,
}

/// A part of a stored tensor.
struct StoredPart {
    target: Target,
    /// Bytes of one layer.
    bytes: u64,
    /// The layers that ranks of a place hold; 0 for a tensor that is not of a layer.
    layers: BTreeMap<Option<At>, BTreeSet<u64>>,
}

/// The tensors that the functions of a module read and keep, for each layer that they run for.
pub(super) fn of_module(module: &Module) -> Load {
    let runs = module.layers_by_place();
    let mut load = Load::default();
    let mut held: BTreeMap<String, StoredPart> = BTreeMap::new();
    for (id, function) in module.functions.iter() {
        for node in &function.nodes {
            let value = node.results.first().or(node.operands.first());
            let Some(ty) = value.map(|&v| function.ty(v)) else { continue };
            let (target, binding) = match &node.op {
                Op::Input(binding) => {
                    let input = (binding.name.clone(), text::show(&module.space, ty).to_string());
                    if !load.inputs.contains(&input) {
                        load.inputs.push(input);
                    }
                    continue;
                }
                Op::Param(binding) => (Target::Param, binding),
                Op::State(binding) => (Target::State, binding),
                Op::Assign { target, binding } => (*target, binding),
                _ => continue,
            };
            let bytes = module.space.max_local_bytes(ty);
            let key = format!("{target:?} {} {:?} {:?}", binding.name, binding.view, binding.window);
            let part =
                held.entry(key).or_insert_with(|| StoredPart { target, bytes, layers: BTreeMap::new() });
            for (layers, at) in &runs[id.index()] {
                let there = part.layers.entry(at.or(ty.layout.at)).or_default();
                there.extend(if binding.is_per_layer() { layers.clone() } else { 0..1 });
            }
        }
    }
    let held: Vec<StoredPart> = held.into_values().collect();
    let stages: BTreeSet<At> = held.iter().flat_map(|part| part.layers.keys().copied().flatten()).collect();
    let places = stages.into_iter().map(Some).chain([None]);
    let of_places = places.map(|at| [Target::Param, Target::State].map(|target| bytes_at(&held, target, at)));
    let busiest = of_places.max_by_key(|[weights, states]| weights.saturating_add(*states));
    [load.weights, load.states] = busiest.unwrap_or_default();
    load
}

/// Bytes that ranks of a place hold, those that all ranks hold included.
fn bytes_at(held: &[StoredPart], target: Target, at: Option<At>) -> u64 {
    let parts = held.iter().filter(|part| part.target == target);
    let bytes = parts.map(|part| {
        let layers: BTreeSet<&u64> =
            [None, at].iter().filter_map(|at| part.layers.get(at)).flatten().collect();
        part.bytes.saturating_mul(layers.len() as u64)
    });
    bytes.fold(0, u64::saturating_add)
}
