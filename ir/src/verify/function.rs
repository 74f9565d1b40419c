//! Invariants of one function: order of values, types, nodes, outputs.

use smallvec::SmallVec;

use crate::diagnostic::{Diagnostic, Diagnostics, MAX_DIAGNOSTICS, Span};
use crate::entity::Entity;
use crate::handles::{FuncId, ValueId};
use crate::identifier::is_identifier;
use crate::module::{Function, Level, Module, Node};
use crate::ops::attr::{Attr, Names};
use crate::ops::context::Context;
use crate::ops::error::OpError;
use crate::ops::state::gradient_of_sum;
use crate::ops::table::op::Op;
use crate::text::show::show;
use crate::types::TensorType;
use crate::verify::space::check_type;

/// Adds the mistakes in function `id`. Types of operations that are `known` are not checked again.
pub(super) fn check(module: &Module, id: FuncId, known: &[bool], found: &mut Diagnostics) {
    let function = &module.functions[id];
    let mut checker = Checker { module, id, function, found, sound: Vec::new() };
    if !checker.order() {
        return;
    }
    checker.types(known);
    for (i, node) in function.nodes.iter().enumerate() {
        if checker.found.len() >= MAX_DIAGNOSTICS {
            return;
        }
        checker.node(node, known.get(i).copied().unwrap_or_default());
    }
    checker.outputs();
}

struct Checker<'m> {
    module: &'m Module,
    id: FuncId,
    function: &'m Function,
    found: &'m mut Diagnostics,
    /// For each value, whether its type is well formed, so that inference may look at it.
    sound: Vec<bool>,
}

impl Checker<'_> {
    fn refuse(&mut self, error: OpError, span: Span, label: &str) {
        self.found.push(place(error, span, label, None));
    }

    /// Whether handles are in order; if not, nothing else can be asked.
    fn order(&mut self) -> bool {
        let Function { params, values, nodes, outputs, span, .. } = self.function;
        let mut n_defined = 0;
        let mut broken = None;
        let mut define = |value: ValueId| {
            n_defined += 1;
            value.index() + 1 == n_defined
        };
        if !params.iter().all(|&p| define(p)) {
            broken = Some(("parameters are not the first values", *span));
        }
        for node in nodes {
            let first_result = node.results.first().map_or(usize::MAX, |r| r.index());
            let defined = node.operands.iter().all(|v| v.index() < first_result.min(values.len()));
            if !defined {
                broken = broken.or(Some(("an operand is not defined before its use", node.span)));
            }
            if !node.results.iter().all(|&r| define(r)) {
                broken = broken.or(Some(("results are not numbered in order of definition", node.span)));
            }
        }
        if n_defined != values.len() || outputs.iter().any(|o| o.value.index() >= values.len()) {
            broken = broken.or(Some(("a value is not defined", *span)));
        }
        match broken {
            None => true,
            Some((what, span)) => {
                let message = format!("in `@{}` {what}", self.function.name);
                self.refuse(OpError::new("V02", message), span, "here");
                false
            }
        }
    }

    fn types(&mut self, known: &[bool]) {
        let Function { values, nodes, .. } = self.function;
        let mut is_known = vec![false; values.len()];
        for (node, _) in nodes.iter().zip(known).filter(|(_, known)| **known) {
            node.results.iter().for_each(|v| is_known[v.index()] = true);
        }
        let mut names: std::collections::HashSet<&str> = std::collections::HashSet::new();
        for (v, value) in values.iter() {
            if let Some(name) = value.name.as_deref() {
                if !is_identifier(name) {
                    let error = OpError::new("V02", format!("`{name}` is no name for a value"));
                    self.refuse(error, value.span, "this value");
                }
                if !names.insert(name) {
                    let error = OpError::new("V02", format!("there are two values `%{name}`"));
                    self.refuse(error, value.span, "the second");
                }
            }
            if is_known[v.index()] {
                self.sound.push(true);
                continue;
            }
            let checked = check_type(&self.module.space, self.module.level, &value.ty);
            let checked = checked.and_then(|()| match value.ty.layout.at {
                Some(_) if self.function.name != "main" => Err(OpError::new(
                    "V33",
                    format!(
                        "a value of `@{}` is on some ranks only; those that run it hold it",
                        self.function.name
                    ),
                )),
                Some(_) | None => Ok(()),
            });
            self.sound.push(checked.is_ok());
            if let Err(error) = checked {
                // A type with handles from elsewhere cannot be spelled.
                let help = match error.code {
                    "V06" => None,
                    _ => Some(format!("the type is {}", show(&self.module.space, &value.ty))),
                };
                self.found.push(place(error, value.span, "this value", help));
            }
        }
    }

    fn node(&mut self, node: &Node, is_known: bool) {
        if let Err(error) = self.level(&node.op) {
            return self.refuse(error, node.span, "this operation");
        }
        if let Op::Call { callee, .. } = node.op
            && callee >= self.id
        {
            let error = OpError::new("V15", "a function may call only functions that stand before it");
            return self.refuse(error, node.span, "this call");
        }
        if matches!(node.op, Op::Call { stage: Some(_), .. }) && self.function.name != "main" {
            let error = OpError::new("V33", "only `@main` calls functions on stages");
            return self.refuse(error, node.span, "this call");
        }
        if let Some(error) = torn_latents(node) {
            return self.refuse(error, node.span, "this operation");
        }
        if is_known {
            return;
        }
        let names = Names { space: &self.module.space, functions: &self.module.functions };
        if let Some((key, _)) = node.op.attrs(names).iter().find(|(_, value)| !is_finite(value)) {
            let message = format!("attribute `{key}` of `{}` is not a finite number", node.op.name());
            return self.refuse(OpError::new("V24", message), node.span, "this operation");
        }
        if node.operands.iter().chain(&node.results).any(|v| !self.sound[v.index()]) {
            return;
        }
        let operands = self.function.operand_types(node);
        let declared: SmallVec<[TensorType; 2]> =
            node.results.iter().map(|&v| self.function.ty(v).clone()).collect();
        let cx = Context { space: &self.module.space, functions: &self.module.functions };
        match node.op.infer(cx, &operands, &declared) {
            Err(error) => {
                let help = operands_help(&error, self.module, &operands);
                self.found.push(place(error, node.span, "this operation", help));
            }
            Ok(inferred) => {
                if let Some(error) = self.torn_copies(&node.op, &operands) {
                    return self.refuse(error, node.span, "this operation");
                }
                self.results(node, &inferred);
            }
        }
    }

    fn level(&self, op: &Op) -> Result<(), OpError> {
        let change = op.is_layout_change();
        match self.module.level {
            Level::Program if change => {
                Err(OpError::new("V13", format!("on the program level there is no `{}`", op.name())))
            }
            Level::PerRank if matches!(op, Op::Reshard) => {
                Err(OpError::new("V12", "a `reshard` is left in a per-rank program"))
            }
            Level::Program | Level::PerRank if has_movement(op) => Err(OpError::new(
                "V29",
                format!("`{}` has a movement, which sharded programs have and no others", op.name()),
            )),
            Level::Program | Level::Sharded | Level::PerRank => Ok(()),
        }
    }

    /// A rank repeats its own elements; where ranks hold different numbers of granules, copies must be dealt as their
    /// originals are.
    fn torn_copies(&self, op: &Op, operands: &[&TensorType]) -> Option<OpError> {
        let Op::Repeat { from, to } = *op else { return None };
        let (original, copy) = (&self.module.space.dims[from], &self.module.space.dims[to]);
        let expected = original.granule * (copy.size / original.size);
        let split = !operands[0].axes_of(from).is_empty();
        (split && original.uneven && copy.granule != expected).then(|| {
            let message = format!(
                "`repeat` of the unevenly split `{}` needs granules of {expected} in `{}`, not {}",
                original.name, copy.name, copy.granule
            );
            OpError::new("V09", message)
        })
    }

    fn results(&mut self, node: &Node, inferred: &[TensorType]) {
        let name = node.op.name();
        if inferred.len() != node.results.len() {
            let message = format!("`{name}` has {} results, not {}", inferred.len(), node.results.len());
            return self.refuse(OpError::new("V03", message), node.span, "this operation");
        }
        for (&result, expected) in node.results.iter().zip(inferred) {
            let value = &self.function.values[result];
            let source = match &node.op {
                // Each rank may have its part of a sum of gradients, and zeros add up to zeros.
                Op::State(binding) => gradient_of_sum(&binding.name).is_none(),
                Op::Fill { value } => *value != 0.0,
                op => matches!(op, Op::Param(_) | Op::Input(_) | Op::Positions { .. }),
            };
            if *value.ty != *expected {
                let space = &self.module.space;
                let (expected, stated) = (show(space, expected), show(space, &value.ty));
                let message = format!("`{name}` gives {expected}, not {stated}");
                self.refuse(OpError::new("V03", message), value.span, "stated with another type");
            } else if source && !expected.layout.partial.is_empty() {
                let message = format!("`{name}` reads whole elements and cannot be a pending sum");
                self.refuse(OpError::new("V11", message), value.span, "stated as a pending sum");
            }
        }
    }

    fn outputs(&mut self) {
        let Function { name, outputs, values, span, .. } = self.function;
        let is_main = name == "main";
        let mut seen: Vec<&str> = Vec::new();
        for (i, output) in outputs.iter().enumerate() {
            let value = &values[output.value];
            let problem = match (&output.name, is_main) {
                (None, true) => Some(format!("output {i} of `@main` has no name")),
                (Some(output), true) if !is_identifier(output) => {
                    Some(format!("`{output}` is no name for an output"))
                }
                (Some(output), true) if seen.contains(&output.as_str()) => {
                    Some(format!("`@main` has two outputs `{output}`"))
                }
                (Some(output), false) => Some(format!("output `{output}` of `@{name}` has a name")),
                (Some(_), true) | (None, false) => None,
            };
            if let Some(message) = problem {
                self.refuse(
                    OpError::new("V19", message),
                    *span,
                    "outputs of `@main` are named, others are not",
                );
            }
            seen.extend(output.name.as_deref());
            if is_main && !value.ty.layout.partial.is_empty() {
                let message = format!("output {i} of `@main` is a sum still to be taken");
                self.refuse(OpError::new("V11", message), value.span, "this value is pending");
            }
        }
    }
}

fn has_movement(op: &Op) -> bool {
    match op {
        Op::Attention(a) | Op::AttentionBackward(a) => a.movement.is_some(),
        _ => false,
    }
}

fn place(error: OpError, span: Span, label: &str, help: Option<String>) -> Diagnostic {
    let mut diagnostic = Diagnostic::from(error).at(span).label(label);
    diagnostic.helps.extend(help);
    diagnostic
}

fn is_finite(attr: &Attr) -> bool {
    match attr {
        Attr::Float(x) => x.is_finite(),
        Attr::List(items) => items.iter().all(is_finite),
        Attr::Call(_, args) => args.iter().all(|(_, value)| is_finite(value)),
        Attr::All(parts) | Attr::Any(parts) => parts.iter().all(is_finite),
        Attr::Int(_)
        | Attr::Text(_)
        | Attr::Word(_)
        | Attr::Func(_)
        | Attr::Range(..)
        | Attr::Numbers(..) => true,
    }
}

/// The operand types of a refused operation, where they are the mistake.
fn operands_help(error: &OpError, module: &Module, operands: &[&TensorType]) -> Option<String> {
    const SHOWN: usize = 4;
    let about_operands = ["V04", "V05", "V07", "V08", "V11", "V14", "V16", "V26"].contains(&error.code)
        && !operands.is_empty();
    about_operands.then(|| {
        let spelled: Vec<String> =
            operands.iter().take(SHOWN).map(|ty| show(&module.space, ty).to_string()).collect();
        let more = if operands.len() > SHOWN { ", …" } else { "" };
        format!("the operands are {}{more}", spelled.join(", "))
    })
}

/// Keys and values of latents are one value.
fn torn_latents(node: &Node) -> Option<OpError> {
    let (Op::Attention(attention) | Op::AttentionBackward(attention) | Op::AttendPages { attention, .. }) =
        &node.op
    else {
        return None;
    };
    let [_, keys, values, ..] = node.operands[..] else { return None };
    let message = "keys and values of latents are one operand, given twice";
    (attention.latent && keys != values).then(|| OpError::new("V05", message))
}
