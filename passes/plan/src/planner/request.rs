//! Requests to the planner.

use ithaca_differentiate::Training;
use ithaca_import::{Mode, Workload};
use ithaca_ir::ops::experts::Experts;
use ithaca_ir::{Diagnostic, Mesh, Module, Op};
use ithaca_layout::shard::ShardOptions;

use super::target::{Stated, Target};
use crate::plan::{self, Choice, Narrowing, Search};

/// A request to the planner.
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
    /// What the search leaves out, if it names no strategy.
    pub narrowing: Narrowing,
    /// The other options of every candidate, each of which has a strategy and a mesh of its own.
    pub options: ShardOptions,
    /// Whether chunks of collectives and two-level collectives are chosen by price; else `options` state them.
    pub chooses_fusion: bool,
    /// Which layers leave blocks of keys unseen, so that strategies that fetch are worth a try.
    pub sparsity: Sparsity,
    /// Experts of the model's mixtures; none of a model without.
    pub experts: u64,
    /// By how many tokens the program continues sequences, where it does: attention reads caches.
    pub continues: Option<u64>,
    /// The training step, where one is searched.
    pub steps: Option<Steps>,
    /// Whether the number of micro-batches of a forward pass in stages is chosen.
    pub chooses_micro_batches: bool,
    /// The framework that the plan is for.
    pub target: Option<Target>,
    /// Whether a search of prefills tries stages.
    pub tries_stages: bool,
}

/// The training steps of a request.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Steps {
    /// The options, of which those that are open are as by default.
    pub training: Training,
    /// What the search chooses.
    pub open: Vec<Choice>,
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

    /// A search of layouts for a program, which was made for `workload` without stages.
    ///
    /// # Errors
    /// `P02` for options of the search that are unknown or have values that they do not take.
    pub fn of_search(
        search: &Search,
        module: &Module,
        workload: &Workload,
        gpus: u64,
    ) -> Result<Self, Diagnostic> {
        Ok(Self {
            gpus,
            batch: workload.batch,
            strategy: search.strategy.clone(),
            mesh: search.mesh(),
            narrowing: search.narrowing.clone(),
            options: search.layout()?,
            chooses_fusion: search.chooses_fusion,
            sparsity: Sparsity::of(module),
            experts: experts(module),
            continues: continues(module),
            steps: (workload.mode == Mode::Train)
                .then(|| Steps { training: workload.training.clone(), open: search.open.clone() }),
            chooses_micro_batches: workload.mode != Mode::Train
                && search.open.contains(&Choice::MicroBatches),
            target: None,
            tries_stages: false,
        })
    }

    /// Whether there is something to choose of a training step.
    pub(super) fn is_search_of_steps(&self) -> bool {
        let is_one = self.strategy.is_some() && self.mesh.is_some();
        self.steps.as_ref().is_some_and(|steps| !is_one || !steps.open.is_empty())
    }

    /// Whether this is a search of prefills that does not try stages.
    pub(super) fn may_try_stages(&self) -> bool {
        let is_open = self.strategy.is_none() && self.mesh.is_none();
        is_open && self.steps.is_none() && self.continues.is_none() && !self.tries_stages
    }

    /// Which parts of a training step candidates state: a search chooses the others later, and that of layouts inside has none.
    pub(super) fn stated(&self) -> Stated {
        let is_step = self.target.as_ref().is_some_and(|target| target.workload.mode == Mode::Train);
        match &self.steps {
            Some(steps) if is_step && self.is_search_of_steps() => {
                let is_open = steps.open.contains(&Choice::Zero);
                Stated::Layout((!is_open).then_some(self.options.zero))
            }
            None if is_step => Stated::Layout(None),
            Some(_) | None => Stated::Whole,
        }
    }

    /// The search of this request, as a plan records it.
    pub fn search(&self) -> Search {
        Search {
            strategy: self.strategy.clone(),
            mesh: self.mesh.as_ref().map(plan::mesh_axes),
            narrowing: self.narrowing.clone(),
            options: plan::layout_options(&self.options),
            chooses_fusion: self.chooses_fusion,
            open: match &self.steps {
                Some(steps) => steps.open.clone(),
                None if self.chooses_micro_batches => vec![Choice::MicroBatches],
                None => Vec::new(),
            },
        }
    }
}

/// The tokens of a step whose attention reads caches.
fn continues(module: &Module) -> Option<u64> {
    let mut nodes = module.functions.values().flat_map(|f| &f.nodes);
    nodes.find_map(|node| match &node.op {
        Op::Attention(a) if a.starts => Some(module.space.size(a.queries)),
        _ => None,
    })
}

/// How many experts a program's mixtures choose from, at most.
pub fn experts(module: &Module) -> u64 {
    let nodes = module.functions.values().flat_map(|f| &f.nodes);
    let dealt = nodes.filter_map(|node| match &node.op {
        Op::Experts(Experts::Deal(deal)) => Some(deal.experts),
        _ => None,
    });
    dealt.map(|experts| module.space.size(experts)).max().unwrap_or(0)
}
