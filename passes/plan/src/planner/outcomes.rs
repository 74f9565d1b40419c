//! Candidates and their outcomes.

use std::borrow::Cow;
use std::cmp::Ordering;

use ithaca_differentiate::Training;
use ithaca_ir::{Diagnostic, Module};
use ithaca_layout::compile::Compiled;
use ithaca_layout::shard::ShardOptions;

use super::compiler::Compiler;
use crate::cluster::Cluster;
use crate::memory::Memory;
use crate::plan::{self, Collective, Step, rounded};
use crate::simulate::Simulation;

/// A candidate with its price.
#[derive(Clone, Debug)]
pub struct Priced {
    /// Strategy, mesh and options.
    pub options: ShardOptions,
    /// Its program and schedule; of one of many candidates what others are compared with.
    pub(super) program: Compilation,
    /// Its time.
    pub simulation: Simulation,
    /// Its memory.
    pub memory: Memory,
    /// The tasks of its frames.
    pub(super) tasks: usize,
    /// Other candidates with the same program: strategies and meshes.
    pub also: Vec<String>,
    /// The training step, where it was searched.
    pub training: Option<Training>,
    /// What the search chose of it beside the layout, as flags.
    pub flags: String,
}

impl Priced {
    /// The price of a compiled step.
    pub(super) fn of(options: &ShardOptions, step: Step) -> Self {
        Self {
            options: options.clone(),
            simulation: step.simulation.clone(),
            memory: step.memory.clone(),
            tasks: step.compiled.schedule.frames.values().map(|frame| frame.tasks.len()).sum(),
            program: Compilation::Kept(Box::new(step)),
            also: Vec::new(),
            training: None,
            flags: String::new(),
        }
    }

    /// The order of rank: by time, then by memory, then by name.
    pub(super) fn cmp_rank(&self, other: &Self) -> Ordering {
        let seconds = |p: &Self| rounded(p.simulation.seconds);
        let by_memory = || self.memory.total.cmp(&other.memory.total);
        let by_name = || self.options.strategy.cmp(&other.options.strategy);
        seconds(self).total_cmp(&seconds(other)).then_with(by_memory).then_with(by_name)
    }
}

/// A candidate's program and schedule, or what is kept of them.
#[derive(Clone, Debug)]
pub(super) enum Compilation {
    /// All of it.
    Kept(Box<Step>),
    /// As far as candidates with the same program are told by it: all candidates at once would fill gigabytes.
    Outline(Outline),
}

/// The collectives of a program, and the operations of each of its functions.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Outline {
    collectives: Vec<Collective>,
    operations: Vec<Vec<&'static str>>,
}

impl Outline {
    pub(super) fn of(compiled: &Compiled) -> Self {
        let per_rank = &compiled.per_rank;
        let functions = per_rank.functions.values().map(|f| {
            let mut names: Vec<&'static str> = f.nodes.iter().map(|node| node.op.name()).collect();
            names.sort_unstable();
            names
        });
        let mut collectives = plan::collectives(per_rank);
        for row in &mut collectives {
            let mut axes: Vec<&str> = row.axis.split('+').collect();
            axes.sort_unstable();
            row.axis = axes.join("+");
        }
        collectives.sort_by(|a, b| (&a.kind, &a.axis, &a.phase).cmp(&(&b.kind, &b.axis, &b.phase)));
        Self { collectives, operations: functions.collect() }
    }
}

impl Priced {
    /// Drops program and schedule.
    pub(super) fn outlined(mut self) -> Self {
        if let Compilation::Kept(step) = &self.program {
            self.program = Compilation::Outline(Outline::of(&step.compiled));
        }
        self
    }

    /// Its program, as long as it is kept.
    pub(super) fn per_rank(&self) -> Option<&Module> {
        match &self.program {
            Compilation::Kept(step) => Some(&step.compiled.per_rank),
            Compilation::Outline(_) => None,
        }
    }

    /// What others are compared with.
    pub(super) fn outline(&self) -> Cow<'_, Outline> {
        match &self.program {
            Compilation::Kept(step) => Cow::Owned(Outline::of(&step.compiled)),
            Compilation::Outline(outline) => Cow::Borrowed(outline),
        }
    }
}

/// Every candidate of a request, sorted by outcome.
#[derive(Debug, Default)]
pub(super) struct Outcomes {
    /// Best first.
    pub(super) fits: Vec<Priced>,
    /// With the bytes that are missing, fewest first.
    pub(super) too_large: Vec<(Priced, u64)>,
    /// In the order of trial.
    pub(super) refused: Vec<(ShardOptions, Diagnostic)>,
    /// Candidates that were not tried.
    pub(super) n_passed_over: usize,
}

impl Outcomes {
    /// Whether nothing fits, but the nearest lacks so little of what is usable that a layout that was passed over may.
    pub(super) fn nearly_fits(&self, usable: u64) -> bool {
        let lasting = |memory: &Memory| memory.parameters + memory.gradients + memory.optimizer;
        let nearest = self.too_large.first().filter(|_| self.fits.is_empty());
        nearest.is_some_and(|(priced, over)| *over < usable / 4 && lasting(&priced.memory) < usable)
    }
}

pub(super) fn price(
    compiler: &dyn Compiler,
    cluster: &Cluster,
    options: &ShardOptions,
) -> Result<Priced, Diagnostic> {
    compiler.step(options, cluster).map(|step| Priced::of(options, step)).map_err(ithaca_pass::first)
}
