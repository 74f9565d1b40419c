//! Functions of one element, and their derivatives.

use ithaca_ir::ops::Unary;

use crate::real::Real;

/// A function of one element.
pub(crate) fn unary<T: Real>(f: Unary, x: T) -> T {
    let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
    match f {
        Unary::Silu => x.through(|x| x * sigmoid(x)),
        Unary::Gelu => x.through(|x| 0.5 * x * libm::erfc(-x * std::f64::consts::FRAC_1_SQRT_2)),
        Unary::GeluTanh => x.through(|x| {
            // `(1 + tanh(u)) / 2 = sigmoid(2 u)`, where nothing cancels.
            let root = (2.0 / std::f64::consts::PI).sqrt();
            x * sigmoid(2.0 * root * (x + 0.044_715 * x * x * x))
        }),
        Unary::QuickGelu => x.through(|x| x * sigmoid(1.702 * x)),
        // Not a number stays so.
        Unary::Relu => {
            if x < T::ZERO {
                T::ZERO
            } else {
                x
            }
        }
        Unary::Tanh => x.through(f64::tanh),
        Unary::Relu2 => {
            let positive = unary(Unary::Relu, x);
            positive * positive
        }
        Unary::Symlog => x.through(|x| x.abs().ln_1p().copysign(x)),
    }
}

/// `x`, at least the first bound and at most the second, as far as there are bounds.
pub(crate) fn clamp<T: Real>([min, max]: [Option<T>; 2], x: T) -> T {
    match (min, max) {
        (Some(min), _) if x < min => min,
        (_, Some(max)) if x > max => max,
        _ => x,
    }
}

/// The bound and the number of a gated activation `f(x) · (y + c)`.
#[derive(Clone, Copy)]
pub(crate) struct Gate<T> {
    limit: Option<T>,
    plus: T,
}

impl<T: Real> Gate<T> {
    /// Without c, it is zero.
    pub(crate) fn new(limit: Option<f64>, c: Option<&[T]>) -> Self {
        let plus = c.and_then(|c| c.first().copied()).unwrap_or(T::ZERO);
        Self { limit: limit.map(T::from_f64), plus }
    }

    /// Whether operands are bounded.
    pub(crate) fn is_bounded(self) -> bool {
        self.limit.is_some()
    }

    /// The operand of f.
    pub(crate) fn input(self, x: T) -> T {
        clamp([None, self.limit], x)
    }

    /// The other factor.
    pub(crate) fn factor(self, y: T) -> T {
        clamp([self.lowest(), self.limit], y) + self.plus
    }

    /// Whether x has a gradient.
    pub(crate) fn has_input(self, x: T) -> bool {
        self.limit.is_none_or(|limit| x <= limit)
    }

    /// Whether y has a gradient.
    pub(crate) fn has_factor(self, y: T) -> bool {
        self.has_input(y) && self.lowest().is_none_or(|lowest| y >= lowest)
    }

    fn lowest(self) -> Option<T> {
        self.limit.map(|limit| T::ZERO - limit)
    }
}

/// The derivative of a function of one element.
pub(crate) fn slope<T: Real>(f: Unary, x: T) -> T {
    let sigmoid = |x: f64| 1.0 / (1.0 + (-x).exp());
    match f {
        Unary::Silu => x.through(|x| sigmoid(x) * (1.0 + x * (1.0 - sigmoid(x)))),
        Unary::Gelu => x.through(|x| {
            let phi = (-0.5 * x * x).exp() / (2.0 * std::f64::consts::PI).sqrt();
            0.5 * libm::erfc(-x * std::f64::consts::FRAC_1_SQRT_2) + x * phi
        }),
        Unary::GeluTanh => x.through(|x| {
            let root = (2.0 / std::f64::consts::PI).sqrt();
            let s = sigmoid(2.0 * root * (x + 0.044_715 * x * x * x));
            let inner = 2.0 * root * (1.0 + 3.0 * 0.044_715 * x * x);
            s * (1.0 + x * (1.0 - s) * inner)
        }),
        Unary::QuickGelu => x.through(|x| {
            let s = sigmoid(1.702 * x);
            s * (1.0 + 1.702 * x * (1.0 - s))
        }),
        // There is none at zero; this is the choice of training frameworks.
        Unary::Relu => {
            if x > T::ZERO {
                T::ONE
            } else {
                T::ZERO
            }
        }
        Unary::Tanh => x.through(|x| 1.0 - x.tanh() * x.tanh()),
        Unary::Relu2 => {
            let positive = unary(Unary::Relu, x);
            positive + positive
        }
        Unary::Symlog => x.through(|x| 1.0 / (1.0 + x.abs())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn squared_relu() {
        assert_eq!([-2.0, 0.0, 3.0].map(|x| unary(Unary::Relu2, x)), [0.0, 0.0, 9.0]);
        assert_eq!([-2.0, 0.0, 3.0].map(|x| slope(Unary::Relu2, x)), [0.0, 0.0, 6.0]);
    }
}
