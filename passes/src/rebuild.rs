//! Copies nodes from one function to another while it is rebuilt.

use ithaca_ir::entity::Entity;
use ithaca_ir::module::{Function, Node, ValueId};
use ithaca_ir::ops::OpError;
use ithaca_ir::{FunctionBuilder, TensorType};

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
