//! Attention by blocks of queries: scores, outputs and gradients are matrix products, the softmax runs over what the
//! mask leaves.

mod backward;
mod block;

pub(super) use backward::attention_backward;

use ithaca_ir::Space;
use ithaca_ir::ops::Attention;

use super::gemm::{Into, multiply};
use crate::error::RunError;
use crate::oracle::Operand;
use crate::oracle::attention::{Extent, check};
use block::{Block, Scores};

/// `o = Σ_k softmax_k(cap(scale · q·k) + bias) v` over the keys held that the mask leaves, and the logarithm of the sum
/// of exponentials; a query that sees no key gives zero and −∞.
pub(super) fn attention(
    space: &Space,
    attention: &Attention,
    operands: &[Operand<'_, f32>],
) -> Result<[Vec<f32>; 2], RunError> {
    check(attention)?;
    let [q, k, v] = [&operands[0], &operands[1], &operands[2]];
    let x = Extent::new(space, attention, q.held(), k.held(), v.held())?;
    let mut scores = Scores::new(space, attention, &x, [q.real()?, k.real()?], operands.get(3))?;
    let v = v.real()?;
    let rows = x.front * x.queries * x.heads;
    let mut out = vec![0.0; rows * x.value_width];
    let mut lse = vec![f32::NEG_INFINITY; rows];
    for block in Block::all(attention, &x) {
        scores.enter(&block);
        for (front, head) in (0..x.front).flat_map(|f| (0..x.heads).map(move |h| (f, h))) {
            let weights = scores.fill(&block, front, head);
            for (i, (row, kept)) in weights.chunks_mut(block.width).zip(&block.rows).enumerate() {
                let query = block.queries.start + i;
                lse[x.row(front, query, head)] = softmax(row, kept);
                if let Some(dropout) = &attention.dropout {
                    for column in kept.iter().cloned().flatten() {
                        row[column] *= x.kept(dropout, front, query, head, block.keys[column]) as f32;
                    }
                }
            }
            for (i, (keys, column)) in block.parts.iter().enumerate() {
                multiply(
                    (block.queries.len(), keys.len(), x.value_width),
                    1.0,
                    weights,
                    block.columns(*column),
                    v,
                    block::key_rows(&x, front, head, keys, x.value_width),
                    &mut out,
                    block.query_rows(&x, front, head, x.value_width),
                    if i == 0 { Into::Replace } else { Into::Add },
                    crate::cpu::threads::Threads::ONE,
                );
            }
        }
    }
    Ok([out, lse])
}

/// Softmax over the kept columns of a row, and the logarithm of its sum; the others become zero, all of them where none
/// is kept.
fn softmax(row: &mut [f32], kept: &[std::ops::Range<usize>]) -> f32 {
    block::clear_others(row, kept);
    let max = kept.iter().flat_map(|run| &row[run.clone()]).copied().fold(f32::NEG_INFINITY, f32::max);
    let mut sum = 0.0;
    for x in kept.iter().flat_map(|run| run.clone()) {
        row[x] = (row[x] - max).exp();
        sum += row[x];
    }
    if kept.is_empty() {
        return f32::NEG_INFINITY;
    }
    row.iter_mut().for_each(|x| *x /= sum);
    max + sum.ln()
}
