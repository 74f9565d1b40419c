//! Candidates and their outcomes.

use std::cmp::Ordering;

use ithaca_differentiate::Training;
use ithaca_ir::Diagnostic;
use ithaca_layout::compile::Compiled;
use ithaca_layout::shard::ShardOptions;

use super::compiler::Compiler;
use crate::cluster::Cluster;
use crate::memory::{self, Memory};
use crate::plan::rounded;
use crate::simulate::{Simulation, simulate};

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
    /// Other candidates with the same program: strategies and meshes.
    pub also: Vec<String>,
    /// The training step, where it was searched.
    pub training: Option<Training>,
    /// What the search chose of it beside the layout, as flags.
    pub flags: String,
}

impl Priced {
    /// The order of rank: by time, then by memory, then by name.
    pub(super) fn cmp_rank(&self, other: &Self) -> Ordering {
        let seconds = |p: &Self| rounded(p.simulation.seconds);
        let by_memory = || self.memory.total.cmp(&other.memory.total);
        let by_name = || self.options.strategy.cmp(&other.options.strategy);
        seconds(self).total_cmp(&seconds(other)).then_with(by_memory).then_with(by_name)
    }
}

/// Every candidate of a request, sorted by outcome.
#[derive(Debug, Default)]
pub(super) struct Tried {
    /// Best first.
    pub(super) fits: Vec<Priced>,
    /// With the bytes that are missing, fewest first.
    pub(super) too_large: Vec<(Priced, u64)>,
    /// In the order of trial.
    pub(super) refused: Vec<(ShardOptions, Diagnostic)>,
}

pub(super) fn price(
    compiler: &dyn Compiler,
    cluster: &Cluster,
    options: &ShardOptions,
) -> Result<Priced, Diagnostic> {
    let compiled = compiler.draft(options).map_err(ithaca_pass::first)?;
    let simulation = simulate(cluster, &compiled.schedule);
    let memory = memory::of_schedule(cluster, &compiled.schedule);
    Ok(Priced {
        options: options.clone(),
        compiled,
        simulation,
        memory,
        also: Vec::new(),
        training: None,
        flags: String::new(),
    })
}
