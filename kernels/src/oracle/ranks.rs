//! Values on all ranks, and operations on local tensors, rank by rank.

use std::rc::Rc;

use ithaca_ir::{Op, Rank, Space, TensorType};
use rayon::iter::{IntoParallelIterator, ParallelIterator};

use super::eval;
use super::value::{Elements, Operand, ResultSpec, Value};
use crate::error::RunError;
use crate::real::Real;
use crate::tensor::{Tensor, index};

/// A value on all ranks, in order of ranks.
pub(super) type RankValues<T> = Vec<Rc<Value<T>>>;

/// Every rank's part of every result of an operation on local tensors.
pub(super) fn compute_all<T: Real>(
    space: &Space,
    op: &Op,
    types: &[TensorType],
    results: &[TensorType],
    operands: &[&RankValues<T>],
) -> Result<Vec<RankValues<T>>, RunError> {
    let of_rank = |(rank, elements): (Rank, Vec<Elements<'_, T>>)| -> Result<Vec<Value<T>>, RunError> {
        if types.iter().chain(results).any(|ty| !space.holds(ty, rank)) {
            return Ok(results.iter().map(absent).collect());
        }
        let parts = types.iter().zip(elements);
        let parts = parts.map(|(ty, elements)| Operand { ty, region: space.local_box(ty, rank), elements });
        let parts: Vec<Operand<'_, T>> = parts.collect();
        let wanted: Vec<ResultSpec<'_>> =
            results.iter().map(|ty| ResultSpec { ty, region: space.local_box(ty, rank) }).collect();
        let values = eval::eval(space, op, &parts, &wanted)?;
        if values.len() < results.len() {
            return Err(RunError::invalid(format!("`{}` gives too few results", op.name())));
        }
        Ok(values)
    };
    let ranks = space.mesh.iter_ranks();
    let elements = |rank: Rank| operands.iter().map(|held| held[index(rank.0)].elements()).collect();
    let ranks: Vec<(Rank, Vec<Elements<'_, T>>)> = ranks.map(|rank| (rank, elements(rank))).collect();
    let values: Vec<Vec<Value<T>>> = if ranks.len() == 1 {
        ranks.into_iter().map(of_rank).collect::<Result<_, _>>()?
    } else {
        ranks.into_par_iter().map(of_rank).collect::<Result<_, _>>()?
    };
    let mut out: Vec<RankValues<T>> = vec![Vec::with_capacity(values.len()); results.len()];
    for values in values {
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
