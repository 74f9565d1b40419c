//! A block of queries, the keys that it needs side by side in the columns of its scores, and these scores.

use std::ops::Range;

use ithaca_ir::Space;
use ithaca_ir::ops::Attention;

use super::super::gemm::{Into, View, multiply};
use crate::error::RunError;
use crate::oracle::Operand;
use crate::oracle::attention::{Bias, Extent, joined};

/// Queries of a block: enough to reuse keys, few enough that a causal mask wastes little.
const BLOCK: usize = 64;

/// Some queries held and the keys held that they see.
pub(super) struct Block {
    /// The queries.
    pub(super) queries: Range<usize>,
    /// Intervals of keys that some of the queries see, each with the column of its first.
    pub(super) parts: Vec<(Range<usize>, usize)>,
    /// Columns in all, at least one.
    pub(super) width: usize,
    /// The key of each column.
    pub(super) keys: Vec<usize>,
    /// For each query the columns that its mask keeps.
    pub(super) rows: Vec<Vec<Range<usize>>>,
}

impl Block {
    /// The blocks of an attention; those that see nothing are left out.
    pub(super) fn all<'a>(attention: &'a Attention, x: &'a Extent) -> impl Iterator<Item = Block> + 'a {
        let block = |start: usize| Block::new(attention, x, start..(start + BLOCK).min(x.queries));
        (0..x.queries).step_by(BLOCK).filter_map(block)
    }

    fn new(attention: &Attention, x: &Extent, queries: Range<usize>) -> Option<Self> {
        let seen: Vec<Vec<Range<usize>>> =
            queries.clone().map(|query| x.seen(&attention.mask, query)).collect();
        let mut width = 0;
        let mut parts: Vec<(Range<usize>, usize)> = Vec::new();
        for keys in joined(seen.iter().flatten().cloned().collect()) {
            let column = width;
            width += keys.len();
            parts.push((keys, column));
        }
        // Each run of a row lies inside one part, which is a union of such runs.
        let column = |run: &Range<usize>| {
            let i = parts.partition_point(|(keys, _)| keys.start <= run.start) - 1;
            let (keys, column) = &parts[i];
            column + run.start - keys.start..column + run.end - keys.start
        };
        let rows = seen.iter().map(|runs| runs.iter().map(column).collect()).collect();
        let keys = parts.iter().flat_map(|(keys, _)| keys.clone()).collect();
        (width > 0).then_some(Self { queries, parts, width, keys, rows })
    }

    /// The scores, from a column on.
    pub(super) fn columns(&self, column: usize) -> View {
        View { start: column, row: self.width, column: 1 }
    }

    /// The rows of these queries in a tensor whose rows are `width` wide: q, o and their gradients.
    pub(super) fn query_rows(&self, x: &Extent, front: usize, head: usize, width: usize) -> View {
        let start = x.row(front, self.queries.start, head) * width;
        View { start, row: x.heads * width, column: 1 }
    }
}

/// The rows of `keys` in a tensor whose rows are `width` wide: k, v and their gradients.
pub(super) fn key_rows(x: &Extent, front: usize, head: usize, keys: &Range<usize>, width: usize) -> View {
    let start = x.key_row(front, keys.start, x.served_by[head]) * width;
    View { start, row: x.kv_heads * width, column: 1 }
}

/// The same matrix with rows and columns exchanged.
pub(super) fn transposed(view: View) -> View {
    View { row: view.column, column: view.row, ..view }
}

/// Makes every column zero that is not kept.
pub(super) fn clear_others(row: &mut [f32], kept: &[Range<usize>]) {
    let mut end = 0;
    for run in kept {
        row[end..run.start].fill(0.0);
        end = run.end;
    }
    row[end..].fill(0.0);
}

/// Scores of a block, for one head after another.
pub(super) struct Scores<'a> {
    attention: &'a Attention,
    extent: &'a Extent,
    q: &'a [f32],
    k: &'a [f32],
    bias: Option<Bias<'a, f32>>,
    /// For each row the buckets of its kept columns, which are the same for all heads.
    buckets: Vec<Vec<usize>>,
    scores: Vec<f32>,
    /// The derivative of each score by the scaled product, where scores are capped.
    pub(super) slopes: Vec<f32>,
}

impl<'a> Scores<'a> {
    pub(super) fn new(
        space: &Space,
        attention: &'a Attention,
        extent: &'a Extent,
        [q, k]: [&'a [f32]; 2],
        bias: Option<&Operand<'a, f32>>,
    ) -> Result<Self, RunError> {
        let bias = Bias::new(space, attention, extent, bias)?;
        let (buckets, scores, slopes) = (Vec::new(), Vec::new(), Vec::new());
        Ok(Self { attention, extent, q, k, bias, buckets, scores, slopes })
    }

    /// Prepares what all heads share.
    pub(super) fn enter(&mut self, block: &Block) {
        let Some(bias) = self.bias else { return };
        let row = |(query, kept): (usize, &Vec<Range<usize>>)| {
            let columns = kept.iter().cloned().flatten();
            columns.map(|c| bias.bucket(self.extent.offset(query, block.keys[c]))).collect()
        };
        self.buckets = block.queries.clone().zip(&block.rows).map(row).collect();
    }

    /// A gradient of zero for the bias, if there is one.
    pub(super) fn no_gradient(&self) -> Option<Vec<f32>> {
        self.bias.as_ref().map(Bias::no_gradient)
    }

    /// Adds the gradients `ds` of a head's scores to those of their buckets.
    pub(super) fn sum_by_bucket(&self, block: &Block, head: usize, ds: &[f32], d_bias: &mut [f32]) {
        let Some(bias) = &self.bias else { return };
        let rows = ds.chunks(block.width).zip(&block.rows).zip(&self.buckets);
        for ((row, kept), buckets) in rows {
            for (column, &bucket) in kept.iter().cloned().flatten().zip(buckets) {
                d_bias[bias.place(bucket, head)] += row[column];
            }
        }
    }

    /// The scores of a head, row by row; those of columns that a row does not keep mean nothing.
    pub(super) fn fill(&mut self, block: &Block, front: usize, head: usize) -> &mut [f32] {
        let x = self.extent;
        self.scores.clear();
        self.scores.resize(block.queries.len() * block.width, 0.0);
        for (keys, column) in &block.parts {
            multiply(
                (block.queries.len(), x.width, keys.len()),
                self.attention.scale as f32,
                self.q,
                block.query_rows(x, front, head, x.width),
                self.k,
                transposed(key_rows(x, front, head, keys, x.width)),
                &mut self.scores,
                block.columns(*column),
                Into::Replace,
                crate::cpu::threads::Threads::ONE,
            );
        }
        if let Some(cap) = self.attention.softcap.map(|cap| cap as f32) {
            self.slopes.clear();
            for x in &mut self.scores {
                let tanh = (*x / cap).tanh();
                *x = cap * tanh;
                self.slopes.push(1.0 - tanh * tanh);
            }
        }
        if let Some(bias) = &self.bias {
            let rows = self.scores.chunks_mut(block.width).zip(&block.rows).zip(&self.buckets);
            for ((row, kept), buckets) in rows {
                for (column, &bucket) in kept.iter().cloned().flatten().zip(buckets) {
                    row[column] += bias.of(bucket, head);
                }
            }
        }
        &mut self.scores
    }
}
