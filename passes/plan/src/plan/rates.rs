//! Throughput and utilization of a step: tokens per second and GPU, and model FLOPs utilization (MFU).
//!
//! Model FLOPs are those that the model needs, whatever the layout: of the forward pass 2 for each weight that multiplies
//! a token, and those of attention over the pairs that the mask leaves; a training step three times as many (Narayanan et
//! al., Efficient Large-Scale Language Model Training on GPU Clusters, 2021; Chowdhery et al., PaLM, appendix B).
//! Recomputation, padding and slots of experts without a token do not count.

use std::collections::BTreeMap;

use ithaca_import::Mode;
use ithaca_ir::entity::Entity;
use ithaca_ir::ops::Unit;
use ithaca_ir::ops::experts::{Experts, Slots};
use ithaca_ir::{DType, DimId, Function, Module, Op, Space};

use super::{Plan, Workload};
use crate::cluster::Cluster;

/// The figures of a request from which the rates of any of its layouts follow.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rates {
    /// Tokens of a step: the sequences times their length, of the encoder where there is one beside the decoder.
    pub tokens: u64,
    /// Model FLOPs of a step.
    pub flops: f64,
    /// The GPUs.
    pub gpus: u64,
    /// The peak rate of a GPU for the element type of the workload, FLOP per second.
    pub peak: f64,
}

impl Rates {
    /// The figures of a workload of so many model FLOPs on a cluster.
    pub fn new(workload: &Workload, flops: f64, cluster: &Cluster, gpus: u64) -> Self {
        let dtype = DType::parse(&workload.dtype).unwrap_or(DType::F32);
        let tokens = workload.batch.saturating_mul(workload.sequence);
        Self { tokens, flops, gpus, peak: cluster.accelerator.peak.of(dtype) }
    }

    /// The figures of a plan.
    pub fn of(plan: &Plan) -> Self {
        Self::new(&plan.workload, plan.model_flops, &plan.cluster, plan.gpus)
    }

    /// Tokens per second and GPU, for a step of so many seconds.
    pub fn tokens_per_gpu(&self, seconds: f64) -> f64 {
        self.tokens as f64 / (seconds * self.gpus as f64)
    }

    /// Model FLOPs utilization: the part of the peak rate of all GPUs that the model FLOPs of the step take.
    pub fn utilization(&self, seconds: f64) -> f64 {
        self.flops / (seconds * self.gpus as f64 * self.peak)
    }
}

/// Model FLOPs of a step; `forward` is the program before differentiation.
pub fn model_flops(forward: &Module, mode: Mode) -> f64 {
    let runs = forward.run_counts();
    let functions = forward.functions.iter();
    let once = functions.map(|(id, f)| runs[id.index()] as f64 * of_function(&forward.space, f));
    let passes = match mode {
        Mode::Prefill | Mode::Decode => 1.0,
        Mode::Train => 3.0,
    };
    passes * once.sum::<f64>()
}

fn of_function(space: &Space, function: &Function) -> f64 {
    let filled = filled_slots(space, function);
    let nodes = function.nodes.iter().filter(|node| match node.op.info().unit {
        Unit::Matmul | Unit::Attention => true,
        Unit::Vector | Unit::NoKernel => false,
    });
    let flops = nodes.map(|node| {
        let (operands, results) = (function.operand_types(node), function.result_types(node));
        let dims = operands.iter().chain(&results).flat_map(|ty| &ty.dims);
        let filled = dims.filter_map(|dim| filled.get(dim)).copied().fold(1.0, f64::min);
        filled * node.op.cost(space, &operands, &results).flops as f64
    });
    flops.sum()
}

/// The part of the slots of experts that tokens fill where each choice has one, by the dimension of the slots.
fn filled_slots(space: &Space, function: &Function) -> BTreeMap<DimId, f64> {
    let dispatched = function.nodes.iter().filter_map(|node| match &node.op {
        Op::Experts(Experts::Dispatch(slots)) => Some(slots),
        _ => None,
    });
    let size = |dim: DimId| space.size(dim) as f64;
    let filled = |Slots { experts, top, shared }: &Slots| {
        let groups = if shared.batches == shared.batch { size(shared.batch) } else { size(shared.batches) };
        let slots = size(*experts) * groups * size(shared.groups) * size(shared.slots);
        (shared.slots, size(shared.batch) * size(shared.sequence) * size(*top) / slots)
    };
    dispatched.map(filled).collect()
}
