//! Work: FLOPs of arithmetic, bytes of memory, on the busiest rank.

use super::{Loss, Op, Random, linear};
use crate::space::Space;
use crate::types::TensorType;

/// What an operation costs on one rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cost {
    /// Floating-point operations.
    pub flops: u128,
    /// Bytes read and written.
    pub bytes: u128,
}

impl Op {
    /// Work and traffic of the operation on the busiest rank, the bytes of collectives on the wire left out.
    pub fn cost(&self, space: &Space, operands: &[&TensorType], results: &[&TensorType]) -> Cost {
        let elements = |ty: &TensorType| u128::from(space.max_local_elements(ty));
        let per_element = |n: u128| results.iter().map(|ty| elements(ty) * n).sum();
        let flops = match self {
            Op::Einsum => linear::flops_einsum(space, operands, results[0]),
            Op::Attention(attention) => attention.flops(space, operands),
            Op::AttentionBackward(attention) => attention.flops_backward(space, operands),
            Op::SumCopies { .. } | Op::Sum => operands.iter().map(|ty| elements(ty)).sum(),
            Op::Gradient(g) => elements(operands[0]) * g.flops(),
            Op::Loss(Loss::CrossEntropy { .. }) => elements(operands[0]) * 5,
            Op::Loss(Loss::Pick { .. } | Loss::Valid { .. })
            | Op::Assign { .. }
            | Op::Fill { .. }
            | Op::State(_) => 0,
            Op::Optimizer(_) => elements(operands[0]) * 15,
            Op::Experts(e) => {
                operands.iter().chain(results).map(|ty| elements(ty)).max().unwrap_or(0) * e.flops()
            }
            Op::Coalesced(members) => match members.first() {
                Some(Op::ReduceScatter { .. } | Op::AllReduce { .. }) => per_element(1),
                Some(_) | None => 0,
            },
            Op::Merge => per_element(4),
            Op::MergeParts { .. } | Op::RowLse { .. } => operands.iter().map(|ty| elements(ty) * 4).sum(),
            Op::Sink => per_element(2),
            Op::Scores { attention, .. } => {
                // Explicit rows are computed whether the mask keeps them or not.
                per_element(2) * u128::from(space.size(attention.width))
            }
            Op::Weigh { attention, .. } => {
                elements(operands[0]) * (4 + 2 * u128::from(space.size(attention.value_width(operands[2]))))
            }
            Op::Unary(f) => per_element(f.flops()),
            Op::Binary(_)
            | Op::Scale { .. }
            | Op::Accumulate
            | Op::ReduceScatter { .. }
            | Op::AllReduce { .. }
            | Op::FetchSum { .. } => per_element(1),
            Op::RmsNorm { .. } => per_element(4),
            Op::RmsScale { .. } => per_element(2),
            Op::LayerNorm { .. } => per_element(6),
            Op::Softmax { .. } => per_element(5),
            Op::Random(Random::Dropout { .. }) => per_element(2),
            Op::Random(
                Random::Key { .. } | Random::FoldIn | Random::LayerKey | Random::DropoutMask { .. },
            ) => 0,
            Op::Rotary(_) => per_element(3),
            Op::Param(_)
            | Op::Input(_)
            | Op::Positions
            | Op::Embed { .. }
            | Op::Cast { .. }
            | Op::Expand
            | Op::Repeat { .. }
            | Op::Take { .. }
            | Op::Join { .. }
            | Op::Window(_)
            | Op::Call { .. }
            | Op::Reshard
            | Op::AllToAll { .. }
            | Op::AllGather { .. }
            | Op::Slice { .. }
            | Op::Permute
            | Op::Fetch { .. } => 0,
        };
        let bytes = match self {
            Op::Param(_) | Op::Input(_) | Op::State(_) | Op::Call { .. } => 0,
            // A table is read only where it is asked.
            Op::Embed { .. } => linear::bytes_embed(space, operands, results[0]),
            // Of the operand only the part is read.
            Op::Take { .. } => {
                2 * results.iter().map(|ty| u128::from(space.max_local_bytes(ty))).sum::<u128>()
            }
            _ => operands.iter().chain(results).map(|ty| u128::from(space.max_local_bytes(ty))).sum(),
        };
        Cost { flops, bytes }
    }
}
