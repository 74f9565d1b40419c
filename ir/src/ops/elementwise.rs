//! Element by element: functions of one and two elements, scaling, conversion.

use crate::builder::FunctionBuilder;
use crate::dtype::DType;
use crate::handles::ValueId;
use crate::ops::check::{need_float, unplaced};
use crate::ops::error::{OpError, bail, ensure};
use crate::ops::gradients::{Gradients, summed_to};
use crate::ops::info::Flops;
use crate::ops::table::elementwise::{Binary, Unary};
use crate::ops::table::op::Op;
use crate::types::TensorType;

pub(super) fn infer_unary(op: &Op, x: &TensorType) -> Result<TensorType, OpError> {
    if let Op::Cast { to } = op {
        if x.dtype == DType::Bool || *to == DType::Bool {
            bail!("V04", "`cast` of {} to {to}: a mask is no number", x.dtype);
        }
        if x.dtype == DType::F8E4M3 || *to == DType::F8E4M3 {
            bail!("V04", "`cast` of {} to {to}: eight bits have a scale, which caches have", x.dtype);
        }
        return Ok(TensorType { dtype: *to, ..unplaced(x) });
    }
    need_float(op.name(), x.dtype)?;
    Ok(unplaced(x))
}

/// FLOPs of the gradient of `f`, for each element.
pub(super) fn flops_gradient(f: Unary) -> u128 {
    flops_unary(f) + 2
}

/// FLOPs of `f`, for each element.
pub(super) fn flops_unary(f: Unary) -> u128 {
    match f.info().flops {
        Flops::Results(n) => u128::from(n),
        flops => unreachable!("`{}` declares {flops:?}", f.name()),
    }
}

pub(super) fn infer_binary(f: Binary, operands: &[&TensorType]) -> Result<TensorType, OpError> {
    let [x, y] = [operands[0], operands[1]];
    need_float(f.name(), x.dtype)?;
    ensure!(x.dtype == y.dtype, "V04", "`{}` of {} and {}", f.name(), x.dtype, y.dtype);
    ensure!(
        !y.dims.iter().any(|&d| !x.has(d)),
        "V05",
        "the second operand of `{}` has a dimension that the first lacks",
        f.name()
    );
    Ok(unplaced(x))
}

/// Gradients of a function of two elements, `z` being its result. The gradient of a broadcast operand is a sum over the dimensions that it lacks.
pub(super) fn adjoint_binary(
    f: Binary,
    b: &mut FunctionBuilder<'_>,
    operands: &[ValueId],
    z: ValueId,
    d: ValueId,
) -> Result<Gradients, OpError> {
    let [x, y] = [operands[0], operands[1]];
    let y_ty = b.ty(y).clone();
    let (dx, dy) = match f {
        Binary::Add => (d, summed_to(b, d, &y_ty)?),
        Binary::Sub => {
            let sum = summed_to(b, d, &y_ty)?;
            (d, b.push(Op::Scale { factor: -1.0 }, &[sum])?)
        }
        Binary::Mul => (b.push(Op::Binary(Binary::Mul), &[d, y])?, product_to(b, d, x, &y_ty)?),
        Binary::Div => {
            // d(x/y)/dy = −z/y, and y is the same wherever it was broadcast.
            let sum = product_to(b, d, z, &y_ty)?;
            let quotient = b.push(Op::Binary(Binary::Div), &[sum, y])?;
            (b.push(Op::Binary(Binary::Div), &[d, y])?, b.push(Op::Scale { factor: -1.0 }, &[quotient])?)
        }
        Binary::LogAddExp => {
            // The shares are sigmoid(x − y) and sigmoid(y − x): halves of d, the tanh of half the difference apart. Where
            // both are −∞ there is no derivative, and the gradient is not a number.
            let difference = b.push(Op::Binary(Binary::Sub), &[x, y])?;
            let half = b.push(Op::Scale { factor: 0.5 }, &[difference])?;
            let tanh = b.push(Op::Unary(Unary::Tanh), &[half])?;
            let mean = b.push(Op::Scale { factor: 0.5 }, &[d])?;
            let apart = b.push(Op::Binary(Binary::Mul), &[mean, tanh])?;
            let of_y = b.push(Op::Binary(Binary::Sub), &[mean, apart])?;
            (b.push(Op::Binary(Binary::Add), &[mean, apart])?, summed_to(b, of_y, &y_ty)?)
        }
    };
    Ok(vec![Some(dx), Some(dy)])
}

/// `x · y`, of the same dimensions, summed over those that `like` lacks.
fn product_to(
    b: &mut FunctionBuilder<'_>,
    x: ValueId,
    y: ValueId,
    like: &TensorType,
) -> Result<ValueId, OpError> {
    if b.ty(x).dims == like.dims {
        b.push(Op::Binary(Binary::Mul), &[x, y])
    } else {
        b.einsum(x, y, &like.dims)
    }
}
