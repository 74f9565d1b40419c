//! `fuse-caches`: fewer kernels, and fewer copies, where a step reads and writes caches.

use ithaca_ir::module::Level;
use ithaca_ir::verify::Verified;
use ithaca_ir::{Diagnostic, Diagnostics, Module};
use ithaca_pass::rebuild::Copy;
use ithaca_pass::{Context, Pass};

use super::appends::appends;
use super::graph::Flow;
use super::pages::attentions;
use super::replace::replaced;

/// The pass.
#[derive(Clone, Copy, Debug, Default)]
pub struct FuseCaches;

impl Pass for FuseCaches {
    fn name(&self) -> &'static str {
        "fuse-caches"
    }

    fn run(&self, module: Verified<'_>, cx: &mut Context<'_>) -> Result<Module, Diagnostics> {
        let module = module.module();
        if module.level != Level::PerRank {
            let message = "`fuse-caches` needs a per-rank program, in which attention has no movement";
            return Err(vec![Diagnostic::new("P03", message).help("run `lower-reshards` first")]);
        }
        let mut rewritten = module.emptied(module.level);
        for function in module.functions.values() {
            let flow = Flow::of(function);
            let mut found = attentions(&module.space, &flow, function);
            found.extend(appends(&flow, function));
            let function = if found.is_empty() {
                function.clone()
            } else {
                replaced(function, found, Copy::of(function, &rewritten.space, &rewritten.functions), cx)?
            };
            rewritten.functions.push(function);
        }
        Ok(rewritten)
    }
}
