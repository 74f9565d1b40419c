//! Attention by blocks of queries: scores and outputs are matrix products, the softmax runs over what the mask leaves.

use ithaca_ir::Space;
use ithaca_ir::ops::Attention;

use super::gemm::{Into, View, multiply};
use crate::error::RunError;
use crate::oracle::Operand;
use crate::oracle::attention::Extent;
use crate::tensor::index;

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
    let first_key = x.key_positions.start;
    for front in 0..x.front {
        for start in (0..x.queries).step_by(BLOCK) {
            let block = start..(start + BLOCK).min(x.queries);
            let seen_by = |query: usize| {
                let seen = attention.mask.keys(x.first_query + query as u64, x.key_positions.clone());
                index(seen.start - first_key)..index(seen.end - first_key)
            };
            let rows = block.clone().map(seen_by).filter(|r| !r.is_empty());
            let Some(seen) = rows.reduce(|a, b| a.start.min(b.start)..a.end.max(b.end)) else { continue };
            for head in 0..x.heads {
                let kv_head = x.served_by[head];
                // Rows of q and o are queries, those of k and v are keys.
                let query_at = (front * x.queries + block.start) * x.heads + head;
                let key_at = (front * x.keys + seen.start) * x.kv_heads + kv_head;
                let size = (block.len(), x.width, seen.len());
                scores.clear();
                scores.resize(block.len() * seen.len(), 0.0);
                multiply(
                    size,
                    attention.scale as f32,
                    q,
                    View { start: query_at * x.width, row: x.heads * x.width, column: 1 },
                    k,
                    View { start: key_at * x.width, row: 1, column: x.kv_heads * x.width },
                    &mut scores,
                    View { start: 0, row: seen.len(), column: 1 },
                    Into::Replace,
                );
                if let Some(cap) = attention.softcap.map(|cap| cap as f32) {
                    scores.iter_mut().for_each(|x| *x = cap * (*x / cap).tanh());
                }
                for (row, query) in scores.chunks_mut(seen.len()).zip(block.clone()) {
                    // An empty range may lie anywhere.
                    let kept = seen_by(query);
                    match kept.is_empty() {
                        true => row.fill(0.0),
                        false => softmax(row, kept.start - seen.start..kept.end - seen.start),
                    }
                }
                multiply(
                    (block.len(), seen.len(), x.value_width),
                    1.0,
                    &scores,
                    View { start: 0, row: seen.len(), column: 1 },
                    v,
                    View { start: key_at * x.value_width, row: x.kv_heads * x.value_width, column: 1 },
                    &mut out,
                    View { start: query_at * x.value_width, row: x.heads * x.value_width, column: 1 },
                    Into::Replace,
                );
            }
        }
    }
    Ok(out)
}

/// Softmax of the kept part of a row; the rest becomes zero.
fn softmax(row: &mut [f32], kept: std::ops::Range<usize>) {
    row[..kept.start].fill(0.0);
    row[kept.end..].fill(0.0);
    let row = &mut row[kept];
    let max = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut sum = 0.0;
    for x in row.iter_mut() {
        *x = (*x - max).exp();
        sum += *x;
    }
    row.iter_mut().for_each(|x| *x /= sum);
}
