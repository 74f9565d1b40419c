//! The states that go from the ranks of prompts to those of tokens, as a table of the module.

use std::collections::{BTreeMap, BTreeSet};

use ithaca_ir::handover::{Handover, MicroBatch, Move, Pieces};
use ithaca_ir::ops::Target;
use ithaca_ir::{Diagnostic, Module, Op, Space, TensorType, text};

use super::python::{string, tuple};

/// The argument of a space that has the process of each rank.
pub(super) fn processes(of: &[u64]) -> String {
    let first = of.first().copied().unwrap_or(0);
    if (first..).zip(of).all(|(process, &of)| process == of) {
        format!(", range({first}, {})", first + of.len() as u64)
    } else {
        format!(", {}", tuple(of.iter().map(u64::to_string)))
    }
}

/// The constant `HANDOVER`; `space` is that of tokens.
pub(super) fn moves(space: &Space, handover: Option<&Handover>) -> String {
    let Some(handover) = handover else { return "ROUNDS, HANDOVER = 1, None\n".to_owned() };
    let mut rows = String::new();
    for (states, rounds) in handover.alike() {
        let mut by_type: BTreeMap<(String, String), Vec<String>> = BTreeMap::new();
        for state in states {
            // The table says which ranks have it.
            let mut ty = TensorType::clone(&state.ty);
            ty.layout.at = None;
            let places =
                tuple(state.micro_batches.iter().map(|of| of.map_or("None".to_owned(), micro_batch)));
            let key = (text::show(space, &ty).to_string(), places);
            by_type.entry(key).or_default().push(string(&state.name));
        }
        let rounds = rounds.iter().map(|moves| tuple(moves.iter().map(one)));
        let rounds = format!("[{}]", Vec::from_iter(rounds).join(", "));
        for ((ty, places), names) in by_type {
            rows.push_str(&format!("    ({}, {places}, {}, {rounds}),\n", tuple(names), string(&ty)));
        }
    }
    format!(
        "# States that go from ranks of prompts to those of tokens: names, the micro-batches of which they are, the type that \
         ranks of tokens have, and for each round of sequences moves (from, to, for each dimension pieces).\nROUNDS = {}\nHANDOVER = [\n{rows}]\n",
        handover.rounds.len()
    )
}

fn micro_batch(of: MicroBatch) -> String {
    format!("({}, {})", of.index, of.of)
}

fn one(of: &Move) -> String {
    let dims = of.pieces.iter().map(|of_dim| tuple(of_dim.iter().map(pieces)));
    format!("({}, {}, {})", of.from, of.to, tuple(dims))
}

fn pieces(of: &Pieces) -> String {
    let Pieces { first, count, steps: [from, to] } = of;
    format!("({}, {}, {}, {count}, ({from}, {to}))", first.from, first.to, first.len)
}

/// Where states are: by name, their types, and the stages and layers that have them.
fn states(module: &Module) -> BTreeMap<&str, BTreeSet<(String, Vec<String>)>> {
    let mut found: BTreeMap<&str, BTreeSet<_>> = BTreeMap::new();
    for (id, function) in module.functions.iter() {
        let nodes = module.functions.values().flat_map(|f| &f.nodes);
        let calls = nodes.filter_map(|node| match &node.op {
            Op::Call { callee, layers, stride, stage, .. } if *callee == id => {
                Some(format!("{layers:?} {stride} {stage:?}"))
            }
            _ => None,
        });
        let calls = Vec::from_iter(calls);
        for node in &function.nodes {
            let (binding, value) = match &node.op {
                Op::State(binding) => (binding, node.result()),
                Op::Assign { target: Target::State, binding } => (binding, node.operands[0]),
                _ => continue,
            };
            let ty = text::show(&module.space, function.ty(value)).to_string();
            found.entry(&binding.name).or_default().insert((ty, calls.clone()));
        }
    }
    found
}

/// Checks that without a handover the steps of prompts leave the states that the steps of a token continue.
///
/// # Errors
/// `S43` for a state that is laid out otherwise.
pub(super) fn check_states(step: &Module, prompts: &Module) -> Result<(), Diagnostic> {
    let left = states(prompts);
    let is_left =
        |(name, held): &(&str, _)| left.get(name).is_some_and(|left| BTreeSet::is_subset(held, left));
    match states(step).into_iter().find(|state| !is_left(state)) {
        None => Ok(()),
        Some((name, _)) => {
            let message =
                format!("state `{name}` is laid out otherwise in a step of prompts than in one of a token");
            Err(Diagnostic::new("S43", message).help("hand states over between the two"))
        }
    }
}
