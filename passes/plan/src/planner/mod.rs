//! The planner: tries every strategy on every mesh, prices what is legal, and says why each loser lost.
//!
//! A candidate is a strategy, or a product of strategies whose axes differ, on a mesh that multiplies to the GPUs. It
//! is compiled, its schedule simulated and its memory counted. The least step time wins; ties go to less memory, then
//! to the name and the order of trial. Only the winner's schedule is checked, for only it can be emitted or run. Where
//! nothing fits, stages of a pipeline are tried. What does not fit or is not legal stays in the list with its reason, and a
//! request of which nothing is left is refused with repairs that were tried and work.

mod candidates;
mod floor;
mod reasons;
mod repair;
mod search;
mod table;

use ithaca_ir::ops::experts::Experts;
use ithaca_ir::{Diagnostic, Diagnostics, Mesh, Module, Op};
use ithaca_layout::compile::{self, Compiled};
use ithaca_layout::registry::Registry;
use ithaca_layout::shard::strategy::STAGE_AXIS;
use ithaca_layout::shard::{self, ShardOptions};

use crate::cluster::Cluster;
use crate::memory::{self, Memory};
use crate::plan::{self, Alternative, Plan};
use crate::simulate::{Simulation, simulate};

pub use candidates::{candidates, candidates_with};
pub use repair::repairs;
pub use table::table;

/// What is asked of the planner.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Request {
    /// Number of GPUs.
    pub gpus: u64,
    /// Sequences of the batch; of one sequence nothing is data-parallel.
    pub batch: u64,
    /// The strategy or product of strategies; every one when `None`.
    pub strategy: Option<String>,
    /// The mesh; every factorisation when `None`.
    pub mesh: Option<Mesh>,
    /// The other options of every candidate, each of which has a strategy and a mesh of its own.
    pub options: ShardOptions,
    /// Which layers leave blocks of keys unseen, so that strategies that fetch are worth a try.
    pub sparsity: Sparsity,
    /// Experts of the model's mixtures; none of a model without.
    pub experts: u64,
    /// Numbers of stages of a pipeline to try where nothing fits without; the compiler makes programs of so many.
    pub stages: Vec<u64>,
}

/// Which layers have masks that are more than causal and leave blocks empty.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Sparsity {
    /// None.
    #[default]
    None,
    /// These functions, and not others.
    Some(Vec<String>),
    /// All.
    All,
}

impl Sparsity {
    /// The sparsity of a program: a mask is sparse unless it is one band, unbounded on one side at least.
    pub fn of(module: &Module) -> Self {
        let mut sparse: Vec<String> = Vec::new();
        let mut dense = false;
        for function in module.functions.values() {
            for node in &function.nodes {
                let Op::Attention(a) = &node.op else { continue };
                match a.mask.offsets() {
                    Some((None, _) | (_, None)) => dense = true,
                    Some((Some(_), Some(_))) | None if !sparse.contains(&function.name) => {
                        sparse.push(function.name.clone());
                    }
                    Some((Some(_), Some(_))) | None => {}
                }
            }
        }
        match (sparse.is_empty(), dense) {
            (true, _) => Self::None,
            (false, true) => Self::Some(sparse),
            (false, false) => Self::All,
        }
    }
}

impl Request {
    /// Every strategy and mesh for `gpus` devices.
    pub fn new(gpus: u64) -> Self {
        Self { gpus, batch: 1, ..Self::default() }
    }
}

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

/// How many experts a program's mixtures choose from, at most.
pub fn experts(module: &Module) -> u64 {
    let nodes = module.functions.values().flat_map(|f| &f.nodes);
    let slots = nodes.filter_map(|node| match &node.op {
        Op::Experts(Experts::Dispatch(slots) | Experts::Combine(slots)) => Some(slots),
        _ => None,
    });
    slots.map(|slots| module.space.size(slots.experts)).max().unwrap_or(0)
}

/// A candidate with its price.
#[derive(Clone, Debug)]
pub struct Priced {
    /// Strategy, mesh and options.
    pub options: ShardOptions,
    /// Its program and schedule.
    pub compiled: Compiled,
    /// Its time.
    pub simulation: Simulation,
    /// Its memory.
    pub memory: Memory,
}

/// The winner, and everything that was tried.
#[derive(Clone, Debug)]
pub struct Ranked {
    /// The winner.
    pub chosen: Priced,
    /// What was tried: by rank, then what does not fit, then what is not legal.
    pub alternatives: Vec<Alternative>,
}

/// A request that nothing satisfies.
#[derive(Clone, Debug)]
pub struct Refusal {
    /// Why, with repairs that work.
    pub diagnostic: Diagnostic,
    /// What was tried.
    pub alternatives: Vec<Alternative>,
}

/// Ranks the candidates of a request.
///
/// # Errors
/// `P10`–`P12` for a strategy or mesh that is none, `P30` when there are no such GPUs, `P31` when no candidate is legal,
/// `P32` when none fits; or the rule that the only candidate breaks.
pub fn rank(compiler: &dyn Compiler, cluster: &Cluster, request: &Request) -> Result<Ranked, Box<Refusal>> {
    let mut tried = try_all(compiler, cluster, request).map_err(|diagnostic| {
        let diagnostic = repair::malformed(compiler, cluster, request, diagnostic);
        Box::new(Refusal { diagnostic, alternatives: Vec::new() })
    })?;
    tried.check_winner(compiler);
    if tried.fits.is_empty() {
        let diagnostic = repair::refusal(compiler, cluster, request, &tried);
        return Err(Box::new(Refusal { diagnostic, alternatives: tried.alternatives(compiler) }));
    }
    let alternatives = tried.alternatives(compiler);
    let chosen = tried.fits.into_iter().next().expect("a list that is not empty has a first item");
    Ok(Ranked { chosen, alternatives })
}

impl Ranked {
    /// The document of the winner.
    pub fn into_plan(self, cluster: &Cluster, model: plan::Model, workload: plan::Workload) -> Plan {
        let Ranked { chosen: Priced { options, compiled, simulation, memory }, alternatives } = self;
        Plan {
            version: plan::VERSION,
            model,
            cluster: cluster.clone(),
            workload,
            gpus: options.mesh.ranks(),
            mesh: plan::mesh_axes(&options.mesh),
            dimensions: plan::dimensions(&compiled.per_rank.space),
            attention: plan::attention(&compiled.attention, &options),
            options: plan::layout_options(&options),
            strategy: options.strategy,
            pipeline: plan::pipeline(&compiled.schedule),
            collectives: plan::collectives(&compiled.per_rank),
            memory: plan::MemoryUse::of(&memory, cluster),
            time: plan::Time::of(&simulation),
            alternatives,
            notes: compiled.notes,
        }
    }
}

/// Every candidate of a request, sorted by what came of it.
#[derive(Debug, Default)]
struct Tried {
    /// Best first.
    fits: Vec<Priced>,
    /// With the bytes that are missing, fewest first.
    too_large: Vec<(Priced, u64)>,
    /// In the order of trial.
    refused: Vec<(ShardOptions, Diagnostic)>,
}

impl Tried {
    fn add(&mut self, compiler: &dyn Compiler, cluster: &Cluster, candidates: Vec<ShardOptions>) {
        for options in candidates {
            match price(compiler, cluster, &options) {
                Ok(priced) => match priced.memory.over(cluster) {
                    None => self.fits.push(priced),
                    Some(over) => self.too_large.push((priced, over)),
                },
                Err(diagnostic) => self.refused.push((options, diagnostic)),
            }
        }
    }

    /// Checks the schedule of the best candidate; one that fails goes, and the next is the best.
    fn check_winner(&mut self, compiler: &dyn Compiler) {
        while let Some(winner) = self.fits.first() {
            match compiler.verify(&winner.compiled) {
                Ok(()) => return,
                Err(diagnostics) => {
                    let options = self.fits.remove(0).options;
                    self.refused.push((options, first(diagnostics)));
                }
            }
        }
    }

    fn alternatives(&self, compiler: &dyn Compiler) -> Vec<Alternative> {
        let fits = self.fits.iter().map(|p| reasons::ranked(p, &self.fits[0]));
        let too_large = self.too_large.iter().map(|(p, over)| reasons::too_large(p, *over));
        let refused = self.refused.iter().map(|(options, diagnostic)| {
            let repairs = repair::of_candidate(compiler, options);
            reasons::refused(options, diagnostic, repairs)
        });
        fits.chain(too_large).chain(refused).collect()
    }
}

fn try_all(compiler: &dyn Compiler, cluster: &Cluster, request: &Request) -> Result<Tried, Diagnostic> {
    let mut tried = Tried::default();
    let registry = compiler.registry();
    tried.add(compiler, cluster, candidates_with(&registry, cluster, request)?);
    if tried.fits.is_empty() && !tried.too_large.is_empty() && !request.stages.is_empty() {
        tried.add(compiler, cluster, candidates::staged(&registry, cluster, request)?);
    }
    let key = |p: &Priced| (plan::rounded(p.simulation.seconds), p.memory.total());
    tried.fits.sort_by(|a, b| {
        let ((a_time, a_bytes), (b_time, b_bytes)) = (key(a), key(b));
        let by_name = || a.options.strategy.cmp(&b.options.strategy);
        a_time.total_cmp(&b_time).then(a_bytes.cmp(&b_bytes)).then_with(by_name)
    });
    tried.too_large.sort_by_key(|(_, over)| *over);
    Ok(tried)
}

fn price(compiler: &dyn Compiler, cluster: &Cluster, options: &ShardOptions) -> Result<Priced, Diagnostic> {
    match compiler.draft(options) {
        Ok(compiled) => {
            let simulation = simulate(cluster, &compiled.schedule);
            let memory = memory::of_schedule(&compiled.schedule);
            Ok(Priced { options: options.clone(), compiled, simulation, memory })
        }
        Err(diagnostics) => Err(first(diagnostics)),
    }
}

fn first(diagnostics: Diagnostics) -> Diagnostic {
    diagnostics.into_iter().next().expect("a refusal has at least one diagnostic")
}

#[cfg(test)]
mod model_tests;
#[cfg(test)]
mod tests;
