//! Factor rules: each operation's own file says its rule, this one asks the right file.

use super::{Op, Optimizer, Window, elementwise, linear, norm, parts, repeat};
use crate::dim::DimId;
use crate::rule::{FactorKind, FactorRule};
use crate::types::TensorType;

impl Op {
    /// The factor rule; `None` for operations that have no loop of their own: calls, sources, changes of layout.
    pub fn rule(&self, operands: &[&TensorType], results: &[&TensorType]) -> Option<FactorRule> {
        match self {
            Op::Einsum | Op::Sum => Some(linear::rule_einsum(operands, results[0])),
            Op::Gradient(gradient) => Some(gradient.rule(operands, results)),
            Op::Loss(loss) => Some(loss.rule(operands, results)),
            Op::Optimizer(_) => Some(Optimizer::rule(operands, results)),
            Op::Experts(experts) => Some(experts.rule(operands, results)),
            Op::Window(_) => Some(Window::rule(operands, results[0])),
            Op::Embed { over, .. } => Some(linear::rule_embed(*over, operands, results[0])),
            Op::Unary(_)
            | Op::Binary(_)
            | Op::Scale { .. }
            | Op::Cast { .. }
            | Op::RmsScale { .. }
            | Op::Expand => Some(elementwise::rule(operands, results[0])),
            Op::RmsNorm { over, .. } | Op::LayerNorm { over, .. } => {
                Some(norm::rule(*over, operands, results[0]))
            }
            Op::Softmax { over } => Some(norm::rule(*over, operands, results[0])),
            Op::Random(random) => random.rule(operands, results),
            Op::Rotary(rotary) => Some(norm::rule(rotary.over, operands, results[0])),
            Op::Attention(attention) => Some(attention.rule(operands)),
            Op::Repeat { .. } => Some(repeat::rule(operands)),
            Op::Take { .. } | Op::Join { .. } => Some(parts::rule(operands)),
            Op::Sink | Op::Merge => {
                let dims: Vec<&[DimId]> = results.iter().map(|ty| ty.dims.as_slice()).collect();
                Some(FactorRule::by_name(operands, &dims, |_| FactorKind::Parallel))
            }
            Op::Accumulate => Some(elementwise::rule(operands, results[0])),
            Op::Param(_)
            | Op::Input(_)
            | Op::State(_)
            | Op::Assign { .. }
            | Op::Fill { .. }
            | Op::Positions
            | Op::AttentionBackward(_)
            | Op::MergeParts { .. }
            | Op::Scores { .. }
            | Op::RowLse { .. }
            | Op::Weigh { .. }
            | Op::SumCopies { .. }
            | Op::Call { .. }
            | Op::Reshard
            | Op::AllToAll { .. }
            | Op::AllGather { .. }
            | Op::Slice { .. }
            | Op::ReduceScatter { .. }
            | Op::AllReduce { .. }
            | Op::Permute
            | Op::Fetch { .. }
            | Op::FetchSum { .. }
            | Op::Coalesced(_) => None,
        }
    }
}
