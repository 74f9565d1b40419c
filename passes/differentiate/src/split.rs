//! Splits a joint function into a forward and a backward function, and decides which forward values are saved and which
//! are recomputed.
//!
//! The forward function returns its results, then the saved values. The backward function takes
//!
//! 1. the gradient of each active result,
//! 2. in a loop over layers: for each active argument that all layers share, the sum of its gradients so far,
//! 3. the arguments of the function that it reads again,
//! 4. the saved values,
//!
//! and returns the gradients of 1 and 2 for the previous layer; without a loop, the gradients of all active arguments.

use std::collections::BTreeSet;

use ithaca_ir::entity::Entity;
use ithaca_ir::module::{FuncId, Function, Node, Output, ValueId};
use ithaca_ir::ops::{Binary, OpError, Random};
use ithaca_ir::phase::Phase;
use ithaca_ir::{Arena, DimId, FunctionBuilder, Op, Space};
use ithaca_pass::rebuild::ValueMap;

use super::active::Activity;

use super::options::Recompute;
use super::tape::or_zeros;

/// The joint function.
pub(super) struct Joint {
    /// Parameters: those of the function, then the gradients of its active results. No outputs.
    pub(super) function: Function,
    /// The outputs of the source in the function.
    pub(super) outputs: Vec<Output>,
    /// The number of forward nodes, which come first.
    pub(super) n_forward: usize,
    /// For each active result its index and the parameter that is its gradient.
    pub(super) seeds: Vec<(usize, ValueId)>,
    /// For each parameter of the source its gradient, if it has one.
    pub(super) gradients: Vec<Option<ValueId>>,
}

/// The forward and backward half of a function, and the operands of the backward half.
pub(super) struct Halves {
    /// The forward function: results, then saved values.
    pub(super) forward: Function,
    /// The backward function.
    pub(super) backward: Function,
    /// The number of results of the source.
    pub(super) n_results: usize,
    /// Results whose gradients the backward function takes.
    pub(super) seeds: Vec<usize>,
    /// Arguments that all layers share and whose gradients are summed.
    pub(super) sums: Vec<usize>,
    /// Arguments that the backward function takes again.
    pub(super) reused: Vec<usize>,
    /// Arguments whose gradients are returned, in order.
    pub(super) returned: Vec<usize>,
}

/// Whether a function runs over several layers in some call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Repetition {
    /// One layer at a time; every argument is available when its gradient is computed.
    Once,
    /// Layer `i` passes its results to layer `i + 1`, in place of the arguments with the same indices.
    Looped,
}

/// The halves of `source`.
///
/// # Errors
/// `P51` when a looped function carries a result that has a gradient into an argument that has none.
pub(super) fn split(
    (space, functions): (&Space, &Arena<FuncId, Function>),
    id: FuncId,
    source: &Function,
    joint: &Joint,
    activity: &Activity,
    (repetition, recompute): (Repetition, Recompute),
) -> Result<Halves, OpError> {
    let n_results = source.outputs.len();
    let n_carried = match repetition {
        Repetition::Once => 0,
        Repetition::Looped => n_results,
    };
    let active = |i: usize| activity.is_active(id, source.params[i]);
    let seeds: Vec<usize> = joint.seeds.iter().map(|&(i, _)| i).collect();
    let carried: Vec<usize> = (0..n_carried).filter(|&i| active(i)).collect();
    if repetition == Repetition::Looped && carried != seeds {
        let message =
            format!("`@{}` carries results that have gradients into arguments that have none", source.name);
        return Err(OpError::new("P51", message));
    }
    let sums: Vec<usize> = match repetition {
        Repetition::Once => Vec::new(),
        Repetition::Looped => (n_carried..source.params.len()).filter(|&i| active(i)).collect(),
    };
    let returned: Vec<usize> = match repetition {
        Repetition::Once => (0..source.params.len()).filter(|&i| active(i)).collect(),
        Repetition::Looped => carried,
    };
    let required = required(joint, source.params.len(), n_carried, recompute, &returned, &sums);
    let forward = forward((space, functions), source, joint, &required.saved)?;
    let reused: Vec<usize> = required.reused.iter().copied().collect();
    let signature = BackwardSignature {
        n_params: source.params.len(),
        seeds: &joint.seeds,
        sums: &sums,
        reused: &reused,
        returned: &returned,
    };
    let backward = backward((space, functions), joint, &signature, &required)?;
    Ok(Halves { forward, backward, n_results, seeds, sums, reused, returned })
}

/// The requirements of the backward function.
struct Requirements {
    /// The nodes of the joint function that it runs.
    nodes: Vec<bool>,
    /// The saved forward values, ascending.
    saved: BTreeSet<ValueId>,
    /// The parameters that it takes again.
    reused: BTreeSet<usize>,
}

fn required(
    joint: &Joint,
    n_params: usize,
    n_carried: usize,
    recompute: Recompute,
    returned: &[usize],
    sums: &[usize],
) -> Requirements {
    let Joint { function, n_forward, gradients, .. } = joint;
    let depends = depends_on_arguments(function, n_params);
    let softmax: BTreeSet<DimId> = function.nodes[..*n_forward]
        .iter()
        .filter_map(|n| match n.op {
            Op::Softmax { over } => Some(over),
            _ => None,
        })
        .collect();
    let mut needed = vec![false; function.values.len()];
    for gradient in returned.iter().chain(sums).filter_map(|&i| gradients[i]) {
        needed[gradient.index()] = true;
    }
    let mut nodes = vec![false; function.nodes.len()];
    let mut saved = BTreeSet::new();
    for (i, node) in function.nodes.iter().enumerate().rev() {
        let is_forward = i < *n_forward;
        // Stores are always needed.
        let writes = !is_forward && (node.results.is_empty() || matches!(node.op, Op::Call { .. }));
        let wanted: Vec<ValueId> = node.results.iter().copied().filter(|v| needed[v.index()]).collect();
        if wanted.is_empty() && !writes {
            continue;
        }
        let keeps = match recompute {
            // With its operand at hand, a function of elements is a part of the kernels that read it.
            _ if matches!(node.op, Op::Unary(_))
                && needed[node.operands[0].index()]
                && only_multiplied(function, &nodes, &wanted) =>
            {
                false
            }
            // Keys are recomputed: it is cheap, and only the key of all layers is saved.
            _ if matches!(node.op, Op::Random(Random::FoldIn | Random::LayerKey)) => false,
            Recompute::None => true,
            Recompute::Selective => !is_attention(function, node, &softmax),
            Recompute::Full { .. } => false,
            Recompute::KeepAttention => matches!(node.op, Op::Attention(_)),
        };
        if is_forward && keeps && wanted.iter().all(|v| depends[v.index()]) {
            saved.extend(wanted);
            continue;
        }
        nodes[i] = true;
        for operand in &node.operands {
            needed[operand.index()] = true;
        }
    }
    let mut reused = BTreeSet::new();
    for (i, &param) in function.params[..n_params].iter().enumerate() {
        if needed[param.index()] && i < n_carried {
            saved.insert(param);
        } else if needed[param.index()] {
            reused.insert(i);
        }
    }
    Requirements { nodes, saved, reused }
}

/// Whether the nodes that run read values only to multiply them, element by element.
fn only_multiplied(function: &Function, runs: &[bool], values: &[ValueId]) -> bool {
    let readers = function.nodes.iter().zip(runs).filter(|&(_, &runs)| runs).map(|(node, _)| node);
    let mut readers = readers.filter(|node| values.iter().any(|v| node.operands.contains(v)));
    readers.all(|node| matches!(node.op, Op::Binary(Binary::Mul)))
}

/// Whether a node belongs to attention: the operation itself, or a value with the dimension of an explicit softmax.
fn is_attention(function: &Function, node: &Node, softmax: &BTreeSet<DimId>) -> bool {
    let over = |v: &ValueId| function.ty(*v).dims.iter().any(|d| softmax.contains(d));
    matches!(node.op, Op::Attention(_)) || node.results.iter().any(over)
}

/// For each value whether it depends on arguments of the function; a value that does not is as cheap to recompute as to
/// save.
fn depends_on_arguments(function: &Function, n_params: usize) -> Vec<bool> {
    let mut depends = vec![false; function.values.len()];
    for param in &function.params[..n_params] {
        depends[param.index()] = true;
    }
    for node in &function.nodes {
        // An input of the model counts as an argument.
        let read = matches!(node.op, Op::Input(_));
        if read || node.operands.iter().any(|v| depends[v.index()]) {
            node.results.iter().for_each(|v| depends[v.index()] = true);
        }
    }
    depends
}

/// The forward nodes; the function returns the results, then the saved values.
fn forward(
    (space, functions): (&Space, &Arena<FuncId, Function>),
    source: &Function,
    joint: &Joint,
    saved: &BTreeSet<ValueId>,
) -> Result<Function, OpError> {
    let mut b = FunctionBuilder::like(source, space, functions);
    let mut map = ValueMap::new(&joint.function);
    for &param in &joint.function.params[..source.params.len()] {
        map.param(&mut b, param);
    }
    for node in &joint.function.nodes[..joint.n_forward] {
        map.copy(&mut b, node)?;
    }
    let outputs = joint.outputs.iter().map(|o| o.value).chain(saved.iter().copied());
    Ok(b.finish(outputs.map(|v| Output { name: None, value: map[v] })))
}

/// The parameters and results of the backward function, see the module.
struct BackwardSignature<'a> {
    n_params: usize,
    seeds: &'a [(usize, ValueId)],
    sums: &'a [usize],
    reused: &'a [usize],
    returned: &'a [usize],
}

fn backward(
    (space, functions): (&Space, &Arena<FuncId, Function>),
    joint: &Joint,
    signature: &BackwardSignature<'_>,
    required: &Requirements,
) -> Result<Function, OpError> {
    let source = &joint.function;
    let name = format!("{}.backward", source.name);
    let mut b = FunctionBuilder::part_of(name, source, space, functions).in_phase(Phase::Backward);
    let mut map = ValueMap::new(source);
    for &(_, seed) in signature.seeds {
        map.param(&mut b, seed);
    }
    let of_params = signature.sums.iter().map(|&i| source.ty(source.params[i]).clone());
    let sums: Vec<ValueId> = of_params.map(|ty| b.param(ty, None)).collect();
    for &i in signature.reused {
        map.param(&mut b, source.params[i]);
    }
    for &v in &required.saved {
        map.param(&mut b, v);
    }
    let runs = source.nodes.iter().zip(&required.nodes).filter(|&(_, &runs)| runs);
    for (node, _) in runs {
        let known: Vec<Option<ValueId>> = node.results.iter().map(|&v| map.get(v)).collect();
        map.copy(&mut b, node)?;
        // A saved result keeps its saved value.
        for (&v, known) in node.results.iter().zip(known) {
            known.into_iter().for_each(|saved| map.insert(v, saved));
        }
    }
    assert!(signature.n_params <= source.params.len(), "gradients of results follow the other parameters");
    let mut outputs = Vec::new();
    for &i in signature.returned {
        let gradient = joint.gradients[i].map(|v| map[v]);
        outputs.push(or_zeros(&mut b, gradient, source.ty(source.params[i]))?);
    }
    for (&i, &sum) in signature.sums.iter().zip(&sums) {
        outputs.push(match joint.gradients[i].and_then(|v| map.get(v)) {
            Some(gradient) => b.add(sum, gradient)?,
            None => sum,
        });
    }
    Ok(b.finish(outputs.into_iter().map(|value| Output { name: None, value })))
}
