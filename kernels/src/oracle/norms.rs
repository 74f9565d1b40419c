//! Gradients of norms: `rms_norm`, `rms_scale`, `layer_norm`, `softmax`.

use ithaca_ir::DimId;

use super::rows::{Weight, lines_of_norm, moments, norm_size, root};
use super::value::LocalOp;
use crate::error::RunError;
use crate::real::{Real, sum};
use crate::tensor::{Offsets, extents};

/// A result that sums over elements of x, the first operand.
struct Sums<T> {
    data: Vec<T>,
    /// For each element of x, its place in the result.
    at: Vec<usize>,
}

impl<T: Real> Sums<T> {
    fn new(call: &LocalOp<'_, T>, result: usize) -> Result<Self, RunError> {
        let (x, result) = (&call.operands[0], call.result_at(result)?);
        let at = Offsets::new(x.shape(), result.strides_in(x.ty), 0).collect();
        Ok(Self { data: vec![T::ZERO; extents(&result.region).iter().product()], at })
    }

    fn add(&mut self, i: usize, x: T) {
        self.data[self.at[i]] += x;
    }
}

/// `dx = y · (d − Σ y d)` of each line of the result y.
pub(super) fn softmax<T: Real>(call: &LocalOp<'_, T>, over: DimId) -> Result<Vec<T>, RunError> {
    let (y, d) = (call.real(0)?, call.real(1)?);
    let mut dx = vec![T::ZERO; y.len()];
    for line in lines_of_norm(call, over)?.iter() {
        let product = sum(line.clone().map(|i| y[i] * d[i]));
        line.for_each(|i| dx[i] = y[i] * (d[i] - product));
    }
    Ok(dx)
}

/// With `g = d · (offset + weight)` and `r` the root: `dx = g / r − x · Σ g x / (n r³)`, `d_weight = Σ d · x / r`.
pub(super) fn rms_norm<T: Real>(
    call: &LocalOp<'_, T>,
    over: DimId,
    eps: f64,
    offset: f64,
) -> Result<Vec<Vec<T>>, RunError> {
    let [x, d] = [call.real(0)?, call.real(2)?];
    let lines = lines_of_norm(call, over)?;
    let weight = Weight::required(call, 1)?;
    let mut d_weight = Sums::new(call, 1)?;
    let n = T::from_f64(lines.length as f64);
    let mut dx = x.to_vec();
    for line in lines.iter() {
        let g = |i: usize| d[i] * (T::from_f64(offset) + weight.get(i));
        let root = root(sum(line.clone().map(|i| x[i] * x[i])) / n, eps);
        let pull = sum(line.clone().map(|i| g(i) * x[i])) / (n * root * root * root);
        for i in line {
            dx[i] = g(i) / root - x[i] * pull;
            d_weight.add(i, d[i] * x[i] / root);
        }
    }
    Ok(vec![dx, d_weight.data])
}

/// With `y = x̂ · weight + bias` and `g = d · weight`: `dx = (g − mean(g) − x̂ · mean(g x̂)) / r`, `d_weight = Σ d · x̂`,
/// `d_bias = Σ d`.
pub(super) fn layer_norm<T: Real>(
    call: &LocalOp<'_, T>,
    over: DimId,
    eps: f64,
) -> Result<Vec<Vec<T>>, RunError> {
    let [x, d] = [call.real(0)?, call.real(2)?];
    let lines = lines_of_norm(call, over)?;
    let weight = Weight::required(call, 1)?;
    let (mut d_weight, mut d_bias) = (Sums::new(call, 1)?, Sums::new(call, 2)?);
    let n = T::from_f64(lines.length as f64);
    let mut dx = x.to_vec();
    for line in lines.iter() {
        let (mean, root) = moments(x, line.clone(), n, eps);
        let unit = |i: usize| (x[i] - mean) / root;
        let g = |i: usize| d[i] * weight.get(i);
        let total = sum(line.clone().map(g));
        let product = sum(line.clone().map(|i| g(i) * unit(i)));
        for i in line {
            dx[i] = (g(i) - total / n - unit(i) * product / n) / root;
            d_weight.add(i, d[i] * unit(i));
            d_bias.add(i, d[i]);
        }
    }
    Ok(vec![dx, d_weight.data, d_bias.data])
}

/// With `r = sqrt(squares / n + eps)`: `dx = d · weight / r`, `d_squares = −Σ d · x · weight / (2 n r³)`,
/// `d_weight = Σ d · x / r`.
pub(super) fn rms_scale<T: Real>(
    call: &LocalOp<'_, T>,
    over: &[DimId],
    eps: f64,
) -> Result<Vec<Vec<T>>, RunError> {
    let n = T::from_f64(norm_size(call.space, over)?);
    let [x, d] = [call.real(0)?, call.real(3)?];
    let (squares, weight) = (Weight::required(call, 1)?, Weight::required(call, 2)?);
    let (mut d_squares, mut d_weight) = (Sums::new(call, 1)?, Sums::new(call, 2)?);
    let mut dx = x.to_vec();
    for i in 0..x.len() {
        let root = root(squares.get(i) / n, eps);
        dx[i] = d[i] * weight.get(i) / root;
        let two = T::from_f64(2.0);
        d_squares.add(i, -(d[i] * x[i] * weight.get(i) / (two * n * root * root * root)));
        d_weight.add(i, d[i] * x[i] / root);
    }
    Ok(vec![dx, d_squares.data, d_weight.data])
}
