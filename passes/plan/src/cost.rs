//! The cost of operations: a roofline for each node, summed over a module.
//!
//! A kernel takes its launch and the longer of its FLOPs at the rate that its kind reaches and its bytes at the
//! bandwidth that streaming reaches (Williams et al., Roofline, CACM 2009). Matrix products (`product`), attention, by the kernel
//! that the cluster assumes (`attention`), and the slots of experts (`experts`) have rules of their own. The cluster prices
//! collectives. Nothing overlaps here; [`crate::simulate`] accounts for overlap.

mod attention;
mod experts;
mod product;
mod reads;

use std::collections::BTreeMap;

use ithaca_ir::entity::Entity;
use ithaca_ir::mask::Positions;
use ithaca_ir::ops::{Attention, Cache, Cost, Unit};
use ithaca_ir::schedule::Schedule;
use ithaca_ir::{DimId, Module, Op, Rank, Space, TensorType, message};
use ithaca_pass::Prices;

use crate::cluster::Cluster;
use attention::LocalAttention;
pub(crate) use attention::saved_bytes;
pub(crate) use experts::FilledSlots;
use product::Product;
pub(crate) use reads::reads;

impl Prices for Cluster {
    fn collective_seconds(&self, space: &Space, op: &Op, from: &TensorType, to: &TensorType) -> f64 {
        Cluster::collective_seconds(self, space, op, from, to)
    }

    fn op_seconds(&self, space: &Space, op: &Op, operands: &[&TensorType], results: &[&TensorType]) -> f64 {
        op_seconds(self, space, op, operands, results)
    }

    fn node_devices(&self) -> Option<u64> {
        Some(self.devices_per_node.value)
    }
}

/// Seconds that `op` takes on the busiest rank. Sources and calls take none of their own.
pub fn op_seconds(
    cluster: &Cluster,
    space: &Space,
    op: &Op,
    operands: &[&TensorType],
    results: &[&TensorType],
) -> f64 {
    filled_seconds(cluster, space, &FilledSlots::default(), op, operands, results)
}

/// The same, where slots of experts may be left out.
fn filled_seconds(
    cluster: &Cluster,
    space: &Space,
    filled: &FilledSlots,
    op: &Op,
    operands: &[&TensorType],
    results: &[&TensorType],
) -> f64 {
    if op.is_communication() {
        return cluster.message_seconds(space, &message::parcels(op, operands, results));
    }
    if let Op::Attention(a) | Op::AttentionBackward(a) = op {
        let held = LocalAttention::most(space, a, operands, results);
        return attention::seconds(cluster, space, op, operands, held).unwrap_or_default();
    }
    if let Op::AttendPages { attention, pages, slots } = op {
        let of_tokens = Op::Attention(attention.clone());
        return attention.of_gathered(space, [*pages, *slots], operands, |seen| {
            filled_seconds(cluster, space, filled, &of_tokens, seen, results)
        });
    }
    if let Some(bytes) = host_bytes(op, space, operands) {
        return cluster.host_seconds(bytes);
    }
    if let Some(seconds) = measured(cluster, space, op, operands, results) {
        return seconds;
    }
    match rate(cluster, op, operands) {
        Some(rate) => {
            let cost = filled.cost(space, op, operands, results);
            kernel_seconds(cluster, space, rate, (op, operands, results), (cost, 1.0))
        }
        None => 0.0,
    }
}

/// Bytes that an operation reads from host memory or writes there: uploads, and the rows that a step appends.
fn host_bytes(op: &Op, space: &Space, operands: &[&TensorType]) -> Option<u64> {
    match op {
        Op::Cache(Cache::Upload) => Some(space.max_local_bytes(operands[0])),
        Op::Cache(Cache::AppendPages { after: Some(_), .. }) => Some(space.max_local_bytes(operands[1])),
        _ => None,
    }
}

/// Seconds of a kernel that is no product and no attention, where it was measured.
fn measured(
    cluster: &Cluster,
    space: &Space,
    op: &Op,
    operands: &[&TensorType],
    results: &[&TensorType],
) -> Option<f64> {
    let measured = cluster.accelerator.measured.as_ref().filter(|_| op.info().unit == Unit::Vector)?;
    let bytes = op.cost(space, operands, results).bytes as f64;
    measured.seconds(&kernel_name(op, operands), cluster.launch_seconds(), bytes)
}

/// The name of a kernel in measurements: that of the operation, and whether it repeats an operand.
pub(crate) fn kernel_name(op: &Op, operands: &[&TensorType]) -> String {
    match (op, operands) {
        (Op::Binary(_), [x, y]) if x.dims != y.dims => format!("{} repeated", op.name()),
        _ => op.name().to_owned(),
    }
}

/// Seconds of a kernel on a rank that has `share` of the results of the busiest.
fn kernel_seconds(
    cluster: &Cluster,
    space: &Space,
    rate: f64,
    (op, operands, results): (&Op, &[&TensorType], &[&TensorType]),
    (cost, share): (Cost, f64),
) -> f64 {
    if op.info().unit == Unit::Matmul {
        let computed: u64 = results.iter().map(|ty| space.max_local_elements(ty)).sum();
        let rows = results.first().map_or(0, |ty| Product::rows(space, operands, ty));
        return Product { cost, results: (computed as f64 * share) as u64, rows }.seconds(cluster, rate);
    }
    // Explicit scores have exponentials, which take the time of products of so many columns.
    let width = match op {
        Op::Scores { attention, .. } => Some(attention.width),
        Op::Weigh { attention, .. } => Some(attention.value_width(operands[2])),
        _ => None,
    };
    let columns = cluster.accelerator.assumed_attention().forward.columns.as_ref().map_or(0.0, |n| n.value);
    let wider = width.map_or(0.0, |width| columns / space.size(width) as f64);
    let computed = cost.flops as f64 * (1.0 + wider) / rate;
    cluster.launch_seconds() + computed.max(cluster.stream_seconds(cost.bytes as f64))
}

/// FLOP per second that kernels of `op` reach; `None` for an operation without a kernel.
fn rate(cluster: &Cluster, op: &Op, operands: &[&TensorType]) -> Option<f64> {
    let a = &cluster.accelerator;
    let peak = |ty: &TensorType| a.peak.of(ty.dtype);
    match op.info().unit {
        Unit::NoKernel => None,
        Unit::Matmul => Some(peak(operands[0]) * a.efficiency.matmul.value),
        Unit::Attention => Some(peak(operands[0]) * a.assumed_attention().forward.efficiency.value),
        Unit::Vector => Some(a.peak.f32.value),
    }
}

/// The time of kernels, rank by rank; the positions of a rank are computed once.
#[derive(Clone, Debug)]
pub struct OnRank<'a> {
    cluster: &'a Cluster,
    space: &'a Space,
    filled: FilledSlots,
    positions: BTreeMap<(DimId, u64, u64), Positions>,
}

impl<'a> OnRank<'a> {
    /// Prices for this cluster and space.
    pub fn new(cluster: &'a Cluster, space: &'a Space) -> Self {
        Self { cluster, space, filled: FilledSlots::default(), positions: BTreeMap::new() }
    }

    /// Prices for the tasks of a schedule.
    pub fn of(cluster: &'a Cluster, schedule: &'a Schedule) -> Self {
        Self { filled: FilledSlots::of(cluster, schedule), ..Self::new(cluster, &schedule.space) }
    }

    /// Seconds that a kernel of `op` takes on each of `ranks`: none where a rank holds nothing of any result. Attention
    /// counts the pairs of a rank's own queries and keys; where the mask leaves none it writes its results only.
    ///
    /// The result has one number for all ranks if they hold equal parts of every tensor and positions do not matter.
    pub fn op_seconds(
        &mut self,
        op: &Op,
        operands: &[&TensorType],
        results: &[&TensorType],
        ranks: &[Rank],
    ) -> Vec<f64> {
        let (cluster, space) = (self.cluster, self.space);
        let Some(rate) = rate(cluster, op, operands) else { return vec![0.0] };
        match op {
            Op::AttendPages { attention, pages, slots } => {
                let of_tokens = Op::Attention(attention.clone());
                attention.of_gathered(space, [*pages, *slots], operands, |seen| {
                    self.op_seconds(&of_tokens, seen, results, ranks)
                })
            }
            Op::Attention(a) | Op::AttentionBackward(a) => {
                let distinct = attention::distinct(a, operands);
                // Of parts that are alike every rank holds as many bytes.
                let alike = |types: &[&TensorType]| {
                    types.iter().all(|ty| space.is_even(ty)).then(|| local_bytes(space, types, Rank(0)))
                };
                let keys = attention::keys_among(a, operands);
                let (read, of_keys, written) = (alike(&distinct), alike(keys), alike(results));
                let on = |&rank: &Rank| {
                    let operand = read.unwrap_or_else(|| local_bytes(space, &distinct, rank));
                    let result = written.unwrap_or_else(|| local_bytes(space, results, rank));
                    if result == 0 {
                        return 0.0;
                    }
                    let (q, k) = (operands[0], operands[1]);
                    let pairs = self.pairs(a, q, k, rank);
                    let extent = |ty: &TensorType, dim: DimId| {
                        ty.position(dim).map_or(1, |i| {
                            let held = space.local_range(ty, i, rank);
                            held.end - held.start
                        })
                    };
                    let bytes = if pairs > 0 { operand + result } else { result };
                    let of_keys = of_keys.unwrap_or_else(|| local_bytes(space, keys, rank));
                    let (queries, keys) = (extent(q, a.queries), extent(k, a.keys));
                    let held = LocalAttention { pairs, queries, keys, bytes, of_keys };
                    attention::seconds(cluster, space, op, operands, held).unwrap_or_default()
                };
                ranks.iter().map(on).collect()
            }
            _ => {
                let most = self.filled.cost(space, op, operands, results);
                if operands.iter().chain(results).all(|ty| space.is_even(ty)) {
                    let nothing = results.iter().all(|ty| space.max_local_elements(ty) == 0);
                    return vec![if nothing {
                        0.0
                    } else {
                        filled_seconds(cluster, space, &self.filled, op, operands, results)
                    }];
                }
                let whole = |types: &[&TensorType]| -> u128 {
                    types.iter().map(|ty| u128::from(space.max_local_bytes(ty))).sum()
                };
                let (read, written) = (whole(operands), whole(results));
                // A rank with less than the busiest has as much less to do.
                let part = |n: u128, of: u128, all: u128| n * of / all.max(1);
                let on = |&rank: &Rank| {
                    let result = local_bytes(space, results, rank);
                    if result == 0 {
                        return 0.0;
                    }
                    let moved = local_bytes(space, operands, rank) + result;
                    let flops = part(most.flops, result, written);
                    let bytes = part(most.bytes, moved, read + written);
                    let share = result as f64 / written.max(1) as f64;
                    kernel_seconds(
                        cluster,
                        space,
                        rate,
                        (op, operands, results),
                        (Cost { flops, bytes }, share),
                    )
                };
                ranks.iter().map(on).collect()
            }
        }
    }

    /// The FLOPs, bytes and seconds of a kernel of `op` on the busiest rank; none for an operation without a kernel.
    pub fn busiest(&self, op: &Op, operands: &[&TensorType], results: &[&TensorType]) -> Option<(Cost, f64)> {
        rate(self.cluster, op, operands)?;
        let cost = self.filled.cost(self.space, op, operands, results);
        Some((cost, filled_seconds(self.cluster, self.space, &self.filled, op, operands, results)))
    }

    /// Pairs of a query and a key that `rank` computes for one head.
    pub fn pairs(&mut self, a: &Attention, q: &TensorType, k: &TensorType, rank: Rank) -> u128 {
        let [queries, keys] = [(q, a.queries), (k, a.keys)].map(|(ty, dim)| {
            let i = ty.position(dim)?;
            let held = self.space.local_range(ty, i, rank);
            let key = (dim, held.start, held.end);
            self.positions.entry(key).or_insert_with(|| Positions::of(self.space, dim, held));
            Some(key)
        });
        match (queries, keys) {
            (Some(q), Some(k)) => a.pairs_of(self.space, &self.positions[&q], &self.positions[&k]),
            _ => 0,
        }
    }
}

/// Bytes that `rank` holds of all of `types`.
fn local_bytes(space: &Space, types: &[&TensorType], rank: Rank) -> u128 {
    types.iter().map(|ty| u128::from(space.local_elements(ty, rank)) * u128::from(ty.dtype.bytes())).sum()
}

/// Seconds of one run of a per-rank module on the busiest rank, nothing overlapped.
pub fn module_seconds(cluster: &Cluster, module: &Module) -> f64 {
    let runs = module.run_counts();
    let functions = module.functions.iter();
    let nodes = functions.flat_map(|(id, f)| f.nodes.iter().map(move |node| (id, f, node)));
    let seconds = nodes.map(|(id, f, node)| {
        let (operands, results) = (f.operand_types(node), f.result_types(node));
        runs[id.index()] as f64 * op_seconds(cluster, &module.space, &node.op, &operands, &results)
    });
    seconds.sum()
}

#[cfg(test)]
mod tests {
    use ithaca_ir::{DType, Dim, Mesh};

    use super::*;
    use crate::cluster::Sourced;

    #[test]
    fn a_large_product_is_bound_by_flops_and_a_sum_by_bytes() {
        let cluster = Cluster::named("dgx-h100").unwrap();
        let a = &cluster.accelerator;
        let number = |n: &Option<Sourced<f64>>| n.as_ref().unwrap().value;
        let e = &a.efficiency;
        let mut space = Space { mesh: Mesh::single(), ..Space::default() };
        let mut product = |n: u64| {
            let [m, k, n] = ["m", "k", "n"].map(|name| space.dims.push(Dim::new(format!("{name}{n}"), n)));
            let ty = |dims: [_; 2]| TensorType::new(DType::BF16, dims);
            let (x, y, z) = (ty([m, k]), ty([k, n]), ty([m, n]));
            (op_seconds(&cluster, &space, &Op::Einsum, &[&x, &y], &[&z]) - a.launch_seconds.value) * 989e12
        };
        for n in [1024, 8192] {
            let side = n as f64;
            let idle = number(&e.matmul_terms) * side * side + number(&e.matmul_results) * side;
            let flops = 2.0 * (side.powi(3) + idle);
            assert!((product(n) * number(&e.matmul_limit) / flops - 1.0).abs() < 1e-9);
        }
        let [m, k] = ["m", "k"].map(|name| space.dims.push(Dim::new(name, 8192)));
        let x = TensorType::new(DType::BF16, [m, k]);
        let add = Op::Binary(ithaca_ir::ops::Binary::Add);
        let sum = op_seconds(&cluster, &space, &add, &[&x, &x], &[&x]);
        let bytes = 3.0 * 2.0 * 8192.0 * 8192.0;
        let expected = a.launch_seconds.value + bytes / (3.35e12 * a.efficiency.memory.value);
        assert!((sum / expected - 1.0).abs() < 1e-12);
    }

    /// XLA's table of products of cuBLAS (2025), each alone, in bf16, TFLOP/s by batch, rows, columns and terms. The profiles are fitted to
    /// 70 rows of H100 and 40 of B200, these among them; the mean error over all is 5.3 and 3.4 %.
    #[test]
    fn products_take_what_was_measured() {
        let h100: &[([u64; 4], f64)] = &[
            ([1, 512, 512, 512], 40.7),
            ([1, 1024, 1024, 1024], 236.3),
            ([1, 2048, 2048, 2048], 632.0),
            ([1, 4096, 4096, 4096], 783.3),
            ([1, 4096, 4096, 256], 392.2),
            ([1, 512, 4096, 4096], 644.1),
            ([4, 1024, 1024, 1024], 489.8),
            ([4, 4096, 4096, 512], 619.9),
        ];
        let b200: &[([u64; 4], f64)] = &[
            ([1, 512, 512, 512], 48.5),
            ([1, 4096, 1024, 1024], 715.6),
            ([1, 4096, 4096, 4096], 1416.9),
            ([1, 4096, 4096, 256], 514.7),
            ([1, 256, 4096, 4096], 651.4),
        ];
        for (name, rows) in [("dgx-h100", h100), ("dgx-b200", b200)] {
            let mut cluster = Cluster::named(name).unwrap();
            cluster.accelerator.efficiency.matmul_limit = None;
            for &(sizes, tflops) in rows {
                let mut space = Space { mesh: Mesh::single(), ..Space::default() };
                let mut dims = sizes.iter().zip(["b", "m", "n", "k"]);
                let [b, m, n, k] = std::array::from_fn(|_| {
                    let (&size, name) = dims.next().unwrap();
                    space.dims.push(Dim::new(name, size))
                });
                let ty = |dims: [_; 3]| TensorType::new(DType::BF16, dims);
                let (x, y, z) = (ty([b, m, k]), ty([b, k, n]), ty([b, m, n]));
                let seconds = op_seconds(&cluster, &space, &Op::Einsum, &[&x, &y], &[&z]);
                let flops = 2.0 * sizes.iter().product::<u64>() as f64;
                let error = seconds / (flops / (tflops * 1e12)) - 1.0;
                assert!(error.abs() < 0.12, "{name} {sizes:?}: {error}");
            }
        }
    }

    /// zhuzilin/ring-flash-attention on 8 H800: one-GPU flash does 73.9 forward passes, and 19.3 forward and backward, a second
    /// of an eighth of 65 536 tokens, causal, 32/8 heads of 128. The profile is fitted to them, so the tolerance is that of the
    /// fit.
    #[test]
    fn attention_takes_what_was_measured_on_one_gpu() {
        let [forward, both] = attention("dgx-h100", 65_536, (32, 8), 128);
        assert!((forward * 73.9 - 1.0).abs() < 0.02 && (both * 19.3 - 1.0).abs() < 0.02, "{forward} {both}");
        // yunchang, 8 A100, 131 072 tokens, 32 heads of 32: 15.90 forward passes of two sequences, all-to-alls included.
        let [forward, _] = attention("dgx-a100-80gb", 131_072, (32, 32), 32);
        assert!((2.0 * forward * 15.9 - 1.0).abs() < 0.03, "{forward}");
    }

    /// Seconds of causal attention on one of 8 GPUs that split its heads: forward, and forward and backward.
    fn attention(cluster: &str, tokens: u64, (heads, kv_heads): (u64, u64), width: u64) -> [f64; 2] {
        let cluster = Cluster::named(cluster).unwrap();
        let mut space = Space { mesh: Mesh::new([("u", 8)]), ..Space::default() };
        let [s, d] = [("s", tokens), ("d", width)].map(|(n, size)| space.dims.push(Dim::new(n, size)));
        let h = space.dims.push(Dim { granule: heads / kv_heads, ..Dim::new("h", heads) });
        let k = space.dims.push(Dim::new("k", kv_heads));
        let axis = space.mesh.axis("u").unwrap();
        let ty = |heads| {
            let mut ty = TensorType::new(DType::BF16, [s, heads, d]);
            ty.layout.split[1].push(axis);
            ty
        };
        let mut lse = TensorType::new(DType::F32, [s, h]);
        lse.layout.split[1].push(axis);
        let dims = ithaca_ir::ops::AttentionDims { heads: h, kv_heads: k, queries: s, keys: s, width: d };
        let attention = ithaca_ir::ops::Attention::new(dims, ithaca_ir::Mask::Causal, 0.1);
        let (q, kv) = (ty(h), ty(k));
        let seconds = |op: &Op, operands: &[&TensorType], results: &[&TensorType]| {
            op_seconds(&cluster, &space, op, operands, results)
        };
        let forward = seconds(&Op::Attention(attention.clone()), &[&q, &kv, &kv], &[&q]);
        let backward = Op::AttentionBackward(attention);
        [forward, forward + seconds(&backward, &[&q, &kv, &kv, &q, &lse, &q], &[&q, &kv, &kv])]
    }
}
