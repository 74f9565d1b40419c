//! The numbers that the oracle computes with.

use std::fmt::Debug;
use std::ops::{Add, AddAssign, Div, Mul, Neg, Sub};

/// A real number: `f64` for reference values, `f32` to see the effect of single precision.
///
/// Sums and products are taken in the type itself; functions such as the exponential are taken in `f64` and rounded
/// once.
pub trait Real:
    Copy
    + Debug
    + Default
    + PartialEq
    + PartialOrd
    + Send
    + Sync
    + Add<Output = Self>
    + AddAssign
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
    + Neg<Output = Self>
    + 'static
{
    /// Zero.
    const ZERO: Self;
    /// One.
    const ONE: Self;
    /// Less than every other number.
    const NEG_INFINITY: Self;
    /// The distance from one to the next number.
    const EPSILON: f64;

    /// The nearest number to `x`.
    fn from_f64(x: f64) -> Self;

    /// The number, exactly.
    fn to_f64(self) -> f64;

    /// `f` of the number, rounded once.
    fn through(self, f: impl Fn(f64) -> f64) -> Self {
        Self::from_f64(f(self.to_f64()))
    }
}

impl Real for f64 {
    const ZERO: Self = 0.0;
    const ONE: Self = 1.0;
    const NEG_INFINITY: Self = Self::NEG_INFINITY;
    const EPSILON: f64 = Self::EPSILON;

    fn from_f64(x: f64) -> Self {
        x
    }

    fn to_f64(self) -> f64 {
        self
    }
}

impl Real for f32 {
    const ZERO: Self = 0.0;
    const ONE: Self = 1.0;
    const NEG_INFINITY: Self = Self::NEG_INFINITY;
    const EPSILON: f64 = Self::EPSILON as f64;

    fn from_f64(x: f64) -> Self {
        x as f32
    }

    fn to_f64(self) -> f64 {
        f64::from(self)
    }
}

/// The sum in order.
pub(crate) fn sum<T: Real>(numbers: impl IntoIterator<Item = T>) -> T {
    numbers.into_iter().fold(T::ZERO, |sum, x| sum + x)
}

/// The largest number; −∞ of nothing. NaN is passed over.
pub(crate) fn max<T: Real>(numbers: impl IntoIterator<Item = T>) -> T {
    numbers.into_iter().fold(T::NEG_INFINITY, |max, x| if x > max { x } else { max })
}
