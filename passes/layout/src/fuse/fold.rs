//! `fold`: kernels write and read wire buffers directly if they can, instead of separate pack and unpack kernels.
//!
//! ```text
//! compute: rotary $v4, $positions -> $q             buffer $q : bf16[b s@u h d] in $v12.send part 0
//! compute: pack $q, $k, $v -> $v12.send             removed
//! ```
//!
//! Lowering finds these tensors, because it makes tasks and buffers. The pass leaves the program unchanged and requests
//! the folding from [`lower`](mod@crate::lower) by its name in the program's pipeline. `RULES.md` states the rules.

use ithaca_ir::Module;
use ithaca_ir::module::Level;
use ithaca_ir::verify::Verified;
use ithaca_ir::{Diagnostic, Diagnostics};
use ithaca_pass::{Context, Pass};

/// The pass.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Fold;

/// Its name in a pipeline.
pub const NAME: &str = "fold";

/// Whether the program's pipeline contains the pass.
pub(crate) fn is_asked(module: &Module) -> bool {
    module.pipeline.iter().any(|pass| pass == NAME)
}

impl Pass for Fold {
    fn name(&self) -> &'static str {
        NAME
    }

    fn run(&self, module: Verified<'_>, _cx: &mut Context<'_>) -> Result<Module, Diagnostics> {
        let module = module.module();
        if module.level == Level::Sharded {
            let message = "`fold` needs a per-rank program, but this one has reshards";
            return Err(vec![Diagnostic::new("P03", message).help("run `lower-reshards` first")]);
        }
        Ok(module.clone())
    }
}
