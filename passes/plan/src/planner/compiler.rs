//! The compiler of candidates.

use std::borrow::Cow;

use ithaca_ir::{Diagnostic, Diagnostics, Module};
use ithaca_layout::compile::{self, Compiled};
use ithaca_layout::registry::Registry;
use ithaca_layout::shard::strategy::STAGE_AXIS;
use ithaca_layout::shard::{self, ShardOptions};

use crate::cluster::Cluster;

/// Compiles a candidate to a schedule. The planner itself knows no model.
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
#[derive(Clone)]
pub struct Program<'a> {
    /// The program; of one stage, where there are programs of several.
    pub module: &'a Module,
    /// The cluster whose prices choose collectives.
    pub cluster: &'a Cluster,
    /// The strategies and movements.
    pub registry: Registry,
    /// Returns the program with as many stages as a candidate's mesh has.
    pub of_stages: Option<&'a dyn Fn(u64) -> Result<Module, Diagnostics>>,
}

impl<'a> Program<'a> {
    /// A program without stages, with the strategies and movements that come with Ithaca.
    pub fn new(module: &'a Module, cluster: &'a Cluster) -> Self {
        Self { module, cluster, registry: Registry::default(), of_stages: None }
    }

    fn module(&self, options: &ShardOptions) -> Result<Cow<'a, Module>, Diagnostics> {
        match (self.of_stages, options.mesh.axis(STAGE_AXIS)) {
            (Some(of_stages), Some(axis)) => of_stages(options.mesh.size(axis)).map(Cow::Owned),
            _ => Ok(Cow::Borrowed(self.module)),
        }
    }
}

impl Compiler for Program<'_> {
    fn registry(&self) -> Registry {
        self.registry.clone()
    }

    fn check(&self, options: &ShardOptions) -> Result<(), Diagnostic> {
        let module = self.module(options).map_err(ithaca_pass::first)?;
        shard::check(&self.registry, &module, options).map(|_| ())
    }

    fn draft(&self, options: &ShardOptions) -> Result<Compiled, Diagnostics> {
        compile::draft_with(&self.registry, &*self.module(options)?, options, self.cluster)
    }
}
