//! `shard`: lays a program out over a mesh.
//!
//! A strategy says which axes split inputs, weights and the inside of attention; everything else follows from factor
//! rules, and a `reshard` stands where an operation needs a layout that its operand has not.
//!
//! ```text
//! %q = einsum %x, %wq : bf16[b s h d]
//! %o = attention %q, %k, %v {…} : bf16[b s h d]
//! ```
//! becomes, under `ulysses`,
//! ```text
//! %q  = einsum %x, %wq : bf16[b s@ulysses h d]
//! %q1 = reshard %q : bf16[b s h@ulysses d]
//! %o  = attention %q1, %k1, %v1 {…} : bf16[b s h@ulysses d]
//! %o1 = reshard %o : bf16[b s@ulysses h d]
//! ```

mod layouts;
mod legality;
mod options;
mod respace;
mod rewrite;
mod roles;
pub mod strategy;

pub use layouts::demand;
pub use legality::Decisions;
pub use options::{HeadSplit, SequenceFit, ShardOptions};
pub use roles::Roles;
pub use strategy::{Placement, STRATEGIES, Strategy, parse_mesh};

use ithaca_ir::module::Level;
use ithaca_ir::ops::Op;
use ithaca_ir::verify::Verified;
use ithaca_ir::{Diagnostic, Diagnostics, Module};

use crate::pass::{Context, Pass};

/// The pass.
#[derive(Clone, Debug)]
pub struct Shard {
    options: ShardOptions,
}

impl Shard {
    /// The pass with these options.
    pub fn new(options: ShardOptions) -> Self {
        Self { options }
    }
}

impl Pass for Shard {
    fn name(&self) -> &'static str {
        "shard"
    }

    fn options(&self) -> Vec<(String, String)> {
        self.options.to_pipeline()
    }

    fn run(&self, module: Verified<'_>, cx: &mut Context<'_>) -> Result<Module, Diagnostics> {
        let module = module.module();
        if module.level != Level::Program {
            let message = format!("`shard` takes a whole program; this one is {}", module.level.name());
            return Err(vec![Diagnostic::new("P03", message)]);
        }
        let (placement, decisions) = check(module, &self.options).map_err(|d| vec![d])?;
        if !cx.rewrite() {
            return Ok(module.clone());
        }
        let roles = Roles::of(module);
        for note in &decisions.notes {
            cx.note(note.clone());
        }
        let (mut sharded, copies) = respace::respace(module, &self.options.mesh, &roles, &decisions);
        let roles = Roles::of(&sharded);
        let program = std::mem::take(&mut sharded.functions);
        let rewritten = rewrite::functions(
            &mut sharded,
            &program,
            &rewrite::Plan { placement, roles, decisions, copies },
        )
        .map_err(|error| vec![Diagnostic::new(error.code, error.message)])?;
        let reached = attentions(module);
        if reached != rewritten {
            let message = format!("`shard` rewrote {rewritten} attention operations of {reached}");
            return Err(vec![Diagnostic::new("P04", message)]);
        }
        Ok(sharded)
    }
}

/// Whether and how `options` may lay `module` out, without doing it: cheap enough to try many.
///
/// # Errors
/// `P10`–`P12` for the strategy and the mesh, `P20`–`P24` for what does not divide.
pub fn check(module: &Module, options: &ShardOptions) -> Result<(Placement, Decisions), Diagnostic> {
    let strategies = strategy::product(&options.strategy)?;
    let placement = strategy::placement(&strategies, &options.mesh)?;
    let roles = Roles::of(module);
    let decisions = legality::decide(module, &options.mesh, &placement, &roles, options)?;
    Ok((placement, decisions))
}

/// Attention operations in every function.
fn attentions(module: &Module) -> usize {
    let nodes = module.functions.values().flat_map(|f| &f.nodes);
    nodes.filter(|n| matches!(n.op, Op::Attention(_))).count()
}
