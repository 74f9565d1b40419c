//! The number of results of an operation.

use crate::ops::table::attention::Returns;
use crate::ops::table::op::Op;

impl Op {
    /// The number of tensors that a computation gives, or writes where it is a task. Calls and messages have as many as
    /// their operands; one for them.
    pub fn n_results(&self) -> usize {
        match self {
            Op::Attention(a) | Op::AttendPages { attention: a, .. } if a.returns != Returns::Output => 2,
            Op::RotateAppend(rotated) if rotated.queries => 3,
            Op::AttentionBackward(a) if a.bias.is_some() => 4,
            Op::Coalesced(_) => 1,
            op => op.info().results.max(1),
        }
    }
}
