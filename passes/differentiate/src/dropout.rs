//! Dropout of a program that is to be differentiated: where its keys begin, and how to leave it out.

use ithaca_ir::entity::Entity;
use ithaca_ir::module::{FuncId, Function, Node, Output, ValueId};
use ithaca_ir::ops::{OpError, Random};
use ithaca_ir::{FunctionBuilder, Module, Op};
use ithaca_pass::rebuild::copy_node;

/// Refuses keys that begin in another function than `main`, where the number of the step cannot be folded into them.
///
/// # Errors
/// `P51`.
pub(super) fn check_keys(module: &Module, main: FuncId) -> Result<(), OpError> {
    let begins = |n: &Node| matches!(n.op, Op::Random(Random::Key { .. }));
    let others = module.functions.iter().filter(|&(id, _)| id != main);
    match others.map(|(_, f)| f).find(|f| f.nodes.iter().any(begins)) {
        None => Ok(()),
        Some(function) => Err(OpError::new(
            "P51",
            format!(
                "a `key` stands in `@{}`; in a program to differentiate keys begin in `@main`",
                function.name
            ),
        )),
    }
}

/// Whether a program drops anything.
pub(super) fn drops(module: &Module) -> bool {
    let mut nodes = module.functions.values().flat_map(|function| &function.nodes);
    nodes.any(|node| match &node.op {
        Op::Random(Random::Dropout { .. }) => true,
        Op::Attention(attention) => attention.dropout.is_some(),
        _ => false,
    })
}

/// The same program, which drops nothing. Keys stay, and nothing is drawn from them.
///
/// # Errors
/// None on a program that verifies.
pub(super) fn without(module: &Module) -> Result<Module, OpError> {
    let mut without = module.emptied(module.level);
    for (_, function) in module.functions.iter() {
        let function = of_function(&without, function)?;
        without.functions.push(function);
    }
    Ok(without)
}

fn of_function(module: &Module, function: &Function) -> Result<Function, OpError> {
    let mut b = FunctionBuilder::like(function, &module.space, &module.functions);
    let mut map: Vec<ValueId> = Vec::with_capacity(function.values.len());
    for &param in &function.params {
        map.push(b.param(function.ty(param).clone(), function.values[param].name.as_deref()));
    }
    for node in &function.nodes {
        match &node.op {
            Op::Random(Random::Dropout { .. }) => map.push(map[node.operands[0].index()]),
            // What nobody reads any more has the place of its key.
            Op::Random(Random::DropoutMask { .. }) if only_drops(function, node.result()) => {
                map.push(map[node.operands[0].index()]);
            }
            Op::Attention(attention) if attention.dropout.is_some() => {
                let key = attention.key_operand(node.operands.len());
                let mut attention = attention.clone();
                attention.dropout = None;
                let operands = node.operands.iter().enumerate().filter(|&(i, _)| Some(i) != key);
                let operands: Vec<ValueId> = operands.map(|(_, v)| map[v.index()]).collect();
                let results = b.node(Op::Attention(attention), &operands, &[])?;
                for (&old, &new) in node.results.iter().zip(&results) {
                    b.name(new, function.values[old].name.as_deref());
                    map.push(new);
                }
            }
            _ => copy_node(&mut b, function, node, &mut map)?,
        }
    }
    let output = |o: &Output| Output { name: o.name.clone(), value: map[o.value.index()] };
    let outputs: Vec<Output> = function.outputs.iter().map(output).collect();
    Ok(b.finish(outputs))
}

/// Whether a mask is for `dropout` alone.
fn only_drops(function: &Function, mask: ValueId) -> bool {
    let drops = |n: &Node| matches!(n.op, Op::Random(Random::Dropout { .. }));
    let mut readers = function.nodes.iter().filter(|n| n.operands.contains(&mask));
    readers.all(drops) && function.outputs.iter().all(|o| o.value != mask)
}
