//! Kernels of one device, as the prices of planning take them.

use ithaca_ir::ops::{Attention, AttentionDims, Unit};
use ithaca_ir::{DType, Dim, DimId, Mask, Mesh, Op, Space, TensorType};

use crate::cluster::Cluster;
use crate::cost::{kernel_name, op_seconds};

/// An operation and the types of its tensors.
#[derive(Clone, Debug)]
pub struct Kernel {
    space: Space,
    op: Op,
    operands: Vec<TensorType>,
    results: Vec<TensorType>,
}

/// The pass of an attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// Output and log-sum-exp.
    Forward,
    /// Gradients of queries, keys and values.
    Backward,
}

/// Sizes of an attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttentionSizes {
    /// Sequences.
    pub batch: u64,
    /// Query heads.
    pub heads: u64,
    /// Key/value heads; they divide the query heads.
    pub kv_heads: u64,
    /// Queries of a sequence.
    pub queries: u64,
    /// Keys of a sequence.
    pub keys: u64,
    /// Elements of a head.
    pub width: u64,
}

impl Kernel {
    /// An operation on tensors of these types.
    pub(super) fn new(space: Space, op: Op, operands: Vec<TensorType>, results: Vec<TensorType>) -> Self {
        Self { space, op, operands, results }
    }

    /// The product `[batch m k] x [batch k n]`.
    pub fn product(dtype: DType, batch: u64, [m, n, k]: [u64; 3]) -> Self {
        let mut space = Space { mesh: Mesh::single(), ..Space::default() };
        let dims = [("b", batch), ("m", m), ("n", n), ("k", k)];
        let [b, m, n, k] = dims.map(|(name, size)| space.dims.push(Dim::new(name, size)));
        let ty = |dims: [DimId; 3]| TensorType::new(dtype, dims);
        Self {
            op: Op::Einsum,
            operands: vec![ty([b, m, k]), ty([b, k, n])],
            results: vec![ty([b, m, n])],
            space,
        }
    }

    /// An attention; the last query is at the last key where it is causal.
    pub fn attention(dtype: DType, sizes: AttentionSizes, is_causal: bool, direction: Direction) -> Self {
        let AttentionSizes { batch, heads, kv_heads, queries, keys, width } = sizes;
        let mut space = Space { mesh: Mesh::single(), ..Space::default() };
        let dims = [("b", batch), ("s", queries), ("t", keys), ("k", kv_heads), ("d", width)];
        let [b, s, t, k, d] = dims.map(|(name, size)| space.dims.push(Dim::new(name, size)));
        let h = space.dims.push(Dim { granule: heads / kv_heads.max(1), ..Dim::new("h", heads) });
        let mask = if is_causal { Mask::CausalAtEnd { queries, keys } } else { Mask::Full };
        let dims = AttentionDims { heads: h, kv_heads: k, queries: s, keys: t, width: d };
        let attention = Attention::new(dims, mask, 1.0 / (width as f64).sqrt());
        let ty = |dims: [DimId; 4]| TensorType::new(dtype, dims);
        let (q, kv) = (ty([b, s, h, d]), ty([b, t, k, d]));
        let lse = TensorType::new(DType::F32, [b, s, h]);
        let (op, operands, results) = match direction {
            Direction::Forward => (Op::Attention(attention), vec![q.clone(), kv.clone(), kv], vec![q, lse]),
            Direction::Backward => {
                let operands = vec![q.clone(), kv.clone(), kv.clone(), q.clone(), lse, q.clone()];
                (Op::AttentionBackward(attention), operands, vec![q, kv.clone(), kv])
            }
        };
        Self { space, op, operands, results }
    }

    pub(super) fn is_product(&self) -> bool {
        self.op.info().unit == Unit::Matmul
    }

    /// The name in measurements and the bytes that it reads and writes, where it is no product and no attention.
    pub(super) fn vector(&self) -> Option<(String, u64)> {
        let (operands, results): (Vec<&TensorType>, Vec<&TensorType>) =
            (self.operands.iter().collect(), self.results.iter().collect());
        let bytes = self.op.cost(&self.space, &operands, &results).bytes;
        let is_vector = self.op.info().unit == Unit::Vector;
        is_vector.then(|| (kernel_name(&self.op, &operands), u64::try_from(bytes).unwrap_or(u64::MAX)))
    }

    /// The pass, of an attention.
    pub(super) fn direction(&self) -> Option<Direction> {
        match &self.op {
            Op::Attention(_) => Some(Direction::Forward),
            Op::AttentionBackward(_) => Some(Direction::Backward),
            _ => None,
        }
    }

    /// Elements of a head, of an attention.
    pub(super) fn width(&self) -> Option<u64> {
        match &self.op {
            Op::Attention(a) | Op::AttentionBackward(a) => Some(self.space.size(a.width)),
            _ => None,
        }
    }

    /// Keys of a sequence, of an attention.
    pub(super) fn keys(&self) -> Option<u64> {
        match &self.op {
            Op::Attention(a) | Op::AttentionBackward(a) => Some(self.space.size(a.keys)),
            _ => None,
        }
    }

    /// The kind, as tables name it.
    pub(super) fn kind(&self) -> String {
        let dtype = self.operands.first().map_or("", |ty| ty.dtype.name());
        match self.direction() {
            Some(Direction::Forward) => format!("attention {dtype}"),
            Some(Direction::Backward) => format!("attention backward {dtype}"),
            None if self.is_product() => format!("matmul {dtype}"),
            None => self.vector().map_or_else(String::new, |(name, _)| name),
        }
    }

    /// The kernel with its sizes.
    pub(super) fn title(&self) -> String {
        let sizes: Vec<String> =
            self.space.dims.iter().map(|(_, dim)| format!("{}={}", dim.name, dim.size)).collect();
        format!("{} of {}", self.kind(), sizes.join(" "))
    }

    /// Seconds on a device of a cluster.
    pub(super) fn seconds(&self, cluster: &Cluster) -> f64 {
        let (operands, results): (Vec<&TensorType>, Vec<&TensorType>) =
            (self.operands.iter().collect(), self.results.iter().collect());
        op_seconds(cluster, &self.space, &self.op, &operands, &results)
    }

    /// FLOP per second in `seconds`, the peak rate of the element type, and its key; of products and attention.
    pub(super) fn rate(&self, cluster: &Cluster, seconds: f64) -> Option<(f64, f64, &'static str)> {
        let is_dense = matches!(self.op.info().unit, Unit::Matmul | Unit::Attention);
        let dtype = self.operands.first().filter(|_| is_dense)?.dtype;
        let (operands, results): (Vec<&TensorType>, Vec<&TensorType>) =
            (self.operands.iter().collect(), self.results.iter().collect());
        let flops = self.op.cost(&self.space, &operands, &results).flops as f64;
        Some((flops / seconds, cluster.accelerator.peak.of(dtype), dtype.name()))
    }
}
