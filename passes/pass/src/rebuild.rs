//! Rebuilds modules node by node: what a pass does not touch is copied.

use ithaca_ir::entity::Entity;
use ithaca_ir::module::{Function, Node, Output, ValueId};
use ithaca_ir::ops::OpError;
use ithaca_ir::{Diagnostic, Diagnostics, FunctionBuilder, Module, TensorType};

/// `module` with every node that `rewrite` replaces replaced; the level stays.
///
/// `rewrite` gets the function under construction, the old function, one of its nodes and that node's operands in the
/// new function. It answers with the values that stand for the node's results, which it may have added to the builder,
/// or with none to keep the node.
///
/// # Errors
/// The invariant that a node breaks: one that `rewrite` added, or a later one that does not fit it.
pub fn rebuild(
    module: &Module,
    mut rewrite: impl FnMut(
        &mut FunctionBuilder<'_>,
        &Function,
        &Node,
        &[ValueId],
    ) -> Result<Option<Vec<ValueId>>, OpError>,
) -> Result<Module, Diagnostics> {
    let broken = |error: OpError| vec![Diagnostic::new(error.code, error.message)];
    let mut rebuilt = module.emptied(module.level);
    for function in module.functions.values() {
        let mut b = FunctionBuilder::like(function, &rebuilt.space, &rebuilt.functions);
        let mut map: Vec<ValueId> = Vec::with_capacity(function.values.len());
        for &param in &function.params {
            map.push(b.param(function.ty(param).clone(), function.values[param].name.as_deref()));
        }
        for node in &function.nodes {
            let operands: Vec<ValueId> = node.operands.iter().map(|v| map[v.index()]).collect();
            match rewrite(&mut b, function, node, &operands).map_err(broken)? {
                None => copy_node(&mut b, function, node, &mut map).map_err(broken)?,
                Some(values) => {
                    assert_eq!(values.len(), node.results.len(), "one value stands for each result");
                    for (&old, &new) in node.results.iter().zip(&values) {
                        b.name(new, function.values[old].name.as_deref());
                    }
                    map.extend(values);
                }
            }
        }
        let output = |o: &Output| Output { name: o.name.clone(), value: map[o.value.index()] };
        let outputs: Vec<Output> = function.outputs.iter().map(output).collect();
        let function = b.finish(outputs);
        rebuilt.functions.push(function);
    }
    Ok(rebuilt)
}

/// Adds `node` of `function` unchanged, its operands renamed by `map`, and appends its results to `map`.
///
/// # Errors
/// The invariant that the node breaks with its new operands.
pub fn copy_node(
    b: &mut FunctionBuilder<'_>,
    function: &Function,
    node: &Node,
    map: &mut Vec<ValueId>,
) -> Result<(), OpError> {
    let operands: Vec<ValueId> = node.operands.iter().map(|v| map[v.index()]).collect();
    let declared: Vec<TensorType> = node.results.iter().map(|&v| function.ty(v).clone()).collect();
    let results = b.node(node.op.clone(), &operands, &declared)?;
    for (&old, &new) in node.results.iter().zip(&results) {
        b.name(new, function.values[old].name.as_deref());
        map.push(new);
    }
    Ok(())
}
