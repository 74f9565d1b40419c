//! Ways to change a program, its data, its messages or its results, each a mistake that a verdict must notice.

use ithaca_ir::entity::Entity;
use ithaca_ir::module::{Function, Node, Value};
use ithaca_ir::ops::{Binary, Gradient, Optimizer, Unary, state};
use ithaca_ir::verify::verify;
use ithaca_ir::{Arena, DType, FuncId, Mask, Module, Op, ValueId};
use ithaca_kernels::Storage;

use crate::fuzz::Choices;

/// A way to change something; which of the places where it can is a choice.
pub(super) enum Change {
    /// An operation, where it gives whether it can.
    Op(fn(&mut Op) -> bool),
    /// The result of an operation goes through others, of which each keeps the layout.
    After(fn(&Op) -> bool, fn(DType) -> Vec<Op>),
    /// An operation is left out: its first operand is its result.
    Skip(fn(&Op) -> bool),
    /// A tensor that the ranks read, by name.
    Read(fn(&str) -> bool, fn(&mut Vec<f64>)),
    /// Two tensors that the ranks read, by parts of their names.
    Swapped(&'static str, &'static str),
    /// The blocks that one rank sends: the block before to the same rank, if any, and the block.
    Sent(fn(Option<&Vec<f32>>, &mut Vec<f32>)),
    /// A tensor of the results.
    Result(fn(&str) -> bool, fn(&mut Vec<f32>)),
    /// A tensor of the results that stays as it was before the step.
    Kept(fn(&str) -> bool),
}

fn any(_: &str) -> bool {
    true
}

fn is_weight(name: &str) -> bool {
    name.ends_with("weight") && ![state::GRADIENT, state::OPTIMIZER].iter().any(|p| name.starts_with(p))
}

fn is_gradient(name: &str) -> bool {
    name.starts_with(state::GRADIENT)
}

fn is_product(op: &Op) -> bool {
    matches!(op, Op::Einsum)
}

fn is_attention(op: &Op) -> bool {
    matches!(op, Op::Attention(_))
}

fn is_add(op: &Op) -> bool {
    matches!(op, Op::Binary(Binary::Add))
}

fn scaled(_: DType) -> Vec<Op> {
    vec![Op::Scale { factor: 1.01 }]
}

fn another(f: Unary) -> Unary {
    if f == Unary::Gelu { Unary::GeluTanh } else { Unary::Gelu }
}

fn through_bf16(dtype: DType) -> Vec<Op> {
    vec![Op::Cast { to: DType::BF16 }, Op::Cast { to: dtype }]
}

/// Changes operations of a pattern.
macro_rules! edit {
    ($pattern:pat $(if $guard:expr)? => $edit:expr) => {
        Change::Op(|op| match op {
            $pattern $(if $guard)? => {
                $edit;
                true
            }
            _ => false,
        })
    };
}

/// Every way, with its name.
pub(super) const CHANGES: &[(&str, Change)] = &[
    ("scores 1.01 times as large", edit!(Op::Attention(a) => a.scale *= 1.01)),
    ("scores 1.01 times as large backwards", edit!(Op::AttentionBackward(a) => a.scale *= 1.01)),
    (
        "a mask shifted by one",
        edit!(Op::Attention(a) if a.mask == Mask::Causal => a.mask = Mask::Window { left: None, right: Some(1) }),
    ),
    (
        "a mask without the token itself's last neighbour",
        edit!(Op::Attention(a) if a.mask == Mask::Causal => a.mask = Mask::Window { left: Some(6), right: Some(0) }),
    ),
    ("no mask", edit!(Op::Attention(a) if a.mask != Mask::Full => a.mask = Mask::Full)),
    ("another epsilon of a norm", edit!(Op::RmsNorm { eps, .. } | Op::LayerNorm { eps, .. } => *eps += 1e-2)),
    (
        "another epsilon of a norm backwards",
        edit!(Op::Gradient(Gradient::RmsNorm { eps, .. } | Gradient::LayerNorm { eps, .. }) => *eps += 1e-2),
    ),
    ("another base of rotary angles", edit!(Op::Rotary(rotary) => rotary.theta *= 1.1)),
    ("another activation", edit!(Op::Unary(f) => *f = another(*f))),
    ("the slope of another activation", edit!(Op::Gradient(Gradient::Unary(f)) => *f = another(*f))),
    ("a difference for a sum", edit!(Op::Binary(f @ Binary::Add) => *f = Binary::Sub)),
    ("a sum for a product", edit!(Op::Binary(f @ Binary::Mul) => *f = Binary::Add)),
    ("a factor 1.01 times as large", edit!(Op::Scale { factor } => *factor *= 1.01)),
    (
        "a learning rate 1.01 times as large",
        edit!(Op::Optimizer(Optimizer::AdamW(adamw)) => adamw.lr *= 1.01),
    ),
    (
        "another decay of the first moment",
        edit!(Op::Optimizer(Optimizer::AdamW(adamw)) => adamw.beta1 = 0.91),
    ),
    (
        "another decay of the second moment",
        edit!(Op::Optimizer(Optimizer::AdamW(adamw)) => adamw.beta2 = 0.99),
    ),
    ("another epsilon of the optimizer", edit!(Op::Optimizer(Optimizer::AdamW(adamw)) => adamw.eps = 1e-3)),
    (
        "twice the decay of weights",
        edit!(Op::Optimizer(Optimizer::AdamW(adamw)) => adamw.weight_decay *= 2.0),
    ),
    (
        "an optimizer that goes the other way",
        edit!(Op::Optimizer(Optimizer::AdamW(adamw)) => adamw.lr = -adamw.lr),
    ),
    ("a product 1.01 times as large", Change::After(is_product, scaled)),
    ("an attention 1.01 times as large", Change::After(is_attention, scaled)),
    ("a product rounded to bf16", Change::After(is_product, through_bf16)),
    ("an attention rounded to bf16", Change::After(is_attention, through_bf16)),
    ("a sum rounded to bf16", Change::After(is_add, through_bf16)),
    ("a summand left out", Change::Skip(is_add)),
    ("a norm left out", Change::Skip(|op| matches!(op, Op::RmsNorm { .. } | Op::LayerNorm { .. }))),
    ("a rotation left out", Change::Skip(|op| matches!(op, Op::Rotary(_)))),
    ("an activation left out", Change::Skip(|op| matches!(op, Op::Unary(_)))),
    ("labels shifted by one", Change::Read(|name| name == "labels", |data| data.rotate_right(1))),
    (
        "one label of another token",
        Change::Read(
            |name| name == "labels",
            |data| {
                let last = data.len() - 2;
                data[last] = if data[last] > 0.0 { 0.0 } else { 1.0 };
            },
        ),
    ),
    (
        "another token",
        Change::Read(
            |name| name == "input_ids",
            |data| {
                data[3] = if data[3] > 0.0 { 0.0 } else { 1.0 };
            },
        ),
    ),
    ("tokens shifted by one", Change::Read(|name| name == "input_ids", |data| data.rotate_left(1))),
    (
        // All of it would be nothing where a norm follows.
        "every second element of a weight 1.01 times as large",
        Change::Read(is_weight, |data| data.iter_mut().step_by(2).for_each(|x| *x *= 1.01)),
    ),
    (
        "a weight with a row of zeros",
        Change::Read(is_weight, |data| {
            let n = (data.len() / 8).max(1);
            data[..n].fill(0.0);
        }),
    ),
    (
        "a weight in bf16",
        Change::Read(is_weight, |data| {
            Storage::AsTyped.keep(DType::BF16, data);
        }),
    ),
    ("weights of two layers swapped", Change::Swapped(".0.", ".1.")),
    ("a part of a rank missing", Change::Sent(|_, block| block.fill(0.0))),
    (
        "a stale block",
        Change::Sent(|before, block| {
            if let Some(before) = before.filter(|before| before.len() == block.len()) {
                block.clone_from(before);
            }
        }),
    ),
    (
        "a block in bf16",
        Change::Sent(|_, block| {
            Storage::AsTyped.keep(DType::BF16, block);
        }),
    ),
    ("a block 1.01 times as large", Change::Sent(|_, block| block.iter_mut().for_each(|x| *x *= 1.01))),
    ("a block twice", Change::Sent(|_, block| block.iter_mut().for_each(|x| *x += *x))),
    ("a block in another order", Change::Sent(|_, block| block.reverse())),
    (
        "one element of a block lost",
        Change::Sent(|_, block| {
            if let Some(x) = block.iter_mut().max_by(|a, b| a.abs().total_cmp(&b.abs())) {
                *x = 0.0;
            }
        }),
    ),
    ("a result 1.001 times as large", Change::Result(any, |data| data.iter_mut().for_each(|x| *x *= 1.001))),
    (
        "one element a thousandth off",
        Change::Result(any, |data| {
            let largest = data.iter().fold(0f32, |a, x| a.max(x.abs()));
            data[0] += 1e-3 * largest;
        }),
    ),
    (
        "a quarter of a result zero",
        Change::Result(any, |data| {
            let n = data.len().div_ceil(4);
            data[..n].fill(0.0);
        }),
    ),
    ("the other sign", Change::Result(any, |data| data.iter_mut().for_each(|x| *x = -*x))),
    (
        "a result in bf16",
        Change::Result(any, |data| {
            Storage::AsTyped.keep(DType::BF16, data);
        }),
    ),
    ("not a number", Change::Result(any, |data| data[0] = f32::NAN)),
    ("a gradient twice", Change::Result(is_gradient, |data| data.iter_mut().for_each(|x| *x += *x))),
    ("a weight that is not updated", Change::Kept(is_weight)),
    ("a moment that is not updated", Change::Kept(|name| name.starts_with(state::FIRST_MOMENT))),
    ("a step that is not counted", Change::Kept(|name| name == state::STEP)),
];

/// A node of a module, chosen among those that are wanted.
fn chosen(
    module: &Module,
    choices: &mut Choices,
    wanted: impl Fn(&Function, &Node) -> bool,
) -> Option<(FuncId, usize)> {
    let all = module.functions.iter().flat_map(|(id, f)| {
        let wanted = &wanted;
        f.nodes.iter().enumerate().filter(move |(_, node)| wanted(f, node)).map(move |(i, _)| (id, i))
    });
    let all: Vec<_> = all.collect();
    (!all.is_empty()).then(|| all[choices.below(all.len())])
}

/// Replaces the uses of a value after a node.
fn replace(function: &mut Function, from: usize, old: ValueId, new: ValueId) {
    let nodes = function.nodes.iter_mut().skip(from).flat_map(|node| &mut node.operands);
    let outputs = function.outputs.iter_mut().map(|output| &mut output.value);
    nodes.chain(outputs).filter(|value| **value == old).for_each(|value| *value = new);
}

/// The changed program; nothing where it cannot be changed so.
pub(super) fn program(module: &Module, change: &Change, choices: &mut Choices) -> Option<Module> {
    let mut module = module.clone();
    let is_float =
        |f: &Function, node: &Node| node.results.first().is_some_and(|&v| f.ty(v).dtype == DType::F32);
    match change {
        Change::Op(change) => {
            let (f, i) = chosen(&module, choices, |_, node| change(&mut node.op.clone()))?;
            change(&mut module.functions[f].nodes[i].op);
        }
        Change::After(wanted, ops) => {
            let (f, i) = chosen(&module, choices, |f, node| wanted(&node.op) && is_float(f, node))?;
            let function = &mut module.functions[f];
            let result = function.nodes[i].results[0];
            let mut ty = function.ty(result).clone();
            // Values are numbered in order of their definition.
            let first = function.nodes[i].results.iter().map(|v| v.index()).max().unwrap() + 1;
            let ops = ops(ty.dtype);
            let moved = |v: ValueId| if v.index() < first { v } else { ValueId::new(v.index() + ops.len()) };
            let mut values: Vec<Value> = function.values.values().cloned().collect();
            for node in &mut function.nodes {
                node.operands.iter_mut().chain(&mut node.results).for_each(|v| *v = moved(*v));
            }
            function.outputs.iter_mut().for_each(|output| output.value = moved(output.value));
            let mut last = result;
            let mut nodes = Vec::new();
            for (k, op) in ops.into_iter().enumerate() {
                if let Op::Cast { to } = op {
                    ty.dtype = to;
                }
                let (span, new) = (function.span, ValueId::new(first + k));
                values.insert(first + k, Value { ty: ty.clone().into(), name: None, span });
                let (operands, results) = ([last].into_iter().collect(), [new].into_iter().collect());
                nodes.push(Node { op, operands, results, span });
                last = new;
            }
            let mut arena = Arena::new();
            for value in values {
                arena.push(value);
            }
            function.values = arena;
            replace(function, i + 1, result, last);
            function.nodes.splice(i + 1..i + 1, nodes);
        }
        Change::Skip(wanted) => {
            let (f, i) = chosen(&module, choices, |f, node| {
                wanted(&node.op) && is_float(f, node) && f.ty(node.operands[0]) == f.ty(node.results[0])
            })?;
            let function = &mut module.functions[f];
            let Node { operands, results, .. } = function.nodes[i].clone();
            replace(function, i + 1, results[0], operands[0]);
        }
        _ => return None,
    }
    verify(&module).is_ok().then_some(module)
}
