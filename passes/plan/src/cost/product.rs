//! The time of a matrix product: products with few rows read their weights at the bandwidth of the memory.
//!
//! A product has further FLOPs that stand for its beginning and end and for idle parts of the device (`Efficiency`). Where its
//! results are too few for the whole device, parts of the sums may be computed beside each other: partial sums are then written
//! and read, in single precision, by another kernel unless the product has no more rows than a tile of the tensor cores, so that
//! a block of threads has whole sums.

use ithaca_ir::ops::Cost;
use ithaca_ir::{Space, TensorType};

use crate::cluster::{Cluster, Sourced};

/// Rows of a tile of the tensor cores.
pub(super) const TILE_ROWS: u64 = 16;

/// A product on a rank.
#[derive(Clone, Copy, Debug)]
pub(super) struct Product {
    /// Its FLOPs and bytes.
    pub(super) cost: Cost,
    /// Its results.
    pub(super) results: u64,
    /// The fewest rows that one of its operands gives to its result.
    pub(super) rows: u64,
}

impl Product {
    /// The fewest rows that one of two operands gives to the result.
    pub(super) fn rows(space: &Space, operands: &[&TensorType], result: &TensorType) -> u64 {
        let only = |other: &TensorType| -> u64 {
            let dims = result.dims.iter().filter(|&&dim| !other.has(dim));
            dims.map(|&dim| space.max_extent(dim, result.axes_of(dim))).product()
        };
        operands.iter().take(2).map(|other| only(other)).min().unwrap_or(0)
    }

    /// Seconds at `rate`, FLOP per second of very large products alone: in a step all products are slower, as the device draws more
    /// power than it may and lowers its clock.
    pub(super) fn seconds(self, cluster: &Cluster, rate: f64) -> f64 {
        let efficiency = &cluster.accelerator.efficiency;
        let under_load = efficiency.matmul_limit.as_ref().unwrap_or(&efficiency.matmul).value;
        let rate = rate * under_load / efficiency.matmul.value;
        let number = |n: &Option<Sourced<f64>>| n.as_ref().map_or(0.0, |n| n.value);
        let (more_terms, more_results) =
            (number(&efficiency.matmul_terms), number(&efficiency.matmul_results));
        let (flops, results) = (self.cost.flops as f64, self.results as f64);
        let terms = if self.results > 0 { flops / 2.0 / results } else { 0.0 };
        let launch = cluster.launch_seconds();
        let in_parts = |parts: f64| {
            let idle = 2.0 * (more_terms * results * parts + more_results * terms / parts);
            // A partial sum is written and read.
            let partial = if parts > 1.0 { 2.0 * 4.0 * parts * results } else { 0.0 };
            let launches = if parts > 1.0 && self.rows > TILE_ROWS { 2.0 } else { 1.0 };
            launches * launch
                + ((flops + idle) / rate).max(cluster.stream_seconds(self.cost.bytes as f64 + partial))
        };
        let most = (more_results / results.max(1.0)).min(terms).max(1.0);
        let parts =
            std::iter::successors(Some(1.0), |parts| Some(2.0 * parts)).take_while(|&parts| parts <= most);
        parts.map(in_parts).fold(f64::INFINITY, f64::min)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_product_of_few_rows_takes_as_long_as_its_weights() {
        let cluster = Cluster::named("dgx-h100").unwrap();
        let cluster = cluster.clone().with_runtime(cluster.decoding_runtime()).unwrap();
        let rate = cluster.accelerator.peak.bf16.value * cluster.accelerator.efficiency.matmul.value;
        for (rows, columns, terms) in [(1u64, 3584u64, 8192u64), (16, 3584, 8192), (64, 8192, 3584)] {
            let bytes = 2 * (rows * columns + columns * terms + rows * terms);
            let cost = Cost { flops: u128::from(2 * rows * columns * terms), bytes: u128::from(bytes) };
            let seconds = Product { cost, results: rows * columns, rows }.seconds(&cluster, rate);
            let read = cluster.launch_seconds() + cluster.stream_seconds(bytes as f64);
            assert!(seconds / read < 1.1, "{rows} {columns} {terms}: {seconds} {read}");
        }
    }
}
