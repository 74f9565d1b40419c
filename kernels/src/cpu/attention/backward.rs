//! Gradients of attention by blocks of queries (FlashAttention-2, arXiv 2307.08691, algorithm 2).

use ithaca_ir::Space;
use ithaca_ir::ops::Attention;

use super::super::gemm::{Into, multiply};
use super::block::{self, Block, Scores, transposed};
use crate::error::RunError;
use crate::oracle::Operand;
use crate::oracle::attention::{Extent, Gradient, check};

/// Gradients for q, k and v, and for the bias if there is one; see the oracle's loops for the equations.
pub(in crate::cpu) fn attention_backward(
    space: &Space,
    attention: &Attention,
    operands: &[Operand<'_, f32>],
) -> Result<Vec<Vec<f32>>, RunError> {
    check(attention)?;
    let [q, k, v] = [&operands[0], &operands[1], &operands[2]];
    let x = Extent::new(space, attention, q.held(), k.held(), v.held())?;
    let gradient = Gradient::of(&x, operands)?;
    let (q, k, v) = (q.real()?, k.real()?, v.real()?);
    let mut scores = Scores::new(space, attention, &x, [q, k], operands.get(6))?;
    let [mut dq, mut dk, mut dv] = [q.len(), k.len(), v.len()].map(|n| vec![0.0; n]);
    let mut d_bias = scores.no_gradient();
    let scale = attention.scale as f32;
    let mut dropped: Vec<f32> = Vec::new();
    let mut ds: Vec<f32> = Vec::new();
    for block in Block::all(attention, &x) {
        scores.enter(&block);
        let n = block.queries.len();
        for (front, head) in (0..x.front).flat_map(|f| (0..x.heads).map(move |h| (f, h))) {
            let weights = scores.fill(&block, front, head);
            for (i, (row, kept)) in weights.chunks_mut(block.width).zip(&block.rows).enumerate() {
                let lse = gradient.lse[x.row(front, block.queries.start + i, head)];
                block::clear_others(row, kept);
                for column in kept.iter().cloned().flatten() {
                    row[column] = if lse == f32::NEG_INFINITY { 0.0 } else { (row[column] - lse).exp() };
                }
            }
            // With dropout the values see other weights than the softmax has.
            dropped.clear();
            dropped.extend_from_slice(weights);
            ds.clear();
            ds.resize(n * block.width, 0.0);
            let (o_rows, q_rows) = (
                block.query_rows(&x, front, head, x.value_width),
                block.query_rows(&x, front, head, x.width),
            );
            for (keys, column) in &block.parts {
                let v_rows = block::key_rows(&x, front, head, keys, x.value_width);
                let (d_o, columns) = (gradient.d_o, block.columns(*column));
                let sizes = (n, x.value_width, keys.len());
                multiply(
                    sizes,
                    1.0,
                    d_o,
                    o_rows,
                    v,
                    transposed(v_rows),
                    &mut ds,
                    columns,
                    Into::Replace,
                    crate::cpu::threads::Threads::ONE,
                );
            }
            for (i, kept) in block.rows.iter().enumerate() {
                let query = block.queries.start + i;
                let delta = gradient.delta[x.row(front, query, head)];
                let row = i * block.width..(i + 1) * block.width;
                block::clear_others(&mut ds[row.clone()], kept);
                for column in kept.iter().cloned().flatten() {
                    let at = row.start + column;
                    let factor = match &attention.dropout {
                        Some(dropout) => x.kept(dropout, front, query, head, block.keys[column]) as f32,
                        None => 1.0,
                    };
                    ds[at] = dropped[at] * (factor * ds[at] - delta);
                    dropped[at] *= factor;
                }
            }
            if let Some(d_bias) = &mut d_bias {
                scores.sum_by_bucket(&block, head, &ds, d_bias);
            }
            if attention.softcap.is_some() {
                ds.iter_mut().zip(&scores.slopes).for_each(|(ds, slope)| *ds *= slope);
            }
            for (keys, column) in &block.parts {
                let columns = block.columns(*column);
                let k_rows = block::key_rows(&x, front, head, keys, x.width);
                let v_rows = block::key_rows(&x, front, head, keys, x.value_width);
                let turned = transposed(columns);
                let of_values = (keys.len(), n, x.value_width);
                multiply(
                    of_values,
                    1.0,
                    &dropped,
                    turned,
                    gradient.d_o,
                    o_rows,
                    &mut dv,
                    v_rows,
                    Into::Add,
                    crate::cpu::threads::Threads::ONE,
                );
                let of_keys = (keys.len(), n, x.width);
                multiply(
                    of_keys,
                    scale,
                    &ds,
                    turned,
                    q,
                    q_rows,
                    &mut dk,
                    k_rows,
                    Into::Add,
                    crate::cpu::threads::Threads::ONE,
                );
                let of_queries = (n, keys.len(), x.width);
                multiply(
                    of_queries,
                    scale,
                    &ds,
                    columns,
                    k,
                    k_rows,
                    &mut dq,
                    q_rows,
                    Into::Add,
                    crate::cpu::threads::Threads::ONE,
                );
            }
        }
    }
    Ok([dq, dk, dv].into_iter().chain(d_bias).collect())
}
