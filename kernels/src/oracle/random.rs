//! Numbers drawn at random: keys, masks and dropout.

use ithaca_ir::Space;
use ithaca_ir::ops::{Attention, Dropout, Random, random};

use super::value::{Elements, LocalOp, Operand, ResultSpec, Value};
use crate::error::RunError;
use crate::positions;
use crate::real::Real;
use crate::tensor::Tensor;

/// A rank's part of the result.
///
/// # Errors
/// [`RunError::Invalid`] for `layer_key`, of which [`layer_key`] knows the layer.
pub(super) fn random<T: Real>(call: &LocalOp<'_, T>, op: &Random) -> Result<Value<T>, RunError> {
    match op {
        Random::Key { seed } => Ok(one(random::key(*seed))),
        Random::FoldIn => {
            let n = match call.operands[1].elements {
                Elements::Int(&[n]) => i64::from(n),
                Elements::Real(&[x]) => x.to_f64().round() as i64,
                Elements::Int(_) | Elements::Real(_) => return Err(call.invalid("folds one number")),
            };
            Ok(one(random::fold_in(scalar(call.operands[0].elements)?, n)))
        }
        Random::LayerKey => Err(RunError::invalid("`layer_key` is computed where the layer is known")),
        Random::DropoutMask { rate, seed } => {
            let from = random::start(scalar(call.operands[0].elements)?, *seed);
            Ok(Value::Int(call.tensor(0, mask(call.space, call.result(), from, *rate))?))
        }
        Random::Dropout { rate } => {
            let (x, mask) = (call.real(0)?, call.int(1)?);
            let kept = T::from_f64(1.0 / (1.0 - rate));
            let data = x.iter().zip(mask).map(|(&x, &m)| if m == 0 { T::ZERO } else { x * kept });
            Ok(Value::Real(call.tensor(0, data.collect())?))
        }
    }
}

/// The key of a layer.
///
/// # Errors
/// [`RunError::Invalid`] when the operand is no key.
pub(crate) fn layer_key<T: Real>(key: Elements<'_, T>, layer: u64) -> Result<Value<T>, RunError> {
    Ok(one(random::fold_in(scalar(key)?, layer.cast_signed())))
}

fn one<T>(key: i32) -> Value<T> {
    Value::Int(Tensor::new(Vec::new(), vec![key]))
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
        (Some(dropout), Some(key)) => Ok(Some(dropout.with_key(scalar(operands[key].elements)?))),
        (dropout, _) => Ok(dropout),
    }
}

fn scalar<T: Real>(key: Elements<'_, T>) -> Result<i32, RunError> {
    match key {
        Elements::Int(&[key]) => Ok(key),
        Elements::Int(_) | Elements::Real(_) => Err(RunError::invalid("a key is one integer")),
    }
}

/// One for each element that is kept. The draw of an element depends on its position along each dimension,
/// outermost first.
fn mask(space: &Space, ResultSpec { ty, region }: &ResultSpec<'_>, from: u64, rate: f64) -> Vec<i32> {
    let mut states = vec![from];
    for (&dim, range) in ty.dims.iter().zip(region) {
        let positions = positions::sequence_positions(space, dim, range.clone());
        let positions: Vec<u64> = positions.into_iter().map(|p| space.origin(dim, p)).collect();
        let next = states.iter().flat_map(|&state| positions.iter().map(move |&p| random::mix(state, p)));
        states = next.collect();
    }
    states.into_iter().map(|state| i32::from(!random::is_below(state, rate))).collect()
}
