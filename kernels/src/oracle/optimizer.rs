//! Steps of an optimizer, element by element.

use ithaca_ir::ops::AdamW;

use super::value::LocalOp;
use crate::error::RunError;
use crate::real::Real;

/// `w, g, m, v, step, clip → w, m, v` (Loshchilov and Hutter, arXiv 1711.05101, algorithm 2).
pub(super) fn adamw<T: Real>(call: &LocalOp<'_, T>, adamw: &AdamW) -> Result<Vec<Vec<T>>, RunError> {
    let &AdamW { lr, beta1, beta2, eps, weight_decay } = adamw;
    let [w, g, m, v] = [call.real(0)?, call.real(1)?, call.real(2)?, call.real(3)?];
    let scalar = |i: usize| -> Result<T, RunError> {
        let data = call.real(i)?;
        data.first().copied().ok_or_else(|| RunError::invalid("a step of the optimizer lacks a scalar"))
    };
    let (step, clip) = (scalar(4)?.to_f64(), scalar(5)?);
    if [g, m, v].iter().any(|x| x.len() != w.len()) {
        return Err(RunError::invalid("weights, gradient and moments are held in parts that do not fit"));
    }
    let number = T::from_f64;
    let (bias1, bias2) = (number(1.0 - beta1.powf(step)), number((1.0 - beta2.powf(step)).sqrt()));
    let mut out = vec![Vec::with_capacity(w.len()), Vec::with_capacity(w.len()), Vec::with_capacity(w.len())];
    for i in 0..w.len() {
        let g = g[i] * clip;
        let m = number(beta1) * m[i] + number(1.0 - beta1) * g;
        let v = number(beta2) * v[i] + number(1.0 - beta2) * g * g;
        let kept = w[i] * number(1.0 - lr * weight_decay);
        let root = v.through(f64::sqrt) / bias2 + number(eps);
        out[0].push(kept - number(lr) * (m / bias1) / root);
        out[1].push(m);
        out[2].push(v);
    }
    Ok(out)
}

/// `min(1, max_norm / (sqrt(squares) + 1e-6))`.
pub(super) fn clip_factor<T: Real>(call: &LocalOp<'_, T>, max_norm: f64) -> Result<Vec<T>, RunError> {
    let factor = |squares: f64| {
        let factor = max_norm / (squares.sqrt() + 1e-6);
        // Written so that NaN stays NaN.
        if factor > 1.0 { 1.0 } else { factor }
    };
    Ok(call.real(0)?.iter().map(|x| x.through(factor)).collect())
}
