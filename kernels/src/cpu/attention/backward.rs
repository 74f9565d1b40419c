//! Gradients, by the weights recomputed from the forward's lse (FlashAttention-2, algorithm 2).

use std::f32::consts::LOG2_E;

use super::operands::{Distances, Incoming, Panels, Problem, Row, finish_scores, hide, scores};
use super::tiles::{BLOCK, Block, MaskCoverage, Tile};
use crate::cpu::gemm::{Buffer, Element};
use crate::cpu::simd::{LhsLayout, STRIDE, Simd, Update};
use crate::cpu::threads::Threads;

/// Gradients of q, k and v, held as they are, and of the bias if there is one.
pub(in crate::cpu) struct Gradients {
    pub(in crate::cpu) dq: Vec<f32>,
    pub(in crate::cpu) dk: Vec<f32>,
    pub(in crate::cpu) dv: Vec<f32>,
    pub(in crate::cpu) d_bias: Option<Vec<f32>>,
}

/// The gradients of one query head: of its queries, and its share of those of the keys and values that serve it, in rows
/// padded to whole panels.
struct HeadGradients {
    front: usize,
    head: usize,
    dq: Buffer,
    dk: Buffer,
    dv: Buffer,
    d_bias: Vec<f32>,
}

/// The gradients of an attention. A query whose lse is −∞ sees nothing and gives nothing.
pub(in crate::cpu) fn backward<E: Element>(
    problem: &Problem<'_, E>,
    incoming: Incoming<'_, E>,
    threads: Threads,
) -> Gradients {
    let simd = Simd::of_machine();
    let x = problem.x;
    let [mut dq, mut dk, mut dv] = [problem.q, problem.k, problem.v].map(|x| vec![0.0; x.len()]);
    let distances = Distances::of(problem);
    let mut d_bias = problem.bias.as_ref().map(crate::oracle::attention::Bias::no_gradient);
    if dq.is_empty() || dk.is_empty() || dv.is_empty() {
        return Gradients { dq, dk, dv, d_bias };
    }
    let blocks = Block::all(simd, &problem.attention.mask, x, threads.worth(x.queries << 16));
    let pairs: usize = blocks.iter().map(Block::pairs).sum();
    let threads = threads.worth(x.front * x.heads * pairs * (6 * x.width + 4 * x.value_width));
    let heads: Vec<(usize, usize)> =
        (0..x.front).flat_map(|front| (0..x.heads).map(move |head| (front, head))).collect();
    let pass = Pass { simd, problem, incoming, distances: distances.as_ref(), blocks: &blocks };
    let parts =
        threads.map(heads, Scratch::default, |scratch, (front, head)| scratch.head(&pass, front, head));
    // Every head has a part of its own, and the parts are summed in order of heads.
    for part in &parts {
        let at = problem.query_rows(part.front, 0, part.head, x.width);
        let (row, own) = (at.row, x.width.next_multiple_of(simd.columns));
        for (i, part) in part.dq.get().chunks_exact(own).enumerate() {
            dq[at.start + i * row..][..x.width].copy_from_slice(&part[..x.width]);
        }
        let sums = [(&mut dk, &part.dk, x.width), (&mut dv, &part.dv, x.value_width)];
        for (sum, data, width) in sums {
            let at = problem.key_rows(part.front, x.served_by[part.head], width);
            for (i, part) in data.get().chunks_exact(width.next_multiple_of(simd.columns)).enumerate() {
                let sum = &mut sum[at.start + i * at.row..][..width];
                sum.iter_mut().zip(part).for_each(|(sum, x)| *sum += x);
            }
        }
        if let (Some(d_bias), Some(distances)) = (&mut d_bias, &distances) {
            for (bucket, x) in part.d_bias.iter().enumerate() {
                d_bias[distances.place(bucket, part.head)] += x;
            }
        }
    }
    Gradients { dq, dk, dv, d_bias }
}

/// The data that all heads share.
struct Pass<'a, E> {
    simd: &'a Simd,
    problem: &'a Problem<'a, E>,
    incoming: Incoming<'a, E>,
    distances: Option<&'a Distances<'a>>,
    blocks: &'a [Block],
}

/// The buffers of one thread.
#[derive(Default)]
struct Scratch {
    /// Keys `[width keys]` and `[keys width]`, values `[value_width keys]`.
    k_turned: Panels,
    k: Panels,
    v_turned: Panels,
    /// Queries of a block in groups of rows and in panels, and so the gradients of its outputs.
    q_rows: Panels,
    q: Panels,
    d_o_rows: Panels,
    d_o: Panels,
    /// A tile of weights, of gradients of scores, and of the derivatives of the score cap.
    weights: Buffer,
    ds: Buffer,
    slopes: Buffer,
}

impl Scratch {
    /// Everything that a query head gives.
    fn head<E: Element>(&mut self, pass: &Pass<'_, E>, front: usize, head: usize) -> HeadGradients {
        let Pass { simd, problem, .. } = pass;
        let x = problem.x;
        let kv_head = x.served_by[head];
        let k = problem.key_rows(front, kv_head, x.width);
        let v = problem.key_rows(front, kv_head, x.value_width);
        self.k_turned.fill(simd.columns, (x.width, x.keys), problem.k, k.transposed());
        self.k.fill(simd.columns, (x.keys, x.width), problem.k, k);
        self.v_turned.fill(simd.columns, (x.value_width, x.keys), problem.v, v.transposed());
        for tile in [&mut self.weights, &mut self.ds, &mut self.slopes] {
            tile.resize(BLOCK * STRIDE);
        }
        let zeros = |rows: usize, width: usize| Buffer::zeros(rows * width.next_multiple_of(simd.columns));
        let mut part = HeadGradients {
            front,
            head,
            dq: zeros(x.queries, x.width),
            dk: zeros(x.keys, x.width),
            dv: zeros(x.keys, x.value_width),
            d_bias: pass.distances.map_or_else(Vec::new, Distances::no_gradient),
        };
        for block in pass.blocks.iter().filter(|block| !block.tiles.is_empty()) {
            let n = block.queries.len();
            let q = problem.query_rows(front, block.queries.start, head, x.width);
            let d_o = problem.query_rows(front, block.queries.start, head, x.value_width);
            self.q_rows.fill(simd.rows, (x.width, n), problem.q, q.transposed());
            self.q.fill(simd.columns, (n, x.width), problem.q, q);
            self.d_o_rows.fill(simd.rows, (x.value_width, n), pass.incoming.d_o, d_o.transposed());
            self.d_o.fill(simd.columns, (n, x.value_width), pass.incoming.d_o, d_o);
            for tile in &block.tiles {
                self.tile(pass, &mut part, block, tile);
                self.sum(pass, &mut part, block, tile);
            }
        }
        part
    }

    /// The weights of a tile and the gradients of its scores; zero where the mask hides a key.
    fn tile<E: Element>(&mut self, pass: &Pass<'_, E>, part: &mut HeadGradients, block: &Block, tile: &Tile) {
        let &Pass { simd, problem, incoming, distances, .. } = pass;
        let (x, head) = (problem.x, part.head);
        let (alpha, factor) = problem.factors();
        scores(simd, alpha, &self.q_rows, &self.k_turned, block, tile, self.weights.get_mut());
        scores(simd, 1.0, &self.d_o_rows, &self.v_turned, block, tile, self.ds.get_mut());
        let capped = problem.attention.softcap.is_some();
        for row in 0..block.queries.len() {
            let columns = tile.columns[row / simd.rows].clone();
            let query = block.queries.start + row;
            let number = x.row(part.front, query, head);
            let weights = &mut self.weights.get_mut()[row * STRIDE..][..STRIDE];
            let ds = &mut self.ds.get_mut()[row * STRIDE..][..STRIDE];
            let slopes = &mut self.slopes.get_mut()[row * STRIDE..][..STRIDE];
            // Other groups may have computed the small products that this group skipped.
            let width = tile.width();
            let lse = incoming.lse[number];
            if columns.is_empty() || lse == f32::NEG_INFINITY {
                weights[width.clone()].fill(0.0);
                ds[width].fill(0.0);
                continue;
            }
            for outside in [width.start..columns.start, columns.end..width.end] {
                weights[outside.clone()].fill(0.0);
                ds[outside].fill(0.0);
            }
            let [weights, ds, slopes] = [weights, ds, slopes].map(|data| &mut data[columns.clone()]);
            let at = Row { query, head, columns: columns.clone(), tile };
            finish_scores(simd, problem, distances, &at, weights, capped.then_some(&mut *slopes));
            if factor != 1.0 {
                simd.multiply(weights, factor);
            }
            let dropped = problem.attention.dropout.as_ref();
            let kept = |column: usize, dropout| {
                x.kept(dropout, part.front, query, head, tile.start + columns.start + column) as f32
            };
            if let Some(dropout) = dropped {
                ds.iter_mut().enumerate().for_each(|(column, ds)| *ds *= kept(column, dropout));
            }
            simd.gradients(weights, ds, lse * LOG2_E, incoming.delta[number]);
            if tile.coverage == MaskCoverage::Partial {
                hide(block, row, tile, &columns, weights, 0.0);
                hide(block, row, tile, &columns, ds, 0.0);
            }
            // With dropout the values see other weights than the softmax has.
            if let Some(dropout) = dropped {
                weights.iter_mut().enumerate().for_each(|(column, w)| *w *= kept(column, dropout));
            }
            if let Some(distances) = distances {
                distances.sum(ds, x, query, at.keys(columns.clone()), &mut part.d_bias);
            }
            if capped {
                ds.iter_mut().zip(&*slopes).for_each(|(ds, slope)| *ds *= slope);
            }
        }
    }

    /// Adds the gradients of a tile.
    fn sum<E: Element>(&self, pass: &Pass<'_, E>, part: &mut HeadGradients, block: &Block, tile: &Tile) {
        let &Pass { simd, problem, .. } = pass;
        let x = problem.x;
        let (n, scale) = (block.queries.len(), problem.attention.scale as f32);
        let [narrow, wide] = [x.width, x.value_width].map(|width| width.next_multiple_of(simd.columns));
        for panel in 0..narrow / simd.columns {
            for (group, columns) in tile.columns.iter().enumerate() {
                if columns.is_empty() {
                    continue;
                }
                let first = group * simd.rows;
                let size = (simd.rows.min(n - first), columns.len());
                let left = LhsLayout::Tile(&self.ds.get()[first * STRIDE + columns.start..]);
                let keys = self.k.panel(panel, tile.start + columns.start);
                let at = (block.queries.start + first) * narrow + panel * simd.columns;
                simd.product(
                    size,
                    scale,
                    left,
                    keys,
                    &mut part.dq.get_mut()[at..],
                    narrow,
                    Update::Accumulate,
                );
            }
        }
        let turned = |sum: &mut Buffer, row: usize, data: &Buffer, right: &Panels, alpha: f32| {
            for panel in 0..row / simd.columns {
                for column in tile.width().step_by(simd.rows) {
                    let rows = simd.rows.min(tile.width().end - column);
                    let sees = |columns: &&std::ops::Range<usize>| {
                        columns.start < column + rows && column < columns.end
                    };
                    // Queries outside the groups that see one of these keys contribute nothing.
                    let Some(first) = tile.columns.iter().position(|columns| sees(&columns)) else {
                        continue;
                    };
                    let last = tile.columns.iter().rposition(|columns| sees(&columns)).unwrap_or(first);
                    let (from, to) = (first * simd.rows, n.min((last + 1) * simd.rows));
                    let left = LhsLayout::Neighbours(&data.get()[from * STRIDE + column..], STRIDE);
                    let at = (tile.start + column) * row + panel * simd.columns;
                    let right = right.panel(panel, from);
                    simd.product(
                        (rows, to - from),
                        alpha,
                        left,
                        right,
                        &mut sum.get_mut()[at..],
                        row,
                        Update::Accumulate,
                    );
                }
            }
        };
        turned(&mut part.dv, wide, &self.weights, &self.d_o, 1.0);
        turned(&mut part.dk, narrow, &self.ds, &self.q, scale);
    }
}
