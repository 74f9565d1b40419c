//! States: tensors that a step reads and writes, beside weights and inputs.
//!
//! Gradients, moments of an optimizer and master weights are *states*: zero before the first step, kept from step to step,
//! and known by a name as weights are. `assign` writes a state or a weight; every later read sees the new value.

use smallvec::smallvec;

use crate::dtype::DType;
use crate::ops::check::only;
use crate::ops::context::Types;
use crate::ops::error::{OpError, bail};
use crate::ops::source;
use crate::ops::table::cache::Cache;
use crate::ops::table::fused::Fused;
use crate::ops::table::op::Op;
use crate::ops::table::random::Random;
use crate::ops::table::source::Binding;
use crate::ops::table::training::Optimizer;
use crate::space::Space;
use crate::types::TensorType;

pub use crate::ops::table::source::Target;

/// The prefix of the names of gradients: that of `w` is `grad.w`.
pub const GRADIENT: &str = "grad.";
/// The prefix of the sum of a gradient's contributions but the last: that of `grad.w` is `sum.grad.w`. It is read within
/// a step only.
pub const SUM: &str = "sum.";
/// The prefix of the names of an optimizer's states.
pub const OPTIMIZER: &str = "optimizer.";
/// The prefix of the names of first moments.
pub const FIRST_MOMENT: &str = "optimizer.exp_avg.";
/// The prefix of the names of second moments.
pub const SECOND_MOMENT: &str = "optimizer.exp_avg_sq.";
/// The prefix of the names of weights in full precision.
pub const MASTER: &str = "optimizer.master.";
/// The name of the count of steps, a scalar.
pub const STEP: &str = "optimizer.step";

/// The prefix of a state that a pipeline stage keeps where another stage updates the weight.
pub fn of_stage(stage: u64) -> String {
    format!("stage{stage}.")
}

/// Whether `name` is that of a gradient or of its sum, whichever stage of a pipeline keeps it.
pub fn is_gradient(name: &str) -> bool {
    let name = name.strip_prefix(SUM).unwrap_or(name);
    let after = name.strip_prefix("stage").map(|rest| rest.trim_start_matches(|c: char| c.is_ascii_digit()));
    after.and_then(|rest| rest.strip_prefix('.')).unwrap_or(name).starts_with(GRADIENT)
}

/// The gradient of which `name` is the sum; `None` for another name.
pub fn gradient_of_sum(name: &str) -> Option<&str> {
    name.strip_prefix(SUM).filter(|gradient| is_gradient(gradient))
}

/// Whether a kernel may write a result where it reads this operand, of the same elements: it reads element i of the
/// operand before it writes element i of any result.
pub fn works_in_place(op: &Op, operand: usize) -> bool {
    matches!(
        op,
        Op::Unary(_)
            | Op::Binary(_)
            | Op::Accumulate
            | Op::Scale { .. }
            | Op::Clamp { .. }
            | Op::Cast { .. }
            | Op::Fused(Fused::Gated { .. })
            | Op::Random(Random::Dropout { .. })
            | Op::Optimizer(Optimizer::AdamW(_))
    ) || (*op == Op::AccumulateProduct && operand == 2)
        || matches!(
            (op, operand),
            (Op::Cache(Cache::Append { .. }), 0 | 4)
                | (Op::Cache(Cache::AppendPages { .. }), 0 | 5)
                | (Op::RotateAppend(_), 0 | 1)
        )
}

pub(super) fn infer_state(
    binding: &Binding,
    space: &Space,
    declared: &[TensorType],
) -> Result<Types, OpError> {
    let op = Op::State(binding.clone());
    only("state", declared)?;
    source::infer(&op, binding, space, declared)
}

pub(super) fn infer_assign(
    binding: &Binding,
    target: Target,
    space: &Space,
    x: &TensorType,
) -> Result<Types, OpError> {
    let is_pending = !x.layout.partial.is_empty() && gradient_of_sum(&binding.name).is_none();
    if is_pending || !x.layout.moved.is_empty() {
        bail!("V11", "`assign` writes `{}` whole and at home, not a sum still to be taken", binding.name);
    }
    let op = Op::Assign { target, binding: binding.clone() };
    source::infer(&op, binding, space, std::slice::from_ref(x))?;
    Ok(smallvec![])
}

pub(super) fn infer_fill(declared: &[TensorType]) -> Result<Types, OpError> {
    let ty = only("fill", declared)?;
    match ty.dtype {
        DType::I32 | DType::Bool => Err(OpError::new("V04", "`fill` makes real numbers")),
        DType::F64 | DType::F32 | DType::F16 | DType::BF16 | DType::F8E4M3 => Ok(smallvec![ty.clone()]),
    }
}
