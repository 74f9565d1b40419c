//! `prefetch`: sharded weights are gathered before their use, and gradients are reduced after their computation, while
//! kernels compute.
//!
//! ```text
//! %x2 = call %x {callee=@block, layers=0..32}
//! ```
//! becomes
//! ```text
//! %w = call {callee=@block.gather, layers=0..1}                               the weights that layer 0 needs first
//! %x1, %w1 = call %x, %w {callee=@block.first, layers=0..31}                  layer i gathers those of layer i + 1
//! %x2 = call %x1, %w1 {callee=@block.last, layers=31..32}                     the last layer gathers nothing
//! ```
//! Within a layer, each message of weights starts as late as possible without delaying a kernel, by the cluster's
//! prices (`timeline`). A message that would have to start before its layer is sent during the previous layer and its
//! result is carried over. A backward pass also carries over gradients whose reduction would end after the layer: the
//! next layer reduces them. The messages and their sizes stay the same. `RULES.md` states the rules.

mod body;
mod callers;
mod parts;
mod plan;
mod timeline;
mod write;

#[cfg(test)]
mod tests;

use ithaca_ir::entity::Entity;
use ithaca_ir::module::{FuncId, Level};
use ithaca_ir::ops::OpError;
use ithaca_ir::verify::Verified;
use ithaca_ir::{Diagnostic, Diagnostics, Module};
use ithaca_pass::{Context, Pass, options};
use serde::{Deserialize, Serialize};

use body::Body;
use plan::Plan;
use write::{Functions, Variant};

/// The pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Prefetch {
    /// The number of layers by which weights are gathered ahead: 1, or 0 for within a layer only.
    #[serde(deserialize_with = "options::whole::<_, 0, MAX_LAYERS>")]
    pub layers: u64,
}

impl Default for Prefetch {
    /// One layer, so at most the weights of two layers are held.
    fn default() -> Self {
        Self { layers: 1 }
    }
}

/// Options, as `list passes` shows them.
pub const OPTIONS: &str = "layers=0|1";

/// The note of a program without weights to gather ahead or gradients to reduce later.
pub(crate) const NO_EFFECT: &str =
    "`prefetch` has no effect: no weights are gathered; `--zero 3` shards them";

/// The maximum number of layers by which weights are gathered ahead.
pub const MAX_LAYERS: u64 = 1;

impl Pass for Prefetch {
    fn name(&self) -> &'static str {
        "prefetch"
    }

    fn options(&self) -> Vec<(String, String)> {
        options::write(self)
    }

    fn run(&self, module: Verified<'_>, cx: &mut Context<'_>) -> Result<Module, Diagnostics> {
        let module = module.module();
        if module.level != Level::PerRank {
            let message = "`prefetch` needs a per-rank program, in which every communication is a collective";
            return Err(vec![Diagnostic::new("P03", message).help("run `lower-reshards` first")]);
        }
        let plan = match self.layers {
            0 => Plan::default(),
            _ => Plan::of(module, cx)?,
        };
        Ok(rewritten(module, &plan, cx)?)
    }
}

/// The module with the planned layers, and every other gather at its position.
fn rewritten(module: &Module, plan: &Plan, cx: &mut Context<'_>) -> Result<Module, OpError> {
    let mut new = module.emptied(module.level);
    let mut called: Vec<Option<FuncId>> = vec![None; module.functions.len()];
    let mut functions = Functions::default();
    let layers = plan.layers(module);
    let is_first = |body| plan.calls.values().any(|worked| worked.first == body && worked.before.is_none());
    let mut works = false;
    for (id, _) in module.functions.iter() {
        for (number, body) in plan.bodies.iter().enumerate().filter(|(_, body)| body.of.callee == id) {
            let own = plan.variants.iter().filter(|variant| variant.own == number);
            let mut own: Vec<Variant> = own.copied().collect();
            // In order of execution.
            own.sort_by_key(|variant| (variant.next.is_none(), variant.before.is_some(), *variant));
            works |= !own.is_empty() && body.has_messages();
            functions.add(&mut new, layers, &own, &plan.variants, is_first)?;
        }
        if plan.unused.contains(&id) {
            continue;
        }
        let function = callers::rewritten(plan, &mut new, module, id, &called, &functions)?;
        let body = Body::alone(&new.space, &function, id, cx)?;
        works |= body.gathers();
        let function = if body.gathers() { write::arranged(&body, &new, &function)? } else { function };
        called[id.index()] = Some(new.functions.push(function));
    }
    if !works {
        cx.note(NO_EFFECT);
    }
    Ok(new)
}
