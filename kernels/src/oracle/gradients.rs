//! Gradients that are operations of their own: of look-ups and sinks.

use ithaca_ir::DimId;

use super::merge::{share, width};
use super::products::known_row;
use super::value::LocalOp;
use crate::error::RunError;
use crate::real::{Real, sum};
use crate::tensor::{Offsets, extents, index};

/// Each row of the table that the rank is to hold sums the gradients of the tokens held that looked it up.
pub(super) fn embed<T: Real>(
    call: &LocalOp<'_, T>,
    over: DimId,
    padding: Option<u64>,
) -> Result<Vec<T>, RunError> {
    let (tokens, gradient) = (call.int(0)?, call.real(1)?);
    let rows = tokens.iter().map(|&id| known_row(call.space, over, id)).collect::<Result<Vec<u64>, _>>()?;
    let (d, held, shape) = (&call.operands[1], &call.result().region[0], call.shape());
    let width: usize = shape[1..].iter().product();
    let mut out = vec![T::ZERO; shape.iter().product()];
    // Each element of the gradient belongs to a token and to a place in the row.
    let token = Offsets::new(d.shape(), call.operands[0].strides_in(d.ty), 0);
    let place = Offsets::new(d.shape(), call.result().strides_in(d.ty), 0);
    for ((token, place), &x) in token.zip(place).zip(gradient) {
        let row = rows[token];
        if held.contains(&row) && padding != Some(row) {
            out[index(row - held.start) * width + place] += x;
        }
    }
    Ok(out)
}

/// Gradients of o, lse and the logits from `o', d_o', lse, lse'`: `exp(lse − lse')` of a row stays its own, and
/// `(1 − exp(lse − lse')) · Σ d_o' · o'` moves from the logit to lse.
pub(super) fn sink<T: Real>(call: &LocalOp<'_, T>) -> Result<Vec<Vec<T>>, RunError> {
    let [o, d_o, before, after] = [call.real(0)?, call.real(1)?, call.real(2)?, call.real(3)?];
    let (width, rows, logits) = (width(o, before)?, &call.operands[2], call.result_at(2)?);
    let mut d_o_before = d_o.to_vec();
    let mut d_before = vec![T::ZERO; before.len()];
    let mut d_logits = vec![T::ZERO; extents(&logits.region).iter().product()];
    for (row, head) in Offsets::new(rows.shape(), logits.strides_in(rows.ty), 0).enumerate() {
        let share = share(before[row], after[row]);
        let columns = row * width..(row + 1) * width;
        columns.clone().for_each(|i| d_o_before[i] = share * d_o[i]);
        d_before[row] = (T::ONE - share) * sum(columns.map(|i| d_o[i] * o[i]));
        d_logits[head] += -d_before[row];
    }
    Ok(vec![d_o_before, d_before, d_logits])
}
