//! How many results an operation has.

use super::{Gradient, Loss, Op, Optimizer, Returns};

impl Op {
    /// How many tensors a computation gives, or writes where it is a task. Calls and messages have as many as they are
    /// given; of these it says one.
    pub fn n_results(&self) -> usize {
        match self {
            Op::Attention(a) if a.returns != Returns::Output => 2,
            Op::Merge | Op::MergeParts { .. } | Op::Sink => 2,
            Op::Experts(e) => e.n_results(),
            Op::AttentionBackward(a) => 3 + usize::from(a.bias.is_some()),
            Op::Gradient(Gradient::RmsNorm { .. }) | Op::Loss(Loss::CrossEntropy { .. }) => 2,
            Op::Gradient(Gradient::RmsScale { .. } | Gradient::LayerNorm { .. } | Gradient::Sink)
            | Op::Optimizer(Optimizer::AdamW(_)) => 3,
            _ => 1,
        }
    }
}
