//! Element by element: functions of one and two elements, scaling, conversion.

use crate::builder::FunctionBuilder;
use crate::dtype::DType;
use crate::module::ValueId;
use crate::ops::adjoint::{Gradients, summed_to};
use crate::ops::{Op, OpError, unplaced};
use crate::rule::{FactorKind, FactorRule};
use crate::types::TensorType;

/// Functions of one element.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Unary {
    /// `x · sigmoid(x)`.
    Silu,
    /// `x · Φ(x)`.
    Gelu,
    /// The tanh approximation of [`Gelu`](Unary::Gelu).
    GeluTanh,
    /// `x · sigmoid(1.702 x)`.
    QuickGelu,
    /// `max(x, 0)`.
    Relu,
    /// Hyperbolic tangent.
    Tanh,
}

impl Unary {
    /// Every function.
    pub const ALL: [Unary; 6] =
        [Unary::Silu, Unary::Gelu, Unary::GeluTanh, Unary::QuickGelu, Unary::Relu, Unary::Tanh];

    /// The name in the text form.
    pub fn name(self) -> &'static str {
        match self {
            Unary::Silu => "silu",
            Unary::Gelu => "gelu",
            Unary::GeluTanh => "gelu_tanh",
            Unary::QuickGelu => "quick_gelu",
            Unary::Relu => "relu",
            Unary::Tanh => "tanh",
        }
    }

    /// FLOPs per element, a transcendental function counted as four.
    pub fn flops(self) -> u128 {
        match self {
            Unary::Relu => 1,
            Unary::Tanh => 4,
            Unary::Silu | Unary::QuickGelu => 6,
            Unary::Gelu | Unary::GeluTanh => 8,
        }
    }
}

/// Functions of two elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Binary {
    /// Sum.
    Add,
    /// Difference.
    Sub,
    /// Product.
    Mul,
    /// Quotient.
    Div,
    /// `log(exp(x) + exp(y))`, −∞ where both are.
    LogAddExp,
}

impl Binary {
    /// Every function.
    pub const ALL: [Binary; 5] = [Binary::Add, Binary::Sub, Binary::Mul, Binary::Div, Binary::LogAddExp];

    /// The name in the text form.
    pub fn name(self) -> &'static str {
        match self {
            Binary::Add => "add",
            Binary::Sub => "sub",
            Binary::Mul => "mul",
            Binary::Div => "div",
            Binary::LogAddExp => "log_add_exp",
        }
    }
}

pub(super) fn infer_unary(op: &Op, x: &TensorType) -> Result<TensorType, OpError> {
    if let Op::Cast { to } = op {
        if x.dtype == DType::Bool || *to == DType::Bool {
            return Err(OpError::new("V04", format!("`cast` of {} to {to}: a mask is no number", x.dtype)));
        }
        return Ok(TensorType { dtype: *to, ..unplaced(x) });
    }
    need_float(op.name(), x.dtype)?;
    Ok(unplaced(x))
}

pub(super) fn infer_binary(f: Binary, operands: &[&TensorType]) -> Result<TensorType, OpError> {
    let [x, y] = [operands[0], operands[1]];
    need_float(f.name(), x.dtype)?;
    if x.dtype != y.dtype {
        return Err(OpError::new("V04", format!("`{}` of {} and {}", f.name(), x.dtype, y.dtype)));
    }
    if y.dims.iter().any(|&d| !x.has(d)) {
        return Err(OpError::new(
            "V05",
            format!("the second operand of `{}` has a dimension that the first lacks", f.name()),
        ));
    }
    Ok(unplaced(x))
}

pub(super) fn rule(operands: &[&TensorType], result: &TensorType) -> FactorRule {
    FactorRule::by_name(operands, &[&result.dims], |_| FactorKind::Parallel)
}

pub(super) fn need_float(name: &str, dtype: DType) -> Result<(), OpError> {
    match dtype.is_float() {
        true => Ok(()),
        false => Err(OpError::new("V04", format!("`{name}` needs real numbers, not {dtype}"))),
    }
}

/// Gradients of a function of two elements, `z` being its result; what was broadcast sums over where it went.
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
    match b.ty(x).dims == like.dims {
        true => b.push(Op::Binary(Binary::Mul), &[x, y]),
        false => b.einsum(x, y, &like.dims),
    }
}
