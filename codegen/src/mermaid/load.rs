//! The content of a rank's memory before a step begins.

use std::collections::{BTreeMap, BTreeSet};

use ithaca_ir::entity::Entity;
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
    /// Bytes of gradients and of the optimizer's states.
    pub(super) states: u64,
}

/// The tensors that the functions of a module read and keep, for each layer that they run for.
pub(super) fn of_module(module: &Module) -> Load {
    let layers = module.layers_of_functions();
    let mut load = Load::default();
    let mut held: BTreeMap<String, (Target, u64, BTreeSet<u64>)> = BTreeMap::new();
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
            // The part of a stored tensor that a binding reads.
            let key = format!("{target:?} {} {:?} {:?}", binding.name, binding.view, binding.window);
            let (.., run_for) = held.entry(key).or_insert_with(|| (target, bytes, BTreeSet::new()));
            if binding.is_per_layer() {
                run_for.extend(layers[id.index()].iter().cloned().flatten());
            } else {
                run_for.insert(0);
            }
        }
    }
    for (target, bytes, layers) in held.into_values() {
        let total = match target {
            Target::Param => &mut load.weights,
            Target::State => &mut load.states,
        };
        *total = total.saturating_add(bytes.saturating_mul(layers.len() as u64));
    }
    load
}
