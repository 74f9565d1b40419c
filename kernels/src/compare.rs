//! Compares outputs with expected ones of another program or file: their distance. [`step_checker`](crate::step_checker) compares with the whole
//! program.
//!
//! Nothing passes silently: a tensor of another shape, a missing tensor, and NaN are failures. −∞, the logarithm of an
//! empty sum, is equal to −∞ and differs from every number.

use ithaca_ir::ops::state;

use crate::Outputs;
use crate::real::Real;
use crate::store::{StoreError, TensorSource};
use crate::tensor::Tensor;

/// The rounding of sums of numbers near one in single precision.
const NOISE: f64 = 1e-5;

/// The least norm of a gradient per element, in parts of the largest element of all gradients and at most [`NOISE`]: at a
/// tolerance of 1e-4 an error of 1e-8 of the largest passes, and sums in single precision had rounding errors of 2e-9 of it.
const FLOOR: f64 = 1e-4;

/// How one tensor compares.
#[derive(Clone, Debug, PartialEq)]
pub struct Comparison {
    /// The tensor's name.
    pub name: String,
    /// The result of the comparison.
    pub verdict: Verdict,
}

/// The distance of two tensors, or why there is none.
#[derive(Clone, Debug, PartialEq)]
pub enum Verdict {
    /// Both have one shape, and every element is finite in both or −∞ in both.
    Distance {
        /// The largest absolute difference of two elements.
        max_abs: f64,
        /// `‖a − b‖ / ‖b‖` in the Euclidean norm, where b is the expected tensor; `‖a − b‖` where b is zero. A gradient that is
        /// only rounding (on average at most `FLOOR` times the largest of all gradients) is measured by that size instead
        /// of its norm; so are moments, by the largest of their kind.
        relative: f64,
        /// The size by which the error of an element is measured: the magnitude of the largest expected element, for a
        /// gradient or a moment that of the largest of its kind; 1 where all are zero, which has no scale.
        scale: f64,
    },
    /// The tensors have no distance.
    Mismatch(Mismatch),
}

/// Why two tensors have no distance.
#[derive(Clone, Debug, PartialEq)]
pub enum Mismatch {
    /// The shapes differ.
    Shape {
        /// The computed shape.
        found: Vec<usize>,
        /// The expected shape.
        expected: Vec<usize>,
    },
    /// A computed or an expected element is infinite or NaN.
    NotFinite {
        /// The first such element, counted in row-major order.
        at: usize,
        /// The computed element.
        found: f64,
        /// The expected element.
        expected: f64,
    },
    /// The tensor was expected and not computed.
    Missing,
}

impl Verdict {
    /// Whether the distance is known and at most `tolerance`: of the tensor relative to its norm, and of each element
    /// relative to the tensor's scale. No absolute size of an error passes or fails.
    pub fn within(&self, tolerance: f64) -> bool {
        match *self {
            Verdict::Distance { max_abs, relative, scale } => {
                max_abs <= tolerance * scale && relative <= tolerance
            }
            Verdict::Mismatch(_) => false,
        }
    }
}

/// Compares `found` with `expected`.
pub fn tensors<A: Real, B: Real>(found: &Tensor<A>, expected: &Tensor<B>) -> Verdict {
    above(Kind::default(), found, expected)
}

/// The sizes of the elements of tensors of one kind.
#[derive(Clone, Copy, Debug, Default)]
struct Kind {
    /// The size of elements that are rounding.
    floor: f64,
    /// The magnitude of the largest element.
    largest: f64,
}

/// Compares relative to the norm, which is at least that of elements of the size of rounding.
fn above<A: Real, B: Real>(
    Kind { floor, largest }: Kind,
    found: &Tensor<A>,
    expected: &Tensor<B>,
) -> Verdict {
    let (mut max_abs, mut difference, mut norm, mut largest) = (0f64, 0f64, 0f64, largest);
    let walked = each_pair(found, expected, |a, b| {
        norm += b * b;
        largest = largest.max(b.abs());
        max_abs = max_abs.max((a - b).abs());
        difference += (a - b) * (a - b);
    });
    if let Err(mismatch) = walked {
        return Verdict::Mismatch(mismatch);
    }
    let noise = floor * floor * expected.data.len() as f64;
    let relative = if norm > 0.0 { (difference / norm.max(noise)).sqrt() } else { difference.sqrt() };
    let scale = if largest > 0.0 { largest } else { 1.0 };
    Verdict::Distance { max_abs, relative, scale }
}

/// Calls `body` with each computed and expected element, except where both are −∞.
pub(crate) fn each_pair<A: Real, B: Real>(
    found: &Tensor<A>,
    expected: &Tensor<B>,
    mut body: impl FnMut(f64, f64),
) -> Result<(), Mismatch> {
    // A scalar may be stored as a vector of one.
    let alike = found.shape == expected.shape || (found.data.len() == 1 && expected.data.len() == 1);
    if !alike || found.data.len() != expected.data.len() {
        return Err(Mismatch::Shape { found: found.shape.clone(), expected: expected.shape.clone() });
    }
    for (at, (a, b)) in found.data.iter().zip(&expected.data).enumerate() {
        let (a, b) = (a.to_f64(), b.to_f64());
        // The logarithm of an empty sum.
        if a == f64::NEG_INFINITY && b == f64::NEG_INFINITY {
            continue;
        }
        if !a.is_finite() || !b.is_finite() {
            return Err(Mismatch::NotFinite { at, found: a, expected: b });
        }
        body(a, b);
    }
    Ok(())
}

/// The kinds of tensors that may be zero but for rounding, each with the prefix of its names.
fn kinds<B: Real>(expected: &Outputs<B>) -> [(&'static str, Kind); 3] {
    let kind = |prefix: &'static str, floor: fn(f64) -> f64| {
        let largest = largest(expected, prefix);
        (prefix, Kind { floor: floor(largest), largest })
    };
    let rounding = |largest: f64| (FLOOR * largest).min(NOISE);
    [
        kind(state::GRADIENT, rounding),
        kind(state::FIRST_MOMENT, rounding),
        kind(state::SECOND_MOMENT, |largest| FLOOR * FLOOR * largest),
    ]
}

/// The magnitude of the largest finite element of all tensors with this prefix.
fn largest<B: Real>(outputs: &Outputs<B>, prefix: &str) -> f64 {
    let tensors = outputs.iter().filter(|(name, _)| name.starts_with(prefix));
    let magnitudes = tensors.flat_map(|(_, t)| &t.data).map(|x| x.to_f64().abs());
    magnitudes.filter(|x| x.is_finite()).fold(0.0, f64::max)
}

/// Compares two sets of outputs by name, in the order of the expected ones.
pub fn outputs<A: Real, B: Real>(found: &Outputs<A>, expected: &Outputs<B>) -> Vec<Comparison> {
    let kinds = kinds(expected);
    let compare = |(name, tensor): (&String, &Tensor<B>)| {
        let kind = kinds.iter().find(|(prefix, _)| name.starts_with(prefix));
        let kind = kind.map_or_else(Kind::default, |(_, kind)| *kind);
        let verdict =
            found.get(name).map_or(Verdict::Mismatch(Mismatch::Missing), |found| above(kind, found, tensor));
        Comparison { name: name.clone(), verdict }
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
    let present = found.keys().filter(|name| expected.shape(name).is_some());
    let read = |name: &String| Ok((name.clone(), expected.read(name)?));
    let read: Outputs<f64> = present.map(read).collect::<Result<_, StoreError>>()?;
    // A run that computes gradients computes all of them.
    let is_gradient = |name: &String| name.starts_with(state::GRADIENT);
    let gradients = found.keys().any(is_gradient);
    let absent = expected.names().into_iter().filter(|name| gradients && is_gradient(name));
    let absent = absent.filter(|name| !found.contains_key(name));
    let missing = absent.map(|name| Comparison { name, verdict: Verdict::Mismatch(Mismatch::Missing) });
    Ok(outputs(found, &read).into_iter().chain(missing).collect())
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
        assert_eq!(verdict, Verdict::Distance { max_abs: 0.5, relative: 0.1, scale: 4.0 });
        assert!(verdict.within(0.125) && !verdict.within(0.12));
        // The norm is a bound beside that of the elements.
        assert!(!tensors(&vector(&[8.0, 1.0]), &vector(&[8.0, 2.0])).within(0.12));
        assert!(!tensors(&vector(&[0.2]), &vector(&[0.5])).within(0.2));
        assert!(tensors(&vector(&[0.0]), &vector(&[0.0])).within(0.0));
    }

    #[test]
    fn verdicts_do_not_depend_on_the_unit() {
        let (found, expected) = (vector(&[3.0, 4.5, 1.0]), vector(&[3.0, 4.0, 1.0]));
        for unit in [1e-6, 1.0, 13_931.0] {
            let verdict = tensors(&found.map(|x| x * unit), &expected.map(|x| x * unit));
            assert!(verdict.within(0.126) && !verdict.within(0.124), "{unit}: {verdict:?}");
        }
        // Zeros have no scale.
        assert!(tensors(&vector(&[1e-7]), &vector(&[0.0])).within(1e-6));
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
        assert_eq!(
            outputs(&Outputs::<f64>::new(), &expected)[0].verdict,
            Verdict::Mismatch(Mismatch::Missing)
        );
    }
}
