//! `lower-movements`: attention with a movement becomes explicit steps, forward and backward.
//!
//! ```text
//! %o = attention %q, %k, %v {…, movement=rotate} : bf16[b s@ring h d]
//! ```
//! becomes, on two ranks,
//! ```text
//! %k1 = permute %k : bf16[b s@ring+1 k d]
//! %v1 = permute %v : bf16[b s@ring+1 k d]
//! %o0, %l0 = attention %q, %k, %v {…, returns=part} : f32[b s@ring h d], f32[b s@ring h]
//! %o1, %l1 = attention %q, %k1, %v1 {…, returns=part} : f32[b s@ring h d], f32[b s@ring h]
//! %o2, %l2 = merge %o0, %l0, %o1, %l1 : f32[b s@ring h d], f32[b s@ring h]
//! %o = cast %o2 {to=bf16} : bf16[b s@ring h d]
//! ```
//! The transfer of a step is issued before the work of the step before it, so that the two overlap.

mod attend;
mod backward;
mod forward;
mod groups;
mod plan;
mod relays;
mod travel;

use ithaca_ir::module::{Function, Level, Node, ValueId};
use ithaca_ir::ops::{Attention, OpError, cast};
use ithaca_ir::verify::Verified;
use ithaca_ir::{Diagnostic, Diagnostics, FunctionBuilder, Module, Op, TensorType};
use ithaca_pass::rebuild::rebuild;
use ithaca_pass::{Context, Pass, options};
use serde::{Deserialize, Serialize};

use crate::movement::Partials;
use crate::registry::Registry;
use plan::Plan;

/// Options of the pass.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Options {
    /// The element type in which partial results travel.
    pub partials: Partials,
}

/// Options, as `list passes` shows them.
pub const OPTIONS: &str = "partials=f32|bf16";

/// The pass.
#[derive(Clone, Default)]
pub struct LowerMovements {
    registry: Registry,
    options: Options,
}

impl LowerMovements {
    /// The pass with the movements of `registry`.
    pub fn new(registry: Registry, options: Options) -> Self {
        Self { registry, options }
    }
}

impl Pass for LowerMovements {
    fn name(&self) -> &'static str {
        "lower-movements"
    }

    fn options(&self) -> Vec<(String, String)> {
        options::write(&self.options)
    }

    fn run(&self, module: Verified<'_>, cx: &mut Context<'_>) -> Result<Module, Diagnostics> {
        let module = module.module();
        let mut declared = module.clone();
        let mut plans: Vec<Option<Plan>> = Vec::new();
        for function in module.functions.values() {
            for node in &function.nodes {
                let Some(attention) = moving(&node.op) else { continue };
                let types = function.operand_types(node);
                let plan = || plan::plan(&self.registry, &mut declared.space, attention, &types);
                plans.push(cx.rewrite().then(plan).transpose().map_err(|d| vec![d])?);
            }
        }
        if module.level == Level::Program && plans.iter().any(Option::is_some) {
            let message =
                "`lower-movements` needs a sharded program, and this one is not laid out over a mesh";
            return Err(vec![Diagnostic::new("P03", message).help("run `shard` first")]);
        }
        let lowered_with = |partials: Partials| {
            let mut plans = plans.iter();
            rebuild(&declared, |b, function, node, operands| {
                match moving(&node.op).and_then(|_| plans.next()) {
                    Some(Some(plan)) => expand(b, function, node, (plan, partials), operands).map(Some),
                    Some(None) | None => Ok(None),
                }
            })
        };
        let partials = self.options.partials;
        let lowered = lowered_with(partials)?;
        if partials != Partials::default() && lowered == lowered_with(Partials::default())? {
            cx.note(format!(
                "`partials={}` has no effect: no partial result travels in f32",
                partials.name()
            ));
        }
        Ok(lowered)
    }
}

/// The attention of an operation that has a movement.
fn moving(op: &Op) -> Option<&Attention> {
    match op {
        Op::Attention(a) | Op::AttentionBackward(a) => a.movement.is_some().then_some(a),
        _ => None,
    }
}

/// Adds the steps of one attention, and returns its results.
fn expand(
    b: &mut FunctionBuilder<'_>,
    function: &Function,
    node: &Node,
    (plan, partials): (&Plan, Partials),
    operands: &[ValueId],
) -> Result<Vec<ValueId>, OpError> {
    let results = match &node.op {
        Op::AttentionBackward(a) => backward::backward(b, a, (plan, partials), operands)?,
        Op::Attention(a) => forward::forward(b, a, (plan, partials), operands)?,
        op => unreachable!("`{}` has no movement", op.name()),
    };
    // A plan may have results that the operation does not return.
    let results = node.results.iter().zip(results).map(|(&old, new)| {
        let ty = function.ty(old);
        let mut value = new;
        if b.ty(value).layout.partial != ty.layout.partial {
            // Sums are taken before they are rounded.
            let wide = TensorType { dtype: b.ty(value).dtype, ..ty.clone() };
            value = b.push_as(Op::Reshard, &[value], wide)?;
        }
        value = cast(b, value, ty.dtype)?;
        if b.ty(value).layout != ty.layout {
            value = b.push_as(Op::Reshard, &[value], ty.clone())?;
        }
        Ok(value)
    });
    results.collect()
}
