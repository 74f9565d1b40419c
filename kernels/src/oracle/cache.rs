//! Steps that continue sequences: lengths, rows of caches, the choice of tokens.

use ithaca_ir::DimId;
use ithaca_ir::ops::Cache;

use super::rows::Lines;
use super::value::{LocalOp, Value};
use crate::error::RunError;
use crate::positions::sequence_positions;
use crate::real::Real;
use crate::tensor::{Offsets, index, strides};

/// Computes `op` on the parts of a rank.
///
/// # Errors
/// [`RunError::CacheFull`] where a sequence has more tokens than its cache; [`RunError::Invalid`] for operands that do not fit,
/// which a verified program does not have.
pub(super) fn cache<T: Real>(call: &LocalOp<'_, T>, op: &Cache) -> Result<Vec<Value<T>>, RunError> {
    let ints = |data: Vec<i32>| Ok(vec![Value::Int(call.tensor(0, data)?)]);
    match op {
        Cache::Advance => {
            let sums = call.int(0)?.iter().zip(call.int(1)?).map(|(start, new)| start + new);
            ints(sums.collect())
        }
        Cache::TokenPositions { rows } => {
            let held = call.result().region.last().cloned().unwrap_or_default();
            let rows = sequence_positions(call.space, *rows, held);
            let lengths = call.int(0)?.iter().zip(call.int(1)?);
            let of_sequence = |(&start, &end): (&i32, &i32)| {
                let position = move |&row: &u64| start.saturating_add(i32::try_from(row).unwrap_or(i32::MAX));
                rows.iter().map(position).map(move |p| if p < end { p } else { 0 }).collect::<Vec<_>>()
            };
            ints(lengths.flat_map(of_sequence).collect())
        }
        Cache::Append { over, rows } => Ok(vec![Value::Real(call.tensor(0, append(call, *over, *rows)?)?)]),
        Cache::LastToken { over } => Ok(vec![Value::Real(call.tensor(0, last_token(call, *over)?)?)]),
        Cache::Argmax { over, .. } => argmax(call, *over),
        Cache::Choose => {
            let pairs = call.int(1)?.iter().zip(call.int(2)?);
            ints(call.int(0)?.iter().zip(pairs).map(|(&n, (&x, &y))| if n > 0 { x } else { y }).collect())
        }
    }
}

/// The cache with the new rows that belong to the rank.
fn append<T: Real>(call: &LocalOp<'_, T>, over: DimId, rows: DimId) -> Result<Vec<T>, RunError> {
    let (mut cache, data) = (call.real(0)?.to_vec(), call.real(1)?);
    let [held, x, start, end] = [0, 1, 2, 3].map(|i| &call.operands[i]);
    let (start_of, end_of) = (start.int()?, end.int()?);
    let at = x.ty.position(rows).ok_or_else(|| call.invalid("with x that lacks the rows"))?;
    if start.ty.dims.iter().any(|d| !x.ty.dims[..at].contains(d)) {
        return Err(RunError::Unsupported("`append` with lengths of dimensions behind the rows".to_owned()));
    }
    let shape = x.shape();
    let width: usize = shape[at + 1..].iter().product();
    let slots = held.shape().get(at).copied().unwrap_or(0);
    let positions = sequence_positions(call.space, rows, x.region[at].clone());
    let of_sequences = start.strides_in(x.ty)[..at].to_vec();
    let capacity = call.space.dims[over].valid;
    for (front, sequence) in Offsets::new(shape[..at].to_vec(), of_sequences, 0).enumerate() {
        let [start, end] = [start_of[sequence], end_of[sequence]].map(|n| u64::try_from(n).unwrap_or(0));
        if end > capacity {
            return Err(RunError::CacheFull { tokens: end, capacity });
        }
        for (row, position) in positions.iter().enumerate() {
            let position = start + position;
            if position >= end {
                continue;
            }
            let slots_held = held.region[at].clone();
            let Some(slot) = call.space.index_at(over, slots_held.clone(), position) else { continue };
            let to = (front * slots + index(slot - slots_held.start)) * width;
            let from = (front * positions.len() + row) * width;
            cache[to..to + width].copy_from_slice(&data[from..from + width]);
        }
    }
    Ok(cache)
}

/// The row of each sequence's last new token, zero where another rank has it.
fn last_token<T: Real>(call: &LocalOp<'_, T>, over: DimId) -> Result<Vec<T>, RunError> {
    let (x, data) = (&call.operands[0], call.real(0)?);
    let [start, end] = [call.int(1)?, call.int(2)?];
    let at = x.ty.position(over).ok_or_else(|| call.invalid("over a dimension that x lacks"))?;
    let (held, step) = (x.region[at].clone(), strides(&x.shape())[at]);
    let result = call.result();
    let sequences = Offsets::new(call.shape(), call.operands[1].strides_in(result.ty), 0);
    let rows = Offsets::new(call.shape(), x.strides_in(result.ty), 0);
    let element = |(sequence, row): (usize, usize)| {
        let last = u64::try_from(end[sequence] - start[sequence] - 1).ok()?;
        let found = call.space.index_at(over, held.clone(), last)?;
        Some(data[row + index(found - held.start) * step])
    };
    Ok(sequences.zip(rows).map(|places| element(places).unwrap_or(T::ZERO)).collect())
}

/// The largest element of each line and its place, or what the second operand has there.
fn argmax<T: Real>(call: &LocalOp<'_, T>, over: DimId) -> Result<Vec<Value<T>>, RunError> {
    let (x, data) = (&call.operands[0], call.real(0)?);
    let given = call.operands.get(1).map(|places| places.int()).transpose()?;
    let at = x.ty.position(over).ok_or_else(|| call.invalid("over a dimension that x lacks"))?;
    let positions = sequence_positions(call.space, over, x.region[at].clone());
    let valid = call.space.dims[over].valid;
    let lines = Lines::of(x, over)?;
    let (mut places, mut values) = (Vec::new(), Vec::new());
    for line in lines.iter() {
        let mut best: Option<(usize, u64)> = None;
        for (i, &position) in line.zip(&positions).filter(|&(_, &position)| position < valid) {
            let better =
                best.is_none_or(|(j, first)| data[i] > data[j] || (data[i] == data[j] && position < first));
            if better {
                best = Some((i, position));
            }
        }
        places.push(match (best, given) {
            (Some((i, _)), Some(given)) => given[i],
            (Some((_, position)), None) => i32::try_from(position).unwrap_or(i32::MAX),
            (None, _) => 0,
        });
        values.push(best.map_or(T::NEG_INFINITY, |(i, _)| data[i]));
    }
    let values = if call.results.len() > 1 { vec![Value::Real(call.tensor(1, values)?)] } else { Vec::new() };
    Ok(std::iter::once(Value::Int(call.tensor(0, places)?)).chain(values).collect())
}
