//! The operands of attention: numbers as they are stored, packed keys and values, biases by distance.

use std::f32::consts::LOG2_E;
use std::ops::Range;

use ithaca_ir::ops::Attention;

use super::tiles::{Block, Tile, gaps};
use crate::cpu::gemm::{Buffer, Element, View, pack};
use crate::cpu::simd::{LhsLayout, STRIDE, Simd, Update};
use crate::error::RunError;
use crate::oracle::Operand;
use crate::oracle::attention::{Bias, Extent};

/// An attention on dense tensors: `q [front queries heads width]`, `k [front keys kv_heads width]` and
/// `v [front keys kv_heads value_width]`.
pub(in crate::cpu) struct Problem<'a, E> {
    pub(in crate::cpu) attention: &'a Attention,
    pub(in crate::cpu) x: &'a Extent,
    pub(in crate::cpu) q: &'a [E],
    pub(in crate::cpu) k: &'a [E],
    pub(in crate::cpu) v: &'a [E],
    pub(in crate::cpu) bias: Option<Bias<'a, f32>>,
}

impl<'a> Problem<'a, f32> {
    /// The attention on these operands, of which the first three are q, k and v.
    pub(super) fn of(
        attention: &'a Attention,
        x: &'a Extent,
        operands: &[Operand<'a, f32>],
        bias: Option<Bias<'a, f32>>,
    ) -> Result<Self, RunError> {
        let [q, k, v] = [operands[0].real()?, operands[1].real()?, operands[2].real()?];
        Ok(Self { attention, x, q, k, v, bias })
    }
}

/// The other operands of the backward pass: the gradient of the output, and for each row of a query's head the logarithm of the
/// sum of exponentials over all keys and the sum over the width of `d_o · o`.
#[derive(Clone, Copy)]
pub(in crate::cpu) struct Incoming<'a, E> {
    pub(in crate::cpu) d_o: &'a [E],
    pub(in crate::cpu) lse: &'a [f32],
    pub(in crate::cpu) delta: &'a [f32],
}

impl<E> Problem<'_, E> {
    /// Combinations of the dimensions in front and key/value heads, in order.
    pub(super) fn kv_heads(&self) -> Vec<(usize, usize)> {
        let x = self.x;
        (0..x.front).flat_map(|front| (0..x.kv_heads).map(move |head| (front, head))).collect()
    }

    /// The view of the rows of queries of a head in a tensor with rows of this width: q, o and their gradients.
    pub(super) fn query_rows(&self, front: usize, query: usize, head: usize, width: usize) -> View {
        View { start: self.x.row(front, query, head) * width, row: self.x.heads * width, column: 1 }
    }

    /// The view of the rows of keys of a key/value head: k, v and their gradients.
    pub(super) fn key_rows(&self, front: usize, kv_head: usize, width: usize) -> View {
        let start = self.x.key_row(front, 0, kv_head) * width;
        View { start, row: self.x.kv_heads * width, column: 1 }
    }

    /// The factor of a small product of queries and keys, and the factor that turns its scores into logarithms to base
    /// two.
    pub(super) fn factors(&self) -> (f32, f32) {
        let scale = self.attention.scale as f32;
        if self.attention.softcap.is_none() && self.bias.is_none() {
            (scale * LOG2_E, 1.0)
        } else {
            (scale, LOG2_E)
        }
    }
}

/// A matrix packed in panels of columns.
#[derive(Default)]
pub(super) struct Panels {
    data: Buffer,
    k: usize,
    columns: usize,
}

impl Panels {
    /// Packs `k` rows of `n` columns in panels of `width`.
    pub(super) fn fill<E: Element>(&mut self, width: usize, (k, n): (usize, usize), data: &[E], view: View) {
        pack(&mut self.data, width, (k, n), data, view);
        (self.k, self.columns) = (k, width);
    }

    /// The panel of this number, from a row on.
    pub(super) fn panel(&self, number: usize, row: usize) -> &[f32] {
        &self.data.get()[(number * self.k + row) * self.columns..(number + 1) * self.k * self.columns]
    }

    /// Bytes between neighbouring rows of a panel, elements.
    pub(super) fn width(&self) -> usize {
        self.columns
    }
}

/// A tile of scores: the product of groups of rows with keys, where one of the group's rows sees them.
pub(super) fn scores(
    simd: &Simd,
    alpha: f32,
    rows: &Panels,
    keys: &Panels,
    block: &Block,
    tile: &Tile,
    out: &mut [f32],
) {
    let n = block.queries.len();
    for column in (0..tile.width().end).step_by(simd.columns) {
        let panel = keys.panel((tile.start + column) / simd.columns, 0);
        for (group, columns) in tile.columns.iter().enumerate() {
            if columns.end <= column || columns.start >= column + simd.columns {
                continue;
            }
            let first = group * simd.rows;
            let left = LhsLayout::Neighbours(rows.panel(group, 0), rows.width());
            let out = &mut out[first * STRIDE + column..];
            simd.product(
                (simd.rows.min(n - first), keys.k),
                alpha,
                left,
                panel,
                out,
                STRIDE,
                Update::Overwrite,
            );
        }
    }
}

/// The biases of one head after another, by the distance from a query to its key.
pub(super) struct Distances<'a> {
    bias: Bias<'a, f32>,
    /// The least distance.
    first: i64,
    /// The bucket of each distance.
    buckets: Vec<usize>,
}

impl<'a> Distances<'a> {
    /// The distances of the queries and keys held, if there is a bias.
    pub(super) fn of<E>(problem: &Problem<'a, E>) -> Option<Self> {
        let bias = problem.bias?;
        let ends = |positions: &[u64]| {
            let ends = positions.iter().min().zip(positions.iter().max());
            ends.map(|(&first, &last)| (first.cast_signed(), last.cast_signed()))
        };
        let x = problem.x;
        let ((q_first, q_last), (k_first, k_last)) = ends(&x.query_positions).zip(ends(&x.key_positions))?;
        let first = k_first - q_last;
        Some(Self { bias, first, buckets: (first..=k_last - q_first).map(|d| bias.bucket(d)).collect() })
    }

    /// A gradient of zero for each bucket of a head.
    pub(super) fn no_gradient(&self) -> Vec<f32> {
        vec![0.0; self.buckets.iter().max().map_or(0, |last| last + 1)]
    }

    /// The buckets of a query and these keys.
    fn buckets<'b>(
        &'b self,
        x: &'b Extent,
        query: usize,
        keys: Range<usize>,
    ) -> impl Iterator<Item = usize> + 'b {
        let from = self.first + x.query_positions[query].cast_signed();
        x.key_positions[keys].iter().map(move |&key| {
            let place = usize::try_from(key.cast_signed() - from);
            self.buckets[place.expect("the first distance is the least")]
        })
    }

    /// Adds to the scores of a query and these keys their biases.
    fn add_to(&self, row: &mut [f32], x: &Extent, query: usize, head: usize, keys: Range<usize>) {
        for (score, bucket) in row.iter_mut().zip(self.buckets(x, query, keys)) {
            *score += self.bias.of(bucket, head);
        }
    }

    /// Adds the gradients of the scores of a query and these keys to those of their buckets.
    pub(super) fn sum(&self, row: &[f32], x: &Extent, query: usize, keys: Range<usize>, sums: &mut [f32]) {
        for (&gradient, bucket) in row.iter().zip(self.buckets(x, query, keys)) {
            sums[bucket] += gradient;
        }
    }

    /// Where the gradient of a bucket for a head goes.
    pub(super) fn place(&self, bucket: usize, head: usize) -> usize {
        self.bias.place(bucket, head)
    }
}

/// A row of a tile: which query and head it is, and its columns that were computed.
pub(super) struct Row<'a> {
    pub(super) query: usize,
    pub(super) head: usize,
    pub(super) columns: Range<usize>,
    pub(super) tile: &'a Tile,
}

impl Row<'_> {
    /// The keys of some columns.
    pub(super) fn keys(&self, columns: Range<usize>) -> Range<usize> {
        self.tile.start + columns.start..self.tile.start + columns.end
    }
}

/// Bounds the scores of a row, if there is a bound, and adds the bias, if there is one; `slopes` are filled with the
/// derivatives of the cap.
pub(super) fn finish_scores<E>(
    simd: &Simd,
    problem: &Problem<'_, E>,
    distances: Option<&Distances<'_>>,
    row: &Row<'_>,
    scores: &mut [f32],
    slopes: Option<&mut [f32]>,
) {
    if let Some(cap) = problem.attention.softcap.map(|cap| cap as f32) {
        simd.tanh(scores, 1.0 / cap);
        if let Some(slopes) = slopes {
            slopes.iter_mut().zip(&*scores).for_each(|(slope, tanh)| *slope = 1.0 - tanh * tanh);
        }
        simd.multiply(scores, cap);
    }
    if let Some(distances) = distances {
        distances.add_to(scores, problem.x, row.query, row.head, row.keys(row.columns.clone()));
    }
}

/// Writes `value` in the columns of a row that the mask leaves out.
pub(super) fn hide(
    block: &Block,
    row: usize,
    tile: &Tile,
    columns: &Range<usize>,
    data: &mut [f32],
    value: f32,
) {
    for gap in gaps(columns.clone(), block.kept(tile, row)) {
        data[gap.start - columns.start..gap.end - columns.start].fill(value);
    }
}
