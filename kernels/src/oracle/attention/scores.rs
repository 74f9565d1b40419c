//! Attention with explicit rows of scores (Ring Self-Attention: Li et al., arXiv 2105.13120): scores of the keys that a
//! rank holds, and values weighed by them.

use std::ops::Range;

use ithaca_ir::ops::Attention;

use super::extent::{Extent, served_by};
use super::score::Scorer;
use crate::error::RunError;
use crate::oracle::value::LocalOp;
use crate::real::Real;
use crate::tensor::length;

/// Scores, row by row of a query's head, in as many columns as the result has: −∞ where the mask hides a key, and after the keys held.
pub(in crate::oracle) fn scores<T: Real>(
    call: &LocalOp<'_, T>,
    attention: &Attention,
) -> Result<Vec<T>, RunError> {
    let columns = call.shape().last().copied().unwrap_or(0);
    let [q, k] = [call.operands[0].held(), call.operands[1].held()];
    let x = Extent::new(call.space, attention, q, k, k)?;
    if x.keys > columns {
        return Err(RunError::invalid(format!("{} keys do not fit in {columns} columns", x.keys)));
    }
    let scorer = Scorer::new(attention, &x, [call.real(0)?, call.real(1)?], None);
    let mut out = vec![T::NEG_INFINITY; x.front * x.queries * x.heads * columns];
    for query in 0..x.queries {
        for key in x.seen(&attention.mask, query).into_iter().flatten() {
            for (front, head) in (0..x.front).flat_map(|f| (0..x.heads).map(move |h| (f, h))) {
                out[x.row(front, query, head) * columns + key] = scorer.score(front, query, head, key).value;
            }
        }
    }
    Ok(out)
}

/// `Σ exp(score − lse) · v` over the keys held; zero where lse is −∞.
pub(in crate::oracle) fn weigh<T: Real>(
    call: &LocalOp<'_, T>,
    attention: &Attention,
) -> Result<Vec<T>, RunError> {
    let [scores, lse, v] = [&call.operands[0], &call.operands[1], &call.operands[2]];
    let n = v.region.len();
    let rows: &[Range<u64>] = &lse.region;
    let fits = n >= 3
        && scores.region.len() == n
        && rows.len() == n - 1
        && scores.region[..n - 1] == *rows
        && v.region[..n - 3] == rows[..n - 3]
        && lse.ty.dims[n - 3..] == [attention.queries, attention.heads]
        && v.ty.dims[n - 3..n - 1] == [attention.keys, attention.kv_heads]
        && length(&v.region[n - 3]) <= length(&scores.region[n - 1]);
    if !fits {
        return Err(RunError::invalid("scores, lse and v of `weigh` are held in parts that do not fit"));
    }
    let served_by = served_by(call.space, attention, &rows[n - 2], &v.region[n - 2])?;
    let (queries, heads) = (length(&rows[n - 3]), length(&rows[n - 2]));
    let (keys, kv_heads, width) =
        (length(&v.region[n - 3]), length(&v.region[n - 2]), length(&v.region[n - 1]));
    let columns = length(&scores.region[n - 1]);
    let (scores, lse, v) = (scores.real()?, lse.real()?, v.real()?);
    let mut out = vec![T::ZERO; lse.len() * width];
    for (row, o) in out.chunks_mut(width.max(1)).enumerate() {
        let (head, front) = (row % heads, row / heads / queries);
        let kv_head = served_by[head];
        for key in 0..keys {
            let score = scores[row * columns + key];
            if score == T::NEG_INFINITY || lse[row] == T::NEG_INFINITY {
                continue;
            }
            let weight = (score - lse[row]).through(f64::exp);
            let v = &v[((front * keys + key) * kv_heads + kv_head) * width..][..width];
            for (o, &v) in o.iter_mut().zip(v) {
                *o += weight * v;
            }
        }
    }
    Ok(out)
}
