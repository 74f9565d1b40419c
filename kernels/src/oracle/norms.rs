//! Gradients of norms: `rms_norm`, `rms_scale`, `layer_norm`, `softmax`.

use ithaca_ir::boxes::Region;
use ithaca_ir::{DimId, Space};

use super::rows::{Weight, lines_of_norm, moments, norm_size};
use super::value::{Operand, ResultSpec};
use crate::error::RunError;
use crate::real::Real;
use crate::tensor::{Offsets, extents, strides};

/// A result that sums over elements of x: for each of these, where it goes.
struct Sums<T> {
    data: Vec<T>,
    at: Vec<usize>,
}

impl<T: Real> Sums<T> {
    fn new(x: &Operand<'_, T>, ResultSpec { ty, region }: &ResultSpec<'_>) -> Self {
        let shape: Region = region.clone();
        let steps = strides(&extents(&shape));
        let steps = x.ty.dims.iter().map(|&d| ty.position(d).map_or(0, |i| steps[i])).collect();
        let at = Offsets::new(x.shape(), steps, 0).collect();
        Self { data: vec![T::ZERO; extents(&shape).iter().product()], at }
    }

    fn add(&mut self, i: usize, x: T) {
        self.data[self.at[i]] += x;
    }
}

fn wanted<'a, 'w>(results: &'a [ResultSpec<'w>], n: usize) -> Result<&'a [ResultSpec<'w>], RunError> {
    if results.len() == n {
        Ok(results)
    } else {
        Err(RunError::invalid(format!("the gradient of a norm has {n} results")))
    }
}

/// `dx = y · (d − Σ y d)` of each line of the result y.
pub(super) fn softmax<T: Real>(
    space: &Space,
    over: DimId,
    y: &Operand<'_, T>,
    d: &Operand<'_, T>,
) -> Result<Vec<T>, RunError> {
    let lines = lines_of_norm(space, over, y)?;
    let (y, d) = (y.real()?, d.real()?);
    let mut dx = vec![T::ZERO; y.len()];
    for &start in &lines.starts {
        let line = (0..lines.length).map(|j| start + j * lines.step);
        let mut sum = T::ZERO;
        line.clone().for_each(|i| sum += y[i] * d[i]);
        line.for_each(|i| dx[i] = y[i] * (d[i] - sum));
    }
    Ok(dx)
}

/// With `g = d · (offset + weight)` and `r` the root: `dx = g / r − x · Σ g x / (n r³)`, `d_weight = Σ d · x / r`.
pub(super) fn rms_norm<T: Real>(
    space: &Space,
    over: DimId,
    (eps, offset): (f64, f64),
    operands: &[Operand<'_, T>],
    results: &[ResultSpec<'_>],
) -> Result<Vec<Vec<T>>, RunError> {
    let results = wanted(results, 2)?;
    let [x, d] = [operands[0].real()?, operands[2].real()?];
    let lines = lines_of_norm(space, over, &operands[0])?;
    let weight = Weight::required(operands, 1)?;
    let mut d_weight = Sums::new(&operands[0], &results[1]);
    let n = T::from_f64(lines.length as f64);
    let mut dx = x.to_vec();
    for &start in &lines.starts {
        let line = (0..lines.length).map(|j| start + j * lines.step);
        let g = |i: usize| d[i] * (T::from_f64(offset) + weight.get(i));
        let (mut squares, mut product) = (T::ZERO, T::ZERO);
        for i in line.clone() {
            squares += x[i] * x[i];
            product += g(i) * x[i];
        }
        let root = (squares / n + T::from_f64(eps)).through(f64::sqrt);
        let pull = product / (n * root * root * root);
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
    space: &Space,
    over: DimId,
    eps: f64,
    operands: &[Operand<'_, T>],
    results: &[ResultSpec<'_>],
) -> Result<Vec<Vec<T>>, RunError> {
    let results = wanted(results, 3)?;
    let [x, d] = [operands[0].real()?, operands[2].real()?];
    let lines = lines_of_norm(space, over, &operands[0])?;
    let weight = Weight::required(operands, 1)?;
    let mut d_weight = Sums::new(&operands[0], &results[1]);
    let mut d_bias = Sums::new(&operands[0], &results[2]);
    let n = T::from_f64(lines.length as f64);
    let mut dx = x.to_vec();
    for &start in &lines.starts {
        let line = (0..lines.length).map(|j| start + j * lines.step);
        let (mean, root) = moments(x, line.clone(), n, eps);
        let unit = |i: usize| (x[i] - mean) / root;
        let (mut sum, mut product) = (T::ZERO, T::ZERO);
        for i in line.clone() {
            sum += d[i] * weight.get(i);
            product += d[i] * weight.get(i) * unit(i);
        }
        for i in line {
            dx[i] = (d[i] * weight.get(i) - sum / n - unit(i) * product / n) / root;
            d_weight.add(i, d[i] * unit(i));
            d_bias.add(i, d[i]);
        }
    }
    Ok(vec![dx, d_weight.data, d_bias.data])
}

/// With `r = sqrt(squares / n + eps)`: `dx = d · weight / r`, `d_squares = −Σ d · x · weight / (2 n r³)`,
/// `d_weight = Σ d · x / r`.
pub(super) fn rms_scale<T: Real>(
    space: &Space,
    over: &[DimId],
    eps: f64,
    operands: &[Operand<'_, T>],
    results: &[ResultSpec<'_>],
) -> Result<Vec<Vec<T>>, RunError> {
    let results = wanted(results, 3)?;
    let n = T::from_f64(norm_size(space, over)?);
    let [x, d] = [operands[0].real()?, operands[3].real()?];
    let (squares, weight) = (Weight::required(operands, 1)?, Weight::required(operands, 2)?);
    let mut d_squares = Sums::new(&operands[0], &results[1]);
    let mut d_weight = Sums::new(&operands[0], &results[2]);
    let mut dx = x.to_vec();
    for i in 0..x.len() {
        let root = (squares.get(i) / n + T::from_f64(eps)).through(f64::sqrt);
        dx[i] = d[i] * weight.get(i) / root;
        let two = T::from_f64(2.0);
        d_squares.add(i, -(d[i] * x[i] * weight.get(i) / (two * n * root * root * root)));
        d_weight.add(i, d[i] * x[i] / root);
    }
    Ok(vec![dx, d_squares.data, d_weight.data])
}
