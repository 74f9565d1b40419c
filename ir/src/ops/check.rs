//! Checks and types that inference of several families shares.

use crate::dtype::DType;
use crate::layout::Layout;
use crate::ops::error::{OpError, ensure};
use crate::types::TensorType;

/// The type with a layout in which nothing is split, for inference to replace.
pub(super) fn unplaced(ty: &TensorType) -> TensorType {
    ty.with_layout(Layout::whole(ty.dims.len()))
}

/// The declared type of an operation with one result.
pub(super) fn only<'a>(name: &str, declared: &'a [TensorType]) -> Result<&'a TensorType, OpError> {
    match declared {
        [ty] => Ok(ty),
        _ => Err(OpError::new("V03", format!("`{name}` has one result, not {}", declared.len()))),
    }
}

/// Refuses integers and masks.
pub(super) fn need_float(name: &str, dtype: DType) -> Result<(), OpError> {
    ensure!(dtype.is_float(), "V04", "`{name}` needs real numbers, not {dtype}");
    Ok(())
}

/// The element type in which sums of elements of `dtype` are computed.
pub fn sums_in(dtype: DType) -> DType {
    match dtype {
        DType::F64 => DType::F64,
        DType::F32 | DType::F16 | DType::BF16 | DType::I32 | DType::Bool => DType::F32,
    }
}
