//! `lower-reshards`: each change of layout becomes the cheapest sequence of collectives.
//!
//! ```text
//! %1 = reshard %0 : bf16[b s h@u d]         // from bf16[b s@u h d]
//! ```
//! becomes
//! ```text
//! %1 = all_to_all %0 {axis=u, split=h, concat=s} : bf16[b s h@u d]
//! ```

mod search;

pub use search::{Step, convert};

use std::collections::BTreeMap;

use ithaca_ir::layout::Layout;
use ithaca_ir::module::{Level, Module};
use ithaca_ir::verify::Verified;
use ithaca_ir::{DType, Diagnostic, Diagnostics, DimId, FunctionBuilder, Op, TensorType};
use ithaca_pass::rebuild::ValueMap;
use ithaca_pass::{Context, Pass};

/// The pass.
#[derive(Clone, Copy, Debug, Default)]
pub struct LowerReshards;

/// Conversions found before, by what they depend on.
type Found = BTreeMap<(DType, Vec<DimId>, Layout, Layout), Vec<Step>>;

impl Pass for LowerReshards {
    fn name(&self) -> &'static str {
        "lower-reshards"
    }

    fn run(&self, module: Verified<'_>, cx: &mut Context<'_>) -> Result<Module, Diagnostics> {
        let module = module.module();
        if module.level == Level::Program {
            let message =
                "`lower-reshards` needs a sharded program, and this one is not laid out over a mesh";
            return Err(vec![Diagnostic::new("P03", message).help("run `shard` first")]);
        }
        let mut lowered = module.emptied(Level::PerRank);
        let mut found = Found::new();
        let mut left = false;
        for function in module.functions.values() {
            let mut b = FunctionBuilder::like(function, &lowered.space, &lowered.functions);
            let mut map = ValueMap::with_params(&mut b, function);
            for node in &function.nodes {
                if node.op == Op::Reshard && cx.rewrite() {
                    let from = function.ty(node.operands[0]);
                    let to = function.ty(node.result());
                    let key = (from.dtype, from.dims.to_vec(), from.layout.clone(), to.layout.clone());
                    let steps = found.entry(key).or_insert_with(|| convert(b.space(), from, to, cx.prices));
                    let mut value = map[node.operands[0]];
                    for step in steps.iter() {
                        value = b.push_as(step.op.clone(), &[value], step.to.clone())?;
                    }
                    map.replace(&mut b, node, &[value]);
                } else {
                    left |= node.op == Op::Reshard;
                    map.copy(&mut b, node)?;
                }
            }
            let function = b.finish(map.outputs());
            lowered.functions.push(function);
        }
        if left {
            lowered.level = Level::Sharded;
        }
        Ok(lowered)
    }
}

/// The bytes that `steps` send from a rank, for tests and reports.
pub fn bytes_sent(space: &ithaca_ir::Space, from: &TensorType, steps: &[Step]) -> u64 {
    let mut from = from;
    let mut total = 0;
    for step in steps {
        total += ithaca_ir::boxes::bytes_sent(space, &step.op, from, &step.to, ithaca_ir::Rank(0));
        from = &step.to;
    }
    total
}
