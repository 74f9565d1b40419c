//! Checks and types that inference of several families shares.

use crate::dim::DimId;
use crate::dtype::DType;
use crate::layout::Layout;
use crate::ops::error::{OpError, ensure};
use crate::rule::RuleViolation;
use crate::space::Space;
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
    ensure!(dtype.is_arithmetic(), "V04", "`{name}` needs real numbers, not {dtype}");
    Ok(())
}

/// The element type in which sums of elements of `dtype` are computed.
pub fn sums_in(dtype: DType) -> DType {
    match dtype {
        DType::F64 => DType::F64,
        DType::F32 | DType::F16 | DType::BF16 | DType::F8E4M3 | DType::I32 | DType::Bool => DType::F32,
    }
}

/// The violation of an operation whose operands do not fit its factor rule.
pub(super) fn refuse(name: &str, space: &Space, violation: RuleViolation) -> OpError {
    let dim = |d: DimId| space.dims[d].name.as_str();
    let (code, message) = match violation {
        RuleViolation::NotWhole(d) => {
            ("V08", format!("`{name}` needs dimension `{}` whole, but it is split", dim(d)))
        }
        RuleViolation::Conflict(d) => {
            let dim = dim(d);
            let message = "split in two different ways; a reshard is missing";
            ("V07", format!("`{name}` sees dimension `{dim}` {message}"))
        }
        RuleViolation::Moved => {
            let message = "parts that have moved along an axis in different ways; a permute is missing";
            ("V07", format!("`{name}` takes {message}"))
        }
        RuleViolation::AxisTwice(d) => {
            ("V07", format!("`{name}` sees one mesh axis split `{}` and another dimension", dim(d)))
        }
        RuleViolation::Pending(i) => {
            let message = "is a partial sum; an all-reduce or reduce-scatter is missing";
            ("V11", format!("operand {i} of `{name}` {message}"))
        }
    };
    OpError::new(code, message)
}
