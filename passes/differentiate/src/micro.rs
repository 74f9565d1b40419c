//! Gradient accumulation: `main` runs the forward and the backward pass once for each micro-batch.
//!
//! Inputs become stacks of micro-batches. Values of `main` that depend on inputs only, such as the count of labels, are
//! computed for the whole batch; the rest becomes the function `@micro`, which adds its part of the loss.
//!
//! Each micro-batch has its own key, derived from its number: the masks of dropout depend on the number of
//! micro-batches, as in frameworks that draw per micro-batch.

use std::collections::BTreeSet;

use ithaca_ir::module::{FuncId, Function, Node, Output, ValueId};
use ithaca_ir::ops::structure::stacked;
use ithaca_ir::ops::{Binding, OpError, Random, Scan, ScanOrder, source};
use ithaca_ir::{Arena, DimId, FunctionBuilder, Op, Space, TensorType};
use ithaca_pass::rebuild::ValueMap;

use super::step::{Cx, Optimize, Sweep};
use super::tape::zeros;

/// The name of the function that runs one micro-batch.
pub(super) const NAME: &str = "micro";

/// The split of the batch.
#[derive(Clone, Copy, Debug)]
pub(super) struct Split {
    /// The dimension of micro-batches; in a pipeline, all sequences of the batch.
    pub(super) over: DimId,
    /// The dimension of a micro-batch's sequences.
    pub(super) batch: DimId,
}

/// `@micro`, which is added to `functions`, and `main`, which is returned.
///
/// # Errors
/// `P52` when `main` needs a value of one micro-batch outside `@micro`, or returns more than the loss.
pub(super) fn functions(
    cx: &Cx<'_>,
    space: &Space,
    functions: &mut Arena<FuncId, Function>,
    (loss, split): (ValueId, Split),
    (zero, optimize): (&Sweep, Option<&Optimize>),
) -> Result<Function, OpError> {
    let source = &cx.source.functions[cx.main];
    only_loss(source)?;
    let outside: BTreeSet<ValueId> = source
        .nodes
        .iter()
        .filter(|n| is_whole_batch(cx, n))
        .flat_map(|n| n.results.iter().copied())
        .collect();
    let read = |v: &&ValueId| source.nodes.iter().any(|n| !is_whole_batch(cx, n) && n.operands.contains(v));
    let shared: Vec<ValueId> = outside.iter().filter(read).copied().collect();

    let micro = {
        let mut b = FunctionBuilder::new(NAME, space, functions);
        let mut map = ValueMap::new(source);
        let before = b.param(source.ty(loss).clone(), Some("loss_before"));
        for &v in &shared {
            map.param(&mut b, v);
        }
        for &v in shared.iter().filter(|&&v| is_key(source, v)) {
            // The layers of this function are micro-batches.
            map.insert(v, b.push(Op::Random(Random::LayerKey), &[map[v]])?);
        }
        let map = cx.forward_and_backward(&mut b, map, loss, |n| !is_whole_batch(cx, n))?;
        let sum = b.add(before, map[loss])?;
        b.finish([Output { name: None, value: sum }])
    };
    let micro = functions.push(micro);

    let mut b = FunctionBuilder::like(source, space, functions);
    let mut map = ValueMap::new(source);
    let all = |ty: &TensorType| if ty.has(split.batch) { stacked(ty, split.over) } else { ty.clone() };
    for node in source.nodes.iter().filter(|n| is_whole_batch(cx, n)) {
        let op = match &node.op {
            Op::Random(Random::Key { .. }) => {
                map.insert(node.result(), cx.key(&mut b, node)?);
                continue;
            }
            Op::Input(binding) if source.ty(node.result()).has(split.batch) => {
                Op::Input(view(space, binding, source.ty(node.result()), split)?)
            }
            op => op.clone(),
        };
        copy_whole_batch(&mut b, node, op, &mut map, all)?;
    }
    zero.run(&mut b, &[])?;
    let mut arguments = vec![zeros(&mut b, source.ty(loss))?];
    arguments.extend(shared.iter().map(|&v| map[v]));
    let n = space.size(split.over);
    let scan = Scan { over: split.over, carried: 1, order: ScanOrder::Ascending };
    let results = b.node(
        Op::Call { callee: micro, layers: 0..n, stride: 0, scan: Some(scan), stage: None },
        &arguments,
        &[],
    )?;
    b.name(results[0], source.values[loss].name.as_deref());
    if let Some(optimize) = optimize {
        optimize.run(&mut b)?;
    }
    let name = source.outputs[0].name.clone();
    Ok(b.finish([Output { name, value: results[0] }]))
}

/// Refuses a program that returns values of one micro-batch.
pub(super) fn only_loss(source: &Function) -> Result<(), OpError> {
    match source.outputs.len() {
        1 => Ok(()),
        n => Err(OpError::new(
            "P52",
            format!("`@main` returns {n} values; with micro-batches it returns the loss and nothing else"),
        )),
    }
}

/// Whether a node is computed for the whole batch: its operands depend on inputs only.
pub(super) fn is_whole_batch(cx: &Cx<'_>, node: &Node) -> bool {
    let known = matches!(
        node.op,
        Op::Input(_)
            | Op::Loss(_)
            | Op::Sum
            | Op::Cast { .. }
            | Op::Fill { .. }
            | Op::Scale { .. }
            | Op::Binary(_)
            | Op::Random(Random::Key { .. })
    );
    known && !node.results.iter().any(|&v| cx.activity.is_active(cx.main, v))
}

/// Whether `value` is an initial key.
pub(super) fn is_key(source: &Function, value: ValueId) -> bool {
    let is_key = |n: &Node| matches!(n.op, Op::Random(Random::Key { .. }));
    source.nodes.iter().any(|n| is_key(n) && n.results.contains(&value))
}

/// Copies a node for the whole batch as `op`, with the types of its results mapped by `all`.
///
/// # Errors
/// `P52` when it needs a value of one micro-batch.
pub(super) fn copy_whole_batch(
    b: &mut FunctionBuilder<'_>,
    node: &Node,
    op: Op,
    map: &mut ValueMap<'_>,
    all: impl Fn(&TensorType) -> TensorType,
) -> Result<(), OpError> {
    if node.operands.iter().any(|&v| map.get(v).is_none()) {
        let message = format!("`{}` of `@main` needs a value of one micro-batch", node.op.name());
        return Err(OpError::new("P52", message));
    }
    let declared: Vec<TensorType> = map.declared(&node.results).iter().map(all).collect();
    map.copy_as(b, node, op, &declared)
}

/// The stored sizes of an input of one micro-batch, in a file that has the batch first.
///
/// # Errors
/// `P52` for another input.
pub(super) fn stored(
    space: &Space,
    binding: &Binding,
    ty: &TensorType,
    split: Split,
) -> Result<Vec<u64>, OpError> {
    if !binding.stored.is_empty() || ty.dims.first() != Some(&split.batch) {
        let message = format!("input `{}` is not stored with the batch first", binding.name);
        return Err(OpError::new("P52", message));
    }
    Ok(ty.dims.iter().map(|&d| source::stored_size(space, d)).collect())
}

/// The binding that views the batch of a file as micro-batches.
fn view(space: &Space, binding: &Binding, ty: &TensorType, split: Split) -> Result<Binding, OpError> {
    let n = space.size(split.over);
    let sizes = stored(space, binding, ty, split)?;
    let mut stored = sizes.clone();
    stored[0] *= n;
    let view = std::iter::once(n).chain(sizes).collect();
    Ok(Binding { stored, view, ..binding.clone() })
}
