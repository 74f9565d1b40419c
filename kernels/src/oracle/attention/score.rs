//! The score of a query and a key.

use ithaca_ir::Space;
use ithaca_ir::ops::{Attention, RelativeBias};

use super::extent::Extent;
use crate::error::RunError;
use crate::oracle::value::Operand;
use crate::real::{Real, sum};
use crate::tensor::index;

/// A score and how it moves with the scaled product.
#[derive(Clone, Copy, Debug)]
pub(super) struct Score<T> {
    /// `cap(scale · q·k) + bias`.
    pub(super) value: T,
    /// The derivative by `scale · q·k`: one without a cap, `1 − tanh²` under one.
    pub(super) slope: T,
}

/// Everything that scores are made of.
pub(super) struct Scorer<'a, T> {
    attention: &'a Attention,
    extent: &'a Extent,
    q: &'a [T],
    k: &'a [T],
    bias: Option<Bias<'a, T>>,
}

impl<'a, T: Real> Scorer<'a, T> {
    /// The scores of queries and keys, with a bias where the attention has one.
    pub(super) fn new(
        attention: &'a Attention,
        extent: &'a Extent,
        [q, k]: [&'a [T]; 2],
        bias: Option<Bias<'a, T>>,
    ) -> Self {
        Self { attention, extent, q, k, bias }
    }

    /// The bias, if there is one.
    pub(super) fn bias(&self) -> Option<&Bias<'a, T>> {
        self.bias.as_ref()
    }

    /// The score of a query of a head and a key, counted as they are held.
    pub(super) fn score(&self, front: usize, query: usize, head: usize, key: usize) -> Score<T> {
        let x = self.extent;
        let q = &self.q[x.row(front, query, head) * x.width..][..x.width];
        let k = &self.k[x.key_row(front, key, x.served_by[head]) * x.width..][..x.width];
        let product = T::from_f64(self.attention.scale) * dot(q, k);
        let mut score = match self.attention.softcap.map(T::from_f64) {
            Some(cap) => {
                let tanh = (product / cap).through(f64::tanh);
                Score { value: cap * tanh, slope: T::ONE - tanh * tanh }
            }
            None => Score { value: product, slope: T::ONE },
        };
        if let Some(bias) = &self.bias {
            score.value += bias.of(bias.bucket(x.offset(query, key)), head);
        }
        score
    }
}

/// A bias by relative position, as a rank holds it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bias<'a, T> {
    relative: RelativeBias,
    buckets: u64,
    heads: usize,
    table: &'a [T],
}

impl<'a, T: Real> Bias<'a, T> {
    /// The bias that `attention` takes from `operand`, if it takes one.
    pub(crate) fn new(
        space: &Space,
        attention: &Attention,
        extent: &Extent,
        operand: Option<&Operand<'a, T>>,
    ) -> Result<Option<Self>, RunError> {
        let (Some(relative), Some(operand)) = (attention.bias, operand) else {
            return match attention.bias {
                None => Ok(None),
                Some(_) => Err(RunError::invalid("`attention` lacks its bias")),
            };
        };
        let buckets = space.size(relative.buckets);
        if operand.shape() == [index(buckets), extent.heads] {
            Ok(Some(Self { relative, buckets, heads: extent.heads, table: operand.real()? }))
        } else {
            Err(RunError::invalid("the bias of `attention` is held otherwise than its heads"))
        }
    }

    /// The bucket of a key so many positions after its query.
    pub(crate) fn bucket(&self, offset: i64) -> usize {
        index(self.relative.bucket(self.buckets, offset))
    }

    /// The bias of a bucket for a head held.
    pub(crate) fn of(&self, bucket: usize, head: usize) -> T {
        self.table[self.place(bucket, head)]
    }

    /// The offset of the bias of a bucket for a head held.
    pub(crate) fn place(&self, bucket: usize, head: usize) -> usize {
        bucket * self.heads + head
    }

    /// A gradient of zero for each bucket and head held.
    pub(crate) fn no_gradient(&self) -> Vec<T> {
        vec![T::ZERO; self.table.len()]
    }
}

/// The inner product, summed in order.
pub(super) fn dot<T: Real>(x: &[T], y: &[T]) -> T {
    sum(x.iter().zip(y).map(|(&x, &y)| x * y))
}
