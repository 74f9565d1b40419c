//! A backward function in two, for pipelines whose stages compute gradients of weights later (Qi et al., Zero Bubble
//! Pipeline Parallelism, arXiv 2401.10241): one returns the gradients of arguments, one stores those of weights.
//!
//! ```text
//! %dx = call %dy, %x, %h {callee=@block.backward}
//! ```
//! becomes
//! ```text
//! %dx, %dh = call %dy, %x, %h {callee=@block.backward.inputs}
//! …
//! call %dh, %dy, %x {callee=@block.backward.weights}
//! ```
//! The first function computes everything that its results depend on, so it also recomputes forward values, and returns
//! the values that the second one reads. The second takes the others from the operands of the backward call. A gradient of a
//! weight that the first one has anyway, as of a norm, is added to its sum there.

use std::collections::BTreeSet;

use ithaca_ir::module::{FuncId, Function, Node, Output, ValueId};
use ithaca_ir::ops::{Binary, OpError, Random};
use ithaca_ir::{Arena, FunctionBuilder, Op, Space};
use ithaca_pass::rebuild::ValueMap;

/// The two parts of a backward function.
pub(super) struct Parts {
    /// Returns the results of the backward function, then the values that `weights` reads. `None` if there are neither.
    pub(super) inputs: Option<Function>,
    /// Stores gradients of weights. Takes the further results of `inputs`, then operands of the backward function.
    pub(super) weights: Function,
    /// The operands of the backward function that `weights` takes.
    pub(super) operands: Vec<usize>,
}

/// The parts of `backward`, or `None` if it stores no gradient. The first `n_carried` parameters change from layer to
/// layer in a loop, so a layer's own values of them are results of the first part.
///
/// # Errors
/// None on a function that verifies.
pub(super) fn parts(
    (space, functions): (&Space, &Arena<FuncId, Function>),
    backward: &Function,
    n_carried: usize,
) -> Result<Option<Parts>, OpError> {
    let is_effect = |node: &Node| node.results.is_empty();
    if !backward.nodes.iter().any(is_effect) {
        return Ok(None);
    }
    let outputs: BTreeSet<ValueId> = backward.outputs.iter().map(|o| o.value).collect();
    let inputs = nodes_of(backward, outputs.clone(), |_, _| false, |_| false);
    let available: BTreeSet<ValueId> = computed_by(backward, &inputs).collect();
    let is_early =
        |node: &Node| is_effect(node) && node.operands.iter().all(|&v| is_summed(backward, &available, v));
    let is_late = |node: &Node| is_effect(node) && !is_early(node);
    if !backward.nodes.iter().any(is_late) {
        return Ok(None);
    }
    let inputs = nodes_of(backward, outputs, |_, _| false, is_early);
    let available: BTreeSet<ValueId> = computed_by(backward, &inputs).collect();
    let is_returned = |node: &Node, v: ValueId| available.contains(&v) && !is_cheap(backward, node);
    let weights = nodes_of(backward, BTreeSet::new(), is_returned, is_late);
    let own: BTreeSet<ValueId> = computed_by(backward, &weights).collect();
    let read: BTreeSet<ValueId> = backward
        .nodes
        .iter()
        .zip(&weights)
        .filter(|&(_, &runs)| runs)
        .flat_map(|(node, _)| node.operands.iter().copied())
        .filter(|v| !own.contains(v))
        .collect();
    let parameter = |v: ValueId| backward.params.iter().position(|&p| p == v);
    let (operands, kept): (Vec<ValueId>, Vec<ValueId>) =
        read.into_iter().partition(|&v| parameter(v).is_some_and(|i| i >= n_carried));

    let b = |part: &str| {
        let name = format!("{}.{part}", backward.name);
        FunctionBuilder::part_of(name, backward, space, functions)
    };
    let results: Vec<ValueId> =
        backward.outputs.iter().map(|o| o.value).chain(kept.iter().copied()).collect();
    let inputs = if results.is_empty() {
        None
    } else {
        Some(part(b("inputs"), backward, &backward.params, &inputs, &results)?)
    };
    let params: Vec<ValueId> = kept.iter().chain(&operands).copied().collect();
    let weights = part(b("weights"), backward, &params, &weights, &[])?;
    Ok(Some(Parts { inputs, weights, operands: operands.into_iter().filter_map(parameter).collect() }))
}

/// Whether a value is one of `available`, or states and casts and sums of them.
fn is_summed(function: &Function, available: &BTreeSet<ValueId>, v: ValueId) -> bool {
    let is_made = |node: &Node| {
        matches!(node.op, Op::State(_) | Op::Cast { .. } | Op::Binary(Binary::Add))
            && node.operands.iter().all(|&operand| is_summed(function, available, operand))
    };
    available.contains(&v) || function.nodes.iter().find(|n| n.results.contains(&v)).is_some_and(is_made)
}

/// Whether a value is computed again rather than returned: it depends on no argument, or is a key.
fn is_cheap(function: &Function, node: &Node) -> bool {
    let constant = |v: &ValueId| {
        let made = function.nodes.iter().find(|n| n.results.contains(v));
        made.is_some_and(|node| is_cheap(function, node))
    };
    matches!(node.op, Op::Random(Random::FoldIn | Random::LayerKey))
        || (!matches!(node.op, Op::Call { .. }) && node.operands.iter().all(constant))
}

/// The nodes that compute `needed`, and those that are `wanted` anyway, with their operands; a value that
/// `is_available` needs no node.
fn nodes_of(
    function: &Function,
    mut needed: BTreeSet<ValueId>,
    is_available: impl Fn(&Node, ValueId) -> bool,
    wanted: impl Fn(&Node) -> bool,
) -> Vec<bool> {
    let mut runs = vec![false; function.nodes.len()];
    for (node, runs) in function.nodes.iter().zip(&mut runs).rev() {
        let is_missing = |&v: &ValueId| needed.contains(&v) && !is_available(node, v);
        if wanted(node) || node.results.iter().any(is_missing) {
            *runs = true;
            needed.extend(node.operands.iter().copied());
        }
    }
    runs
}

/// The results of the nodes that run.
fn computed_by<'a>(function: &'a Function, runs: &'a [bool]) -> impl Iterator<Item = ValueId> + 'a {
    let nodes = function.nodes.iter().zip(runs).filter(|&(_, &runs)| runs);
    nodes.flat_map(|(node, _)| node.results.iter().copied())
}

fn part(
    mut b: FunctionBuilder<'_>,
    source: &Function,
    params: &[ValueId],
    runs: &[bool],
    results: &[ValueId],
) -> Result<Function, OpError> {
    let mut map = ValueMap::new(source);
    for &param in params {
        map.param(&mut b, param);
    }
    for (node, _) in source.nodes.iter().zip(runs).filter(|&(_, &runs)| runs) {
        map.copy(&mut b, node)?;
    }
    Ok(b.finish(results.iter().map(|&v| Output { name: None, value: map[v] })))
}
