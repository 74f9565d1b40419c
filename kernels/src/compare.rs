//! Judges outputs: how far they are from what was expected.
//!
//! Nothing passes silently: a tensor of another shape, a missing tensor, and a number that is none are failures. −∞ is
//! equal to −∞, being the logarithm of a sum of nothing, and differs from every number.

use ithaca_ir::ops::state;

use crate::Outputs;
use crate::real::Real;
use crate::store::{StoreError, TensorSource};
use crate::tensor::Tensor;

/// Elements that single precision cannot tell from zero, where they are sums of numbers near one: the gradient of the bias
/// of keys is zero, and computed as less than this.
pub const NOISE: f64 = 1e-5;

/// How one tensor compares.
#[derive(Clone, Debug, PartialEq)]
pub struct Comparison {
    /// The tensor's name.
    pub name: String,
    /// What was found.
    pub verdict: Verdict,
}

/// The distance of two tensors, or why there is none.
#[derive(Clone, Debug, PartialEq)]
pub enum Verdict {
    /// Both are of one shape, and finite where they are not −∞ both.
    Distance {
        /// The largest absolute difference of two elements.
        max_abs: f64,
        /// `‖a − b‖ / ‖b‖` in the Euclidean norm, b being what was expected; `‖a − b‖` where b is zero. A gradient that is
        /// nothing but rounding, elements of [`NOISE`] and below on average, is measured by that instead of its norm.
        relative: f64,
    },
    /// The shapes differ.
    Shape {
        /// What was computed.
        found: Vec<usize>,
        /// What was expected.
        expected: Vec<usize>,
    },
    /// An element is infinite or not a number, in what was computed or in what was expected.
    NotFinite {
        /// The first such element, counted in row-major order.
        at: usize,
        /// What was computed there.
        found: f64,
        /// What was expected there.
        expected: f64,
    },
    /// Expected and not computed.
    Missing,
}

impl Verdict {
    /// Whether the distance is known, and both the absolute and the relative one are at most `tolerance`.
    pub fn within(&self, tolerance: f64) -> bool {
        match *self {
            Verdict::Distance { max_abs, relative } => max_abs <= tolerance && relative <= tolerance,
            Verdict::Shape { .. } | Verdict::NotFinite { .. } | Verdict::Missing => false,
        }
    }
}

/// Compares `found` with `expected`.
pub fn tensors<A: Real, B: Real>(found: &Tensor<A>, expected: &Tensor<B>) -> Verdict {
    above(0.0, found, expected)
}

/// Compares what is called `name`: gradients, and what an optimizer makes of them, may be zero but for rounding.
fn named<A: Real, B: Real>(name: &str, found: &Tensor<A>, expected: &Tensor<B>) -> Verdict {
    let may_vanish = [state::GRADIENT, state::OPTIMIZER].iter().any(|prefix| name.starts_with(prefix));
    above(if may_vanish { NOISE } else { 0.0 }, found, expected)
}

/// Compares relative to a norm of at least that of elements of size `floor`.
fn above<A: Real, B: Real>(floor: f64, found: &Tensor<A>, expected: &Tensor<B>) -> Verdict {
    // A scalar may be stored as a vector of one.
    let alike = found.shape == expected.shape || (found.data.len() == 1 && expected.data.len() == 1);
    if !alike || found.data.len() != expected.data.len() {
        return Verdict::Shape { found: found.shape.clone(), expected: expected.shape.clone() };
    }
    let (mut max_abs, mut difference, mut norm) = (0f64, 0f64, 0f64);
    for (at, (a, b)) in found.data.iter().zip(&expected.data).enumerate() {
        let (a, b) = (a.to_f64(), b.to_f64());
        if a == f64::NEG_INFINITY && b == f64::NEG_INFINITY {
            continue;
        }
        if !a.is_finite() || !b.is_finite() {
            return Verdict::NotFinite { at, found: a, expected: b };
        }
        max_abs = max_abs.max((a - b).abs());
        difference += (a - b) * (a - b);
        norm += b * b;
    }
    let noise = floor * floor * expected.data.len() as f64;
    let relative = match norm > 0.0 {
        true => (difference / norm.max(noise)).sqrt(),
        false => difference.sqrt(),
    };
    Verdict::Distance { max_abs, relative }
}

/// Compares two sets of outputs by name, in the order of what was expected.
pub fn outputs<A: Real, B: Real>(found: &Outputs<A>, expected: &Outputs<B>) -> Vec<Comparison> {
    let compare = |(name, expected): (&String, &Tensor<B>)| Comparison {
        name: name.clone(),
        verdict: found.get(name).map_or(Verdict::Missing, |found| named(name, found, expected)),
    };
    expected.iter().map(compare).collect()
}

/// Compares outputs with the tensors of the same names in `expected`; outputs that it lacks are left out.
///
/// # Errors
/// [`StoreError`] for a tensor that is there and cannot be read.
pub fn with_source<A: Real>(
    found: &Outputs<A>,
    expected: &dyn TensorSource,
) -> Result<Vec<Comparison>, StoreError> {
    let present = found.iter().filter(|(name, _)| expected.shape(name).is_some());
    let compared = present.map(|(name, tensor)| {
        let verdict = named(name, tensor, &expected.read(name)?);
        Ok(Comparison { name: name.clone(), verdict })
    });
    // Whoever computes gradients computes all of them.
    let is_gradient = |name: &String| name.starts_with(state::GRADIENT);
    let gradients = found.keys().any(is_gradient);
    let absent = expected.names().into_iter().filter(|name| gradients && is_gradient(name));
    let absent = absent.filter(|name| !found.contains_key(name));
    compared.chain(absent.map(|name| Ok(Comparison { name, verdict: Verdict::Missing }))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vector(data: &[f64]) -> Tensor<f64> {
        Tensor::new(vec![data.len()], data.to_vec())
    }

    #[test]
    fn distances() {
        let verdict = tensors(&vector(&[3.0, 4.5]), &vector(&[3.0, 4.0]));
        assert_eq!(verdict, Verdict::Distance { max_abs: 0.5, relative: 0.1 });
        assert!(verdict.within(0.5) && !verdict.within(0.49));
        assert!(tensors(&vector(&[0.0]), &vector(&[0.0])).within(0.0));
    }

    #[test]
    fn nothing_passes_silently() {
        let huge = 1e300;
        assert!(!tensors(&vector(&[f64::NAN]), &vector(&[f64::NAN])).within(huge));
        assert!(!tensors(&vector(&[1.0]), &vector(&[f64::INFINITY])).within(huge));
        assert!(!tensors(&vector(&[f64::INFINITY]), &vector(&[f64::INFINITY])).within(huge));
        assert!(!tensors(&vector(&[f64::NEG_INFINITY]), &vector(&[1.0])).within(huge));
        assert!(tensors(&vector(&[f64::NEG_INFINITY]), &vector(&[f64::NEG_INFINITY])).within(0.0));
        assert!(!tensors(&vector(&[1.0]), &vector(&[1.0, 1.0])).within(huge));
        assert!(!tensors(&vector(&[1.0]), &vector(&[1.0])).within(f64::NAN));
        let expected: Outputs<f64> = [("y".to_owned(), vector(&[1.0]))].into_iter().collect();
        assert_eq!(outputs(&Outputs::<f64>::new(), &expected)[0].verdict, Verdict::Missing);
    }
}
