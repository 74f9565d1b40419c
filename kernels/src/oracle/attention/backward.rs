//! Gradients of attention, by the probabilities recomputed from the forward's lse (FlashAttention-2, arXiv 2307.08691,
//! algorithm 2).

use ithaca_ir::ops::Attention;

use super::extent::{Extent, check};
use super::score::{Bias, Scorer, dot};
use crate::error::RunError;
use crate::oracle::random::dropout_of;
use crate::oracle::value::{LocalOp, Operand};
use crate::real::Real;

/// Gradients for q, k and v, and for the bias if there is one.
///
/// With `p = exp(score − lse)`, dropped weights being zero and the others divided by the share that is kept:
/// `dv = Σ p' d_o`, `ds = p · (kept · d_o·v − delta)`, `dq = scale · Σ ds · slope · k`, `dk` likewise; a bucket of
/// the bias sums the `ds` of its scores. A query with
/// `lse = −∞` sees nothing and gives nothing.
pub(in crate::oracle) fn attention_backward<T: Real>(
    call: &LocalOp<'_, T>,
    attention: &Attention,
) -> Result<Vec<Vec<T>>, RunError> {
    check(attention)?;
    let dropout = dropout_of(attention, call.operands)?;
    let x = Extent::of(call.space, attention, call.operands)?;
    let scorer = {
        let bias = Bias::new(call.space, attention, &x, call.operands.get(6))?;
        Scorer::new(attention, &x, [call.real(0)?, call.real(1)?], bias)
    };
    let Gradient { d_o, lse, delta } = Gradient::of(&x, call.operands)?;
    let (q, k, v) = (call.real(0)?, call.real(1)?, call.real(2)?);
    let scale = T::from_f64(attention.scale);
    let [mut dq, mut dk, mut dv] = [q.len(), k.len(), v.len()].map(|n| vec![T::ZERO; n]);
    let mut d_bias = scorer.bias().map(Bias::no_gradient);
    for query in 0..x.queries {
        let seen: Vec<usize> = x.seen(&attention.mask, query).into_iter().flatten().collect();
        for (front, head) in (0..x.front).flat_map(|f| (0..x.heads).map(move |h| (f, h))) {
            let row = x.row(front, query, head);
            if lse[row] == T::NEG_INFINITY {
                continue;
            }
            let d_o = &d_o[row * x.value_width..][..x.value_width];
            for &key in &seen {
                let key_row = x.key_row(front, key, x.served_by[head]);
                let (wide, narrow) = (key_row * x.value_width, key_row * x.width);
                let score = scorer.score(front, query, head, key);
                let p = (score.value - lse[row]).through(f64::exp);
                let kept = match &dropout {
                    Some(dropout) => T::from_f64(x.kept(dropout, front, query, head, key)),
                    None => T::ONE,
                };
                for (dv, &d_o) in dv[wide..].iter_mut().zip(d_o) {
                    *dv += p * kept * d_o;
                }
                let dp = kept * dot(d_o, &v[wide..][..x.value_width]);
                let ds = p * (dp - delta[row]);
                if let (Some(bias), Some(d_bias)) = (scorer.bias(), &mut d_bias) {
                    d_bias[bias.place(bias.bucket(x.offset(query, key)), head)] += ds;
                }
                let ds = scale * score.slope * ds;
                let at = row * x.width;
                for c in 0..x.width {
                    dq[at + c] += ds * k[narrow + c];
                    dk[narrow + c] += ds * q[at + c];
                }
            }
        }
    }
    Ok([dq, dk, dv].into_iter().chain(d_bias).collect())
}

/// The operands of the backward pass beside those of the forward pass, in rows of queries.
pub(crate) struct Gradient<'a, T> {
    /// The gradient of the output.
    pub(crate) d_o: &'a [T],
    /// The logarithm of the sum of exponentials over all keys.
    pub(crate) lse: &'a [T],
    /// The sum over the width of `d_o · o`.
    pub(crate) delta: &'a [T],
}

impl<'a, T: Real> Gradient<'a, T> {
    /// Operands 3 to 5, which must be held as the queries are.
    pub(crate) fn of(x: &Extent, operands: &[Operand<'a, T>]) -> Result<Self, RunError> {
        let rows = &operands[0].region[..operands[0].region.len() - 1];
        let alike = operands[3].region[..rows.len().min(operands[3].region.len())] == *rows
            && operands[3].shape().last() == Some(&x.value_width)
            && operands[4..6].iter().all(|operand| operand.region == *rows);
        if alike {
            Ok(Self { d_o: operands[3].real()?, lse: operands[4].real()?, delta: operands[5].real()? })
        } else {
            Err(RunError::invalid("d_o, lse and delta are held otherwise than the queries"))
        }
    }
}
