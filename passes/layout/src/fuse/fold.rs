//! `fold`: no kernel of its own packs or unpacks what kernels can write, or read, where it lies on the wire.
//!
//! ```text
//! compute: rotary $v4, $positions -> $q             buffer $q : bf16[b s@u h d] in $v12.send part 0
//! compute: pack $q, $k, $v -> $v12.send             is gone
//! ```
//!
//! Which tensors these are is seen when tasks and buffers are made, so the pass leaves the program as it is and asks
//! [`lower`](mod@crate::lower) for it, by its name among the passes that made the program. The rules stand in `RULES.md`.

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

/// Whether the passes that made a program ask for it.
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
            let message = "`fold` is about messages, and this program has reshards";
            return Err(vec![Diagnostic::new("P03", message).help("run `lower-reshards` first")]);
        }
        Ok(module.clone())
    }
}
