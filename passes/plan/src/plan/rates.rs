//! Throughput and utilization of a step: tokens per second and GPU, and model FLOPs utilization (MFU).

use ithaca_import::Mode;
use ithaca_ir::DType;

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
    /// Whether a step decodes one token of each sequence.
    pub decodes: bool,
}

impl Rates {
    /// The figures of a workload of so many model FLOPs on a cluster.
    pub fn new(workload: &Workload, flops: f64, cluster: &Cluster, gpus: u64) -> Self {
        let dtype = DType::parse(&workload.dtype).unwrap_or(DType::F32);
        let tokens = workload.batch.saturating_mul(workload.sequence);
        let decodes = workload.mode == Mode::Decode;
        Self { tokens, flops, gpus, peak: cluster.accelerator.peak.of(dtype), decodes }
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

    /// The price of a million tokens, US dollars, where the cluster has the price of a GPU.
    pub fn price_per_million_tokens(&self, cluster: &Cluster, seconds: f64) -> Option<f64> {
        let an_hour = cluster.accelerator.price_per_hour.as_ref()?.value;
        Some(an_hour / 3600.0 / self.tokens_per_gpu(seconds) * 1e6)
    }
}
