//! Costs of terms: kernels and collectives by the cluster's prices, a reshard by the collectives that it becomes.

use std::collections::BTreeMap;

use ithaca_ir::{DType, DimId, Function, Layout, Op, Space, TensorType};
use ithaca_pass::Prices;

use crate::reshard::convert;

/// A reshard, as the key of its price.
type Conversion = (DType, Vec<DimId>, Layout, Layout);

/// Prices of operations, in seconds on the busiest rank; prices of reshards are cached.
pub(in crate::fuse) struct PriceList<'a> {
    space: &'a Space,
    prices: &'a dyn Prices,
    reshards: BTreeMap<Conversion, f64>,
}

impl<'a> PriceList<'a> {
    /// Prices of operations on values of `space`.
    pub(in crate::fuse) fn new(space: &'a Space, prices: &'a dyn Prices) -> Self {
        Self { space, prices, reshards: BTreeMap::new() }
    }

    /// Seconds of one operation.
    pub(super) fn seconds(&mut self, op: &Op, operands: &[&TensorType], results: &[&TensorType]) -> f64 {
        if *op != Op::Reshard {
            return self.prices.op_seconds(self.space, op, operands, results);
        }
        let (from, to) = (operands[0], results[0]);
        let key = (from.dtype, from.dims.to_vec(), from.layout.clone(), to.layout.clone());
        let (space, prices) = (self.space, self.prices);
        *self.reshards.entry(key).or_insert_with(|| {
            let steps = convert(space, from, to, prices);
            let before = std::iter::once(from).chain(steps.iter().map(|step| &step.to));
            let each = before.zip(&steps).map(|(x, s)| prices.op_seconds(space, &s.op, &[x], &[&s.to]));
            each.sum()
        })
    }

    /// Seconds of all reshards and collectives of a function, one after another.
    pub(in crate::fuse) fn of_layouts(&mut self, function: &Function) -> f64 {
        self.of_nodes(function, |op| *op == Op::Reshard || op.is_communication())
    }

    /// Seconds of the operations of a function that count, one after another.
    pub(super) fn of_nodes(&mut self, function: &Function, counts: impl Fn(&Op) -> bool) -> f64 {
        let nodes = function.nodes.iter().filter(|node| counts(&node.op));
        nodes
            .map(|node| self.seconds(&node.op, &function.operand_types(node), &function.result_types(node)))
            .sum()
    }
}
