//! `shard`: lays a program out over a mesh.
//!
//! A strategy states which axes split inputs, weights and the inside of attention; everything else follows from factor
//! rules, and a `reshard` changes the layout of an operand where an operation needs another.
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

mod caches;
mod choice;
mod degrees;
mod experts;
mod flow;
mod gradients;
mod inner;
mod inside;
mod join;
mod layouts;
mod legality;
mod lookups;
mod masks;
mod options;
mod orders;
mod pages;
mod placements;
mod replicas;
mod respace;
mod rewrite;
mod rewriter;
mod send;
mod stages;
pub mod table;
mod training;
mod zero;

pub use choice::{AttentionChoice, axes_text, parse_axes, parse_movement};
pub use layouts::demand;
pub use legality::Decisions;
pub use options::{HeadSplit, OPTIONS, OrderChoice, Prune, SequenceFit, ShardOptions};
pub use orders::{ChosenOrder, ChosenOrders};
pub use placements::{Placements, check_names};
pub use zero::{WeightSize, Zero};

pub use crate::strategy::{self, Placement, STRATEGIES, Strategy, parse_mesh};
pub use ithaca_pass::roles::Roles;

use std::collections::BTreeMap;

use ithaca_ir::module::Level;
use ithaca_ir::ops::OpError;
use ithaca_ir::verify::Verified;
use ithaca_ir::{Diagnostic, Diagnostics, DimId, Module};
use ithaca_pass::choices::{Choice, Choices, Source, Topic, impossible};
use ithaca_pass::{Context, Pass};

use flow::Flows;
use inner::is_attention;

use crate::registry::Registry;

/// The pass.
#[derive(Clone, Debug)]
pub struct Shard {
    options: ShardOptions,
    registry: Registry,
}

impl Shard {
    /// The pass with these options.
    pub fn new(options: ShardOptions) -> Self {
        Self { options, registry: Registry::default() }
    }

    /// The same pass with the strategies and movements of `registry`.
    pub fn with_registry(mut self, registry: Registry) -> Self {
        self.registry = registry;
        self
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
        let orders = match cx.source() {
            Source::Prices(_) => None,
            Source::Record(choices) => Some(recorded_orders(choices)?),
        };
        let checked = checked(&self.registry, module, &self.options, orders.as_ref());
        let (placements, decisions) = checked.map_err(|d| vec![d])?;
        if !cx.rewrite() {
            return Ok(module.clone());
        }
        for (dim, order) in &decisions.chosen_orders {
            if let Choice::ByPrice(_) = cx.choose(Topic::Orders, dim.as_str())? {
                cx.record(order.to_string());
            }
        }
        let roles = Roles::of(module);
        let both = flow::keep_both_sides(module)?;
        let (mut sharded, copies) = respace::respace(both, &self.options.mesh, &roles, &decisions);
        let roles = Roles::of(&sharded);
        let is_split = |d: DimId| roles.splits_weights(d) && !decisions.whole.contains(&d);
        let heads_as_inside = caches::heads_as_inside(&placements.base, &roles, &sharded.space);
        let parts = respace::parts(&mut sharded, &placements.base.weights, is_split);
        let replicas = replicas::axes(&placements, &sharded.space);
        let flows = Flows::of(&sharded);
        let zero = self.options.zero;
        let persistent = replicas::persistent(&sharded, zero, cx)?;
        let (pending, sent_as) = (BTreeMap::new(), training::sent_as(&sharded));
        let mut plan = rewriter::Plan {
            placements,
            roles,
            decisions,
            copies,
            parts,
            heads_as_inside,
            flows,
            zero,
            persistent,
            replicas,
            pending,
            sent_as,
        };
        for dim in replicas::uneven(&sharded, &plan) {
            sharded.space.dims[dim].uneven = true;
        }
        for note in plan.decisions.notes.iter().cloned().chain(replicas::notes(&sharded, &plan)) {
            cx.note(note);
        }
        let program = std::mem::take(&mut sharded.functions);
        if zero.keeps_sums() && training::has_sums(&program) {
            // A sum stays pending over the axes over which all of its contributions are.
            let mut tried = sharded.clone();
            plan.pending = rewrite::functions(&mut tried, &program, &plan, cx)?.contributions;
        }
        let rewritten = rewrite::functions(&mut sharded, &program, &plan, cx)?.attentions;
        let reached = attentions(module);
        if reached != rewritten {
            let message = format!("`shard` rewrote {rewritten} attention operations of {reached}");
            return Err(vec![Diagnostic::new("P04", message)]);
        }
        Ok(join::join_alike(sharded)?)
    }
}

/// Whether and how `options` may lay `module` out, without doing it: cheap enough to try many.
///
/// # Errors
/// `P10`–`P13` for the strategy and the mesh, `P20`–`P28` for what does not divide, `P40`–`P49` for what a movement does
/// not compute.
pub fn check(
    registry: &Registry,
    module: &Module,
    options: &ShardOptions,
) -> Result<(Placements, Decisions), Diagnostic> {
    checked(registry, module, options, None)
}

/// As [`check`], with recorded orders of tokens in place of new ones.
fn checked(
    registry: &Registry,
    module: &Module,
    options: &ShardOptions,
    orders: Option<&ChosenOrders>,
) -> Result<(Placements, Decisions), Diagnostic> {
    let roles = Roles::of(module);
    let placements = Placements::of(registry, module, &roles, options)?;
    stages::check(module, &options.mesh, &placements.base.stages)?;
    let decisions = legality::decide(registry, module, &placements, &roles, options, orders)?;
    Ok((placements, decisions))
}

fn recorded_orders(choices: &Choices) -> Result<ChosenOrders, OpError> {
    let orders = choices.of(Topic::Orders).iter().map(|(dim, text)| {
        let order = text.parse().map_err(|known| impossible(Topic::Orders, dim, text, known))?;
        Ok((dim.clone(), order))
    });
    orders.collect()
}

/// Attention operations in every function.
fn attentions(module: &Module) -> usize {
    let nodes = module.functions.values().flat_map(|f| &f.nodes);
    nodes.filter(|n| is_attention(&n.op)).count()
}
