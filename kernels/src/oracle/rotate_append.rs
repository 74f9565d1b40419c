//! Rotation and `append` in one kernel: the loops of the operations that it is, one after another.

use ithaca_ir::boxes::Region;
use ithaca_ir::ops::RotateAppend;
use ithaca_ir::{Op, TensorType};

use super::value::{LocalOp, Operand, ResultSpec, Value};
use super::{cache, rows};
use crate::error::RunError;
use crate::real::Real;
use crate::tensor::Tensor;

/// Caches with the new rows of keys, rotated, and of values; and rotated queries.
///
/// # Errors
/// Those of `append`.
pub(super) fn rotate_append<T: Real>(
    call: &LocalOp<'_, T>,
    rotated: &RotateAppend,
) -> Result<Vec<Value<T>>, RunError> {
    let space = call.space;
    let types: Vec<&TensorType> = call.operands.iter().map(|operand| operand.ty).collect();
    let ty = rotated.positions_type(space, &types).map_err(|error| RunError::invalid(error.message))?;
    let lengths = &call.operands[RotateAppend::START..RotateAppend::START + 2];
    let keys = &call.operands[2];
    let at = keys.ty.position(rotated.rows).ok_or_else(|| call.invalid("with keys that lack the rows"))?;
    let region: Region = lengths[0].region.iter().chain([&keys.region[at]]).cloned().collect();
    let cached = |op, operands: &[Operand<'_, T>], ty, region: &Region| {
        let results = [ResultSpec { ty, region: region.clone() }];
        let call = LocalOp { space, op: &Op::Cache(op), operands, results: &results };
        Ok::<_, RunError>(cache::cache(&call, &op)?.remove(0))
    };
    let positions = cached(rotated.positions(), lengths, &ty, &region)?;
    let positions = Operand { ty: &ty, region, elements: positions.elements() };
    let rotate = |i: usize| {
        let x = call.operands[i].clone();
        let results = [ResultSpec { ty: x.ty, region: x.region.clone() }];
        let op = Op::Rotary(rotated.rotary.clone());
        let call = LocalOp { space, op: &op, operands: &[x, positions.clone()], results: &results };
        Ok::<_, RunError>(Value::Real(Tensor::new(call.shape(), rows::rotary(&call, &rotated.rotary)?)))
    };
    let rotated_keys = rotate(2)?;
    let mut results = Vec::with_capacity(3);
    for i in [0, 1] {
        let mut operands: Vec<_> = rotated.operands_of(i).map(|i| call.operands[i].clone()).collect();
        if i == 0 {
            operands[1].elements = rotated_keys.elements();
        }
        let cache = &call.operands[i];
        results.push(cached(rotated.append(), &operands, cache.ty, &cache.region)?);
    }
    results.extend(rotated.queries().map(rotate).transpose()?);
    Ok(results)
}
