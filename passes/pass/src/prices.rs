//! Prices, by which passes choose: those of a cluster, or of bytes alone.

use ithaca_ir::ops::Family;
use ithaca_ir::space::Space;
use ithaca_ir::{Op, TensorType};

/// Prices of collectives, by which layout conversions are chosen.
pub trait Prices {
    /// Seconds that the collective `op` takes from `from` to `to`, on the busiest rank.
    fn collective_seconds(&self, space: &Space, op: &Op, from: &TensorType, to: &TensorType) -> f64;

    /// Seconds that any operation takes on the busiest rank. Sources and calls take none of their own; kernels take none
    /// where only collectives have prices.
    fn op_seconds(&self, space: &Space, op: &Op, operands: &[&TensorType], results: &[&TensorType]) -> f64 {
        match (op.is_communication(), operands, results) {
            (true, [from, ..], [to, ..]) => self.collective_seconds(space, op, from, to),
            (true | false, _, _) => 0.0,
        }
    }

    /// Neighbouring devices that share a node, where there is a topology.
    fn node_devices(&self) -> Option<u64> {
        None
    }
}

/// Seconds of a kernel, and of each byte that it reads or writes, by [`Volume`].
const KERNEL: f64 = 1e-3;

/// Prices that count bytes only, at one byte a second, plus one second for each collective: no cluster needed.
#[derive(Clone, Copy, Debug, Default)]
pub struct Volume;

impl Prices for Volume {
    fn collective_seconds(&self, space: &Space, op: &Op, from: &TensorType, to: &TensorType) -> f64 {
        if !op.is_communication() {
            return 0.0;
        }
        let rank = ithaca_ir::Rank(0);
        1.0 + ithaca_ir::boxes::bytes_sent(space, op, from, to, rank) as f64
    }

    /// A kernel takes a thousandth of the time of a collective of as many bytes.
    fn op_seconds(&self, space: &Space, op: &Op, operands: &[&TensorType], results: &[&TensorType]) -> f64 {
        if op.is_communication() {
            return self.collective_seconds(space, op, operands[0], results[0]);
        }
        if matches!(op.info().family, Family::Source | Family::Structure) {
            return 0.0;
        }
        let values = operands.iter().chain(results);
        let bytes: u64 = values.map(|ty| space.max_local_bytes(ty)).sum();
        KERNEL * (1.0 + bytes as f64)
    }
}
