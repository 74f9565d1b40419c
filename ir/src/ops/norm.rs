//! Normalisation over one dimension: `rms_norm`, `layer_norm`.

use crate::dim::DimId;
use crate::ops::elementwise::need_float;
use crate::ops::{OpError, unplaced};
use crate::rule::{FactorKind, FactorRule};
use crate::space::Space;
use crate::types::TensorType;

pub(super) fn infer(
    name: &str,
    space: &Space,
    over: DimId,
    operands: &[&TensorType],
) -> Result<TensorType, OpError> {
    let x = operands[0];
    need_float(name, x.dtype)?;
    if !x.has(over) {
        return Err(OpError::new(
            "V05",
            format!("`{name}` is over `{}`, which x lacks", space.dims[over].name),
        ));
    }
    for weight in &operands[1..] {
        if weight.dtype != x.dtype {
            return Err(OpError::new("V04", format!("`{name}` of {} by {}", x.dtype, weight.dtype)));
        }
        if !weight.has(over) || weight.dims.iter().any(|&d| !x.has(d)) {
            return Err(OpError::new(
                "V05",
                format!(
                    "weights of `{name}` have dimension `{}` and no other than those of x",
                    space.dims[over].name
                ),
            ));
        }
    }
    Ok(unplaced(x))
}

/// The dimension stays whole; every other one is free.
pub(super) fn rule(over: DimId, operands: &[&TensorType], result: &TensorType) -> FactorRule {
    FactorRule::by_name(operands, &[&result.dims], |d| match d == over {
        true => FactorKind::Whole,
        false => FactorKind::Parallel,
    })
}
