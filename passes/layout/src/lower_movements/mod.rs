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
//! The transfer of a step is issued before the work of the step before it, so that one hides behind the other.

mod attend;
mod backward;
mod forward;
mod groups;
mod plan;
mod travel;

use std::collections::BTreeMap;

use ithaca_ir::entity::Entity;
use ithaca_ir::module::{Function, Level, Node};
use ithaca_ir::ops::{Attention, OpError};
use ithaca_ir::verify::Verified;
use ithaca_ir::{Diagnostic, Diagnostics, FunctionBuilder, Module, Op, TensorType};
use ithaca_pass::rebuild::ValueMap;
use ithaca_pass::{Context, Pass};

use crate::registry::Registry;
use plan::Plan;

/// The pass.
#[derive(Clone, Default)]
pub struct LowerMovements {
    registry: Registry,
}

impl LowerMovements {
    /// The pass with the movements of `registry`.
    pub fn new(registry: Registry) -> Self {
        Self { registry }
    }
}

impl Pass for LowerMovements {
    fn name(&self) -> &'static str {
        "lower-movements"
    }

    fn run(&self, module: Verified<'_>, cx: &mut Context<'_>) -> Result<Module, Diagnostics> {
        let module = module.module();
        let mut lowered = module.emptied(module.level);
        let mut plans: BTreeMap<(usize, usize), Plan> = BTreeMap::new();
        for (id, function) in module.functions.iter() {
            for (i, node) in function.nodes.iter().enumerate() {
                let Some(attention) = moving(&node.op) else { continue };
                if !cx.rewrite() {
                    continue;
                }
                let types = function.operand_types(node);
                let plan =
                    plan::plan(&self.registry, &mut lowered.space, attention, &types).map_err(|d| vec![d])?;
                plans.insert((id.index(), i), plan);
            }
        }
        if module.level == Level::Program && !plans.is_empty() {
            let message =
                "`lower-movements` needs a sharded program, and this one is not laid out over a mesh";
            return Err(vec![Diagnostic::new("P03", message).help("run `shard` first")]);
        }
        for (id, function) in module.functions.iter() {
            let mut b = FunctionBuilder::like(function, &lowered.space, &lowered.functions);
            let mut map = ValueMap::with_params(&mut b, function);
            for (i, node) in function.nodes.iter().enumerate() {
                match plans.get(&(id.index(), i)) {
                    None => map.copy(&mut b, node)?,
                    Some(plan) => expand(&mut b, function, node, plan, &mut map)?,
                }
            }
            let function = b.finish(map.outputs());
            lowered.functions.push(function);
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

/// Adds the steps of one attention and maps its results.
fn expand(
    b: &mut FunctionBuilder<'_>,
    function: &Function,
    node: &Node,
    plan: &Plan,
    map: &mut ValueMap<'_>,
) -> Result<(), OpError> {
    let operands = map.operands(node);
    let results = match &node.op {
        Op::AttentionBackward(a) => backward::backward(b, a, plan, &operands)?,
        Op::Attention(a) => forward::forward(b, a, plan, &operands)?,
        op => unreachable!("`{}` has no movement", op.name()),
    };
    for (&old, new) in node.results.iter().zip(results) {
        let ty = function.ty(old);
        let mut value = new;
        if b.ty(value).layout.partial != ty.layout.partial {
            // Sums are taken before they are rounded.
            let wide = TensorType { dtype: b.ty(value).dtype, ..ty.clone() };
            value = b.push_as(Op::Reshard, &[value], wide)?;
        }
        if b.ty(value).dtype != ty.dtype {
            value = b.push(Op::Cast { to: ty.dtype }, &[value])?;
        }
        if b.ty(value).layout != ty.layout {
            value = b.push_as(Op::Reshard, &[value], ty.clone())?;
        }
        b.name(value, function.values[old].name.as_deref());
        map.insert(old, value);
    }
    Ok(())
}
