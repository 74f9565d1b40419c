//! The figures of a plan, of its per-rank program and of its simulated schedule: dimensions, attention, collectives and times.

use ithaca_ir::schedule::Schedule;
use ithaca_ir::traffic;
use ithaca_ir::{Dim, Module, Order, Space};
use ithaca_layout::compile::AttentionUse;
use ithaca_layout::shard::ShardOptions;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::cluster::Cluster;
use crate::cost::reads;
use crate::simulate::Simulation;

/// A dimension of the per-rank program.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Dimension {
    /// The name.
    pub name: String,
    /// Elements over all ranks, padding included.
    pub size: u64,
    /// Elements that carry data, where others are padding.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub valid: Option<u64>,
    /// The position that each index has, as the text form writes it, for example `zigzag(8)`; absent where it is the
    /// index.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub order: Option<String>,
    /// The dimension of which ranks fetch the elements that they need, where this one is that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fetches: Option<String>,
}

/// How the attention of a function is distributed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct AttentionPlan {
    /// The function of the program.
    pub function: String,
    /// The strategy inside attention, or the product of strategies.
    pub strategy: String,
    /// How keys and queries meet that lie on different ranks, for example `rotate`; `local` where keys are whole.
    pub movement: String,
}

/// Collectives of one kind along one axis, over one step of the whole model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Collective {
    /// The operation, for example `all_to_all`, `permute` or `fetch`.
    pub kind: String,
    /// The mesh axis; several joined by `+` where parts travel along them at once, `mesh` where along none.
    pub axis: String,
    /// `forward` or `backward`.
    pub phase: String,
    /// How many each rank takes part in.
    pub count: u64,
    /// Bytes that the busiest rank sends to others in all of them; where some have slots of experts, with all slots filled.
    pub bytes_sent_per_rank: u64,
    /// Where some have slots of experts, the same with the slots that are expected to be filled.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expected_bytes_per_rank: Option<u64>,
}

/// Time of a step, seconds.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Time {
    /// The step.
    pub step_seconds: f64,
    /// Kernels.
    pub compute_seconds: f64,
    /// Communication that no kernel hides.
    pub exposed_seconds: f64,
    /// Where sequences are continued: the time to read the weights and caches of a rank once, at the whole bandwidth of its
    /// memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub floor_seconds: Option<f64>,
    /// Bytes of weights and of caches on the device that are read in this time: of a rank, or of all stages.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub floor_bytes: Option<[u64; 2]>,
    /// The communication stream, by kind and axis.
    pub communication: Vec<Communication>,
}

/// Time of collectives of one kind along one axis.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Communication {
    /// The operation.
    pub kind: String,
    /// The mesh axis.
    pub axis: String,
    /// In all, seconds.
    pub seconds: f64,
    /// While no kernel ran, seconds.
    pub exposed_seconds: f64,
}

/// The dimensions of a space, as a plan writes them.
pub fn dimensions(space: &Space) -> Vec<Dimension> {
    let dimension = |dim: &Dim| Dimension {
        name: dim.name.clone(),
        size: dim.size,
        valid: (dim.valid != dim.size).then_some(dim.valid),
        order: (dim.order != Order::Contiguous).then(|| dim.order.to_string()),
        fetches: dim.fetched.as_ref().map(|f| space.dims[f.of].name.clone()),
    };
    space.dims.values().map(dimension).collect()
}

/// How attention is distributed, as a plan writes it.
pub fn attention(uses: &[AttentionUse], options: &ShardOptions) -> Vec<AttentionPlan> {
    let strategy = |function: &str| {
        let own = options.layers.iter().rev().find(|(name, _)| name == function);
        own.map_or(&options.strategy, |(_, strategy)| strategy).clone()
    };
    let plan = |one: &AttentionUse| AttentionPlan {
        function: one.function.clone(),
        strategy: strategy(&one.function),
        movement: one.movement.clone(),
    };
    uses.iter().map(plan).collect()
}

/// The collectives of a per-rank module, as a plan writes them.
pub fn collectives(per_rank: &Module) -> Vec<Collective> {
    let rows = traffic::of_module(per_rank).into_iter();
    rows.map(|row| Collective {
        kind: row.kind,
        axis: row.axis,
        phase: row.phase.name().to_owned(),
        count: row.count,
        bytes_sent_per_rank: row.bytes_sent_per_rank,
        expected_bytes_per_rank: row.filled_bytes_per_rank,
    })
    .collect()
}

impl Time {
    /// The times of the simulation of a schedule, rounded.
    pub fn of(
        cluster: &Cluster,
        (schedule, micro_batches): (&Schedule, Option<u64>),
        simulation: &Simulation,
    ) -> Self {
        let rows = simulation.communication.iter();
        let floor = reads(cluster, schedule, micro_batches.unwrap_or(1));
        Self {
            step_seconds: rounded(simulation.seconds),
            compute_seconds: rounded(simulation.compute),
            exposed_seconds: rounded(simulation.exposed()),
            floor_seconds: floor.map(|floor| rounded(floor.seconds)),
            floor_bytes: floor.map(|floor| [floor.weights, floor.caches].map(|bytes| bytes as u64)),
            communication: rows
                .map(|((kind, axis), time)| Communication {
                    kind: (*kind).to_owned(),
                    axis: axis.clone(),
                    seconds: rounded(time.total),
                    exposed_seconds: rounded(time.exposed),
                })
                .collect(),
        }
    }
}

/// `x` with six significant digits.
pub fn rounded(x: f64) -> f64 {
    format!("{x:.5e}").parse().expect("a printed number is a number")
}
