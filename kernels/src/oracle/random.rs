//! Numbers drawn at random: keys, masks and dropout.

use ithaca_ir::boxes::Region;
use ithaca_ir::ops::{Attention, Dropout, Random, random};
use ithaca_ir::{Space, TensorType};

use super::value::{Elements, Operand, Value};
use crate::error::RunError;
use crate::positions;
use crate::real::Real;
use crate::tensor::{Tensor, extents};

/// A rank's part of the result, whose type and region are `wanted`.
///
/// # Errors
/// [`RunError::Invalid`] for `layer_key`, of which [`layer_key`] knows the layer.
pub(super) fn random<T: Real>(
    space: &Space,
    op: &Random,
    operands: &[Operand<'_, T>],
    (ty, region): (&TensorType, &Region),
) -> Result<Value<T>, RunError> {
    let one = |key: i32| Ok(Value::Int(Tensor::new(Vec::new(), vec![key])));
    match op {
        Random::Key { seed } => one(random::key(*seed)),
        Random::FoldIn => one(random::fold_in(scalar(&operands[0])?, number(&operands[1])?)),
        Random::LayerKey => Err(RunError::invalid("`layer_key` is computed where the layer is known")),
        Random::DropoutMask { rate, seed } => {
            let from = random::start(scalar(&operands[0])?, *seed);
            Ok(Value::Int(Tensor::new(extents(region), mask(space, (ty, region), from, *rate))))
        }
        Random::Dropout { rate } => {
            let (x, mask) = (operands[0].real()?, operands[1].int()?);
            let kept = T::from_f64(1.0 / (1.0 - rate));
            let data = x.iter().zip(mask).map(|(&x, &m)| if m == 0 { T::ZERO } else { x * kept });
            Ok(Value::Real(Tensor::new(extents(region), data.collect())))
        }
    }
}

/// The key of a layer.
///
/// # Errors
/// [`RunError::Invalid`] when the operand is no key.
pub(crate) fn layer_key<T: Real>(key: Elements<'_, T>, layer: u64) -> Result<Value<T>, RunError> {
    let key = match key {
        Elements::Int(&[key]) => key,
        Elements::Int(_) | Elements::Real(_) => return Err(no_key()),
    };
    let key = random::fold_in(key, layer.cast_signed());
    Ok(Value::Int(Tensor::new(Vec::new(), vec![key])))
}

/// The dropout of an attention on these operands, drawn from their key where they have one.
///
/// # Errors
/// [`RunError::Invalid`] when that operand is no key.
pub(crate) fn dropout_of<T: Real>(
    attention: &Attention,
    operands: &[Operand<'_, T>],
) -> Result<Option<Dropout>, RunError> {
    match (attention.dropout, attention.key_operand(operands.len())) {
        (Some(dropout), Some(key)) => Ok(Some(dropout.with_key(scalar(&operands[key])?))),
        (dropout, _) => Ok(dropout),
    }
}

fn scalar<T: Real>(key: &Operand<'_, T>) -> Result<i32, RunError> {
    match key.int()? {
        &[key] => Ok(key),
        _ => Err(no_key()),
    }
}

fn no_key() -> RunError {
    RunError::invalid("a key is one integer")
}

/// A whole number, of any type.
fn number<T: Real>(number: &Operand<'_, T>) -> Result<i64, RunError> {
    match number.elements {
        Elements::Int(&[n]) => Ok(i64::from(n)),
        Elements::Real(&[x]) => Ok(x.to_f64().round() as i64),
        Elements::Int(_) | Elements::Real(_) => Err(RunError::invalid("`fold_in` folds one number")),
    }
}

/// One for each element that is kept. The draw of an element depends on its position along each dimension,
/// outermost first.
fn mask(space: &Space, (ty, region): (&TensorType, &Region), from: u64, rate: f64) -> Vec<i32> {
    let mut states = vec![from];
    for (&dim, range) in ty.dims.iter().zip(region) {
        let positions = positions::sequence_positions(space, dim, range.clone());
        let positions: Vec<u64> = positions.into_iter().map(|p| space.origin(dim, p)).collect();
        let next = states.iter().flat_map(|&state| positions.iter().map(move |&p| random::mix(state, p)));
        states = next.collect();
    }
    states.into_iter().map(|state| i32::from(!random::is_below(state, rate))).collect()
}
