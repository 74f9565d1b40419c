//! Saved values that `keep_both_sides` doubled and that have one layout after all: functions return them once again, and take them
//! once.

use ithaca_ir::entity::Entity;
use ithaca_ir::module::{Function, Node, ValueId};
use ithaca_ir::ops::{Op, OpError};
use ithaca_ir::{FuncId, Module};
use ithaca_pass::rebuild::Copy;

/// For each result, or parameter, of a function the index of an earlier one with the same value, if it has one.
type Same = Vec<Option<usize>>;

/// The same program, in which no function returns a value twice, where it can be helped: results that are handed on from layer to
/// layer have places of their own.
///
/// # Errors
/// None on a program that verifies.
pub(super) fn join_alike(module: Module) -> Result<Module, OpError> {
    let results: Vec<Same> = module.functions.iter().map(|(id, _)| same_results(&module, id)).collect();
    if results.iter().flatten().all(Option::is_none) {
        return Ok(module);
    }
    let firsts: Vec<Vec<ValueId>> = module.functions.values().map(|f| firsts(f, &results)).collect();
    let params: Vec<Same> =
        module.functions.iter().map(|(id, _)| same_params(&module, id, &firsts)).collect();
    let mut joined = module.emptied(module.level);
    for (id, function) in module.functions.iter() {
        let function = without(&joined, function, &firsts[id.index()], (&results, &params), id)?;
        joined.functions.push(function);
    }
    Ok(joined)
}

/// The calls of a function, each with its caller.
fn calls(module: &Module, callee: FuncId) -> impl Iterator<Item = (FuncId, &Node)> {
    let is_call = move |node: &&Node| matches!(node.op, Op::Call { callee: of, .. } if of == callee);
    module
        .functions
        .iter()
        .flat_map(move |(id, f)| f.nodes.iter().filter(is_call).map(move |node| (id, node)))
}

/// The number of arguments and results that a call hands on from layer to layer.
fn carried(call: &Node) -> usize {
    match &call.op {
        Op::Call { scan: Some(scan), .. } => scan.carried,
        Op::Call { layers, .. } if layers.end - layers.start == 1 => 0,
        _ => call.results.len(),
    }
}

fn same_results(module: &Module, id: FuncId) -> Same {
    let outputs = &module.functions[id].outputs;
    // What a program returns has names.
    let free = calls(module, id).map(|(_, call)| carried(call)).max().unwrap_or(outputs.len());
    let same = |i: usize| (free..i).find(|&before| outputs[before].value == outputs[i].value);
    (0..outputs.len()).map(same).collect()
}

/// For each value of a function itself, or the result of the same call that is the same.
fn firsts(function: &Function, results: &[Same]) -> Vec<ValueId> {
    let mut firsts: Vec<ValueId> = (0..function.values.len()).map(ValueId::new).collect();
    for node in &function.nodes {
        let Op::Call { callee, .. } = node.op else { continue };
        for (&result, same) in node.results.iter().zip(&results[callee.index()]) {
            if let Some(before) = *same {
                firsts[result.index()] = node.results[before];
            }
        }
    }
    firsts
}

/// Parameters for which every call has such a result twice.
fn same_params(module: &Module, id: FuncId, firsts: &[Vec<ValueId>]) -> Same {
    let function = &module.functions[id];
    let ty = |i: usize| function.ty(function.params[i]);
    let calls: Vec<(FuncId, &Node)> = calls(module, id).collect();
    let is_same = |before: usize, i: usize| {
        // A parameter may take a stack apart, and another the whole of it.
        ty(before) == ty(i)
            && !calls.is_empty()
            && calls.iter().all(|(caller, call)| {
                let first = |i: usize| firsts[caller.index()][call.operands[i].index()];
                let doubled = first(i) != call.operands[i] || first(before) != call.operands[before];
                before >= carried(call) && doubled && first(before) == first(i)
            })
    };
    (0..function.params.len()).map(|i| (0..i).find(|&before| is_same(before, i))).collect()
}

/// The function without its second parameters and results, and those of the functions that it calls.
fn without(
    joined: &Module,
    function: &Function,
    firsts: &[ValueId],
    (results, params): (&[Same], &[Same]),
    id: FuncId,
) -> Result<Function, OpError> {
    fn kept<'a, T>(all: &'a [T], same: &'a Same) -> impl Iterator<Item = &'a T> {
        all.iter().zip(same).filter(|(_, same)| same.is_none()).map(|(one, _)| one)
    }
    let mut copy =
        Copy::into(function, ithaca_ir::FunctionBuilder::like(function, &joined.space, &joined.functions));
    for (i, &param) in function.params.iter().enumerate() {
        match params[id.index()][i] {
            None => copy.param(param),
            Some(before) => copy.values.insert(param, copy.values[function.params[before]]),
        }
    }
    for node in &function.nodes {
        let Op::Call { callee, .. } = node.op else {
            copy.node(node)?;
            continue;
        };
        let operands: Vec<ValueId> =
            kept(&node.operands, &params[callee.index()]).map(|&v| copy.values[firsts[v.index()]]).collect();
        let own: Vec<ValueId> = kept(&node.results, &results[callee.index()]).copied().collect();
        copy.node_as(node.op.clone(), &operands, &own)?;
        for &result in &node.results {
            copy.values.insert(result, copy.values[firsts[result.index()]]);
        }
    }
    let mut outputs = copy.values.outputs();
    let mut same = results[id.index()].iter();
    outputs.retain(|_| same.next().is_some_and(Option::is_none));
    Ok(copy.b.finish(outputs))
}
