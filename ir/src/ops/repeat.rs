//! The replication of key/value heads.

use smallvec::smallvec;

use crate::dim::DimId;
use crate::ops::OpError;
use crate::rule::{FactorKind, FactorRule, Factors};
use crate::space::Space;
use crate::types::TensorType;

pub(super) fn infer(space: &Space, from: DimId, to: DimId, x: &TensorType) -> Result<TensorType, OpError> {
    if !x.has(from) || x.has(to) {
        return Err(OpError::new("V05", format!("`repeat` needs `{}` in x", space.dims[from].name)));
    }
    // Directly, or both copy the same dimension, the result the more often.
    let (source, target) = (&space.dims[from], &space.dims[to]);
    let siblings =
        target.copies.is_some() && target.copies == source.copies && target.size % source.size == 0;
    if target.copies != Some(from) && !siblings {
        return Err(OpError::new(
            "V05",
            format!("`{}` is not declared to copy `{}`", space.dims[to].name, space.dims[from].name),
        ));
    }
    let dims = x.dims.iter().map(|&d| if d == from { to } else { d });
    Ok(TensorType::new(x.dtype, dims.collect::<Vec<_>>()))
}

/// Every dimension is parallel; the repeated one is the same factor on both sides.
pub(super) fn rule(operands: &[&TensorType]) -> FactorRule {
    let factors: Factors = (0..operands[0].dims.len()).collect();
    FactorRule {
        factors: factors.iter().map(|_| FactorKind::Parallel).collect(),
        operands: smallvec![factors.clone()],
        results: smallvec![factors],
    }
}
