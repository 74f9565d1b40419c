//! Prices of links that are far slower than kernels.

use ithaca_ir::{Op, Space, TensorType};
use ithaca_passes::pass::Prices;

/// Links on which whatever travels takes longer than a layer computes: all that may be handed to a neighbour is.
pub(crate) struct SlowLinks;

impl Prices for SlowLinks {
    fn collective_seconds(&self, _: &Space, op: &Op, _: &TensorType, _: &TensorType) -> f64 {
        if op.is_communication() { 1.0 } else { 0.0 }
    }

    fn op_seconds(&self, space: &Space, op: &Op, operands: &[&TensorType], results: &[&TensorType]) -> f64 {
        match (op.is_communication(), operands, results) {
            (true, [from, ..], [to, ..]) => self.collective_seconds(space, op, from, to),
            (true | false, _, _) => 1e-3,
        }
    }
}
