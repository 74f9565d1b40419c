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
use ithaca_ir::{DType, Diagnostic, Diagnostics, DimId, Op};
use ithaca_pass::rebuild::rebuild;
use ithaca_pass::{Context, Pass};

/// The pass.
#[derive(Clone, Copy, Debug, Default)]
pub struct LowerReshards;

/// Conversions so far, by element type, dimensions and both layouts.
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
        let mut found = Found::new();
        let mut level = Level::PerRank;
        let lowered = rebuild(module, |b, function, node, operands| {
            if node.op != Op::Reshard {
                return Ok(None);
            }
            if !cx.rewrite() {
                level = Level::Sharded;
                return Ok(None);
            }
            let (from, to) = (function.ty(node.operands[0]), function.ty(node.result()));
            let key = (from.dtype, from.dims.to_vec(), from.layout.clone(), to.layout.clone());
            let steps = found.entry(key).or_insert_with(|| convert(b.space(), from, to, cx.prices));
            let mut value = operands[0];
            for step in steps.iter() {
                value = b.push_as(step.op.clone(), &[value], step.to.clone())?;
            }
            Ok(Some(vec![value]))
        })?;
        Ok(Module { level, ..lowered })
    }
}
