//! The loss: cross-entropy of labels, its gradient, and the pieces that ranks with parts of the vocabulary compute.
//!
//! Padding is ignored: neither the padded part of the vocabulary, whose logits are unused, nor tokens of padding,
//! whatever their labels.

use ithaca_ir::{DimId, Space};

use super::merge::log_sum_exp;
use super::rows::Lines;
use super::value::{LocalOp, Operand};
use crate::error::RunError;
use crate::positions;
use crate::real::Real;
use crate::tensor::{place_in, strides};

/// Rows of logits, and the label of each.
pub(crate) struct Rows {
    lines: Lines,
    /// Of each row, the label's index in the vocabulary; `None` where it is ignored or padding.
    labels: Vec<Option<u64>>,
    /// Which columns held are no padding.
    data: Vec<bool>,
    /// The first column held.
    first: u64,
}

impl Rows {
    /// The rows of these logits, `over` being the vocabulary and `ignore` the label that does not count.
    ///
    /// # Errors
    /// [`RunError::LabelOutOfRange`], and [`RunError::Invalid`] where labels do not fit the logits.
    pub(crate) fn of<T: Real>(
        space: &Space,
        (over, ignore): (DimId, i64),
        logits: &Operand<'_, T>,
        labels: &Operand<'_, T>,
    ) -> Result<Self, RunError> {
        let lines = Lines::of(logits, over)?;
        let column = logits.ty.position(over).map(|i| logits.region[i].clone()).unwrap_or_default();
        let data = positions::carries_data(space, over, column.clone());
        let labels = counted(space, ignore, Some(over), labels)?;
        if labels.len() != lines.starts.len() {
            return Err(RunError::invalid("logits and labels are held in parts that do not fit"));
        }
        Ok(Self { lines, labels, data, first: column.start })
    }

    /// The offset of the logit of a row's label, if the rank holds it.
    pub(crate) fn label(&self, row: usize) -> Option<usize> {
        let j = usize::try_from(self.labels[row]?.checked_sub(self.first)?).ok()?;
        (j < self.lines.length).then(|| self.lines.starts[row] + j * self.lines.step)
    }

    /// Whether a row's label counts, on whichever rank it is.
    pub(crate) fn counts(&self, row: usize) -> bool {
        self.labels[row].is_some()
    }

    /// How many columns are no padding, where these are the first.
    pub(crate) fn leading_columns(&self) -> Option<usize> {
        let n = self.data.iter().take_while(|&&data| data).count();
        self.data[n..].iter().all(|&data| !data).then_some(n)
    }

    /// The offsets of the columns that are not padding.
    fn columns(&self, row: usize) -> impl Iterator<Item = usize> + Clone + '_ {
        let at = move |j: usize| self.lines.starts[row] + j * self.lines.step;
        self.data.iter().enumerate().filter(|&(_, &data)| data).map(move |(j, _)| at(j))
    }
}

/// The label of each token; `None` where it is ignored, or the token is padding.
fn counted<T: Real>(
    space: &Space,
    ignore: i64,
    over: Option<DimId>,
    labels: &Operand<'_, T>,
) -> Result<Vec<Option<u64>>, RunError> {
    let steps = strides(&labels.shape());
    let data: Vec<Vec<bool>> = labels
        .ty
        .dims
        .iter()
        .zip(&labels.region)
        .map(|(&d, held)| positions::carries_data(space, d, held.clone()))
        .collect();
    let label = |(i, &label): (usize, &i32)| {
        let padding = data.iter().zip(&steps).any(|(data, step)| !data[i / step % data.len()]);
        if padding || i64::from(label) == ignore {
            return Ok(None);
        }
        let known = over.map_or(u64::MAX, |over| space.dims[over].valid);
        match u64::try_from(label) {
            Ok(index) if index < known => Ok(Some(index)),
            _ if over.is_none() => Ok(Some(0)),
            _ => Err(RunError::LabelOutOfRange {
                value: label,
                labels: known,
                dim: over.map(|over| space.dims[over].name.clone()).unwrap_or_default(),
                at: at(space, labels, i),
            }),
        }
    };
    labels.int()?.iter().enumerate().map(label).collect()
}

/// The positions of element `i` of a rank's part.
fn at<T: Real>(space: &Space, x: &Operand<'_, T>, i: usize) -> Vec<u64> {
    let along = |(index, &dim): (u64, &DimId)| {
        let positions = positions::sequence_positions(space, dim, index..index + 1);
        positions.first().copied().unwrap_or(index)
    };
    place_in(&x.region, i as u64).into_iter().zip(&x.ty.dims).map(along).collect()
}

/// `nll = lse − logit[label]`, zero where the label is ignored; and lse.
pub(super) fn cross_entropy<T: Real>(
    call: &LocalOp<'_, T>,
    attrs: (DimId, i64),
) -> Result<Vec<Vec<T>>, RunError> {
    let logits = call.real(0)?;
    let rows = Rows::of(call.space, attrs, &call.operands[0], &call.operands[1])?;
    let lse: Vec<T> =
        (0..rows.labels.len()).map(|row| log_sum_exp(rows.columns(row).map(|i| logits[i]))).collect();
    let nll = lse.iter().enumerate();
    let nll = nll.map(|(row, &lse)| rows.label(row).map_or(T::ZERO, |i| lse - logits[i])).collect();
    Ok(vec![nll, lse])
}

/// `(exp(logit − lse) − [v = label]) · d_nll`, zero where the label is ignored and in padding.
pub(super) fn cross_entropy_backward<T: Real>(
    call: &LocalOp<'_, T>,
    attrs: (DimId, i64),
) -> Result<Vec<T>, RunError> {
    let (logits, lse, d) = (call.real(0)?, call.real(2)?, call.real(3)?);
    let rows = Rows::of(call.space, attrs, &call.operands[0], &call.operands[1])?;
    let mut out = vec![T::ZERO; logits.len()];
    for row in (0..rows.labels.len()).filter(|&row| rows.labels[row].is_some()) {
        for i in rows.columns(row) {
            out[i] = (logits[i] - lse[row]).through(f64::exp) * d[row];
        }
        if let Some(i) = rows.label(row) {
            out[i] = out[i] - d[row];
        }
    }
    Ok(out)
}

/// The logit of each label; zero where the label is ignored, or another rank has it.
pub(super) fn pick<T: Real>(call: &LocalOp<'_, T>, attrs: (DimId, i64)) -> Result<Vec<T>, RunError> {
    let logits = call.real(0)?;
    let rows = Rows::of(call.space, attrs, &call.operands[0], &call.operands[1])?;
    Ok((0..rows.labels.len()).map(|row| rows.label(row).map_or(T::ZERO, |i| logits[i])).collect())
}

/// One for labels that count, zero for those that are ignored and for padding.
pub(super) fn valid<T: Real>(call: &LocalOp<'_, T>, ignore: i64) -> Result<Vec<T>, RunError> {
    let counted = counted(call.space, ignore, None, &call.operands[0])?;
    Ok(counted.into_iter().map(|label| if label.is_some() { T::ONE } else { T::ZERO }).collect())
}

/// The logarithm of the sum of exponentials along the part of a dimension that a rank holds, padding left out; −∞ of
/// nothing.
pub(super) fn row_lse<T: Real>(call: &LocalOp<'_, T>, over: DimId) -> Result<Vec<T>, RunError> {
    let (x, logits) = (&call.operands[0], call.real(0)?);
    let lines = Lines::of(x, over)?;
    let held = x.ty.position(over).map(|i| x.region[i].clone()).unwrap_or_default();
    let data = positions::carries_data(call.space, over, held);
    let lse = lines
        .iter()
        .map(|line| log_sum_exp(line.zip(&data).filter(|&(_, &data)| data).map(|(i, _)| logits[i])));
    Ok(lse.collect())
}
