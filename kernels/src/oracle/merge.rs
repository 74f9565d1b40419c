//! Operations that merge partial attentions: `merge`, `merge_parts`, `accumulate`, `sink`.
//!
//! A part is an output and, for each of its rows, the logarithm of its sum of exponentials. A part of no keys is o = 0
//! and lse = −∞, and merging with it changes nothing.

use super::value::LocalOp;
use crate::error::RunError;
use crate::real::{self, Real};
use crate::tensor::Offsets;

/// The weight that a part has in a sum of exponentials: `exp(part − all)`, zero for a part of nothing.
pub(super) fn share<T: Real>(part: T, all: T) -> T {
    if part == T::NEG_INFINITY { T::ZERO } else { (part - all).through(f64::exp) }
}

/// Two parts become one; a second part that the rank does not hold changes nothing.
pub(super) fn merge<T: Real>(call: &LocalOp<'_, T>) -> Result<Vec<Vec<T>>, RunError> {
    let [o, lse, more_o, more_lse] = [call.real(0)?, call.real(1)?, call.real(2)?, call.real(3)?];
    let (mut out_o, mut out_lse) = (o.to_vec(), lse.to_vec());
    if more_lse.is_empty() && more_o.is_empty() {
        return Ok(vec![out_o, out_lse]);
    }
    if more_lse.len() != lse.len() || more_o.len() != o.len() {
        return Err(RunError::invalid("`merge` of parts of different sizes"));
    }
    let width = width(o, lse)?;
    for row in 0..lse.len() {
        let all = log_add_exp(lse[row], more_lse[row]);
        let (first, second) = (share(lse[row], all), share(more_lse[row], all));
        out_lse[row] = all;
        for i in row * width..(row + 1) * width {
            out_o[i] = first * o[i] + second * more_o[i];
        }
    }
    Ok(vec![out_o, out_lse])
}

/// The parts along the first dimension become one.
pub(super) fn merge_parts<T: Real>(call: &LocalOp<'_, T>) -> Result<Vec<Vec<T>>, RunError> {
    let (o, lse) = (call.real(0)?, call.real(1)?);
    let parts = call.operands[1].shape().first().copied().unwrap_or(0);
    let width = width(o, lse)?;
    let rows = lse.len().checked_div(parts).unwrap_or(0);
    let (mut out_o, mut out_lse) = (vec![T::ZERO; rows * width], vec![T::NEG_INFINITY; rows]);
    for row in 0..rows {
        let of_part = |part: usize| part * rows + row;
        let all = log_sum_exp((0..parts).map(|part| lse[of_part(part)]));
        out_lse[row] = all;
        for part in 0..parts {
            let share = share(lse[of_part(part)], all);
            for i in 0..width {
                out_o[row * width + i] += share * o[of_part(part) * width + i];
            }
        }
    }
    Ok(vec![out_o, out_lse])
}

/// `x + y`; a y that the rank does not hold adds nothing.
pub(super) fn accumulate<T: Real>(call: &LocalOp<'_, T>) -> Result<Vec<T>, RunError> {
    let (x, y) = (call.real(0)?, call.real(1)?);
    match (y.is_empty(), x.len() == y.len()) {
        (true, _) => Ok(x.to_vec()),
        (false, true) => Ok(x.iter().zip(y).map(|(&x, &y)| x + y).collect()),
        (false, false) => Err(RunError::invalid("`accumulate` of parts of different sizes")),
    }
}

/// A logit for each head enters the denominator: `lse' = log(exp(lse) + exp(logit))`, `o' = o · exp(lse − lse')`.
pub(super) fn sink<T: Real>(call: &LocalOp<'_, T>) -> Result<Vec<Vec<T>>, RunError> {
    let (o, lse, logits) = (call.real(0)?, call.real(1)?, call.real(2)?);
    let (width, rows) = (width(o, lse)?, &call.operands[1]);
    let (mut out_o, mut out_lse) = (o.to_vec(), lse.to_vec());
    for (row, logit) in Offsets::new(rows.shape(), call.operands[2].strides_in(rows.ty), 0).enumerate() {
        out_lse[row] = log_add_exp(lse[row], logits[logit]);
        let share = share(lse[row], out_lse[row]);
        out_o[row * width..(row + 1) * width].iter_mut().for_each(|o| *o = share * *o);
    }
    Ok(vec![out_o, out_lse])
}

/// `log Σ exp(x)` about the largest; −∞ of nothing and of nothing but −∞.
pub(super) fn log_sum_exp<T: Real>(numbers: impl Iterator<Item = T> + Clone) -> T {
    let max = real::max(numbers.clone());
    if max == T::NEG_INFINITY {
        // Summed, so that NaN stays NaN.
        return numbers.fold(max, |sum, x| sum + x);
    }
    max + real::sum(numbers.map(|x| (x - max).through(f64::exp))).through(f64::ln)
}

/// `log(exp(x) + exp(y))`; −∞ of two that are.
pub(super) fn log_add_exp<T: Real>(x: T, y: T) -> T {
    let (less, more) = if x < y { (x, y) } else { (y, x) };
    if less == T::NEG_INFINITY { more } else { more + (less - more).through(|d| d.exp().ln_1p()) }
}

/// Elements of a row of o.
pub(super) fn width<T>(o: &[T], lse: &[T]) -> Result<usize, RunError> {
    if !o.len().is_multiple_of(lse.len()) {
        return Err(RunError::invalid("o and lse have different rows"));
    }
    Ok(o.len().checked_div(lse.len()).unwrap_or(0))
}
