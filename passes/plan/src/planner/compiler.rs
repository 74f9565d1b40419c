//! What compiles candidates.

use ithaca_ir::{Diagnostic, Diagnostics, Module};
use ithaca_layout::compile::{self, Compiled};
use ithaca_layout::registry::Registry;
use ithaca_layout::shard::strategy::STAGE_AXIS;
use ithaca_layout::shard::{self, ShardOptions};

use crate::cluster::Cluster;

/// What makes a schedule of a candidate. The planner itself knows no model.
pub trait Compiler {
    /// The strategies that are tried, and their movements.
    fn registry(&self) -> Registry {
        Registry::default()
    }

    /// Whether the candidate is legal; cheap.
    ///
    /// # Errors
    /// The rule that it breaks.
    fn check(&self, options: &ShardOptions) -> Result<(), Diagnostic>;

    /// The candidate's program, verified, and its schedule, which need not be: it is priced, and verified if it wins.
    ///
    /// # Errors
    /// The rules that it breaks, or invariants of ours that the passes broke.
    fn draft(&self, options: &ShardOptions) -> Result<Compiled, Diagnostics>;

    /// Verifies the schedule of a draft.
    ///
    /// # Errors
    /// Invariants of ours that lowering broke.
    fn verify(&self, draft: &Compiled) -> Result<(), Diagnostics> {
        compile::verify_schedule(draft)
    }
}

/// A whole program, compiled by the passes.
#[derive(Clone, Copy, Debug)]
pub struct Program<'a> {
    /// The program.
    pub module: &'a Module,
    /// The cluster whose prices choose collectives.
    pub cluster: &'a Cluster,
}

impl Compiler for Program<'_> {
    fn check(&self, options: &ShardOptions) -> Result<(), Diagnostic> {
        shard::check(self.module, options).map(|_| ())
    }

    fn draft(&self, options: &ShardOptions) -> Result<Compiled, Diagnostics> {
        compile::draft_with(&Registry::default(), self.module, options, self.cluster)
    }
}

/// A whole program, compiled by the passes with strategies and movements beyond those that come with Ithaca.
#[derive(Clone, Copy, Debug)]
pub struct Extended<'a> {
    /// The program.
    pub program: Program<'a>,
    /// The strategies and movements.
    pub registry: &'a Registry,
}

impl Compiler for Extended<'_> {
    fn registry(&self) -> Registry {
        self.registry.clone()
    }

    fn check(&self, options: &ShardOptions) -> Result<(), Diagnostic> {
        shard::check_with(self.registry, self.program.module, options).map(|_| ())
    }

    fn draft(&self, options: &ShardOptions) -> Result<Compiled, Diagnostics> {
        compile::draft_with(self.registry, self.program.module, options, self.program.cluster)
    }
}

/// Programs with as many stages as a candidate's mesh has, compiled by the passes.
pub struct Staged<'a> {
    /// The program of one stage.
    pub program: Extended<'a>,
    /// Makes the program of several stages.
    pub of_stages: &'a dyn Fn(u64) -> Result<Module, Diagnostics>,
}

impl Staged<'_> {
    fn stages(options: &ShardOptions) -> Option<u64> {
        options.mesh.axis(STAGE_AXIS).map(|axis| options.mesh.size(axis))
    }
}

impl Compiler for Staged<'_> {
    fn registry(&self) -> Registry {
        self.program.registry()
    }

    fn check(&self, options: &ShardOptions) -> Result<(), Diagnostic> {
        let Some(stages) = Self::stages(options) else { return self.program.check(options) };
        let module = (self.of_stages)(stages).map_err(first)?;
        shard::check_with(self.program.registry, &module, options).map(|_| ())
    }

    fn draft(&self, options: &ShardOptions) -> Result<Compiled, Diagnostics> {
        let Some(stages) = Self::stages(options) else { return self.program.draft(options) };
        let module = (self.of_stages)(stages)?;
        compile::draft_with(self.program.registry, &module, options, self.program.program.cluster)
    }
}

/// The first diagnostic of a refusal.
pub(super) fn first(diagnostics: Diagnostics) -> Diagnostic {
    diagnostics.into_iter().next().expect("a refusal has at least one diagnostic")
}
