//! Requests to the planner.

use ithaca_ir::{Mesh, Module, Op};
use ithaca_layout::shard::ShardOptions;

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
    /// The other options of every candidate, each of which has a strategy and a mesh of its own.
    pub options: ShardOptions,
    /// Whether chunks of collectives and two-level collectives are chosen by price; else `options` state them.
    pub chooses_fusion: bool,
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
