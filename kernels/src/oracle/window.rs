//! Parts of a dimension: `concat`, `cut`.

use ithaca_ir::TensorType;
use ithaca_ir::ops::Window;

use super::value::Operand;
use crate::error::RunError;
use crate::real::Real;
use crate::tensor::{Offsets, index};

/// The elements of `op` of a result of this shape.
pub(super) fn window<T: Real>(
    op: &Window,
    operands: &[Operand<'_, T>],
    ty: &TensorType,
    shape: &[usize],
) -> Result<Vec<T>, RunError> {
    let Some((&width, front)) = shape.split_last() else {
        return Err(RunError::invalid(format!("`{}` gives a scalar", op.name())));
    };
    let x = operands[0].real()?;
    let n = last(&operands[0]);
    let rows: usize = front.iter().product();
    if x.len() != rows * n {
        return Err(RunError::invalid(format!("`{}` has another number of rows than its result", op.name())));
    }
    match op {
        Window::Cut { start, .. } => {
            let start = index(*start);
            if start + width > n {
                return Err(RunError::invalid("`cut` on a part of its dimension"));
            }
            Ok((0..rows).flat_map(|row| &x[row * n + start..][..width]).copied().collect())
        }
        Window::Concat { .. } => {
            let (y, m) = (operands[1].real()?, last(&operands[1]));
            if n + m != width {
                return Err(RunError::invalid("`concat` on a part of its dimension"));
            }
            // Rows of y, repeated along the dimensions that it lacks.
            let mut strides = operands[1].strides_in(ty);
            strides.pop();
            let mut out = Vec::with_capacity(rows * width);
            for (row, at) in Offsets::new(front.to_vec(), strides, 0).enumerate() {
                out.extend_from_slice(&x[row * n..][..n]);
                out.extend_from_slice(&y[at..][..m]);
            }
            Ok(out)
        }
    }
}

/// Elements of the last dimension.
fn last<T: Real>(x: &Operand<'_, T>) -> usize {
    x.shape().last().copied().unwrap_or(0)
}
