//! The loss, gradients that are operations of their own, and the optimizer.

use crate::dim::DimId;
use crate::ops::declare::{attributes, ops};
use crate::ops::table::elementwise::Unary;

ops! {
    /// The gradient of an operation, from its operands and the gradient of its result.
    #[derive(Clone, Debug, PartialEq)]
    pub enum Gradient {
        family Training {
            /// `dy · f'(x)`.
            Unary(
                /// The function f of one element.
                of: Unary
            ) = "unary_backward", "x, dy -> dx", Compute, Vector, Own;
            /// `dy` where x is within the bounds of `clamp`, which belong to it; zero outside.
            Clamp {
                /// The least result; none when absent.
                min: Option<f64> = None,
                /// The largest result; none when absent.
                max: Option<f64> = None,
            } = "clamp_backward", "x, dy -> dx", Compute, Vector, FirstOperand(2);
            /// Each row sums the gradients of the tokens that looked it up. The declared result says how rows are split:
            /// tokens are whole along these axes, and each rank adds to its own rows.
            Embed {
                /// The dimension of the table that the integers index.
                over: DimId,
                /// The row of padding tokens, which has no gradient.
                padding: Option<u64> = None,
            } = "embed_backward", "b s, b s m -> v m", Compute, Vector, Zero;
            /// Gradients of `rms_norm` for x and the weight.
            RmsNorm {
                /// The dimension that is normalised.
                over: DimId,
                /// Added to the mean square.
                eps: f64,
                /// Added to the weight.
                offset: f64 = 0.0,
            } = "rms_norm_backward", "x, m, x -> x, m", Compute, Vector, FirstOperand(8);
            /// Gradients of `rms_scale` for x, the squares and the weight.
            RmsScale {
                /// The dimensions over which the squares were summed.
                over: Vec<DimId>,
                /// Added to the mean square.
                eps: f64,
            } = "rms_scale_backward", "b s h d, b s, h d, b s h d -> b s h d, b s, h d", Compute, Vector,
                FirstOperand(6);
            /// Gradients of `layer_norm` for x, the weight and the bias.
            LayerNorm {
                /// The dimension that is normalised.
                over: DimId,
                /// Added to the variance.
                eps: f64,
            } = "layer_norm_backward", "x, m, x -> x, m, m", Compute, Vector, FirstOperand(11);
            /// `y · (dy − Σ y · dy)`, from the result y of a softmax and its gradient.
            Softmax {
                /// The dimension that is summed over.
                over: DimId,
            } = "softmax_backward", "x, x -> x", Compute, Vector, FirstOperand(4);
            /// Gradients of `sink` for o, lse and the logits, from its result o, d_o, lse before and after.
            Sink = "sink_backward", "b s h e, b s h e, b s h, b s h -> b s h e, b s h, h", Compute, Vector,
                FirstOperand(4);
            /// `(exp(logit − lse) − [v = label]) · d_nll`, from logits, labels, lse and d_nll; zero at ignored labels.
            CrossEntropy {
                /// The vocabulary.
                over: DimId,
                /// The label that is ignored.
                ignore: i64,
            } = "cross_entropy_backward", "b s v, b s, b s, b s -> b s v", Compute, Vector, FirstOperand(6);
        }
    }
}

ops! {
    /// Operations of the loss. Labels are `i32`, below the size of the vocabulary or `ignore`.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Loss {
        family Training {
            /// Negative log-likelihood of each label, zero where it is ignored, and the logarithm of the sum of exponentials
            /// (lse) of the logits; both in `f32` (`f64` of `f64`).
            CrossEntropy {
                /// The vocabulary.
                over: DimId,
                /// The label that is ignored.
                ignore: i64,
            } = "cross_entropy", "b s v, b s -> b s, b s", Compute, Vector, FirstOperand(5);
            /// The logit of each label, zero where it is ignored; a rank that lacks it contributes zero.
            Pick {
                /// The vocabulary.
                over: DimId,
                /// The label that is ignored.
                ignore: i64,
            } = "pick", "b s v, b s -> b s", Compute, Vector, Zero;
            /// 1 for labels that count, 0 for those that are ignored; in `f32`.
            Valid {
                /// The label that is ignored.
                ignore: i64,
            } = "valid", "b s -> b s", Compute, Vector, Zero;
        }
    }
}

ops! {
    /// Operations of an optimizer.
    #[derive(Clone, Copy, Debug, PartialEq)]
    pub enum Optimizer {
        family Training {
            /// One step of AdamW, element by element: weights and moments from w, g, m, v, the count of steps from 1, and
            /// the factor of the gradient. `w`, `m` and `v` have one type, `f32` or `f64`; `g` may be narrower.
            AdamW(constants: AdamW)
                = "adamw", "w, w, w, w, scalar, scalar -> w, w, w", Compute, Vector, FirstOperand(15);
            /// `min(1, max_norm / (sqrt(squares) + 1e-6))`.
            ClipFactor {
                /// The largest norm that is left as it is.
                max_norm: f64,
            } = "clip_factor", "scalar -> scalar", Compute, Vector, FirstOperand(15);
        }
    }
}

attributes! {
    /// Constants of AdamW.
    #[derive(Clone, Copy, Debug, PartialEq)]
    pub struct AdamW {
        /// Learning rate.
        pub lr: f64,
        /// Decay of the first moment.
        pub beta1: f64,
        /// Decay of the second moment.
        pub beta2: f64,
        /// Added to the root of the second moment.
        pub eps: f64,
        /// Weight decay; a step multiplies weights by `1 − lr · weight_decay`.
        pub weight_decay: f64,
    }
}
