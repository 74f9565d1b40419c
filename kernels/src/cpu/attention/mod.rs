//! Attention in tiles that stay in a core's caches (FlashAttention-2, arXiv 2307.08691).
//!
//! Queries are taken in blocks; for each, the mask says which tiles of keys are empty, which are full and which keep a part
//! ([`tiles`]). Empty tiles cost nothing; the small products of a partial tile that the mask hides are skipped. Scores and
//! gradients are small products over packed keys and values, the softmax runs over rows of a tile.
//!
//! Every row of a result is summed in one order, whichever thread computes it.

mod backward;
mod forward;
mod operands;
mod tiles;

pub(super) use backward::{Gradients, backward};
pub use forward::Forward;
pub(super) use forward::forward;
pub(super) use operands::{Incoming, Problem};

use ithaca_ir::Space;
use ithaca_ir::ops::Attention;

use super::threads::Threads;
use crate::error::RunError;
use crate::oracle::Operand;
use crate::oracle::attention::{Bias, Extent, Gradient, check, with_scales};
use crate::oracle::random::dropout_of;

/// `o = Σ_k softmax_k(cap(scale · q·k) + bias) v` over the keys held that the mask leaves, and the logarithm of the sum
/// of exponentials; a query that sees no key gives zero and −∞.
pub(super) fn attention(
    space: &Space,
    attention: &Attention,
    operands: &[Operand<'_, f32>],
    threads: Threads,
) -> Result<Vec<Vec<f32>>, RunError> {
    let attention = &with_key(attention, operands)?;
    let x = Extent::of(space, attention, operands)?;
    let bias = |x: &Extent| Bias::new(space, attention, x, attention.bias.and(operands.get(3)));
    let Some(lengths) = attention.length_operand() else {
        let Forward { o, lse } = forward(&Problem::of(attention, &x, operands, bias(&x)?)?, threads);
        return Ok(vec![o, lse]);
    };
    let scaled = with_scales(attention, operands)?;
    let [k, v] = match &scaled {
        Some([k, v]) => [k.as_slice(), v.as_slice()],
        None => [operands[1].real()?, operands[2].real()?],
    };
    let qkv = [operands[0].real()?, k, v];
    let (mut o, mut lse) = (Vec::new(), Vec::new());
    for (i, x) in x.of_sequences(attention, operands[lengths].elements.int()?)?.iter().enumerate() {
        let [q, k, v] = x.sequence_of(i, qkv);
        let part = forward(&Problem { attention, x, q, k, v, bias: bias(x)? }, threads);
        o.extend(part.o);
        lse.extend(part.lse);
    }
    Ok(vec![o, lse])
}

/// Gradients for q, k and v, and for the bias if there is one; see the oracle's loops for the equations.
pub(super) fn attention_backward(
    space: &Space,
    attention: &Attention,
    operands: &[Operand<'_, f32>],
    threads: Threads,
) -> Result<Vec<Vec<f32>>, RunError> {
    let attention = &with_key(attention, operands)?;
    let x = Extent::of(space, attention, operands)?;
    let Gradient { d_o, lse, delta } = Gradient::of(&x, operands)?;
    let bias = Bias::new(space, attention, &x, operands.get(6))?;
    let problem = Problem::of(attention, &x, operands, bias)?;
    let Gradients { dq, dk, dv, d_bias } = backward(&problem, Incoming { d_o, lse, delta }, threads);
    Ok([dq, dk, dv].into_iter().chain(d_bias).collect())
}

/// The attention with the key of its dropout, if it has one.
fn with_key(attention: &Attention, operands: &[Operand<'_, f32>]) -> Result<Attention, RunError> {
    check(attention)?;
    Ok(Attention { dropout: dropout_of(attention, operands)?, ..attention.clone() })
}
