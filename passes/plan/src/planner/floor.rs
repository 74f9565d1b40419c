//! A lower bound of the memory of a layout, known before it is compiled: enough to skip most layouts that cannot fit.

use ithaca_ir::{AxisId, Mesh};
use ithaca_layout::registry::Registry;
use ithaca_layout::shard::strategy::{self, Placement};
use ithaca_layout::shard::{ShardOptions, Zero};

use crate::cluster::Cluster;
use crate::memory::{self, Memory};
use crate::planner::compiler::Compiler;

/// The memory of a program on one device, from which a lower bound for each of several follows.
///
/// A parameter, with its gradient and states, is split by no other axes than those of a placement for weights, experts
/// and stages, and with ZeRO by all. Each activation is at its peak on some rank, so at most all ranks
/// share it; where kernels work in chunks, each chunk's scratch is smaller, and half is taken for that.
pub(super) struct Floor {
    /// The memory on one device; zero if it is not known.
    whole: Memory,
    registry: Registry,
}

impl Floor {
    /// Compiles the program for one device.
    pub(super) fn of(compiler: &dyn Compiler, cluster: &Cluster) -> Self {
        let single = ShardOptions::new("single", Mesh::single());
        let whole = compiler.draft(&single).map(|compiled| memory::of_schedule(cluster, &compiled.schedule));
        Self { whole: whole.unwrap_or_default(), registry: compiler.registry() }
    }

    /// The memory of the busiest rank of a layout.
    pub(super) fn of_layout(&self, options: &ShardOptions) -> MemoryBounds {
        let mesh = &options.mesh;
        let strategies = self.registry.product(&options.strategy).ok();
        // A mesh that does not fit the strategy is refused elsewhere.
        let placement = strategies.and_then(|s| strategy::placement(&s, mesh, &[]).ok());
        let Some(placement) = placement else { return MemoryBounds::default() };
        let Placement { weights, experts, stages, batch, .. } = &placement;
        let splits = |axis: &AxisId| [weights, experts, stages].iter().any(|split| split.contains(axis));
        let apart: u64 = mesh.axes.ids().filter(splits).map(|axis| mesh.size(axis)).product();
        let tokens = mesh.degree(&placement.residual_sequence()).saturating_mul(mesh.degree(batch));
        let ranks = mesh.ranks().max(1);
        let (parameters, kept) = match options.zero {
            Zero::Off => (apart, apart),
            Zero::Optimizer | Zero::Gradients => (apart, ranks),
            Zero::Parameters | Zero::ParametersAbove(_) => (ranks, ranks),
        };
        let Memory { parameters: of_model, gradients, optimizer, states, inputs, arena, .. } = self.whole;
        let shares =
            [(of_model, parameters), (gradients, kept), (optimizer, kept), (states, ranks), (inputs, ranks)];
        let lasting =
            shares.into_iter().fold(0, |sum: u64, (bytes, parts)| sum.saturating_add(bytes / parts.max(1)));
        MemoryBounds {
            at_least: lasting.saturating_add(arena / 2 / ranks),
            about: lasting.saturating_add(arena / tokens.max(1)),
        }
    }
}

/// The memory of a rank, bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct MemoryBounds {
    /// No less than this.
    pub(super) at_least: u64,
    /// A guess, by which layouts are put in order: activations are split as tokens are.
    pub(super) about: u64,
}
