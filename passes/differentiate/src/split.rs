//! What is kept from the forward pass and what is computed again: one joint function becomes two.
//!
//! The forward function returns what it returned, and behind it what is kept. The backward function takes
//!
//! 1. the gradient of each active result,
//! 2. where layers hand results on: for each active argument that is the same for all layers, the sum of its gradients so
//!    far,
//! 3. the arguments of the function that it reads again,
//! 4. what was kept,
//!
//! and returns the gradients of 1 and 2 one layer earlier; where nothing is handed on, those of all active arguments.

use std::collections::BTreeSet;

use ithaca_ir::entity::Entity;
use ithaca_ir::module::{FuncId, Function, Node, Output, ValueId};
use ithaca_ir::ops::{Binary, OpError, Random};
use ithaca_ir::phase::Phase;
use ithaca_ir::{Arena, DimId, FunctionBuilder, Op, Space};

use super::active::Activity;
use super::joint::{Joint, copy_node, zeros};
use super::options::Recompute;

/// A function's forward and backward half, and how the backward half is called.
pub(super) struct Halves {
    /// The forward function: results, then what is kept.
    pub(super) forward: Function,
    /// The backward function.
    pub(super) backward: Function,
    /// Results of the function as it was.
    pub(super) n_results: usize,
    /// Results whose gradients the backward function takes.
    pub(super) seeds: Vec<usize>,
    /// Arguments that are the same for all layers and whose gradients are summed.
    pub(super) sums: Vec<usize>,
    /// Arguments that are passed again.
    pub(super) again: Vec<usize>,
    /// Arguments whose gradients are returned, in order.
    pub(super) gives: Vec<usize>,
}

/// Whether a function runs over several layers somewhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Runs {
    /// One layer at a time; every argument is still there when its gradient is computed.
    Once,
    /// Results are handed on to the next layer, in place of the arguments of the same number.
    Looped,
}

/// The halves of `source`.
///
/// # Errors
/// `P51` when a looped function hands on what has a gradient in place of what has none.
pub(super) fn split(
    (space, functions): (&Space, &Arena<FuncId, Function>),
    id: FuncId,
    source: &Function,
    joint: &Joint,
    activity: &Activity,
    (runs, recompute): (Runs, Recompute),
) -> Result<Halves, OpError> {
    let n_results = source.outputs.len();
    let n_carried = match runs {
        Runs::Once => 0,
        Runs::Looped => n_results,
    };
    let active = |i: usize| activity.is_active(id, source.params[i]);
    let seeds: Vec<usize> = joint.seeds.iter().map(|&(i, _)| i).collect();
    let carried: Vec<usize> = (0..n_carried).filter(|&i| active(i)).collect();
    if runs == Runs::Looped && carried != seeds {
        let message =
            format!("`@{}` hands on results that have gradients to arguments that have none", source.name);
        return Err(OpError::new("P51", message));
    }
    let sums: Vec<usize> = match runs {
        Runs::Once => Vec::new(),
        Runs::Looped => (n_carried..source.params.len()).filter(|&i| active(i)).collect(),
    };
    let gives: Vec<usize> = match runs {
        Runs::Once => (0..source.params.len()).filter(|&i| active(i)).collect(),
        Runs::Looped => carried,
    };
    let needs = needs(joint, source.params.len(), n_carried, recompute, &gives, &sums);
    let forward = forward((space, functions), source, joint, &needs.kept)?;
    let again: Vec<usize> = needs.again.iter().copied().collect();
    let halves = Shape {
        n_params: source.params.len(),
        seeds: &joint.seeds,
        sums: &sums,
        again: &again,
        gives: &gives,
    };
    let backward = backward((space, functions), joint, &halves, &needs)?;
    Ok(Halves { forward, backward, n_results, seeds, sums, again, gives })
}

/// What the backward function needs.
struct Needs {
    /// Nodes of the joint function that it runs.
    nodes: Vec<bool>,
    /// Values of the forward pass that are kept, ascending.
    kept: BTreeSet<ValueId>,
    /// Parameters that are passed again.
    again: BTreeSet<usize>,
}

fn needs(
    joint: &Joint,
    n_params: usize,
    n_carried: usize,
    recompute: Recompute,
    gives: &[usize],
    sums: &[usize],
) -> Needs {
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
    for gradient in gives.iter().chain(sums).filter_map(|&i| gradients[i]) {
        needed[gradient.index()] = true;
    }
    let mut nodes = vec![false; function.nodes.len()];
    let mut kept = BTreeSet::new();
    for (i, node) in function.nodes.iter().enumerate().rev() {
        let is_forward = i < *n_forward;
        // What is written is what the function is for.
        let writes = !is_forward && (node.results.is_empty() || matches!(node.op, Op::Call { .. }));
        let wanted: Vec<ValueId> = node.results.iter().copied().filter(|v| needed[v.index()]).collect();
        if wanted.is_empty() && !writes {
            continue;
        }
        let keeps = match recompute {
            // A key is as cheap to make again, from the key of all layers, which is kept once.
            _ if matches!(node.op, Op::Random(Random::FoldIn | Random::LayerKey)) => false,
            Recompute::None => true,
            Recompute::Selective => !is_attention(function, node, &softmax),
            Recompute::Full { .. } => false,
            Recompute::KeepAttention => matches!(node.op, Op::Attention(_)),
        };
        if is_forward && keeps && wanted.iter().all(|v| depends[v.index()]) {
            kept.extend(wanted);
            continue;
        }
        nodes[i] = true;
        for operand in &node.operands {
            needed[operand.index()] = true;
        }
    }
    let mut again = BTreeSet::new();
    for (i, &param) in function.params[..n_params].iter().enumerate() {
        match needed[param.index()] {
            true if i < n_carried => drop(kept.insert(param)),
            true => drop(again.insert(i)),
            false => {}
        }
    }
    Needs { nodes, kept, again }
}

/// Whether a node is attention: one operation, or what has the dimension that an explicit softmax goes over.
fn is_attention(function: &Function, node: &Node, softmax: &BTreeSet<DimId>) -> bool {
    let over = |v: &ValueId| function.ty(*v).dims.iter().any(|d| softmax.contains(d));
    matches!(node.op, Op::Attention(_)) || node.results.iter().any(over)
}

/// For each value whether it depends on arguments of the function; what does not is as cheap to make again as to keep.
fn depends_on_arguments(function: &Function, n_params: usize) -> Vec<bool> {
    let mut depends = vec![false; function.values.len()];
    for param in &function.params[..n_params] {
        depends[param.index()] = true;
    }
    for node in &function.nodes {
        // Inputs of the model are arguments by another name.
        let read = matches!(node.op, Op::Input(_));
        if read || node.operands.iter().any(|v| depends[v.index()]) {
            node.results.iter().for_each(|v| depends[v.index()] = true);
        }
    }
    depends
}

/// The forward nodes, with what is kept behind the results.
fn forward(
    (space, functions): (&Space, &Arena<FuncId, Function>),
    source: &Function,
    joint: &Joint,
    kept: &BTreeSet<ValueId>,
) -> Result<Function, OpError> {
    let mut b = FunctionBuilder::like(source, space, functions);
    let mut map: Vec<Option<ValueId>> = vec![None; joint.function.values.len()];
    for &param in &joint.function.params[..source.params.len()] {
        let value = &joint.function.values[param];
        map[param.index()] = Some(b.param(value.ty.clone(), value.name.as_deref()));
    }
    for node in &joint.function.nodes[..joint.n_forward] {
        copy_node(&mut b, &joint.function, node, &mut map)?;
    }
    let results = source.outputs.iter().map(|o| joint.map[o.value.index()]);
    let outputs: Vec<Output> = results
        .chain(kept.iter().copied())
        .map(|v| Output {
            name: None,
            value: map[v.index()].expect("a forward value is in the forward function"),
        })
        .collect();
    Ok(b.finish(outputs))
}

/// How the backward function is called: see the module.
struct Shape<'a> {
    n_params: usize,
    seeds: &'a [(usize, ValueId)],
    sums: &'a [usize],
    again: &'a [usize],
    gives: &'a [usize],
}

fn backward(
    (space, functions): (&Space, &Arena<FuncId, Function>),
    joint: &Joint,
    shape: &Shape<'_>,
    needs: &Needs,
) -> Result<Function, OpError> {
    let source = &joint.function;
    let name = format!("{}.backward", source.name);
    let mut b = FunctionBuilder::part_of(name, source, space, functions).in_phase(Phase::Backward);
    let mut map: Vec<Option<ValueId>> = vec![None; source.values.len()];
    let param = |b: &mut FunctionBuilder<'_>, v: ValueId| {
        b.param(source.ty(v).clone(), source.values[v].name.as_deref())
    };
    for &(_, seed) in shape.seeds {
        map[seed.index()] = Some(param(&mut b, seed));
    }
    let mut sums = Vec::new();
    for &i in shape.sums {
        sums.push(b.param(source.ty(source.params[i]).clone(), None));
    }
    for &i in shape.again {
        let v = source.params[i];
        map[v.index()] = Some(param(&mut b, v));
    }
    for &v in &needs.kept {
        map[v.index()] = Some(param(&mut b, v));
    }
    for i in 0..source.nodes.len() {
        if needs.nodes[i] {
            run(&mut b, source, i, &needs.kept, &mut map)?;
        }
    }
    debug_assert!(
        shape.n_params <= source.params.len(),
        "gradients of results are parameters behind the others"
    );
    let mut outputs = Vec::new();
    for &i in shape.gives {
        outputs.push(match joint.gradients[i] {
            Some(v) => map[v.index()].expect("a gradient that is returned is computed"),
            None => zeros(&mut b, source.ty(source.params[i]))?,
        });
    }
    for (&i, &sum) in shape.sums.iter().zip(&sums) {
        outputs.push(match joint.gradients[i].and_then(|v| map[v.index()]) {
            Some(gradient) => b.push(Op::Binary(Binary::Add), &[sum, gradient])?,
            None => sum,
        });
    }
    Ok(b.finish(outputs.into_iter().map(|value| Output { name: None, value })))
}

/// Copies a node; what of its results was kept stays what was kept.
fn run(
    b: &mut FunctionBuilder<'_>,
    source: &Function,
    i: usize,
    kept: &BTreeSet<ValueId>,
    map: &mut [Option<ValueId>],
) -> Result<(), OpError> {
    let node = &source.nodes[i];
    let before: Vec<Option<ValueId>> = node.results.iter().map(|v| map[v.index()]).collect();
    copy_node(b, source, node, map)?;
    for (&v, before) in node.results.iter().zip(before) {
        if kept.contains(&v) {
            map[v.index()] = before;
        }
    }
    Ok(())
}
