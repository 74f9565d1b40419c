//! Operations along dimensions: `rms_norm`, `rms_scale`, `layer_norm`, `softmax`, `rotary`.

use ithaca_ir::ops::Rotary;
use ithaca_ir::{Dim, DimId, Space};

use super::value::{LocalOp, Operand};
use crate::error::RunError;
use crate::real::{self, Real};
use crate::tensor::{Offsets, index, strides};

/// The lines of a tensor along one dimension: where each starts, the step within it, its length.
pub(super) struct Lines {
    pub(super) starts: Vec<usize>,
    pub(super) step: usize,
    pub(super) length: usize,
}

impl Lines {
    pub(super) fn of<T: Real>(x: &Operand<'_, T>, over: DimId) -> Result<Self, RunError> {
        let i = x.ty.position(over).ok_or_else(|| RunError::invalid("x lacks the dimension"))?;
        let strides = strides(&x.shape());
        let mut shape = x.shape();
        let length = std::mem::replace(&mut shape[i], 1);
        Ok(Self { starts: Offsets::new(shape, strides.clone(), 0).collect(), step: strides[i], length })
    }

    /// The offsets of the elements of each line.
    pub(super) fn iter(&self) -> impl Iterator<Item = impl Iterator<Item = usize> + Clone + '_> + '_ {
        self.starts.iter().map(move |&start| (0..self.length).map(move |j| start + j * self.step))
    }
}

/// The dimension of a norm; a mean over padding would be another mean.
fn unpadded(space: &Space, over: DimId) -> Result<&Dim, RunError> {
    let dim = &space.dims[over];
    if dim.valid == dim.size {
        Ok(dim)
    } else {
        Err(RunError::Unsupported(format!(
            "a norm over `{}`, of which {} of {} elements are padding,",
            dim.name,
            dim.size - dim.valid,
            dim.size
        )))
    }
}

/// Elements of the dimensions of a norm, on all ranks together.
pub(super) fn norm_size(space: &Space, over: &[DimId]) -> Result<f64, RunError> {
    over.iter().map(|&d| Ok(unpadded(space, d)?.size as f64)).product()
}

/// Whole lines of the first operand, without padding.
pub(super) fn lines_of_norm<T: Real>(call: &LocalOp<'_, T>, over: DimId) -> Result<Lines, RunError> {
    let dim = unpadded(call.space, over)?;
    let lines = Lines::of(&call.operands[0], over)?;
    if lines.length as u64 == dim.size {
        Ok(lines)
    } else {
        Err(RunError::invalid(format!("a norm over `{}` on a part of it", dim.name)))
    }
}

/// `exp(x − max) / Σ exp(x − max)` and `max + log Σ exp(x − max)`.
pub(super) fn softmax_of<T: Real>(numbers: impl Iterator<Item = T> + Clone) -> (Vec<T>, T) {
    let max = real::max(numbers.clone());
    let terms: Vec<T> = numbers.map(|x| (x - max).through(f64::exp)).collect();
    let sum = real::sum(terms.iter().copied());
    (terms.into_iter().map(|term| term / sum).collect(), max + sum.through(f64::ln))
}

/// The softmax of each line.
pub(super) fn softmax<T: Real>(call: &LocalOp<'_, T>, over: DimId) -> Result<Vec<T>, RunError> {
    let x = call.real(0)?;
    let mut out = x.to_vec();
    for line in lines_of_norm(call, over)?.iter() {
        let (weights, _) = softmax_of(line.clone().map(|i| x[i]));
        line.zip(weights).for_each(|(i, weight)| out[i] = weight);
    }
    Ok(out)
}

/// A weight of a norm: its elements and, per element of x, their offsets.
pub(super) struct Weight<'a, T> {
    data: &'a [T],
    at: Vec<usize>,
}

impl<'a, T: Real> Weight<'a, T> {
    /// Operand `i`, if there is one, seen as x is, the first operand.
    pub(super) fn of(call: &LocalOp<'a, T>, i: usize) -> Result<Option<Self>, RunError> {
        let (x, Some(w)) = (&call.operands[0], call.operands.get(i)) else { return Ok(None) };
        Ok(Some(Self { data: w.real()?, at: Offsets::new(x.shape(), w.strides_in(x.ty), 0).collect() }))
    }

    /// Operand `i`, which there must be.
    pub(super) fn required(call: &LocalOp<'a, T>, i: usize) -> Result<Self, RunError> {
        Self::of(call, i)?.ok_or_else(|| RunError::invalid("a norm lacks an operand"))
    }

    /// The weight of element `i` of x.
    pub(super) fn get(&self, i: usize) -> T {
        self.data[self.at[i]]
    }
}

/// `sqrt(squares + eps)`.
pub(super) fn root<T: Real>(squares: T, eps: f64) -> T {
    (squares + T::from_f64(eps)).through(f64::sqrt)
}

/// `x / sqrt(mean(x²) + eps) · (offset + weight)`.
pub(super) fn rms_norm<T: Real>(
    call: &LocalOp<'_, T>,
    over: DimId,
    eps: f64,
    offset: f64,
) -> Result<Vec<T>, RunError> {
    let x = call.real(0)?;
    let lines = lines_of_norm(call, over)?;
    let weight = Weight::of(call, 1)?;
    let n = T::from_f64(lines.length as f64);
    let mut out = x.to_vec();
    for line in lines.iter() {
        let root = root(real::sum(line.clone().map(|i| x[i] * x[i])) / n, eps);
        for i in line {
            out[i] = x[i] / root;
            if let Some(w) = &weight {
                out[i] = out[i] * (T::from_f64(offset) + w.get(i));
            }
        }
    }
    Ok(out)
}

/// `x / sqrt(squares / n + eps) · weight`, `n` being the elements of `over` on all ranks together.
pub(super) fn rms_scale<T: Real>(
    call: &LocalOp<'_, T>,
    over: &[DimId],
    eps: f64,
) -> Result<Vec<T>, RunError> {
    let n = T::from_f64(norm_size(call.space, over)?);
    let (squares, weight) = (Weight::required(call, 1)?, Weight::required(call, 2)?);
    let scaled = |(i, &x): (usize, &T)| x / root(squares.get(i) / n, eps) * weight.get(i);
    Ok(call.real(0)?.iter().enumerate().map(scaled).collect())
}

/// The mean of a line of `n` elements, and the root of its variance plus `eps`.
pub(super) fn moments<T: Real>(x: &[T], line: impl Iterator<Item = usize> + Clone, n: T, eps: f64) -> (T, T) {
    let mean = real::sum(line.clone().map(|i| x[i])) / n;
    let squares = real::sum(line.map(|i| (x[i] - mean) * (x[i] - mean)));
    (mean, root(squares / n, eps))
}

/// `(x − mean) / sqrt(variance + eps) · weight + bias`, the variance being that of the line itself.
pub(super) fn layer_norm<T: Real>(call: &LocalOp<'_, T>, over: DimId, eps: f64) -> Result<Vec<T>, RunError> {
    let x = call.real(0)?;
    let lines = lines_of_norm(call, over)?;
    let (weight, bias) = (Weight::of(call, 1)?, Weight::of(call, 2)?);
    let n = T::from_f64(lines.length as f64);
    let mut out = x.to_vec();
    for line in lines.iter() {
        let (mean, root) = moments(x, line.clone(), n, eps);
        for i in line {
            out[i] = (x[i] - mean) / root;
            if let Some(w) = &weight {
                out[i] = out[i] * w.get(i);
            }
            if let Some(b) = &bias {
                out[i] += b.get(i);
            }
        }
    }
    Ok(out)
}

/// Rotates pair `i` of the first `width` elements by `position · frequency[i]`; later elements pass through.
pub(super) fn rotary<T: Real>(call: &LocalOp<'_, T>, rotary: &Rotary) -> Result<Vec<T>, RunError> {
    let (data, at) = (call.real(0)?, call.int(1)?);
    let lines = Lines::of(&call.operands[0], rotary.over)?;
    let width = index(rotary.width);
    if lines.length < width {
        return Err(RunError::invalid("`rotary` on a part of its dimension"));
    }
    let place = Offsets::new(call.shape(), call.operands[1].strides_in(call.result().ty), 0);
    let place: Vec<usize> = place.collect();
    let (frequencies, amplitude) = (rotary.frequencies(), rotary.amplitude());
    let mut out = data.to_vec();
    for &start in &lines.starts {
        let position = f64::from(at[place[start]]);
        for (pair, frequency) in frequencies.iter().enumerate() {
            let (sin, cos) = (rotary.turn.sign() * position * frequency).sin_cos();
            let (sin, cos) = (T::from_f64(amplitude * sin), T::from_f64(amplitude * cos));
            let (i, j) = rotary.pairs.places(pair, width);
            let (i, j) = (start + i * lines.step, start + j * lines.step);
            out[i] = data[i] * cos - data[j] * sin;
            out[j] = data[j] * cos + data[i] * sin;
        }
    }
    Ok(out)
}
