//! Values on all ranks, and operations on local tensors, rank by rank.

use std::rc::Rc;

use ithaca_ir::{Op, Space, TensorType};

use super::eval;
use super::value::{Operand, ResultSpec, Value};
use crate::error::RunError;
use crate::real::Real;
use crate::tensor::{Tensor, index};

/// A value on all ranks, in order of ranks.
pub(super) type Held<T> = Vec<Rc<Value<T>>>;

/// Every rank's part of every result of an operation on local tensors.
pub(super) fn compute_all<T: Real>(
    space: &Space,
    op: &Op,
    types: &[TensorType],
    results: &[TensorType],
    operands: &[&Held<T>],
) -> Result<Vec<Held<T>>, RunError> {
    let mut out: Vec<Held<T>> = vec![Vec::new(); results.len()];
    for rank in space.mesh.iter_ranks() {
        if types.iter().chain(results).any(|ty| !space.holds(ty, rank)) {
            for (held, ty) in out.iter_mut().zip(results) {
                held.push(Rc::new(absent(ty)));
            }
            continue;
        }
        let mut parts: Vec<Operand<'_, T>> = Vec::with_capacity(types.len());
        for (ty, held) in types.iter().zip(operands) {
            let elements = held[index(rank.0)].elements();
            parts.push(Operand { ty, region: space.local_box(ty, rank), elements });
        }
        let wanted: Vec<ResultSpec<'_>> =
            results.iter().map(|ty| ResultSpec { ty, region: space.local_box(ty, rank) }).collect();
        let values = eval::eval(space, op, &parts, &wanted)?;
        if values.len() < results.len() {
            return Err(RunError::invalid(format!("`{}` gives too few results", op.name())));
        }
        for (held, value) in out.iter_mut().zip(values) {
            held.push(Rc::new(value));
        }
    }
    Ok(out)
}

/// The empty part of a rank that does not hold a value.
pub(super) fn absent<T: Real>(ty: &TensorType) -> Value<T> {
    let shape = vec![0; ty.dims.len().max(1)];
    if ty.dtype.is_float() {
        Value::Real(Tensor::new(shape, Vec::new()))
    } else {
        Value::Int(Tensor::new(shape, Vec::new()))
    }
}
