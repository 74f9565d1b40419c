//! What a proof must have of its plan: every collective.
//!
//! A plan is proven on a small model of the same structure. The proof is one of the plan if both per-rank programs have the
//! same collectives: kind by kind, axis by axis and count by count in every function, which is every kind of layer, however
//! many layers there are; and if each of them sends something in the one where it does in the other.

use std::collections::{BTreeMap, BTreeSet};

use ithaca_ir::diagnostic::counted;
use ithaca_ir::entity::Entity;
use ithaca_ir::text::show;
use ithaca_ir::{Diagnostic, Dim, Function, Module, Phase, TensorType, message, traffic};

/// The collectives of a kind along an axis in one phase of a function.
type Key = (String, &'static str, String, Phase);

/// The collectives of one run of each function that runs.
fn census(per_rank: &Module) -> BTreeMap<Key, u64> {
    let mut counts: BTreeMap<Key, u64> = BTreeMap::new();
    let runs = per_rank.run_counts();
    for (_, function) in per_rank.functions.iter().filter(|(id, _)| runs[id.index()] > 0) {
        let phases = traffic::Phases::of(per_rank, function);
        for node in &function.nodes {
            let (operands, results) = (function.operand_types(node), function.result_types(node));
            let parcels = message::parcels(&node.op, &operands, &results);
            let phase = phases.of_node(node);
            if let Some((kind, axis, phase)) = traffic::key(&per_rank.space, phase, &parcels) {
                *counts.entry((function.name.clone(), kind, axis, phase)).or_default() += 1;
            }
        }
    }
    counts
}

/// The number of collectives of one run of each function that runs.
pub fn n_collectives(per_rank: &Module) -> u64 {
    census(per_rank).values().sum()
}

/// The kinds of collectives, along an axis and in a phase, that send something.
fn sending(per_rank: &Module) -> BTreeSet<(String, String, Phase)> {
    let rows = traffic::of_module(per_rank).into_iter().filter(|row| row.bytes_sent_per_rank > 0);
    rows.map(|row| (row.kind, row.axis, row.phase)).collect()
}

/// Checks that the per-rank program of a proof has the collectives of that of the plan.
///
/// # Errors
/// `P06` with the first difference.
pub fn same_collectives(plan: &Module, proof: &Module) -> Result<(), Diagnostic> {
    let (planned, proven) = (census(plan), census(proof));
    let keys: BTreeSet<&Key> = planned.keys().chain(proven.keys()).collect();
    let count = |counts: &BTreeMap<Key, u64>, key: &Key| counts.get(key).copied().unwrap_or(0);
    let differences: Vec<String> = keys
        .into_iter()
        .filter(|key| count(&planned, key) != count(&proven, key))
        .map(|key| {
            let (function, kind, axis, phase) = key;
            format!(
                "`@{function}` has {} {kind}/{axis} {} in the plan and {} in the proof",
                count(&planned, key),
                phase.name(),
                count(&proven, key)
            )
        })
        .collect();
    if let Some(first) = differences.first() {
        let others = match differences.len() - 1 {
            0 => String::new(),
            n => format!(", and {} more", counted(n as u64, "difference")),
        };
        return Err(refused(&format!("{first}{others}")));
    }
    same_sending(plan, proof)
}

/// Checks that collectives send data in the proof if and only if they do in the plan.
fn same_sending(plan: &Module, proof: &Module) -> Result<(), Diagnostic> {
    let (planned, proven) = (sending(plan), sending(proof));
    match planned.symmetric_difference(&proven).next() {
        None => Ok(()),
        Some(row @ (kind, axis, phase)) => {
            let (sends, is_silent) =
                if planned.contains(row) { ("plan", "proof") } else { ("proof", "plan") };
            let phase = phase.name();
            Err(refused(&format!(
                "{kind}/{axis} {phase} sends data in the {sends} and nothing in the {is_silent}"
            )))
        }
    }
}

/// Checks that the per-rank program of a smaller mesh is that of a larger one but for sizes: the same operations in the same
/// order, on types with the same layouts, whose dimensions divide where they did before, and the same collectives, each of which sends
/// data in both.
///
/// # Errors
/// `P06` with the first difference.
pub fn same_operations(large: &Module, small: &Module) -> Result<(), Diagnostic> {
    same_collectives(large, small)?;
    let names = |module: &Module| Vec::from_iter(module.functions.values().map(|f| f.name.clone()));
    if names(large) != names(small) {
        return Err(refused("functions differ"));
    }
    for (of_large, of_small) in large.functions.values().zip(small.functions.values()) {
        let (mut of_large, mut of_small) = (outline(large, of_large), outline(small, of_small));
        loop {
            match (of_large.next(), of_small.next()) {
                (None, None) => break,
                (one, other) if one == other => {}
                (one, other) => {
                    let [one, other] = [one, other].map(|line| line.unwrap_or_else(|| "nothing".to_owned()));
                    return Err(refused(&format!(
                        "`{one}` on the mesh of the plan and `{other}` on a smaller one"
                    )));
                }
            }
        }
    }
    Ok(())
}

/// Checks that a step of `n` micro-batches, `large`, is what two steps of fewer become with more of them: the functions that these
/// call have the same operations, and each micro-batch adds the same collectives.
///
/// # Errors
/// `P06` with the first difference.
pub fn same_growth(large: &Module, n: u64, small: [(&Module, u64); 2]) -> Result<(), Diagnostic> {
    let called = |module: &Module| -> Vec<String> {
        let called = module.functions.iter().filter(|(id, _)| Some(*id) != module.main());
        called.flat_map(|(_, function)| Vec::from_iter(outline(module, function))).collect()
    };
    let [(one, n_one), (other, n_other)] = small;
    if called(large) != called(one) || called(one) != called(other) {
        return Err(refused("functions differ with the number of micro-batches"));
    }
    let counts = [large, one, other].map(census);
    let keys: BTreeSet<&Key> = counts.iter().flat_map(BTreeMap::keys).collect();
    for key in keys {
        let [all, first, second] = [0, 1, 2].map(|i| i128::from(counts[i].get(key).copied().unwrap_or(0)));
        let [n, n_one, n_other] = [n, n_one, n_other].map(i128::from);
        if (second - first) * (n - n_one) != (all - first) * (n_other - n_one) {
            let (function, kind, axis, _) = key;
            return Err(refused(&format!("{kind}/{axis} of `@{function}` does not grow with micro-batches")));
        }
    }
    same_sending(large, one)
}

/// The operations of a function with their types, without sizes: `+` follows dimensions that split evenly.
fn outline<'a>(module: &'a Module, function: &'a Function) -> impl Iterator<Item = String> + 'a {
    let Module { space, .. } = module;
    let ty = |ty: &TensorType| {
        let mut text = show(space, ty).to_string();
        for (&dim, axes) in ty.dims.iter().zip(&ty.layout.split) {
            let Dim { size, granule, valid, .. } = space.dims[dim];
            let is_even = size.is_multiple_of(granule.saturating_mul(space.mesh.degree(axes)));
            text.extend(is_even.then_some('+'));
            text.extend((valid < size).then_some('~'));
        }
        text
    };
    function.nodes.iter().map(move |node| {
        let [operands, results] = [node.operands.as_slice(), node.results.as_slice()]
            .map(|values| Vec::from_iter(values.iter().map(|&value| ty(function.ty(value)))).join(", "));
        format!("@{}: {} {operands} -> {results}", function.name, node.op.name())
    })
}

fn refused(what: &str) -> Diagnostic {
    Diagnostic::new("P06", format!("the proof does not have the collectives of the plan: {what}"))
}
