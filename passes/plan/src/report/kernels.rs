//! Kernels against the limits of the accelerator: FLOPs and bytes of each, by the prices of the plan.

use std::collections::BTreeMap;

use ithaca_ir::DType;
use ithaca_ir::TensorType;
use ithaca_ir::entity::Entity;
use ithaca_ir::ops::Unit;
use ithaca_ir::schedule::{BufferId, Frame, Schedule, Work};
use serde::Serialize;

use crate::cost::OnRank;
use crate::plan::Plan;

/// Kernels of the busiest rank.
#[derive(Clone, Debug, Serialize)]
pub struct Kernels {
    /// The peak rate for the element type of the workload, FLOP per second.
    pub peak: f64,
    /// The element type.
    pub dtype: String,
    /// The bandwidth of memory, bytes per second.
    pub bandwidth: f64,
    /// Kernels of one operation in one function, the longest first.
    pub rows: Vec<Kernel>,
}

/// All kernels of an operation in a function.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Kernel {
    /// The operation.
    pub name: String,
    /// The function.
    pub function: String,
    /// `matmul`, `attention` or `vector`.
    pub unit: &'static str,
    /// Runs in a step.
    pub runs: u64,
    /// FLOPs of all runs.
    pub flops: f64,
    /// Bytes that all runs read and write, each tensor once.
    pub bytes: f64,
    /// Seconds of all runs.
    pub seconds: f64,
}

impl Kernels {
    pub(super) fn new(plan: &Plan, schedule: &Schedule) -> Self {
        let accelerator = &plan.cluster.accelerator;
        let dtype = DType::parse(&plan.workload.dtype).unwrap_or(DType::F32);
        let prices = OnRank::of(&plan.cluster, schedule);
        let runs = schedule.layers_by_place();
        let mut rows: BTreeMap<(String, &str), Kernel> = BTreeMap::new();
        for (id, frame) in schedule.frames.iter() {
            // A rank runs the layers of its own place.
            let mut by_place: BTreeMap<_, u64> = BTreeMap::new();
            for (layers, at) in &runs[id.index()] {
                *by_place.entry(*at).or_default() += layers.end - layers.start;
            }
            let times = by_place.values().copied().max().unwrap_or(0);
            for task in &frame.tasks {
                let Work::Compute(op) = &task.work else { continue };
                let Some((reads, writes)) = types(frame, &task.reads).zip(types(frame, &task.writes)) else {
                    continue;
                };
                let Some((cost, seconds)) = prices.busiest(op, &reads, &writes) else { continue };
                let unit = match op.info().unit {
                    Unit::Matmul => "matmul",
                    Unit::Attention => "attention",
                    Unit::Vector => "vector",
                    Unit::NoKernel => continue,
                };
                let row = rows.entry((frame.name.clone(), op.name())).or_default();
                (row.name, row.function, row.unit) = (op.name().to_owned(), frame.name.clone(), unit);
                let n = times as f64;
                row.runs += times;
                row.flops += n * cost.flops as f64;
                row.bytes += n * cost.bytes as f64;
                row.seconds += n * seconds;
            }
        }
        let mut rows: Vec<Kernel> = rows.into_values().filter(|row| row.seconds > 0.0).collect();
        rows.sort_by(|a, b| b.seconds.total_cmp(&a.seconds));
        Self {
            peak: accelerator.peak.of(dtype),
            dtype: dtype.name().to_owned(),
            bandwidth: accelerator.memory_bandwidth.value,
            rows,
        }
    }
}

fn types<'a>(frame: &'a Frame, buffers: &[BufferId]) -> Option<Vec<&'a TensorType>> {
    buffers.iter().map(|&b| frame.buffers[b].tensor()).collect()
}
