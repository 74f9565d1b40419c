//! Operations along dimensions: `rms_norm`, `rms_scale`, `layer_norm`, `softmax`, `rotary`.

use ithaca_ir::ops::Rotary;
use ithaca_ir::{Dim, DimId, Space, TensorType};

use super::value::Operand;
use crate::error::RunError;
use crate::real::Real;
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

/// Whole lines without padding.
pub(super) fn lines_of_norm<T: Real>(
    space: &Space,
    over: DimId,
    x: &Operand<'_, T>,
) -> Result<Lines, RunError> {
    let dim = unpadded(space, over)?;
    let lines = Lines::of(x, over)?;
    if lines.length as u64 == dim.size {
        Ok(lines)
    } else {
        Err(RunError::invalid(format!("a norm over `{}` on a part of it", dim.name)))
    }
}

/// `exp(x − max) / Σ exp(x − max)` of each line.
pub(super) fn softmax<T: Real>(space: &Space, over: DimId, x: &Operand<'_, T>) -> Result<Vec<T>, RunError> {
    let lines = lines_of_norm(space, over, x)?;
    let mut out = x.real()?.to_vec();
    for &start in &lines.starts {
        let line = (0..lines.length).map(|j| start + j * lines.step);
        let max = line.clone().map(|i| out[i]).fold(T::NEG_INFINITY, |m, x| if x > m { x } else { m });
        let mut sum = T::ZERO;
        for i in line.clone() {
            out[i] = (out[i] - max).through(f64::exp);
            sum += out[i];
        }
        line.for_each(|i| out[i] = out[i] / sum);
    }
    Ok(out)
}

/// A weight of a norm: its elements and, per element of x, their offsets.
pub(super) struct Weight<'a, T> {
    data: &'a [T],
    at: Vec<usize>,
}

impl<'a, T: Real> Weight<'a, T> {
    /// Operand `i`, if there is one.
    fn of(operands: &[Operand<'a, T>], i: usize, ty: &TensorType) -> Result<Option<Self>, RunError> {
        let Some(w) = operands.get(i) else { return Ok(None) };
        let at = Offsets::new(operands[0].shape(), w.strides_in(ty), 0).collect();
        Ok(Some(Self { data: w.real()?, at }))
    }

    /// Operand `i`, seen as x is, the first operand.
    pub(super) fn required(operands: &[Operand<'a, T>], i: usize) -> Result<Self, RunError> {
        Self::of(operands, i, operands[0].ty)?.ok_or_else(|| RunError::invalid("a norm lacks an operand"))
    }

    /// The weight of element `i` of x.
    pub(super) fn get(&self, i: usize) -> T {
        self.data[self.at[i]]
    }
}

/// `x / sqrt(mean(x²) + eps) · (offset + weight)`.
pub(super) fn rms_norm<T: Real>(
    space: &Space,
    over: DimId,
    (eps, offset): (f64, f64),
    operands: &[Operand<'_, T>],
    ty: &TensorType,
) -> Result<Vec<T>, RunError> {
    let x = operands[0].real()?;
    let lines = lines_of_norm(space, over, &operands[0])?;
    let weight = Weight::of(operands, 1, ty)?;
    let n = T::from_f64(lines.length as f64);
    let mut out = x.to_vec();
    for &start in &lines.starts {
        let line = (0..lines.length).map(|j| start + j * lines.step);
        let mut squares = T::ZERO;
        for i in line.clone() {
            squares += x[i] * x[i];
        }
        let root = (squares / n + T::from_f64(eps)).through(f64::sqrt);
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
    space: &Space,
    over: &[DimId],
    eps: f64,
    operands: &[Operand<'_, T>],
) -> Result<Vec<T>, RunError> {
    let n = norm_size(space, over)?;
    let x = operands[0].real()?;
    let (squares, weight) = (Weight::required(operands, 1)?, Weight::required(operands, 2)?);
    let scaled = x.iter().enumerate().map(|(i, &x)| {
        let root = (squares.get(i) / T::from_f64(n) + T::from_f64(eps)).through(f64::sqrt);
        x / root * weight.get(i)
    });
    Ok(scaled.collect())
}

/// The mean of a line of `n` elements, and the root of its variance plus `eps`.
pub(super) fn moments<T: Real>(x: &[T], line: impl Iterator<Item = usize> + Clone, n: T, eps: f64) -> (T, T) {
    let mut sum = T::ZERO;
    for i in line.clone() {
        sum += x[i];
    }
    let mean = sum / n;
    let mut squares = T::ZERO;
    for i in line {
        squares += (x[i] - mean) * (x[i] - mean);
    }
    (mean, (squares / n + T::from_f64(eps)).through(f64::sqrt))
}

/// `(x − mean) / sqrt(variance + eps) · weight + bias`, the variance being that of the line itself.
pub(super) fn layer_norm<T: Real>(
    space: &Space,
    over: DimId,
    eps: f64,
    operands: &[Operand<'_, T>],
    ty: &TensorType,
) -> Result<Vec<T>, RunError> {
    let x = operands[0].real()?;
    let lines = lines_of_norm(space, over, &operands[0])?;
    let (weight, bias) = (Weight::of(operands, 1, ty)?, Weight::of(operands, 2, ty)?);
    let n = T::from_f64(lines.length as f64);
    let mut out = x.to_vec();
    for &start in &lines.starts {
        let line = (0..lines.length).map(|j| start + j * lines.step);
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
pub(super) fn rotary<T: Real>(
    rotary: &Rotary,
    x: &Operand<'_, T>,
    positions: &Operand<'_, T>,
    ty: &TensorType,
) -> Result<Vec<T>, RunError> {
    let (data, at) = (x.real()?, positions.int()?);
    let lines = Lines::of(x, rotary.over)?;
    let width = index(rotary.width);
    if lines.length < width {
        return Err(RunError::invalid("`rotary` on a part of its dimension"));
    }
    let place: Vec<usize> = Offsets::new(x.shape(), positions.strides_in(ty), 0).collect();
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
