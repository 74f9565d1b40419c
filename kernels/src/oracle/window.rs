//! Parts of a dimension: `concat`, `cut`.

use ithaca_ir::ops::Window;

use super::value::LocalOp;
use crate::error::RunError;
use crate::real::Real;
use crate::tensor::{Offsets, index};

/// The elements of `op`.
pub(super) fn window<T: Real>(call: &LocalOp<'_, T>, op: &Window) -> Result<Vec<T>, RunError> {
    let last = |i: usize| call.operands[i].shape().last().copied().unwrap_or(0);
    let shape = call.shape();
    let Some((&width, front)) = shape.split_last() else {
        return Err(call.invalid("gives a scalar"));
    };
    let (x, n) = (call.real(0)?, last(0));
    let rows: usize = front.iter().product();
    if x.len() != rows * n {
        return Err(call.invalid("has another number of rows than its result"));
    }
    match op {
        Window::Cut { start, .. } => {
            let start = index(*start);
            if start + width > n {
                return Err(call.invalid("on a part of its dimension"));
            }
            Ok((0..rows).flat_map(|row| &x[row * n + start..][..width]).copied().collect())
        }
        Window::Concat { .. } => {
            let (y, m) = (call.real(1)?, last(1));
            if n + m != width {
                return Err(call.invalid("on a part of its dimension"));
            }
            // Rows of y, repeated along the dimensions that it lacks.
            let mut strides = call.operands[1].strides_in(call.result().ty);
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
