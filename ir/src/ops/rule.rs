//! Factor rules: this file calls the function of the operation's family.

use crate::ops::table::cache::Cache;
use crate::ops::table::op::Op;
use crate::ops::table::window::Window;
use crate::ops::{linear, norm, parts};
use crate::rule::FactorRule;
use crate::types::TensorType;

impl Op {
    /// The factor rule; `None` for operations that have no loop of their own: calls, sources, changes of layout.
    pub fn rule(&self, operands: &[&TensorType], results: &[&TensorType]) -> Option<FactorRule> {
        match self {
            Op::Einsum | Op::AccumulateProduct | Op::Sum | Op::Select { .. } => {
                Some(linear::rule_einsum(operands, results[0]))
            }
            Op::Gradient(gradient) => Some(gradient.rule(operands, results)),
            Op::Fused(fused) => Some(fused.rule(operands, results)),
            Op::Loss(loss) => Some(loss.rule(operands, results)),
            Op::Cache(Cache::Argmax { parts: Some(_), .. }) => None,
            Op::Cache(cache) => Some(cache.rule(operands, results)),
            Op::Experts(experts) => Some(experts.rule(operands, results)),
            Op::Window(_) => Some(Window::rule(operands, results[0])),
            Op::Embed { over, .. } => Some(linear::rule_embed(*over, operands, results[0])),
            Op::Unary(_)
            | Op::Binary(_)
            | Op::Scale { .. }
            | Op::Clamp { .. }
            | Op::Cast { .. }
            | Op::RmsScale { .. }
            | Op::Expand
            | Op::Accumulate
            | Op::Sink
            | Op::Merge
            | Op::Optimizer(_) => Some(FactorRule::parallel(operands, results)),
            Op::RmsNorm { over, .. } | Op::LayerNorm { over, .. } | Op::Softmax { over } => {
                Some(norm::rule(*over, operands, results[0]))
            }
            Op::Random(random) => random.rule(operands, results),
            Op::Rotary(rotary) => Some(norm::rule(rotary.over, operands, results[0])),
            Op::Attention(attention) => Some(attention.rule(operands)),
            Op::Repeat { .. } | Op::Take { .. } | Op::Join { .. } => Some(parts::rule(operands)),
            _ => None,
        }
    }
}
