//! What lies in a rank's memory before a step begins.

use std::collections::{BTreeMap, BTreeSet};

use ithaca_ir::entity::Entity;
use ithaca_ir::ops::state::Target;
use ithaca_ir::ops::{Binding, Op};
use ithaca_ir::{Module, text};

/// What is loaded.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub(super) struct Load {
    /// Inputs by name, with their types.
    pub(super) inputs: Vec<(String, String)>,
    /// Bytes of weights on the busiest rank.
    pub(super) weights: u64,
    /// Bytes of gradients and of what the optimizer keeps.
    pub(super) states: u64,
}

/// What the functions of a module read and keep, for each layer that they run for.
pub(super) fn of_module(module: &Module) -> Load {
    let layers = module.layers_of_functions();
    let mut load = Load::default();
    let mut held: BTreeMap<String, (Kind, u64, BTreeSet<u64>)> = BTreeMap::new();
    for (id, function) in module.functions.iter() {
        for node in &function.nodes {
            let value = node.results.first().or(node.operands.first());
            let Some(ty) = value.map(|&v| function.ty(v)) else { continue };
            let (kind, binding) = match &node.op {
                Op::Input(binding) => {
                    let input = (binding.name.clone(), text::show(&module.space, ty).to_string());
                    if !load.inputs.contains(&input) {
                        load.inputs.push(input);
                    }
                    continue;
                }
                Op::Param(binding) => (Kind::Weight, binding),
                Op::State(binding) => (Kind::State, binding),
                Op::Assign { target: Target::Param, binding } => (Kind::Weight, binding),
                Op::Assign { target: Target::State, binding } => (Kind::State, binding),
                _ => continue,
            };
            let bytes = module.space.max_local_bytes(ty);
            let one = held.entry(key(kind, binding)).or_insert_with(|| (kind, bytes, BTreeSet::new()));
            match binding.is_per_layer() {
                true => one.2.extend(layers[id.index()].iter().cloned().flatten()),
                false => one.2.extend([0]),
            }
        }
    }
    for (kind, bytes, layers) in held.into_values() {
        let bytes = bytes.saturating_mul(layers.len() as u64);
        match kind {
            Kind::Weight => load.weights = load.weights.saturating_add(bytes),
            Kind::State => load.states = load.states.saturating_add(bytes),
        }
    }
    load
}

/// What lasts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Weight,
    State,
}

/// The part of a stored tensor that a binding reads.
fn key(kind: Kind, binding: &Binding) -> String {
    format!("{kind:?} {} {:?} {:?}", binding.name, binding.view, binding.window)
}
