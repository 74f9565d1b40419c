//! A job: a program, its layout, and where its weights are; and the job of a model.

use std::collections::BTreeMap;
use std::path::PathBuf;

use ithaca_ir::diagnostic::printable;
use ithaca_ir::layout::At;
use ithaca_ir::module::{Function, Node};
use ithaca_ir::verify::verify;
use ithaca_ir::{Diagnostics, Module};
use ithaca_passes::cluster::Cluster;
use ithaca_passes::compile::{Compiled, compile_with, draft_with, replay};
use ithaca_passes::differentiate::{Recompute, Training};
use ithaca_passes::import::{self, Mode, Workload};
use ithaca_passes::pass::choices::Choices;
use ithaca_passes::plan::Plan;
use ithaca_passes::planner::{self, Program};
use ithaca_passes::registry::Registry;
use ithaca_passes::shard::ShardOptions;
use ithaca_passes::shard::strategy::{self, Placement};
use serde_json::Value;

use crate::error::{Failure, Result};

/// A program and its layout.
#[derive(Clone, Debug)]
pub struct Job {
    /// The name for reports.
    pub title: String,
    /// The whole program.
    pub program: Module,
    /// The same step in one stage, without recomputation and loss chunks, where that is another program.
    pub plain: Option<Module>,
    /// Its layout.
    pub options: ShardOptions,
    /// The cluster whose prices choose collectives.
    pub cluster: Cluster,
    /// The path of the weights, if it is known.
    pub weights: Option<PathBuf>,
    /// The known strategies and movements.
    pub registry: Registry,
    /// The choices that the passes replay; without them they choose by prices.
    pub choices: Option<Choices>,
    /// What the job compiles to, where that is known.
    pub compiled: Option<Box<Compiled>>,
    /// The plan of the program; its stated figures must hold.
    pub plan: Option<Box<Plan>>,
    /// Notes on options without effect.
    pub notes: Vec<String>,
}

impl Job {
    /// A job of a program and its layout: without a plan, known weights or notes.
    pub fn new(registry: &Registry, program: Module, (options, cluster): (ShardOptions, Cluster)) -> Self {
        Self {
            title: printable(&program.name),
            program,
            plain: None,
            options,
            cluster,
            weights: None,
            choices: None,
            compiled: None,
            registry: registry.clone(),
            plan: None,
            notes: Vec::new(),
        }
    }

    /// The job's per-rank program and schedule.
    ///
    /// # Errors
    /// The rule that the layout breaks, with repairs that were checked; `M33` for a plan whose stated figures differ.
    pub fn compile(&self) -> Result<Compiled> {
        if let Some(compiled) = &self.compiled {
            return Ok(Compiled::clone(compiled));
        }
        let compiled = self.lay_out()?;
        match &self.plan {
            Some(plan) => Ok(plan.checked(&self.registry, compiled)?),
            None => Ok(compiled),
        }
    }

    /// As [`compile`](Self::compile), with a schedule that is not checked.
    ///
    /// # Errors
    /// The rule that the layout breaks, with repairs that were checked.
    pub fn draft(&self) -> Result<Compiled> {
        let compiled = verify(&self.program)
            .and_then(|program| draft_with(&self.registry, program, &self.options, &self.cluster));
        compiled.map_err(|refusal| self.repaired(refusal))
    }

    fn lay_out(&self) -> Result<Compiled> {
        let Self { registry, program, options, .. } = self;
        let compiled = match &self.choices {
            Some(choices) => replay(registry, program, options, choices),
            None => compile_with(registry, program, options, &self.cluster),
        };
        compiled.map_err(|refusal| self.repaired(refusal))
    }

    /// A refusal of the layout with repairs.
    fn repaired(&self, mut refusal: Diagnostics) -> Failure {
        if let [only] = refusal.as_mut_slice()
            && let Ok(program) = verify(&self.program)
            && only.code.starts_with("P2")
        {
            let compiler =
                Program { registry: self.registry.clone(), ..Program::new(program, &self.cluster) };
            only.repairs = planner::repairs(&compiler, &self.cluster, &self.options);
            if !only.repairs.is_empty() {
                // Degrees that one rule allows may break another; the repairs were checked against all rules.
                only.helps.clear();
            }
        }
        Failure::from(refusal)
    }

    /// The model, its strategy and its mesh, for reports.
    pub fn heading(&self) -> String {
        let ShardOptions { strategy, mesh, .. } = &self.options;
        match mesh.ranks() {
            1 => format!("{}, {strategy} on one rank", self.title),
            n => format!("{}, {strategy} on {n} ranks ({mesh})", self.title),
        }
    }

    /// The program whose results are expected.
    pub fn reference(&self) -> &Module {
        self.plain.as_ref().unwrap_or(&self.program)
    }

    /// FLOPs of the whole program.
    pub fn flops(&self) -> u128 {
        let Module { space, functions, .. } = &self.program;
        let runs = self.program.run_counts();
        let mut flops: u128 = 0;
        for (function, &runs) in functions.values().zip(&runs) {
            for node in &function.nodes {
                let cost = node.op.cost(space, &function.operand_types(node), &function.result_types(node));
                flops = flops.saturating_add(u128::from(runs).saturating_mul(cost.flops));
            }
        }
        flops
    }
}

/// The operations of a per-rank program that all ranks run together.
pub fn operations(per_rank: &Module) -> u128 {
    let mesh = &per_rank.space.mesh;
    let ranks = |at: Option<At>| u128::from(mesh.ranks() / at.map_or(1, |at| mesh.size(at.axis)));
    let of_function = |(function, runs): (&Function, BTreeMap<Option<At>, u64>)| -> u128 {
        let place = |node: &Node| function.result_types(node).first().and_then(|ty| ty.layout.at);
        let run =
            |at: Option<At>| -> u128 { function.nodes.iter().map(|node| ranks(at.or(place(node)))).sum() };
        runs.into_iter().map(|(at, count)| u128::from(count).saturating_mul(run(at))).sum()
    };
    per_rank.functions.values().zip(per_rank.runs_by_place()).map(of_function).sum()
}

/// A model and its workload.
#[derive(Clone, Copy, Debug)]
pub struct Large<'a> {
    /// The configuration.
    pub config: &'a Value,
    /// The name for reports.
    pub name: &'a str,
    /// The workload.
    pub workload: &'a Workload,
}

impl Large<'_> {
    /// A job of the model in a layout.
    ///
    /// # Errors
    /// Those of the configuration and the workload.
    pub fn job(&self, registry: &Registry, layout: (ShardOptions, Cluster)) -> Result<Job> {
        let Self { config, name, workload } = *self;
        let program = import::program(config, name, workload)?;
        let plain = plain(config, name, workload)?;
        Ok(Job { plain, ..Job::new(registry, program, layout) })
    }
}

/// The program of a workload in one stage, without recomputation and loss chunks; `None` where `workload` is that.
fn plain(config: &Value, name: &str, workload: &Workload) -> Result<Option<Module>> {
    let training =
        Training { recompute: Recompute::None, loss_chunks: 1, stages: 1, ..workload.training.clone() };
    if workload.mode != Mode::Train || training == workload.training {
        return Ok(None);
    }
    Ok(Some(import::program(config, name, &Workload { training, ..workload.clone() })?))
}

/// The axes that split each kind of dimension in a layout.
///
/// # Errors
/// `P10`–`P12` for strategies and meshes that do not go together.
pub fn placement(registry: &Registry, options: &ShardOptions) -> Result<Placement> {
    let axes: Vec<_> = options.mesh.axes.iter().map(|(axis, _)| axis).collect();
    Ok(strategy::placement(&registry.product(&options.strategy)?, &options.mesh, &axes)?)
}

/// The number of ranks, or groups of them, that have sequences of the batch of their own.
///
/// # Errors
/// As [`placement`].
pub fn sequence_groups(registry: &Registry, options: &ShardOptions) -> Result<u64> {
    Ok(options.mesh.degree(&placement(registry, options)?.batch))
}
