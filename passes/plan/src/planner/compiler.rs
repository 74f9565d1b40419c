//! The compiler of candidates.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use ithaca_differentiate::Training;
use ithaca_ir::verify::{Verified, VerifiedModule};
use ithaca_ir::{Diagnostic, Diagnostics, Module};
use ithaca_layout::compile::{self, Compiled};
use ithaca_layout::registry::Registry;
use ithaca_layout::shard::strategy::STAGE_AXIS;
use ithaca_layout::shard::{self, ShardOptions};

use super::estimate::Cut;
use crate::cluster::Cluster;
use crate::plan::Step;

/// Compiles a candidate to a schedule. The planner itself knows no model.
pub trait Compiler: Sync {
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

    /// As [`draft`](Self::draft), of a long step by shorter ones.
    ///
    /// # Errors
    /// As [`draft`](Self::draft).
    fn step(&self, options: &ShardOptions, cluster: &Cluster) -> Result<Step, Diagnostics> {
        Ok(Step::whole(cluster, self.draft(options)?))
    }

    /// The compiler of a training step of `batch` sequences with options of its own; nothing where there is one program only.
    ///
    /// # Errors
    /// The rules that such a step breaks.
    fn of_step(
        &self,
        batch: u64,
        training: &Training,
    ) -> Result<Option<Box<dyn Compiler + '_>>, Diagnostics> {
        let _ = (batch, training);
        Ok(None)
    }

    /// For each of so many chunks of layers the calls of the model, by number, with their layers; nothing where the model has
    /// fewer layers.
    fn cut(&self, chunks: u64) -> Option<Cut> {
        let _ = chunks;
        None
    }

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
    pub module: Verified<'a>,
    /// The cluster whose prices choose collectives.
    pub cluster: &'a Cluster,
    /// The strategies and movements.
    pub registry: Registry,
    /// Returns the program with as many stages as a candidate's mesh has.
    pub of_stages: Option<&'a OfStages<'a>>,
    /// Returns the program of a training step of so many sequences.
    pub of_step: Option<&'a OfStep<'a>>,
    /// The training step, of so many sequences.
    pub training: Option<(u64, &'a Training)>,
    /// The forward pass of the model, which stages cut.
    pub forward: Option<&'a Module>,
    /// Ends a search soon after it is set; what the search returns then means nothing.
    pub stop: Option<&'a AtomicBool>,
}

type OfStages<'a> = dyn Fn(u64) -> Result<Arc<VerifiedModule>, Diagnostics> + Sync + 'a;
type OfStep<'a> = dyn Fn(u64, &Training) -> Result<Arc<VerifiedModule>, Diagnostics> + Sync + 'a;

/// One training step of several.
struct Single<'a> {
    module: Arc<VerifiedModule>,
    cluster: &'a Cluster,
    registry: Registry,
    stop: Option<&'a AtomicBool>,
}

/// Refuses every candidate once a search is to stop.
fn go_on(stop: Option<&AtomicBool>) -> Result<(), Diagnostic> {
    let is_set = stop.is_some_and(|stop| stop.load(Ordering::Relaxed));
    if is_set { Err(Diagnostic::new("P31", "the search was stopped")) } else { Ok(()) }
}

impl Compiler for Single<'_> {
    fn check(&self, options: &ShardOptions) -> Result<(), Diagnostic> {
        go_on(self.stop)?;
        shard::check(&self.registry, self.module.verified().module(), options).map(|_| ())
    }

    fn draft(&self, options: &ShardOptions) -> Result<Compiled, Diagnostics> {
        go_on(self.stop).map_err(|stopped| vec![stopped])?;
        compile::draft_with(&self.registry, self.module.verified(), options, self.cluster)
    }
}

impl<'a> Program<'a> {
    /// A program without stages, with the strategies and movements that come with Ithaca.
    pub fn new(module: Verified<'a>, cluster: &'a Cluster) -> Self {
        Self {
            module,
            cluster,
            registry: Registry::default(),
            of_stages: None,
            of_step: None,
            training: None,
            forward: None,
            stop: None,
        }
    }

    /// What `f` makes of the program of a candidate.
    fn with<T>(
        &self,
        options: &ShardOptions,
        f: impl FnOnce(Verified<'_>) -> Result<T, Diagnostics>,
    ) -> Result<T, Diagnostics> {
        match (self.of_stages, options.mesh.axis(STAGE_AXIS)) {
            (Some(of_stages), Some(axis)) => f(of_stages(options.mesh.size(axis))?.verified()),
            _ => f(self.module),
        }
    }
}

impl Compiler for Program<'_> {
    fn registry(&self) -> Registry {
        self.registry.clone()
    }

    fn check(&self, options: &ShardOptions) -> Result<(), Diagnostic> {
        go_on(self.stop)?;
        let checked = self.with(options, |program| {
            shard::check(&self.registry, program.module(), options).map_err(|refused| vec![refused])
        });
        checked.map(|_| ()).map_err(ithaca_pass::first)
    }

    fn draft(&self, options: &ShardOptions) -> Result<Compiled, Diagnostics> {
        go_on(self.stop).map_err(|stopped| vec![stopped])?;
        self.with(options, |program| compile::draft_with(&self.registry, program, options, self.cluster))
    }

    fn step(&self, options: &ShardOptions, cluster: &Cluster) -> Result<Step, Diagnostics> {
        let stages = options.mesh.axis(STAGE_AXIS).map_or(1, |axis| options.mesh.size(axis));
        match self.training {
            Some((batch, training)) if Step::is_long(stages, training.micro_batches) => {
                let training = Training { stages, ..training.clone() };
                training_step((self, cluster), (batch, &training), options)
            }
            _ => Ok(Step::whole(cluster, self.draft(options)?)),
        }
    }

    fn of_step(
        &self,
        batch: u64,
        training: &Training,
    ) -> Result<Option<Box<dyn Compiler + '_>>, Diagnostics> {
        let Some(of_step) = self.of_step else { return Ok(None) };
        let module = of_step(batch, training)?;
        let Self { cluster, stop, .. } = *self;
        Ok(Some(Box::new(Single { module, cluster, registry: self.registry.clone(), stop })))
    }

    fn cut(&self, chunks: u64) -> Option<Cut> {
        let stage_layers = self.training.map_or_else(Vec::new, |(_, training)| training.stage_layers.clone());
        // In the usual order a stage has one chunk.
        let staged = Training { stages: chunks, stage_layers, ..Training::default() };
        ithaca_differentiate::chunks(self.forward?, &staged).ok()
    }
}

/// A training step of so many sequences in a layout; a long one by shorter ones.
///
/// # Errors
/// As [`Compiler::draft`].
pub(super) fn training_step(
    (compiler, cluster): (&dyn Compiler, &Cluster),
    (batch, training): (u64, &Training),
    options: &ShardOptions,
) -> Result<Step, Diagnostics> {
    ithaca_differentiate::check_calls(training).map_err(|refusal| vec![*refusal])?;
    Step::of(cluster, (batch, training), |batch, training| {
        let step = compiler.of_step(batch, training)?;
        step.as_deref().unwrap_or(compiler).draft(options)
    })
}
