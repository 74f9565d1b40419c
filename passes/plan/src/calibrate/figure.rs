//! The figures of a cluster that are fitted.

use super::kernel::Direction;
use crate::cluster::{Accelerator, AttentionRate, Cluster, Sourced};

/// A figure of a cluster; those of links with the number of their level.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Figure {
    Launch,
    Memory,
    Matmul,
    MatmulTerms,
    MatmulResults,
    Attention(Direction),
    AttentionColumns(Direction),
    AttentionKeys(Direction),
    Latency(usize),
    MessageLatency(usize),
    RingStart(usize),
    ExchangeStart(usize),
    RingEfficiency(usize),
    ExchangeEfficiency(usize),
}

impl Figure {
    /// The figure of `cluster`; one that it leaves out gets a value to begin with.
    pub(super) fn of(self, cluster: &mut Cluster) -> &mut Sourced<f64> {
        let begin = |value: f64| Sourced { value, source: String::new() };
        let a = &mut cluster.accelerator;
        match self {
            Figure::Launch => &mut a.launch_seconds,
            Figure::Memory => &mut a.efficiency.memory,
            Figure::Matmul => &mut a.efficiency.matmul,
            Figure::MatmulTerms => a.efficiency.matmul_terms.get_or_insert_with(|| begin(100.0)),
            Figure::MatmulResults => a.efficiency.matmul_results.get_or_insert_with(|| begin(10_000.0)),
            Figure::Attention(direction) => &mut rate(a, direction).efficiency,
            Figure::AttentionColumns(direction) => {
                rate(a, direction).columns.get_or_insert_with(|| begin(16.0))
            }
            Figure::AttentionKeys(direction) => rate(a, direction).keys.get_or_insert_with(|| begin(32.0)),
            Figure::Latency(level) => &mut cluster.levels[level].latency,
            Figure::MessageLatency(level) => &mut cluster.levels[level].message_latency,
            Figure::RingStart(level) => cluster.levels[level].ring_start.get_or_insert_with(|| begin(1e-5)),
            Figure::ExchangeStart(level) => {
                cluster.levels[level].exchange_start.get_or_insert_with(|| begin(1e-5))
            }
            Figure::RingEfficiency(level) => &mut cluster.levels[level].ring_efficiency,
            Figure::ExchangeEfficiency(level) => &mut cluster.levels[level].exchange_efficiency,
        }
    }

    /// The least value: elements below a hundredth change no time.
    pub(super) fn least(self) -> f64 {
        match self {
            Figure::MatmulTerms
            | Figure::MatmulResults
            | Figure::AttentionColumns(_)
            | Figure::AttentionKeys(_) => 0.01,
            Figure::Memory
            | Figure::Matmul
            | Figure::Attention(_)
            | Figure::RingEfficiency(_)
            | Figure::ExchangeEfficiency(_)
            | Figure::Launch
            | Figure::Latency(_)
            | Figure::MessageLatency(_)
            | Figure::RingStart(_)
            | Figure::ExchangeStart(_) => 1e-12,
        }
    }

    /// Whether it is a part of a peak, at most one.
    pub(super) fn is_part(self) -> bool {
        match self {
            Figure::Memory
            | Figure::Matmul
            | Figure::Attention(_)
            | Figure::RingEfficiency(_)
            | Figure::ExchangeEfficiency(_) => true,
            Figure::Launch
            | Figure::MatmulTerms
            | Figure::MatmulResults
            | Figure::AttentionColumns(_)
            | Figure::AttentionKeys(_)
            | Figure::Latency(_)
            | Figure::MessageLatency(_)
            | Figure::RingStart(_)
            | Figure::ExchangeStart(_) => false,
        }
    }
}

/// The rate of the attention kernel that times assume.
fn rate(accelerator: &mut Accelerator, direction: Direction) -> &mut AttentionRate {
    let kernel = accelerator.assumed_attention_mut();
    match direction {
        Direction::Forward => &mut kernel.forward,
        Direction::Backward => &mut kernel.backward,
    }
}
