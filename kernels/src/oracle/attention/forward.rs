//! Attention of the queries and keys that a rank holds.

use ithaca_ir::Space;
use ithaca_ir::ops::Attention;

use super::extent::{Extent, check};
use super::score::Scorer;
use crate::error::RunError;
use crate::oracle::random::dropout_of;
use crate::oracle::value::Operand;
use crate::real::Real;

/// Output and logarithm of the sum of exponentials, row by row of a query's head.
#[derive(Clone, Debug)]
pub(crate) struct Rows<T> {
    /// The output, of the width of values.
    pub(crate) o: Vec<T>,
    /// The logarithm; −∞ for a query that sees no key.
    pub(crate) lse: Vec<T>,
}

/// `o = Σ_k softmax_k(cap(scale · q·k) + bias) v` over the keys held that the mask leaves; a query that sees no key gives
/// zero.
pub(in crate::oracle) fn attention<T: Real>(
    space: &Space,
    attention: &Attention,
    operands: &[Operand<'_, T>],
) -> Result<Rows<T>, RunError> {
    check(attention)?;
    let dropout = dropout_of(attention, operands)?;
    let [q, k, v] = [&operands[0], &operands[1], &operands[2]];
    let x = Extent::new(space, attention, q.held(), k.held(), v.held())?;
    let scorer = Scorer::new(space, attention, &x, q.real()?, k.real()?, operands.get(3))?;
    let v = v.real()?;
    let rows = x.front * x.queries * x.heads;
    let mut out = Rows { o: vec![T::ZERO; rows * x.value_width], lse: vec![T::NEG_INFINITY; rows] };
    for query in 0..x.queries {
        let seen: Vec<usize> = x.seen(&attention.mask, query).into_iter().flatten().collect();
        for (front, head) in (0..x.front).flat_map(|f| (0..x.heads).map(move |h| (f, h))) {
            let row = x.row(front, query, head);
            let scores: Vec<T> =
                seen.iter().map(|&key| scorer.score(front, query, head, key).value).collect();
            let Some((weights, lse)) = softmax(&scores) else { continue };
            out.lse[row] = lse;
            let o = &mut out.o[row * x.value_width..][..x.value_width];
            for (&key, mut weight) in seen.iter().zip(weights) {
                if let Some(dropout) = &dropout {
                    weight = weight * T::from_f64(x.kept(dropout, front, query, head, key));
                }
                let v = &v[x.key_row(front, key, x.served_by[head]) * x.value_width..][..x.value_width];
                for (o, &v) in o.iter_mut().zip(v) {
                    *o += weight * v;
                }
            }
        }
    }
    Ok(out)
}

/// `exp(x − max) / Σ exp(x − max)` and `max + log Σ exp(x − max)`; `None` of nothing.
fn softmax<T: Real>(scores: &[T]) -> Option<(Vec<T>, T)> {
    let mut max = *scores.first()?;
    for &x in scores {
        if x > max {
            max = x;
        }
    }
    let weights: Vec<T> = scores.iter().map(|&x| (x - max).through(f64::exp)).collect();
    let mut sum = T::ZERO;
    for &w in &weights {
        sum += w;
    }
    Some((weights.into_iter().map(|w| w / sum).collect(), max + sum.through(f64::ln)))
}
