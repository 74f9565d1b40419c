//! Functions of one and two elements.

use crate::ops::attr::{Attr, Names};
use crate::ops::attribute::{Refused, Value};
use crate::ops::declare::functions;

functions! {
    /// Functions of one element. A transcendental function counts as four FLOPs.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
    pub enum Unary {
        family Elementwise {
            /// `x · sigmoid(x)`.
            Silu = "silu", "x -> x", Compute, Vector, Results(6);
            /// `x · Φ(x)`, by the error function.
            Gelu = "gelu", "x -> x", Compute, Vector, Results(8);
            /// `x · Φ(x)`, by the tanh approximation.
            GeluTanh = "gelu_tanh", "x -> x", Compute, Vector, Results(8);
            /// `x · sigmoid(1.702 x)`.
            QuickGelu = "quick_gelu", "x -> x", Compute, Vector, Results(6);
            /// `max(x, 0)`.
            Relu = "relu", "x -> x", Compute, Vector, Results(1);
            /// Hyperbolic tangent.
            Tanh = "tanh", "x -> x", Compute, Vector, Results(4);
            /// `max(x, 0)²` (So et al., arXiv 2109.08668).
            Relu2 = "relu2", "x -> x", Compute, Vector, Results(2);
            /// `sign(x) · log(1 + |x|)`, which is `log(1 + x)` from zero on (Hafner et al., arXiv 2301.04104).
            Symlog = "symlog", "x -> x", Compute, Vector, Results(5);
        }
    }
}

functions! {
    /// Functions of two elements.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
    pub enum Binary {
        family Elementwise {
            /// `x + y`; y may lack dimensions of x.
            Add = "add", "x, y -> x", Compute, Vector, Results(1);
            /// `x − y`; y may lack dimensions of x.
            Sub = "sub", "x, y -> x", Compute, Vector, Results(1);
            /// `x · y`; y may lack dimensions of x.
            Mul = "mul", "x, y -> x", Compute, Vector, Results(1);
            /// `x / y`; y may lack dimensions of x.
            Div = "div", "x, y -> x", Compute, Vector, Results(1);
            /// `log(exp(x) + exp(y))`; −∞ where both are.
            LogAddExp = "log_add_exp", "x, y -> x", Compute, Vector, Results(1);
        }
    }
}

/// A function by its name.
impl Value for Unary {
    const KIND: &'static str = "a function of one element";

    fn to_attr(&self, _: Names<'_>) -> Attr {
        Attr::Word(self.name().to_owned())
    }

    fn from_attr(attr: Attr, _: Names<'_>) -> Result<Self, Refused> {
        let found = Unary::ALL.into_iter().find(|f| attr.is_word(f.name()));
        found.ok_or(Refused::Kind(attr))
    }
}
