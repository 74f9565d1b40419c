//! Numbers drawn at random, so that every layout, order and shard draws the same.
//!
//! A *key* determines the numbers that are drawn, as in JAX: `main` makes one from a seed, a training step folds its number into it,
//! and a layer its own. A *mask* is drawn from a key element by element: whether an element is kept depends on the key, on
//! the seed of the place in the program, and on the position of the element along each dimension, and on nothing else. So a
//! backward pass may draw it again instead of keeping it.
//!
//! Keys have 30 bits: below 2³⁰ they are exact in every way in which runtimes hold integers, and as the bits of a single
//! precision number they are never one that is not a number.

use smallvec::smallvec;

use crate::builder::FunctionBuilder;
use crate::dtype::DType;
use crate::handles::ValueId;
use crate::ops::check::{need_float, only, unplaced};
use crate::ops::context::Types;
use crate::ops::error::{OpError, bail, ensure};
use crate::ops::gradients::Gradients;
use crate::ops::table::op::Op;
use crate::ops::table::random::Random;
use crate::rule::FactorRule;
use crate::types::TensorType;

/// Bits of a key.
pub const KEY_BITS: u32 = 30;

impl Random {
    /// The result type; that of a mask is declared.
    pub(super) fn infer(&self, operands: &[&TensorType], declared: &[TensorType]) -> Result<Types, OpError> {
        let name = self.name();
        let key = || TensorType::new(DType::I32, []);
        match self {
            Random::Key { .. } => Ok(smallvec![key()]),
            Random::FoldIn => {
                need_key(name, operands[0])?;
                let number = operands[1];
                if number.dims.is_empty() && number.dtype != DType::Bool {
                    need_taken(name, 1, number)?
                } else {
                    bail!("V05", "`fold_in` folds one number into a key");
                }
                Ok(smallvec![key()])
            }
            Random::LayerKey => {
                need_key(name, operands[0])?;
                Ok(smallvec![key()])
            }
            Random::DropoutMask { rate, .. } => {
                need_key(name, operands[0])?;
                need_rate(name, *rate)?;
                let ty = only(name, declared)?;
                ensure!(ty.dtype == DType::Bool, "V04", "`{name}` makes a mask of bool, not {}", ty.dtype);
                if !ty.layout.partial.is_empty() || !ty.layout.moved.is_empty() {
                    bail!("V11", "`{name}` makes a mask, and no part of a sum");
                }
                Ok(smallvec![ty.clone()])
            }
            Random::Dropout { rate } => {
                let [x, mask] = [operands[0], operands[1]];
                need_float(name, x.dtype)?;
                need_rate(name, *rate)?;
                ensure!(
                    mask.dtype == DType::Bool,
                    "V04",
                    "`{name}` takes a mask of bool, not {}",
                    mask.dtype
                );
                ensure!(x.dims == mask.dims, "V05", "`{name}` takes x and a mask of the same dimensions");
                Ok(smallvec![unplaced(x)])
            }
        }
    }

    /// The factor rule; none where results are declared or follow from no operand.
    pub(super) fn rule(&self, operands: &[&TensorType], results: &[&TensorType]) -> Option<FactorRule> {
        match self {
            Random::Dropout { .. } | Random::FoldIn | Random::LayerKey => {
                Some(FactorRule::parallel(operands, results))
            }
            Random::Key { .. } | Random::DropoutMask { .. } => None,
        }
    }

    /// The gradient of a dropout is the same dropout of the gradient; nothing else has one.
    pub(super) fn adjoint(
        &self,
        b: &mut FunctionBuilder<'_>,
        operands: &[ValueId],
        d: ValueId,
    ) -> Result<Gradients, OpError> {
        match self {
            Random::Dropout { .. } => Ok(vec![Some(b.push(Op::Random(*self), &[d, operands[1]])?), None]),
            Random::Key { .. } | Random::FoldIn | Random::LayerKey | Random::DropoutMask { .. } => {
                Ok(vec![None; operands.len()])
            }
        }
    }
}

/// A key is one integer.
pub(super) fn need_key(name: &str, ty: &TensorType) -> Result<(), OpError> {
    if ty.dtype == DType::I32 && ty.dims.is_empty() {
        need_taken(name, 0, ty)
    } else {
        Err(OpError::new("V04", format!("the key of `{name}` is one i32")))
    }
}

fn need_taken(name: &str, i: usize, ty: &TensorType) -> Result<(), OpError> {
    ensure!(ty.layout.partial.is_empty(), "V11", "operand {i} of `{name}` is a sum still to be taken");
    Ok(())
}

fn need_rate(name: &str, rate: f64) -> Result<(), OpError> {
    ensure!(rate.is_finite() && (0.0..1.0).contains(&rate), "V05", "`{name}` cannot drop a share of {rate}");
    Ok(())
}

/// The finaliser of splitmix64 (Steele, Lea and Flood, 2014) over one more word.
pub fn mix(state: u64, word: u64) -> u64 {
    let mut x = (state ^ word).wrapping_add(0x9e37_79b9_7f4a_7c15);
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// Whether a drawn number is in the share `rate` of all numbers.
pub fn is_below(drawn: u64, rate: f64) -> bool {
    ((drawn >> 11) as f64) < rate * (1u64 << 53) as f64
}

/// The key of a seed.
pub fn key(seed: u64) -> i32 {
    cut(mix(0, seed))
}

/// The key of `number` among those of `key`.
pub fn fold_in(key: i32, number: i64) -> i32 {
    cut(mix(mix(0, word(key)), number.cast_unsigned()))
}

/// The state from which the numbers of `key` and `seed` are drawn, position after position.
pub fn start(key: i32, seed: u64) -> u64 {
    mix(seed, word(key))
}

fn word(key: i32) -> u64 {
    u64::from(key.cast_unsigned())
}

fn cut(x: u64) -> i32 {
    i32::try_from(x >> (u64::BITS - KEY_BITS)).expect("30 bits are an i32")
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn keys_differ_and_fit_everywhere() {
        let root = key(0);
        let steps: Vec<i32> = (0..100).map(|step| fold_in(root, step)).collect();
        let layers: BTreeSet<i32> =
            steps.iter().flat_map(|&step| (0..100).map(move |layer| fold_in(step, layer))).collect();
        // Of 10 000 keys out of 2³⁰ two are alike once in twenty.
        assert!(layers.len() > 9_998, "{}", layers.len());
        assert!(layers.iter().all(|&k| (0..1 << KEY_BITS).contains(&k)));
        assert!(layers.iter().all(|&k| !f32::from_bits(k.cast_unsigned()).is_nan()));
    }

    #[test]
    fn the_share_that_is_dropped_is_the_rate() {
        for rate in [0.0, 0.1, 0.5, 0.9] {
            let n = 100_000;
            let from = start(key(3), 1);
            let dropped = (0..n).filter(|&i| is_below(mix(from, i), rate)).count() as f64;
            let deviation = (n as f64 * rate * (1.0 - rate)).sqrt();
            assert!((dropped - n as f64 * rate).abs() <= 4.0 * deviation, "{dropped} of {n} at {rate}");
        }
    }
}
