//! Attention, forward and backward: its factor rule, types and cost.

mod adjoint;
mod bias;
mod dropout;
mod infer;
mod pages;
mod work;

use smallvec::smallvec;

use crate::dim::DimId;
use crate::dtype::DType;
use crate::mask::Mask;
use crate::mesh::AxisId;
use crate::ops::context::Types;
use crate::ops::table::attention::{Attention, Returns};
use crate::rule::{FactorKind, FactorRule, Factors};
use crate::types::TensorType;

pub(in crate::ops) use adjoint::adjoint;
pub use pages::TABLE;

pub(in crate::ops) use infer::{infer, infer_backward};

/// Operands of attention without a bias and a key.
const FORWARD: usize = 3;
/// Operands of its gradient without a bias and a key.
const BACKWARD: usize = 6;

/// The dimensions that attention goes over, by role.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttentionDims {
    /// Query heads.
    pub heads: DimId,
    /// Key/value heads.
    pub kv_heads: DimId,
    /// The query sequence.
    pub queries: DimId,
    /// The key sequence.
    pub keys: DimId,
    /// The width of a head.
    pub width: DimId,
}

impl Attention {
    /// Attention that returns its output, without softcap, bias or dropout.
    pub fn new(dims: AttentionDims, mask: Mask, scale: f64) -> Self {
        let AttentionDims { heads, kv_heads, queries, keys, width } = dims;
        Self {
            heads,
            kv_heads,
            queries,
            keys,
            width,
            mask,
            scale,
            softcap: None,
            bias: None,
            dropout: None,
            starts: false,
            ends: false,
            wraps: false,
            scaled: false,
            latent: false,
            returns: Returns::Output,
            parts: None,
            movement: None,
        }
    }

    /// Which of `n` operands, forward or backward, is the key that dropout draws from, if one is.
    pub fn key_operand(&self, n: usize) -> Option<usize> {
        if self.starts || self.ends {
            return None;
        }
        let plain = if n >= BACKWARD { BACKWARD } else { FORWARD };
        let i = plain + usize::from(self.bias.is_some());
        (i < n).then_some(i)
    }

    /// The operand with the positions of first queries, if queries stand behind tokens of a cache.
    pub fn start_operand(&self) -> Option<usize> {
        self.starts.then_some(FORWARD + usize::from(self.bias.is_some()))
    }

    /// The operand with the numbers of keys of sequences, if they have ends of their own.
    pub fn end_operand(&self) -> Option<usize> {
        self.ends.then_some(FORWARD + usize::from(self.bias.is_some()))
    }

    /// The operand with a number of each sequence: the position of its first query, or its end.
    pub fn length_operand(&self) -> Option<usize> {
        self.start_operand().or_else(|| self.end_operand())
    }

    /// The operands with the scales of keys and of values, if they have some.
    pub fn scale_operands(&self) -> Option<[usize; 2]> {
        let start = self.start_operand().filter(|_| self.scaled)?;
        Some([start + 1, start + 2])
    }

    /// Whether operand `i` has keys, values, or their scales.
    pub fn is_of_keys(&self, i: usize) -> bool {
        i == 1 || i == 2 || self.scale_operands().is_some_and(|scales| scales.contains(&i))
    }

    /// Rule where keys are whole: heads are parallel (key/value heads being the same factor), queries are parallel, keys
    /// are the softmax.
    pub fn rule(&self, operands: &[&TensorType]) -> FactorRule {
        const HEADS: usize = 0;
        const QUERIES: usize = 1;
        const KEYS: usize = 2;
        const WIDTH: usize = 3;
        const BUCKETS: usize = 4;
        let mut factors = smallvec![
            FactorKind::Parallel,
            FactorKind::Parallel,
            FactorKind::Softmax,
            FactorKind::Whole,
            FactorKind::Whole
        ];
        let mut shared: Vec<DimId> = Vec::new();
        let mut factors_of = |dims: &[DimId], sequence: usize| -> Factors {
            dims.iter()
                .map(|&d| {
                    if d == self.heads || d == self.kv_heads {
                        HEADS
                    } else if d == self.queries || d == self.keys {
                        sequence
                    } else if d == self.width {
                        WIDTH
                    } else if self.bias.is_some_and(|b| b.buckets == d) {
                        BUCKETS
                    } else {
                        let i = shared.iter().position(|&s| s == d).unwrap_or_else(|| {
                            shared.push(d);
                            factors.push(FactorKind::Parallel);
                            shared.len() - 1
                        });
                        BUCKETS + 1 + i
                    }
                })
                .collect()
        };
        let results = self.results(operands[0], operands[2]);
        let operand = |i: usize, ty: &TensorType, f: &mut dyn FnMut(&[DimId], usize) -> Factors| {
            f(&ty.dims, if self.is_of_keys(i) { KEYS } else { QUERIES })
        };
        let operands = operands.iter().enumerate().map(|(i, ty)| operand(i, ty, &mut factors_of)).collect();
        let results = results.iter().map(|ty| factors_of(&ty.dims, QUERIES)).collect();
        FactorRule { factors, operands, results }
    }

    /// The width of a value, the dimension of `v` that is no role of `k`; `width` itself when they are the same.
    pub fn value_width(&self, v: &TensorType) -> DimId {
        v.dims.last().copied().unwrap_or(self.width)
    }

    /// The types of the results, laid out whole.
    fn results(&self, q: &TensorType, v: &TensorType) -> Types {
        let e = self.value_width(v);
        let float = match self.returns {
            Returns::Part => DType::F32,
            Returns::Output | Returns::WithLse => q.dtype,
        };
        let parts = self.parts.into_iter();
        let output = q.dims.iter().map(|&d| if d == self.width { e } else { d });
        let o = TensorType::new(float, parts.clone().chain(output));
        let lse = q.dims.iter().copied().filter(|&d| d != self.width);
        match self.returns {
            Returns::Output => smallvec![o],
            Returns::WithLse | Returns::Part => smallvec![o, TensorType::new(DType::F32, parts.chain(lse))],
        }
    }

    /// Axes that split the keys and not the queries: ranks that hold the same queries and see other keys.
    fn key_axes_alone(&self, q: &TensorType, k: &TensorType) -> Vec<AxisId> {
        let queries = q.axes_of(self.queries);
        k.axes_of(self.keys).iter().copied().filter(|a| !queries.contains(a)).collect()
    }
}
