//! The planner: tries every strategy on every mesh, prices the legal ones, and reports why each loser lost.
//!
//! A candidate is a strategy, or a product of strategies whose axes differ, on a mesh that multiplies to the GPUs. It
//! is compiled, its schedule simulated and its memory counted; the best are also tried with collectives in chunks and in
//! two levels. Training steps are searched (module `explore`). The least step time wins; ties go to less memory, then to the name and
//! the order of trial. Only the winner's schedule is checked, for only it can be emitted or run. Layouts that do not fit or are
//! not legal stay in the list with the reason, and a request of which nothing is left is refused with repairs that were tried
//! and work.

mod ahead;
mod block;
mod candidates;
mod compiler;
mod estimate;
mod explore;
mod floor;
mod fusion;
mod grow;
mod outcomes;
mod reasons;
mod repair;
mod request;
mod same;
mod search;
mod sequences;
mod table;
mod target;
mod tasks;

use ithaca_ir::Diagnostic;
use ithaca_layout::shard::ShardOptions;
use ithaca_layout::shard::strategy::STAGE_AXIS;
use rayon::prelude::*;

use crate::cluster::Cluster;
use crate::plan::{self, Alternative, Plan, Step, rounded};
use outcomes::{Compilation, Outcomes, price};

pub use candidates::candidates;
pub use compiler::{Compiler, Program};
pub use outcomes::Priced;
pub use repair::repairs;
pub use request::{Request, Sparsity, Steps, experts};
pub use table::{Refusals, Rows, View, table};
pub use target::Target;

/// The winner, and everything that was tried.
#[derive(Clone, Debug)]
pub struct Ranked {
    /// The winner.
    pub chosen: Priced,
    /// Its program and schedule.
    pub step: Step,
    /// The candidates: by rank, then those that do not fit, then those that are not legal.
    pub alternatives: Vec<Alternative>,
    /// How many candidates were not compiled, as they join strategies that are far from the best.
    pub n_passed_over: usize,
}

/// What a plan is of.
#[derive(Clone, Debug)]
pub struct Subject {
    /// The model.
    pub model: plan::Model,
    /// The workload.
    pub workload: plan::Workload,
    /// The FLOPs that the model needs for a step.
    pub model_flops: f64,
}

/// A request that nothing satisfies.
#[derive(Clone, Debug)]
pub struct Refusal {
    /// Why, with repairs that work.
    pub diagnostic: Diagnostic,
    /// The candidates.
    pub alternatives: Vec<Alternative>,
}

/// Ranks the candidates of a request.
///
/// # Errors
/// `P10`–`P12` for an unknown strategy or a wrong mesh, `P30` when the cluster lacks the GPUs, `P31` when no candidate is legal,
/// `P32` when none fits; or the rule that the only candidate breaks.
pub fn rank(compiler: &dyn Compiler, cluster: &Cluster, request: &Request) -> Result<Ranked, Box<Refusal>> {
    let blocks = explore::Blocks::default();
    let tried = if request.is_search_of_steps() {
        explore::explore(compiler, cluster, request, &blocks).map(ranked).and_then(|tried| {
            // A layout that is named says why no step is legal.
            let is_named = request.strategy.is_some() || request.mesh.is_some();
            if !tried.is_empty() || !is_named {
                return Ok(tried);
            }
            let mut tried = try_all(compiler, cluster, request)?;
            for (options, diagnostic) in &mut tried.refused {
                if let Some(reason) = explore::no_micro_batches(request, &options.mesh) {
                    *diagnostic = reason;
                }
            }
            Ok(tried)
        })
    } else {
        try_all(compiler, cluster, request)
    };
    let mut tried = tried.map_err(|diagnostic| {
        let diagnostic = repair::malformed(compiler, cluster, request, diagnostic);
        Box::new(Refusal { diagnostic, alternatives: Vec::new() })
    })?;
    if request.chooses_fusion && !request.is_search_of_steps() {
        fusion::refine(compiler, cluster, &mut tried.fits);
    }
    sequences::refine(compiler, cluster, request, &mut tried);
    let Some(step) = tried.check_winner(compiler, cluster) else {
        let diagnostic = repair::refusal(compiler, cluster, request, (&tried, &blocks));
        return Err(Box::new(Refusal { diagnostic, alternatives: tried.alternatives(compiler, request) }));
    };
    let alternatives = tried.alternatives(compiler, request);
    let chosen = tried.fits.into_iter().next().expect("a list that is not empty has a first item");
    Ok(Ranked { chosen, step, alternatives, n_passed_over: tried.n_passed_over })
}

/// The candidates of a request that fit, best first, without the trials that refine the best or repair the others.
///
/// # Errors
/// `P10`–`P12` for an unknown strategy or a wrong mesh, `P30` when the cluster lacks the GPUs.
pub fn fitting(
    compiler: &dyn Compiler,
    cluster: &Cluster,
    request: &Request,
) -> Result<Vec<Priced>, Diagnostic> {
    Ok(try_all(compiler, cluster, request)?.fits)
}

impl Ranked {
    /// The document of the winner.
    pub fn into_plan(self, cluster: &Cluster, request: &Request, subject: Subject) -> Plan {
        let Ranked { chosen, step, alternatives, n_passed_over } = self;
        let Priced { options, simulation, memory, .. } = chosen;
        let search = request.search();
        let micro_batches = request.steps.as_ref().map_or(1, |steps| steps.training.micro_batches);
        let left_out = plan::stages_left_out(&search, micro_batches, request.gpus);
        let left_out = plan::passed_over(n_passed_over).into_iter().chain(left_out);
        let Subject { model, workload, model_flops } = subject;
        let time = plan::Time::of(cluster, (&step.compiled.schedule, workload.micro_batches), &simulation);
        Plan {
            version: plan::VERSION,
            model,
            cluster: cluster.clone(),
            workload,
            gpus: options.mesh.ranks(),
            search,
            mesh: plan::mesh_axes(&options.mesh),
            dimensions: step.dimensions(),
            attention: plan::attention(&step.compiled.attention, &options),
            options: plan::layout_options(&options),
            strategy: options.strategy,
            pipeline: step.pipeline(),
            collectives: step.collectives(),
            choices: step.compiled.choices,
            memory,
            time,
            model_flops: rounded(model_flops),
            alternatives,
            n_passed_over,
            notes: step.compiled.notes.into_iter().chain(left_out).collect(),
        }
    }
}

impl Outcomes {
    fn add(&mut self, compiler: &dyn Compiler, cluster: &Cluster, candidates: Vec<ShardOptions>) {
        let is_one = candidates.len() == 1;
        let price = |options: ShardOptions| {
            let priced = price(compiler, cluster, &options);
            (if is_one { priced } else { priced.map(Priced::outlined) }, options)
        };
        let priced: Vec<(Result<Priced, Diagnostic>, ShardOptions)> =
            candidates.into_par_iter().map(price).collect();
        for (priced, options) in priced {
            match priced {
                Ok(priced) => match priced.memory.over() {
                    None => self.fits.push(priced),
                    Some(over) => self.too_large.push((priced, over)),
                },
                Err(diagnostic) => self.refused.push((options, diagnostic)),
            }
        }
    }

    fn is_empty(&self) -> bool {
        self.fits.is_empty() && self.too_large.is_empty() && self.refused.is_empty()
    }

    /// Checks the schedule of the best candidate, and gives it; one that fails goes, and the next is the best.
    fn check_winner(&mut self, compiler: &dyn Compiler, cluster: &Cluster) -> Option<Step> {
        while let Some(winner) = self.fits.first_mut() {
            let outline = Compilation::Outline(winner.outline().into_owned());
            let step = match std::mem::replace(&mut winner.program, outline) {
                Compilation::Kept(step) => Ok(*step),
                Compilation::Outline(_) => compiler.step(&winner.options, cluster),
            };
            match step.and_then(|step| compiler.verify(&step.compiled).map(|()| step)) {
                Ok(step) => return Some(step),
                Err(diagnostics) => {
                    let options = self.fits.remove(0).options;
                    self.refused.push((options, ithaca_pass::first(diagnostics)));
                }
            }
        }
        None
    }

    fn alternatives(&self, compiler: &dyn Compiler, request: &Request) -> Vec<Alternative> {
        let registry = compiler.registry();
        let names = |priced: &Priced| {
            let target = request.target.as_ref();
            target.map_or_else(String::new, |target| {
                target.names(&registry, &priced.options, priced.training.as_ref())
            })
        };
        let fits =
            self.fits.iter().map(|p| Alternative { settings: names(p), ..reasons::ranked(p, &self.fits[0]) });
        let too_large = self.too_large.iter().map(|(p, over)| reasons::too_large(p, *over));
        let refused = self.refused.iter().map(|(options, diagnostic)| {
            let repairs = repair::of_candidate(compiler, options);
            reasons::refused(options, diagnostic, repairs)
        });
        fits.chain(too_large).chain(refused).collect()
    }
}

fn try_all(compiler: &dyn Compiler, cluster: &Cluster, request: &Request) -> Result<Outcomes, Diagnostic> {
    let mut tried = Outcomes::default();
    let registry = compiler.registry();
    let may_try_stages = request.may_try_stages();
    match candidates(&registry, cluster, request) {
        Ok(candidates) => grow::add(&mut tried, compiler, cluster, (candidates, request)),
        Err(error) if error.code == candidates::OF_FRAMEWORK && may_try_stages => {
            let staged = Request { tries_stages: true, ..request.clone() };
            return try_all(compiler, cluster, &staged).map_err(|_| error);
        }
        Err(error) => return Err(error),
    }
    // Stages of a prefill wait for each other, but each has its own layers only.
    if tried.fits.is_empty() && may_try_stages {
        let staged = Request { tries_stages: true, ..request.clone() };
        let mut candidates = candidates(&registry, cluster, &staged)?;
        candidates.retain(|options| options.mesh.axis(STAGE_AXIS).is_some());
        let mut of_stages = Outcomes::default();
        grow::add(&mut of_stages, compiler, cluster, (candidates, &staged));
        if !of_stages.fits.is_empty() {
            tried.fits = of_stages.fits;
            tried.n_passed_over += of_stages.n_passed_over;
        }
    }
    Ok(ranked(tried))
}

/// Puts candidates in order, and merges those with the same program.
fn ranked(mut tried: Outcomes) -> Outcomes {
    tried.fits.sort_by(Priced::cmp_rank);
    same::merge(&mut tried.fits);
    tried.too_large.sort_by_key(|(_, over)| *over);
    tried
}

#[cfg(test)]
mod model_tests;
#[cfg(test)]
mod tests;
