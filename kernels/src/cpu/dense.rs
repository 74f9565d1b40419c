//! Kernels on dense tensors, for comparison with other libraries.

use ithaca_ir::ops::{Attention, AttentionDims};
use ithaca_ir::{DType, Dim, DimId, Mask, Mesh, Space, TensorType};

use super::attention::{Incoming, Problem, backward, forward};

use super::gemm::{self, View};
use super::simd::Simd;
use super::threads::Threads;
use crate::RunError;
use crate::oracle::attention::Extent;
use crate::tensor::{index, whole};

pub use super::attention::Forward;
pub use super::gemm::Element;

/// The instructions of this machine that kernels are compiled for.
pub fn instructions() -> &'static str {
    Simd::of_machine().name
}

/// The product of `a [m k]` and `b [k n]`, written over `c [m n]`.
///
/// # Panics
/// When a slice is shorter than its matrix.
pub fn matmul((m, k, n): (usize, usize, usize), a: &[f32], b: &[f32], c: &mut [f32], threads: Threads) {
    let view = |row: usize| View { start: 0, row, column: 1 };
    gemm::multiply(
        (m, k, n),
        1.0,
        (a, view(k)),
        (b, view(n)),
        (c, view(n)),
        gemm::Update::Overwrite,
        threads,
    );
}

/// Sizes of an attention of a sequence to itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Sequences.
    pub batch: u64,
    /// Tokens of each.
    pub tokens: u64,
    /// Query heads.
    pub heads: u64,
    /// Key/value heads; they divide the query heads.
    pub kv_heads: u64,
    /// Elements of a head, of queries, keys and values.
    pub width: u64,
}

/// An attention on dense tensors, scaled by one over the root of its width.
#[derive(Clone, Debug)]
pub struct DenseAttention {
    shape: Shape,
    attention: Attention,
    extent: Extent,
}

impl DenseAttention {
    /// An attention of these sizes under a mask.
    ///
    /// # Errors
    /// [`RunError::Invalid`] when the heads do not fit.
    pub fn new(shape: Shape, mask: Mask) -> Result<Self, RunError> {
        let Shape { batch, tokens, heads, kv_heads, width } = shape;
        let mut space = Space { dims: [].into_iter().collect(), mesh: Mesh::single() };
        let mut dim = |name: &str, size: u64| space.dims.push(Dim::new(name, size));
        let [b, s, t] = [("b", batch), ("s", tokens), ("t", tokens)].map(|(name, size)| dim(name, size));
        let [h, g, d] = [("h", heads), ("g", kv_heads), ("d", width)].map(|(name, size)| dim(name, size));
        if kv_heads == 0 || !heads.is_multiple_of(kv_heads) {
            return Err(RunError::Invalid(format!("{kv_heads} key/value heads do not divide {heads} heads")));
        }
        let dims = AttentionDims { heads: h, kv_heads: g, queries: s, keys: t, width: d };
        let attention = Attention::new(dims, mask, 1.0 / (width as f64).sqrt());
        let ty = |dims: [DimId; 4]| TensorType::new(DType::F32, dims);
        let (q, kv) = (ty([b, s, h, d]), ty([b, t, g, d]));
        let [q_all, kv_all] = [&q, &kv].map(|ty| whole(&space.shape(ty)));
        let extent = Extent::new(&space, &attention, (&q, &q_all), (&kv, &kv_all), (&kv, &kv_all))?;
        Ok(Self { shape, attention, extent })
    }

    /// Elements of q, and of k and of v.
    pub fn lengths(&self) -> (usize, usize) {
        let Shape { batch, tokens, heads, kv_heads, width } = self.shape;
        (index(batch * tokens * heads * width), index(batch * tokens * kv_heads * width))
    }

    /// Output `[batch tokens heads width]` and lse `[batch tokens heads]`, of q, k and v `[batch tokens heads width]`, k and v
    /// with their own heads. Sums are taken in single precision.
    ///
    /// # Panics
    /// When a tensor does not have the elements of its shape.
    pub fn forward<E: Element>(&self, tensors: [&[E]; 3], threads: Threads) -> Forward {
        forward(&self.problem(tensors), threads)
    }

    /// Gradients of q, k and v for that of o, which is `d_o`.
    ///
    /// # Panics
    /// When a tensor does not have the elements of its shape.
    pub fn backward<E: Element>(
        &self,
        tensors: [&[E]; 3],
        Forward { o, lse }: &Forward,
        d_o: &[E],
        threads: Threads,
    ) -> [Vec<f32>; 3] {
        let width = self.extent.width.max(1);
        assert!(d_o.len() == o.len() && lse.len() * width == o.len(), "there is a gradient of each output");
        let rows = d_o.chunks(width).zip(o.chunks(width));
        let delta: Vec<f32> = rows.map(|(d, o)| d.iter().zip(o).map(|(d, o)| d.number() * o).sum()).collect();
        let gradients = backward(&self.problem(tensors), Incoming { d_o, lse, delta: &delta }, threads);
        [gradients.dq, gradients.dk, gradients.dv]
    }

    fn problem<'a, E>(&'a self, [q, k, v]: [&'a [E]; 3]) -> Problem<'a, E> {
        let (of_queries, of_keys) = self.lengths();
        let lengths = [q.len(), k.len(), v.len()];
        assert_eq!(lengths, [of_queries, of_keys, of_keys], "tensors have the elements of their shapes");
        Problem { attention: &self.attention, x: &self.extent, q, k, v, bias: None }
    }
}
