//! Several operations as one kernel.

use crate::dim::DimId;
use crate::ops::declare::ops;
use crate::ops::table::elementwise::Unary;

ops! {
    /// Operations that compute the same as several others, in one kernel that reads and writes less. `saturate` makes them
    /// by rules, which define them (`kernels.rules`). They have no adjoint.
    #[derive(Clone, Copy, Debug, PartialEq)]
    pub enum Fused {
        family Linear {
            /// `f(z + Σ x · y + b)`, summed over the dimensions that the result lacks and rounded once: a product with its bias,
            /// which lacks dimensions of the result, and its activation.
            BiasProduct {
                /// The function f of one element; none if absent.
                of: Option<Unary> = None,
            } = "bias_product", "x, y, b, (z) -> z", Compute, Matmul, Own;
            /// `Σ x · y` and `Σ x · w`, of operands y and w of one type, as a batch of two products: keys and values, the gate
            /// and the input of a gated activation.
            ProductPair = "product_pair", "x, y, w -> z, v", Compute, Matmul, Own;
        }
        family Elementwise {
            /// `f(x) · (y + c)`: a gated activation, as in SwiGLU and GeGLU; the number c is left out where there is none.
            Gated {
                /// The function f of one element.
                of: Unary,
                /// Bounds x from above, and y from both sides, as in gpt-oss; none when absent.
                limit: Option<f64> = None,
            } = "gated", "x, x, (c) -> x", Compute, Vector, Own;
            /// Gradients of `gated` for x and y, from x, y, the gradient of the result and c: `dz · (y + c) · f'(x)` and
            /// `dz · f(x)`, of x and y within their bounds, and zero beyond.
            GatedBackward {
                /// The function f of one element.
                of: Unary,
                /// Bounds x from above, and y from both sides; none when absent.
                limit: Option<f64> = None,
            } = "gated_backward", "x, x, x, (c) -> x, x", Compute, Vector, Own;
        }
        family Norm {
            /// `x + y`, and the `rms_norm` of this sum.
            AddRmsNorm {
                /// The dimension that is normalised.
                over: DimId,
                /// Added to the mean square.
                eps: f64,
                /// Added to the weight.
                offset: f64 = 0.0,
            } = "add_rms_norm", "x, x, m -> x, x", Compute, Vector, FirstOperand(5);
            /// `x + y`, and the `layer_norm` of this sum.
            AddLayerNorm {
                /// The dimension that is normalised.
                over: DimId,
                /// Added to the variance.
                eps: f64,
            } = "add_layer_norm", "x, x, m, m -> x, x", Compute, Vector, FirstOperand(7);
        }
    }
}
