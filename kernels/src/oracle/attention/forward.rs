//! Attention of the queries and keys that a rank holds.

use ithaca_ir::ops::{Attention, Dropout};

use super::extent::{Extent, check, with_scales};
use super::score::{Bias, Scorer};
use crate::error::RunError;
use crate::oracle::random::dropout_of;
use crate::oracle::rows::softmax_of;
use crate::oracle::value::LocalOp;
use crate::real::Real;

/// `o = Σ_k softmax_k(cap(scale · q·k) + bias) v` over the keys held that the mask leaves, and the logarithm of the sum of
/// exponentials, row by row of a query's head; a query that sees no key gives zero and −∞.
pub(in crate::oracle) fn attention<T: Real>(
    call: &LocalOp<'_, T>,
    attention: &Attention,
) -> Result<Vec<Vec<T>>, RunError> {
    check(attention)?;
    let dropout = dropout_of(attention, call.operands)?;
    let x = Extent::of(call.space, attention, call.operands)?;
    let scaled = with_scales(attention, call.operands)?;
    let [k, v] = match &scaled {
        Some([k, v]) => [k.as_slice(), v.as_slice()],
        None => [call.real(1)?, call.real(2)?],
    };
    let qkv = [call.real(0)?, k, v];
    let bias = |x: &Extent| Bias::new(call.space, attention, x, attention.bias.and(call.operands.get(3)));
    let Some(lengths) = attention.length_operand() else {
        return Ok(rows(attention, &x, qkv, bias(&x)?, dropout.as_ref()).into());
    };
    let mut all = [Vec::new(), Vec::new()];
    for (i, x) in x.of_sequences(attention, call.int(lengths)?)?.iter().enumerate() {
        let rows = rows(attention, x, x.sequence_of(i, qkv), bias(x)?, None);
        all.iter_mut().zip(rows).for_each(|(all, rows)| all.extend(rows));
    }
    Ok(all.into())
}

/// Output and lse of queries, keys and values.
fn rows<T: Real>(
    attention: &Attention,
    x: &Extent,
    [q, k, v]: [&[T]; 3],
    bias: Option<Bias<'_, T>>,
    dropout: Option<&Dropout>,
) -> [Vec<T>; 2] {
    let scorer = Scorer::new(attention, x, [q, k], bias);
    let rows = x.front * x.queries * x.heads;
    let (mut o, mut lse) = (vec![T::ZERO; rows * x.value_width], vec![T::NEG_INFINITY; rows]);
    for query in 0..x.queries {
        let seen: Vec<usize> = x.seen(&attention.mask, query).into_iter().flatten().collect();
        for (front, head) in (0..x.front).flat_map(|f| (0..x.heads).map(move |h| (f, h))) {
            let row = x.row(front, query, head);
            if seen.is_empty() {
                continue;
            }
            let weights;
            (weights, lse[row]) =
                softmax_of(seen.iter().map(|&key| scorer.score(front, query, head, key).value));
            let o = &mut o[row * x.value_width..][..x.value_width];
            for (&key, mut weight) in seen.iter().zip(weights) {
                if let Some(dropout) = dropout {
                    weight = weight * T::from_f64(x.kept(dropout, front, query, head, key));
                }
                let v = &v[x.key_row(front, key, x.served_by[head]) * x.value_width..][..x.value_width];
                for (o, &v) in o.iter_mut().zip(v) {
                    *o += weight * v;
                }
            }
        }
    }
    [o, lse]
}
