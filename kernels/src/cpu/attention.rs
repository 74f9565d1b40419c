//! Attention by blocks of queries: scores and outputs are matrix products, the softmax runs over what the mask leaves.

use std::ops::Range;

use ithaca_ir::Space;
use ithaca_ir::ops::Attention;

use super::gemm::{Into, View, multiply};
use crate::error::RunError;
use crate::oracle::Operand;
use crate::oracle::attention::Extent;

/// Queries of a block: enough to reuse keys, few enough that a causal mask wastes little.
const BLOCK: usize = 64;

/// `o = Σ_k softmax_k(cap(scale · q·k)) v` over the keys that the mask leaves; a query that sees no key gives zero.
pub(super) fn attention(
    space: &Space,
    attention: &Attention,
    operands: &[Operand<'_, f32>],
) -> Result<Vec<f32>, RunError> {
    let [q, k, v] = [&operands[0], &operands[1], &operands[2]];
    let x = Extent::new(space, attention, &q.region, &k.region, &v.region)?;
    let (q, k, v) = (q.real()?, k.real()?, v.real()?);
    let mut out = vec![0.0; x.front * x.queries * x.heads * x.value_width];
    let mut scores: Vec<f32> = Vec::new();
    for start in (0..x.queries).step_by(BLOCK) {
        let block = start..(start + BLOCK).min(x.queries);
        let kept = Kept::new(attention, &x, block.clone());
        if kept.width == 0 {
            continue;
        }
        for (front, head) in (0..x.front).flat_map(|f| (0..x.heads).map(move |h| (f, h))) {
            let kv_head = x.served_by[head];
            // Rows of q and o are queries, those of k and v are keys.
            let query_at = (front * x.queries + block.start) * x.heads + head;
            let key_at = |key: usize| (front * x.keys + key) * x.kv_heads + kv_head;
            scores.clear();
            scores.resize(block.len() * kept.width, 0.0);
            for (keys, column) in &kept.parts {
                multiply(
                    (block.len(), x.width, keys.len()),
                    attention.scale as f32,
                    q,
                    View { start: query_at * x.width, row: x.heads * x.width, column: 1 },
                    k,
                    View { start: key_at(keys.start) * x.width, row: 1, column: x.kv_heads * x.width },
                    &mut scores,
                    View { start: *column, row: kept.width, column: 1 },
                    Into::Replace,
                );
            }
            if let Some(cap) = attention.softcap.map(|cap| cap as f32) {
                scores.iter_mut().for_each(|x| *x = cap * (*x / cap).tanh());
            }
            for (row, kept) in scores.chunks_mut(kept.width).zip(&kept.rows) {
                softmax(row, kept);
            }
            for (i, (keys, column)) in kept.parts.iter().enumerate() {
                multiply(
                    (block.len(), keys.len(), x.value_width),
                    1.0,
                    &scores,
                    View { start: *column, row: kept.width, column: 1 },
                    v,
                    View {
                        start: key_at(keys.start) * x.value_width,
                        row: x.kv_heads * x.value_width,
                        column: 1,
                    },
                    &mut out,
                    View { start: query_at * x.value_width, row: x.heads * x.value_width, column: 1 },
                    if i == 0 { Into::Replace } else { Into::Add },
                );
            }
        }
    }
    Ok(out)
}

/// The keys that a block of queries needs, side by side in the columns of its scores.
struct Kept {
    /// Intervals of keys, as indices of those held, each with the column of its first.
    parts: Vec<(Range<usize>, usize)>,
    /// Columns in all.
    width: usize,
    /// For each query the columns that its mask keeps.
    rows: Vec<Vec<Range<usize>>>,
}

impl Kept {
    fn new(attention: &Attention, x: &Extent, block: Range<usize>) -> Self {
        let position = |query: usize| x.first_query + query as u64;
        let keys = &x.key_positions;
        let reach = attention.mask.reach(position(block.start)..position(block.end), keys.clone());
        let mut width = 0;
        let mut parts = Vec::new();
        for keys in x.held(&reach) {
            let column = width;
            width += keys.len();
            parts.push((keys, column));
        }
        let row = |query: usize| {
            let runs = x.held(&attention.mask.runs(position(query), keys.clone()));
            // Each run lies inside one part.
            let column = |run: &Range<usize>| {
                let i = parts.partition_point(|(keys, _)| keys.start <= run.start) - 1;
                let (keys, column) = &parts[i];
                column + run.start - keys.start..column + run.end - keys.start
            };
            runs.iter().map(column).collect()
        };
        let rows = block.map(row).collect();
        Self { parts, width, rows }
    }
}

/// Softmax over the kept columns of a row; the others become zero, all of them where none is kept.
fn softmax(row: &mut [f32], kept: &[Range<usize>]) {
    let mut max = f32::NEG_INFINITY;
    let mut end = 0;
    for run in kept {
        row[end..run.start].fill(0.0);
        max = row[run.clone()].iter().copied().fold(max, f32::max);
        end = run.end;
    }
    row[end..].fill(0.0);
    let mut sum = 0.0;
    for x in kept.iter().flat_map(|run| run.clone()) {
        row[x] = (row[x] - max).exp();
        sum += row[x];
    }
    if sum > 0.0 {
        row.iter_mut().for_each(|x| *x /= sum);
    }
}
