//! Gradient accumulation: `main` runs the forward and the backward pass once for each micro-batch.
//!
//! Values of `main` that depend on inputs only, such as the count of labels, are computed for the whole batch; the rest
//! becomes the function `@micro`, which adds its part of the loss. It runs in a loop over stacks of inputs; the last
//! micro-batch, which completes gradients (`last`), runs after it.
//!
//! Each micro-batch has its own key, derived from its number: the masks of dropout depend on the number of
//! micro-batches, as in frameworks that draw per micro-batch.

use std::collections::BTreeSet;

use ithaca_ir::diagnostic::counted;
use ithaca_ir::entity::Entity;
use ithaca_ir::module::{FuncId, Function, Layers, Node, Output, ValueId};
use ithaca_ir::ops::experts::{Deal, Experts, bounded_slots};
use ithaca_ir::ops::structure::stacked;
use ithaca_ir::ops::{Binding, OpError, Random, Scan, ScanOrder, source};
use ithaca_ir::{Arena, Dim, DimId, FunctionBuilder, Module, Op, Space, TensorType};
use ithaca_pass::rebuild::ValueMap;
use ithaca_pass::roles::Roles;

use super::last::{LastPass, MICRO};
use super::step::{Cx, StepParts};
use super::tape::zeros;

/// The split of the batch.
#[derive(Clone, Copy, Debug)]
pub(super) struct Split {
    /// The dimension of all sequences of the batch.
    pub(super) all: DimId,
    /// The dimension of a micro-batch's sequences.
    pub(super) batch: DimId,
    /// The dimension of the micro-batches before the last; `None` if `main` runs them one by one.
    pub(super) earlier: Option<DimId>,
}

/// Why a batch is not cut into `n` micro-batches where each of some ranks has its part of the batch, with numbers that cut it.
pub fn undivided(batch: u64, n: u64, ranks: u64) -> OpError {
    let of_ranks = if ranks == 1 { String::new() } else { format!(" on {ranks} data-parallel ranks") };
    let message =
        format!("a batch of {} does not divide into {n} micro-batches{of_ranks}", counted(batch, "sequence"));
    let share = batch / ranks;
    let numbers = (1..=share.min(64)).filter(|&n| share.is_multiple_of(n));
    let numbers: Vec<String> = numbers.map(|n| n.to_string()).collect();
    let larger = batch.next_multiple_of(n.max(1).saturating_mul(ranks));
    OpError::new("P52", message).help(format!(
        "numbers of micro-batches that divide it: {}; {n} divide a batch of {larger}",
        numbers.join(", ")
    ))
}

/// Cuts the batch into micro-batches.
pub(super) fn cut(
    stepped: &mut Module,
    module: &Module,
    n: u64,
    is_pipeline: bool,
) -> Result<Option<Split>, OpError> {
    if n == 1 && !is_pipeline {
        return Ok(None);
    }
    let batches = Roles::of(module).batches;
    let [batch] = batches.iter().copied().collect::<Vec<DimId>>()[..] else {
        let message = format!(
            "micro-batches split one batch dimension of the inputs, but the inputs have {}",
            batches.len()
        );
        return Err(OpError::new("P52", message));
    };
    let dim = &mut stepped.space.dims[batch];
    if !dim.size.is_multiple_of(n) {
        return Err(undivided(dim.size, n, 1));
    }
    let (name, all) = (dim.name.clone(), dim.size);
    dim.size /= n;
    dim.valid = dim.size;
    bound_slots(&mut stepped.space, module, batch);
    let all = declare(stepped, &format!("{name}_all"), all);
    // The unrolled step of a pipeline reads windows of the whole batch; a loop over micro-batches reads a stack.
    let earlier = (!is_pipeline).then(|| declare(stepped, "micro", n - 1));
    Ok(Some(Split { all, batch, earlier }))
}

/// A new dimension named `base`, with a number appended if the name is taken.
pub(super) fn declare(module: &mut Module, base: &str, size: u64) -> DimId {
    let mut name = base.to_owned();
    let mut i = 1;
    while module.space.dim(&name).is_some() {
        i += 1;
        name = format!("{base}{i}");
    }
    module.space.dims.push(Dim::new(&name, size))
}

/// Sets the slots of experts with a bound to those for the tokens of a micro-batch.
fn bound_slots(space: &mut Space, module: &Module, batch: DimId) {
    for node in module.functions.values().flat_map(|f| &f.nodes) {
        if let Op::Experts(Experts::Deal(Deal { experts, top, shared, bound: Some(bound) })) = &node.op
            && shared.batch == batch
        {
            let tokens = space.size(batch) * space.size(shared.sequence);
            let size = bounded_slots(*bound, tokens, space.size(*top), space.size(*experts));
            let slots = &mut space.dims[shared.slots];
            (slots.size, slots.valid) = (size, size);
        }
    }
}

/// `@micro` and the function of the last micro-batch, which are added to `functions`, and `main`, which is returned.
///
/// # Errors
/// `P52` when `main` needs a value of one micro-batch outside `@micro`, or returns more than the loss.
pub(super) fn functions(
    cx: &Cx<'_>,
    space: &Space,
    functions: &mut Arena<FuncId, Function>,
    (loss, split, earlier): (ValueId, Split, DimId),
    (parts, last_pass): (&StepParts<'_>, &mut LastPass<'_>),
) -> Result<Function, OpError> {
    let source = cx.function();
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
        let mut b = FunctionBuilder::new(MICRO, space, functions);
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
    let last = last_pass.function(functions, micro);

    let mut b = FunctionBuilder::like(source, space, functions);
    let known = whole_batch(cx, &mut b, split)?;
    parts.zero.run(&mut b, &[])?;
    let mut sum = zeros(&mut b, source.ty(loss))?;
    let n = space.size(earlier);
    let scan = Scan { over: earlier, carried: 1, order: ScanOrder::Ascending };
    for (callee, layers, scan) in [(micro, 0..n, Some(scan)), (last, n..n + 1, None)] {
        let inputs = part_inputs(cx, &mut b, &known, split, (layers.clone(), scan.map(|s| s.over)))?;
        let mut arguments = vec![sum];
        arguments.extend(shared.iter().map(|&v| inputs[v]));
        sum = b.push(Op::Call { callee, layers, stride: 0, scan, stage: None }, &arguments)?;
    }
    b.name(sum, source.values[loss].name.as_deref());
    parts.finish(&mut b)?;
    Ok(b.finish([Output { name: source.outputs[0].name.clone(), value: sum }]))
}

/// The values that are computed for the whole batch.
///
/// # Errors
/// `P52` when one needs a value of one micro-batch.
pub(super) fn whole_batch<'a>(
    cx: &Cx<'a>,
    b: &mut FunctionBuilder<'_>,
    split: Split,
) -> Result<ValueMap<'a>, OpError> {
    let source = cx.function();
    let mut known = ValueMap::new(source);
    let whole = whole_batch_values(cx, split);
    let all = |ty: &TensorType| {
        let mut ty = ty.clone();
        ty.dims.iter_mut().filter(|d| **d == split.batch).for_each(|d| *d = split.all);
        ty
    };
    for node in source.nodes.iter().filter(|n| is_whole_batch(cx, n)) {
        if let Op::Random(Random::Key { .. }) = node.op {
            known.insert(node.result(), cx.key(b, node)?);
        } else if node.results.is_empty() || node.results.iter().any(|v| whole[v.index()]) {
            copy_whole_batch(b, node, node.op.clone(), &mut known, all)?;
        }
    }
    Ok(known)
}

/// The values outside of calls that are needed for the whole batch: those without a batch dimension, and their
/// operands.
fn whole_batch_values(cx: &Cx<'_>, split: Split) -> Vec<bool> {
    let source = cx.function();
    let mut needed: Vec<bool> = source.values.values().map(|value| !value.ty.has(split.batch)).collect();
    for node in source.nodes.iter().rev().filter(|n| is_whole_batch(cx, n)) {
        if node.results.is_empty() || node.results.iter().any(|v| needed[v.index()]) {
            node.operands.iter().for_each(|v| needed[v.index()] = true);
        }
    }
    needed
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
fn copy_whole_batch(
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
fn stored(space: &Space, binding: &Binding, ty: &TensorType, split: Split) -> Result<Vec<u64>, OpError> {
    if !binding.stored.is_empty() || ty.dims.first() != Some(&split.batch) {
        let message = format!("input `{}` is not stored with the batch first", binding.name);
        return Err(OpError::new("P52", message));
    }
    Ok(ty.dims.iter().map(|&d| source::stored_size(space, d)).collect())
}

/// The initial values of some micro-batches: values of the whole batch, and their own part of values with a batch
/// dimension, stacked along a dimension or of one micro-batch.
///
/// # Errors
/// `P52` for an input that is not stored with the batch first.
pub(super) fn part_inputs<'a>(
    cx: &Cx<'a>,
    b: &mut FunctionBuilder<'_>,
    known: &ValueMap<'_>,
    split: Split,
    (micros, stack): (Layers, Option<DimId>),
) -> Result<ValueMap<'a>, OpError> {
    let source = cx.function();
    let of_part = |ty: &TensorType| match stack {
        Some(stack) if ty.has(split.batch) => stacked(ty, stack),
        _ => ty.clone(),
    };
    let has_batch = |v: ValueId| source.ty(v).has(split.batch);
    let mut map = ValueMap::new(source);
    for v in source.values.ids().filter(|&v| !has_batch(v)) {
        known.get(v).into_iter().for_each(|value| map.insert(v, value));
    }
    // Values with a batch dimension are copied only if a call needs them.
    let mut needed = vec![false; source.values.len()];
    for node in source.nodes.iter().rev() {
        let outside = is_whole_batch(cx, node);
        if !outside || node.results.iter().any(|&v| needed[v.index()] && has_batch(v)) {
            node.operands.iter().for_each(|v| needed[v.index()] = true);
        }
    }
    for node in source.nodes.iter().filter(|n| is_whole_batch(cx, n)) {
        if !node.results.iter().any(|&v| needed[v.index()] && has_batch(v)) {
            continue;
        }
        match &node.op {
            Op::Input(binding) => {
                let ty = source.ty(node.result());
                let window = window(b.space(), binding, ty, split, &micros)?;
                let input = b.push_as(Op::Input(window), &[], of_part(ty))?;
                map.insert(node.result(), input);
            }
            op => {
                let declared: Vec<TensorType> = map.declared(&node.results).iter().map(of_part).collect();
                map.copy_as(b, node, op.clone(), &declared)?;
            }
        }
    }
    Ok(map)
}

/// The binding that reads some micro-batches of a file's batch.
fn window(
    space: &Space,
    binding: &Binding,
    ty: &TensorType,
    split: Split,
    micros: &Layers,
) -> Result<Binding, OpError> {
    let mut stored = stored(space, binding, ty, split)?;
    let mut window: Vec<Layers> = stored.iter().map(|&n| 0..n).collect();
    let each = stored[0];
    window[0] = micros.start * each..micros.end * each;
    stored[0] = space.size(split.all);
    Ok(Binding { stored, window, ..binding.clone() })
}
