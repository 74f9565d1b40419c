//! Helpers of adjoints.

use crate::builder::FunctionBuilder;
use crate::dtype::DType;
use crate::handles::ValueId;
use crate::ops::error::OpError;
use crate::ops::table::op::Op;
use crate::types::TensorType;

/// The gradient of each operand; none where no gradient flows, or the operand is of integers.
pub type Gradients = Vec<Option<ValueId>>;

/// `x` with the dimensions of `like`, in their order; the others are summed over.
pub(super) fn summed_to(
    b: &mut FunctionBuilder<'_>,
    x: ValueId,
    like: &TensorType,
) -> Result<ValueId, OpError> {
    let ty = b.ty(x).clone();
    if ty.dims == like.dims {
        return Ok(x);
    }
    let to = TensorType::new(ty.dtype, like.dims.iter().copied());
    if ty.dims.iter().filter(|&&d| like.has(d)).eq(&like.dims) {
        return b.push_as(Op::Sum, &[x], to);
    }
    // `sum` keeps the order of dimensions; a product with one does not.
    let one = b.push_as(Op::Fill { value: 1.0 }, &[], TensorType::new(ty.dtype, []))?;
    b.push_as(Op::Einsum, &[x, one], to)
}

/// `x` in the element type `to`.
///
/// # Errors
/// `V04` when no cast leads to that type.
pub fn cast(b: &mut FunctionBuilder<'_>, x: ValueId, to: DType) -> Result<ValueId, OpError> {
    if b.ty(x).dtype == to { Ok(x) } else { b.push(Op::Cast { to }, &[x]) }
}
