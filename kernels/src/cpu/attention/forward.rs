//! Outputs, by online softmax over the tiles of a block.

use std::f32::consts::LN_2;

use super::operands::{Distances, Panels, Problem, Row, finish_scores, hide, scores};
use super::tiles::{BLOCK, Block, MaskCoverage};
use crate::cpu::gemm::{Buffer, Element};
use crate::cpu::simd::{LhsLayout, STRIDE, Simd, Update};
use crate::cpu::threads::Threads;

/// The results of attention, row by row of a query's head.
#[derive(Clone, Debug, PartialEq)]
pub struct Forward {
    /// The output.
    pub o: Vec<f32>,
    /// The logarithm of the sum of exponentials.
    pub lse: Vec<f32>,
}

/// Keys and values of a key/value head, packed.
#[derive(Default)]
struct Head {
    /// `[width keys]`.
    k: Panels,
    /// `[keys value_width]`.
    v: Panels,
}

/// A block of queries of all heads, and where its results go.
struct Unit<'a> {
    front: usize,
    block: &'a Block,
    o: &'a mut [f32],
    lse: &'a mut [f32],
}

/// The output and lse of an attention; zero and −∞ for a query that sees no key.
pub(in crate::cpu) fn forward<E: Element>(problem: &Problem<'_, E>, threads: Threads) -> Forward {
    let simd = Simd::of_machine();
    let x = problem.x;
    let rows = x.front * x.queries * x.heads;
    let (mut o, mut lse) = (vec![0.0; rows * x.value_width], vec![f32::NEG_INFINITY; rows]);
    if rows == 0 || x.keys == 0 || x.value_width == 0 {
        return Forward { o, lse };
    }
    let blocks = Block::all(simd, &problem.attention.mask, x, threads.worth(x.queries << 16));
    let pairs: usize = blocks.iter().map(Block::pairs).sum();
    let threads = threads.worth(2 * x.front * x.heads * pairs * (x.width + x.value_width));
    let pack = |(front, head)| {
        let mut packed = Head::default();
        let (k, v) = (problem.key_rows(front, head, x.width), problem.key_rows(front, head, x.value_width));
        packed.k.fill(simd.columns, (x.width, x.keys), problem.k, k.transposed());
        packed.v.fill(simd.columns, (x.keys, x.value_width), problem.v, v);
        packed
    };
    let packed = threads.map(problem.kv_heads(), || (), |(), head| pack(head));
    let distances = Distances::of(problem);
    let mut units = Vec::new();
    let parts = o.chunks_mut(x.queries * x.heads * x.value_width).zip(lse.chunks_mut(x.queries * x.heads));
    for (front, (o, lse)) in parts.enumerate() {
        let parts = o.chunks_mut(BLOCK * x.heads * x.value_width).zip(lse.chunks_mut(BLOCK * x.heads));
        for (block, (o, lse)) in blocks.iter().zip(parts) {
            units.push(Unit { front, block, o, lse });
        }
    }
    // The longest first, so that threads end together.
    units.sort_by_key(|unit| std::cmp::Reverse(unit.block.pairs()));
    threads.map(units, Scratch::default, |scratch, unit| {
        for head in 0..x.heads {
            let keys = &packed[unit.front * x.kv_heads + x.served_by[head]];
            scratch.head(simd, problem, distances.as_ref(), keys, unit.front, unit.block, head);
            scratch.write(x.heads, x.value_width, head, unit.o, unit.lse);
        }
    });
    Forward { o, lse }
}

/// The buffers of one thread.
#[derive(Default)]
struct Scratch {
    q: Panels,
    scores: Buffer,
    /// Outputs, not yet divided by their sums.
    o: Buffer,
    /// From row to row of them.
    o_row: usize,
    /// The greatest score of each row so far, to base two.
    max: Vec<f32>,
    /// The sum of its exponentials so far, relative to the greatest.
    sum: Vec<f32>,
}

impl Scratch {
    /// Computes a block of a head.
    #[expect(clippy::too_many_arguments, reason = "a block of a head is told by three numbers")]
    fn head<E: Element>(
        &mut self,
        simd: &Simd,
        problem: &Problem<'_, E>,
        distances: Option<&Distances<'_>>,
        keys: &Head,
        front: usize,
        block: &Block,
        head: usize,
    ) {
        let (x, n) = (problem.x, block.queries.len());
        self.max.clear();
        self.max.resize(n, f32::NEG_INFINITY);
        self.sum.clear();
        self.sum.resize(n, 0.0);
        self.o_row = x.value_width.next_multiple_of(simd.columns);
        self.o.resize(BLOCK * self.o_row).fill(0.0);
        self.scores.resize(BLOCK * STRIDE);
        if block.tiles.is_empty() {
            return;
        }
        let rows = problem.query_rows(front, block.queries.start, head, x.width);
        self.q.fill(simd.rows, (x.width, n), problem.q, rows.transposed());
        let (alpha, factor) = problem.factors();
        for tile in &block.tiles {
            scores(simd, alpha, &self.q, &keys.k, block, tile, self.scores.get_mut());
            for row in 0..n {
                let columns = tile.columns[row / simd.rows].clone();
                if columns.is_empty() {
                    continue;
                }
                let data = &mut self.scores.get_mut()[row * STRIDE..][columns.clone()];
                let at = Row { query: block.queries.start + row, head, columns: columns.clone(), tile };
                finish_scores(simd, problem, distances, &at, data, None);
                if tile.coverage == MaskCoverage::Partial {
                    hide(block, row, tile, &columns, data, f32::NEG_INFINITY);
                }
                let max = self.max[row].max(simd.max(data) * factor);
                // Where all scores are −∞ their weights are zero, whatever they are relative to.
                let relative_to = if max == f32::NEG_INFINITY { 0.0 } else { max };
                let before = (self.max[row] - relative_to).exp2();
                let sum = simd.exponentials(data, factor, relative_to);
                self.sum[row] = self.sum[row] * before + sum;
                if max > self.max[row] {
                    let o = &mut self.o.get_mut()[row * self.o_row..][..x.value_width];
                    simd.multiply(o, before);
                    self.max[row] = max;
                }
                if let Some(dropout) = &problem.attention.dropout {
                    for column in block.kept(tile, row).flatten() {
                        let kept = x.kept(dropout, front, at.query, head, tile.start + column);
                        data[column - columns.start] *= kept as f32;
                    }
                }
            }
            for panel in 0..x.value_width.div_ceil(simd.columns) {
                for (group, columns) in tile.columns.iter().enumerate() {
                    if columns.is_empty() {
                        continue;
                    }
                    let first = group * simd.rows;
                    let size = (simd.rows.min(n - first), columns.len());
                    let left = LhsLayout::Tile(&self.scores.get()[first * STRIDE + columns.start..]);
                    let values = keys.v.panel(panel, tile.start + columns.start);
                    let o = &mut self.o.get_mut()[first * self.o_row + panel * simd.columns..];
                    simd.product(size, 1.0, left, values, o, self.o_row, Update::Accumulate);
                }
            }
        }
    }

    /// Writes the block of a head where it belongs.
    fn write(&self, heads: usize, width: usize, head: usize, o: &mut [f32], lse: &mut [f32]) {
        for (row, (&sum, &max)) in self.sum.iter().zip(&self.max).enumerate() {
            if sum == 0.0 {
                continue;
            }
            let at = row * heads + head;
            lse[at] = (max + sum.log2()) * LN_2;
            let from = &self.o.get()[row * self.o_row..][..width];
            let share = 1.0 / sum;
            o[at * width..][..width].iter_mut().zip(from).for_each(|(o, x)| *o = x * share);
        }
    }
}
