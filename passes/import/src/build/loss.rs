//! The loss: where a model returns logits, the head returns the mean cross-entropy of labels instead.
//!
//! The mean is over all labels of the batch that count, for any sharding and any split of the batch: `main` counts
//! them, and the head divides its sum by that count.

use ithaca_ir::module::{FuncId, Function, Node, Output};
use ithaca_ir::ops::{Binary, Binding, Loss, OpError, cast, sums_in};
use ithaca_ir::{DType, Diagnostic, DimId, FunctionBuilder, Module, Op, TensorType};
use ithaca_pass::rebuild::ValueMap;

use crate::workload::Labels;

/// Replaces the output `logits` of `module` by `loss`.
///
/// # Errors
/// `M11` when the model returns no logits.
pub(super) fn of_logits(module: &Module, labels: Labels) -> Result<Module, Diagnostic> {
    let refuse = || {
        Diagnostic::new(
            "M11",
            format!("model `{}` returns no `logits`, so it has no loss to train", module.name),
        )
    };
    let main = module.main().ok_or_else(refuse)?;
    let function = &module.functions[main];
    let logits = match function.outputs.as_slice() {
        [only] if only.name.as_deref() == Some("logits") => only.value,
        _ => return Err(refuse()),
    };
    let call = function.nodes.iter().find(|n| n.results.contains(&logits)).ok_or_else(refuse)?;
    let Op::Call { callee, .. } = call.op else { return Err(refuse()) };
    build(module, (main, callee), call, labels).map_err(|e| Diagnostic::new(e.code, e.message))
}

fn build(
    module: &Module,
    (main, head): (FuncId, FuncId),
    call: &Node,
    labels: Labels,
) -> Result<Module, OpError> {
    let mut built = module.emptied(module.level);
    for (id, function) in module.functions.iter() {
        let rewritten = match id {
            _ if id == head => with_loss(&built, function, labels)?,
            _ if id == main => with_labels(&built, function, call, labels)?,
            _ => function.clone(),
        };
        built.functions.push(rewritten);
    }
    Ok(built)
}

/// The head with labels and their count as further arguments, and the loss in place of the logits.
fn with_loss(module: &Module, head: &Function, labels: Labels) -> Result<Function, OpError> {
    let mut b = FunctionBuilder::like(head, &module.space, &module.functions);
    let mut map = ValueMap::with_params(&mut b, head);
    let output = head.outputs[0].value;
    let ty = head.ty(output);
    let (rows, over) = rows(ty)?;
    let sums = sums_in(ty.dtype);
    let labelled = b.param(TensorType::new(DType::I32, rows.iter().copied()), Some("labels"));
    let count = b.param(TensorType::new(sums, []), Some("count"));
    for node in &head.nodes {
        map.copy(&mut b, node)?;
    }
    let logits = map[output];
    let op = Op::Loss(Loss::CrossEntropy { over, ignore: labels.ignore });
    let nll = b.node(op, &[logits, labelled], &[])?[0];
    b.name(nll, Some("nll"));
    let sum = b.push_as(Op::Sum, &[nll], TensorType::new(sums, []))?;
    let loss = b.push(Op::Binary(Binary::Div), &[sum, count])?;
    b.name(loss, Some("loss"));
    Ok(b.finish([Output { name: None, value: loss }]))
}

/// `main` with the labels as an input and the count of those that count.
fn with_labels(module: &Module, main: &Function, call: &Node, labels: Labels) -> Result<Function, OpError> {
    let mut b = FunctionBuilder::like(main, &module.space, &module.functions);
    let mut map = ValueMap::new(main);
    for node in &main.nodes {
        if node != call {
            map.copy(&mut b, node)?;
            continue;
        }
        let logits = main.ty(call.results[0]);
        let (rows, _) = rows(logits)?;
        let binding = Binding { ahead: labels.ahead, fill: labels.ignore, ..Binding::named("labels") };
        let ty = TensorType::new(DType::I32, rows.iter().copied());
        let labelled = b.push_as(Op::Input(binding), &[], ty)?;
        b.name(labelled, Some("labels"));
        let valid = b.push(Op::Loss(Loss::Valid { ignore: labels.ignore }), &[labelled])?;
        let count = b.push_as(Op::Sum, &[valid], TensorType::new(DType::F32, []))?;
        let count = cast(&mut b, count, sums_in(logits.dtype))?;
        b.name(count, Some("count"));
        let mut operands = map.operands(call);
        operands.extend([labelled, count]);
        let loss = b.node(call.op.clone(), &operands, &[])?[0];
        b.name(loss, Some("loss"));
        map.insert(call.result(), loss);
    }
    let value = map[main.outputs[0].value];
    Ok(b.finish([Output { name: Some("loss".to_owned()), value }]))
}

/// The token dimensions and the vocabulary dimension of logits.
fn rows(logits: &TensorType) -> Result<(Vec<DimId>, DimId), OpError> {
    match logits.dims.split_last() {
        Some((&over, rows)) => Ok((rows.to_vec(), over)),
        None => Err(OpError::new("M11", "logits have a vocabulary")),
    }
}
