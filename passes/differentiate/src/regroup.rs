//! The two halves of a group of layers. The forward half saves no value inside the group. The backward half runs the
//! layers again, saves the values that their gradients need, and then runs the backward pass.
//!
//! ```text
//! @block.group (%x):
//!   %y = call %x {callee=@block, layers=0..4, stride=4}
//!   return %y, %x
//! @block.group.backward (%dy, %x):
//!   %y, %q, … = call %x {callee=@block.again.backward, layers=0..4, stride=4, over=l, carried=1}
//!   %dx = call %dy, %q, … {callee=@block.backward, layers=0..4, stride=4, over=l, carried=1, order=descending}
//!   return %dx
//! ```

use ithaca_ir::entity::Entity;
use ithaca_ir::module::{FuncId, Function, Output};
use ithaca_ir::ops::OpError;
use ithaca_ir::{Arena, FunctionBuilder, Op, Space};
use ithaca_pass::rebuild::ValueMap;

use super::split::Halves;
use super::step::Cx;

/// The forward half of a group: as in `halves`, but its layers save nothing.
///
/// # Errors
/// None on a program that verifies.
pub(super) fn forward(
    cx: &Cx<'_>,
    space: &Space,
    functions: &Arena<FuncId, Function>,
    halves: &Halves,
) -> Result<Function, OpError> {
    let source = cx.function();
    let mut b = FunctionBuilder::like(source, space, functions);
    let mut map = ValueMap::with_params(&mut b, source);
    for node in &source.nodes {
        let mut op = node.op.clone();
        if let Op::Call { callee, .. } = &mut op {
            let made = cx.functions[callee.index()].as_ref();
            *callee =
                made.and_then(|f| f.plain).expect("members of a group have a version that saves nothing");
        }
        let results = b.node(op, &map.operands(node), &[])?;
        node.results.iter().zip(&results).for_each(|(&old, &new)| map.insert(old, new));
    }
    let results = source.outputs.iter().map(|o| map[o.value]);
    // The saved values of a group are its arguments, which have the same indices in both functions.
    let saved = halves.forward.outputs[halves.n_results..].iter().map(|o| o.value);
    assert!(
        saved.clone().all(|v| v.index() < source.params.len()),
        "a recomputed group saves its arguments only"
    );
    let outputs: Vec<Output> = results.chain(saved).map(|value| Output { name: None, value }).collect();
    Ok(b.finish(outputs))
}
