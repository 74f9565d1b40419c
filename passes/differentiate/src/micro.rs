//! Gradient accumulation: `main` runs the forward and the backward pass once for each part of the batch.
//!
//! Inputs become stacks of micro-batches. What `main` computes of inputs alone, such as the number of labels that count, is
//! computed of the whole batch; the rest becomes the function `@micro`, which adds its part of the loss.
//!
//! A micro-batch draws from a key of its own, which its number is folded into: cut otherwise, a batch is dropped from
//! otherwise, as by frameworks that draw for one micro-batch after another.

use std::collections::BTreeSet;

use ithaca_ir::entity::Entity;
use ithaca_ir::module::{FuncId, Function, Node, Output, ValueId};
use ithaca_ir::ops::structure::stacked;
use ithaca_ir::ops::{Binary, Binding, OpError, Random, Scan, ScanOrder, source};
use ithaca_ir::{Arena, DimId, FunctionBuilder, Op, Space, TensorType};

use super::joint::zeros;
use super::step::{Cx, Optimize, Sweep};

/// The name of the function that runs one micro-batch.
pub(super) const NAME: &str = "micro";

/// How the batch is cut.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cut {
    /// Micro-batches; in a pipeline, sequences of all of them.
    pub(super) over: DimId,
    /// Sequences of one.
    pub(super) batch: DimId,
}

/// `@micro` and `main`, in this order; `functions` are those that `main` calls.
///
/// # Errors
/// `P52` when `main` computes of inputs what cannot be computed of stacks of them, or returns more than the loss.
pub(super) fn functions(
    cx: &Cx<'_>,
    space: &Space,
    functions: &mut Arena<FuncId, Function>,
    (loss, cut): (ValueId, Cut),
    (zero, optimize): (&Sweep, Option<&Optimize>),
) -> Result<Function, OpError> {
    let source = &cx.source.functions[cx.main];
    only_loss(source)?;
    let outside: BTreeSet<ValueId> =
        source.nodes.iter().filter(|n| is_outside(cx, n)).flat_map(|n| n.results.iter().copied()).collect();
    let read = |v: &&ValueId| source.nodes.iter().any(|n| !is_outside(cx, n) && n.operands.contains(v));
    let shared: Vec<ValueId> = outside.iter().filter(read).copied().collect();

    let micro = {
        let mut b = FunctionBuilder::new(NAME, space, functions);
        let mut map = vec![None; source.values.len()];
        let before = b.param(source.ty(loss).clone(), Some("loss_before"));
        for &v in &shared {
            map[v.index()] = Some(b.param(source.ty(v).clone(), source.values[v].name.as_deref()));
        }
        for &v in shared.iter().filter(|&&v| is_key(source, v)) {
            // Micro-batches are the layers of this function.
            let given = map[v.index()].expect("every shared value is a parameter");
            map[v.index()] = Some(b.push(Op::Random(Random::LayerKey), &[given])?);
        }
        cx.forward_and_backward(&mut b, &mut map, loss, |n| !is_outside(cx, n))?;
        let part = map[loss.index()].expect("the loss was computed");
        let sum = b.push(Op::Binary(Binary::Add), &[before, part])?;
        b.finish([Output { name: None, value: sum }])
    };
    let micro = functions.push(micro);

    let mut b = FunctionBuilder::like(source, space, functions);
    let mut map: Vec<Option<ValueId>> = vec![None; source.values.len()];
    for node in source.nodes.iter().filter(|n| is_outside(cx, n)) {
        match node.op {
            Op::Random(Random::Key { .. }) => map[node.result().index()] = Some(cx.key(&mut b, node)?),
            _ => whole(&mut b, source, node, cut, &mut map)?,
        }
    }
    zero.run(&mut b, &[])?;
    let mut arguments = vec![zeros(&mut b, source.ty(loss))?];
    arguments.extend(
        shared.iter().map(|v| map[v.index()].expect("what micro-batches read is computed before them")),
    );
    let n = space.size(cut.over);
    let scan = Scan { over: cut.over, carried: 1, order: ScanOrder::Ascending };
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

/// Refuses a program that returns what is of one micro-batch.
pub(super) fn only_loss(source: &Function) -> Result<(), OpError> {
    match source.outputs.len() {
        1 => Ok(()),
        n => Err(OpError::new(
            "P52",
            format!("`@main` returns {n} values; with micro-batches it returns the loss and nothing else"),
        )),
    }
}

/// Whether a node is computed of the whole batch: what depends on inputs only.
pub(super) fn is_outside(cx: &Cx<'_>, node: &Node) -> bool {
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

/// Whether keys begin with `value`.
pub(super) fn is_key(source: &Function, value: ValueId) -> bool {
    let is_key = |n: &Node| matches!(n.op, Op::Random(Random::Key { .. }));
    source.nodes.iter().any(|n| is_key(n) && n.results.contains(&value))
}

/// A node of the whole batch: its values are stacks where they have a batch.
fn whole(
    b: &mut FunctionBuilder<'_>,
    source: &Function,
    node: &Node,
    cut: Cut,
    map: &mut [Option<ValueId>],
) -> Result<(), OpError> {
    let operands: Vec<ValueId> = node
        .operands
        .iter()
        .map(|v| {
            map[v.index()].ok_or_else(|| {
                let message =
                    format!("`{}` of `@main` needs what is computed of one micro-batch", node.op.name());
                OpError::new("P52", message)
            })
        })
        .collect::<Result<_, _>>()?;
    let declared: Vec<TensorType> = node
        .results
        .iter()
        .map(|&v| match source.ty(v) {
            ty if ty.has(cut.batch) => stacked(ty, cut.over),
            ty => ty.clone(),
        })
        .collect();
    let op = match &node.op {
        Op::Input(binding) if source.ty(node.result()).has(cut.batch) => {
            Op::Input(view(b.space(), binding, source.ty(node.result()), cut)?)
        }
        op => op.clone(),
    };
    let results = b.node(op, &operands, &declared)?;
    for (&old, &new) in node.results.iter().zip(&results) {
        b.name(new, source.values[old].name.as_deref());
        map[old.index()] = Some(new);
    }
    Ok(())
}

/// The binding that sees the batch of a file as micro-batches.
fn view(space: &Space, binding: &Binding, ty: &TensorType, cut: Cut) -> Result<Binding, OpError> {
    if !binding.stored.is_empty() || ty.dims.first() != Some(&cut.batch) {
        let message = format!("input `{}` is not stored with the batch first", binding.name);
        return Err(OpError::new("P52", message));
    }
    let n = space.size(cut.over);
    let sizes: Vec<u64> = ty.dims.iter().map(|&d| source::stored_size(space, d)).collect();
    let mut stored = sizes.clone();
    stored[0] *= n;
    let view = std::iter::once(n).chain(sizes).collect();
    Ok(Binding { stored, view, ..binding.clone() })
}
