//! The two halves of a group of layers: forward, keeping nothing inside; backward, running the layers again with all that
//! their gradients need, and then backward.
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
use ithaca_ir::module::{FuncId, Function, Output, ValueId};
use ithaca_ir::ops::OpError;
use ithaca_ir::{Arena, FunctionBuilder, Op, Space};

use super::joint::Joint;
use super::split::Halves;
use super::step::{Cx, Run};

/// The joint function of the group that `cx` has in place of `main`.
///
/// # Errors
/// None on a program that verifies.
pub(super) fn joint(
    cx: &Cx<'_>,
    space: &Space,
    functions: &Arena<FuncId, Function>,
) -> Result<Joint, OpError> {
    let source = cx.function();
    let mut b = FunctionBuilder::like(source, space, functions);
    let mut known = vec![None; source.values.len()];
    for &param in &source.params {
        known[param.index()] = Some(b.param(source.ty(param).clone(), source.values[param].name.as_deref()));
    }
    let mut seeds = Vec::new();
    for (i, output) in source.outputs.iter().enumerate() {
        if cx.activity.is_active(cx.main, output.value) {
            seeds.push((i, b.param(source.ty(output.value).clone(), None)));
        }
    }
    let mut run = Run::new(cx, known);
    for i in 0..source.nodes.len() {
        cx.forward(&mut b, &mut run, i, None)?;
    }
    let n_forward = b.function().nodes.len();
    for &(i, seed) in &seeds {
        run.tape.add(&mut b, source.outputs[i].value, seed)?;
    }
    for i in (0..source.nodes.len()).rev() {
        cx.backward(&mut b, &mut run, i, None)?;
    }
    let gradients = source.params.iter().map(|&p| run.tape.of(p)).collect();
    let map = run.map.into_iter().map(|v| v.expect("every node of a group ran")).collect();
    Ok(Joint { function: b.finish([]), map, n_forward, seeds, gradients })
}

/// The forward half of `source`, a group: as `halves` have it, but that layers keep nothing.
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
    let mut map: Vec<Option<ValueId>> = vec![None; source.values.len()];
    for &param in &source.params {
        map[param.index()] = Some(b.param(source.ty(param).clone(), source.values[param].name.as_deref()));
    }
    for node in &source.nodes {
        let mut op = node.op.clone();
        if let Op::Call { callee, .. } = &mut op {
            let made = cx.functions[callee.index()].as_ref();
            *callee = made.and_then(|f| f.plain).expect("what runs in groups is there without what it keeps");
        }
        let known = |v: &ValueId| map[v.index()].expect("what a node reads was put before it");
        let operands: Vec<ValueId> = node.operands.iter().map(known).collect();
        let results = b.node(op, &operands, &[])?;
        for (&old, &new) in node.results.iter().zip(&results) {
            map[old.index()] = Some(new);
        }
    }
    let results = source.outputs.iter().map(|o| map[o.value.index()].expect("every node ran"));
    // What is kept of a group are arguments, which have the same numbers in both.
    let kept = halves.forward.outputs[halves.n_results..].iter().map(|o| o.value);
    debug_assert!(
        kept.clone().all(|v| v.index() < source.params.len()),
        "a group that is computed again keeps its arguments alone"
    );
    let outputs: Vec<Output> = results.chain(kept).map(|value| Output { name: None, value }).collect();
    Ok(b.finish(outputs))
}
