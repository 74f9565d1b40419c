//! Work: FLOPs of arithmetic, bytes of memory, on the busiest rank.

use crate::ops::info::Flops;
use crate::ops::table::cache::Cache;
use crate::ops::table::op::Op;
use crate::ops::table::training::Gradient;
use crate::ops::{elementwise, linear};
use crate::space::Space;
use crate::types::TensorType;

/// The cost of an operation on one rank.
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
        let sum = |types: &[&TensorType]| types.iter().map(|ty| elements(ty)).sum::<u128>();
        let flops = match self.info().flops {
            Flops::Zero => 0,
            Flops::Results(n) => sum(results) * u128::from(n),
            Flops::Operands(n) => sum(operands) * u128::from(n),
            Flops::FirstOperand(n) => elements(operands[0]) * u128::from(n),
            Flops::Largest(n) => {
                let largest = operands.iter().chain(results).map(|ty| elements(ty)).max();
                largest.unwrap_or(0) * u128::from(n)
            }
            Flops::Own => match self {
                Op::Einsum => linear::flops_einsum(space, operands, results[0]),
                Op::AccumulateProduct => linear::flops_einsum(space, &operands[..2], results[0]),
                Op::Attention(attention) => attention.flops(space, operands),
                Op::AttentionBackward(attention) => attention.flops_backward(space, operands),
                Op::AttendPages { attention, pages, slots } => {
                    attention
                        .of_gathered(space, [*pages, *slots], operands, |seen| attention.flops(space, seen))
                }
                // Explicit rows are computed whether the mask keeps them or not.
                Op::Scores { attention, .. } => sum(results) * 2 * u128::from(space.size(attention.width)),
                Op::Weigh { attention, .. } => {
                    let width = space.size(attention.value_width(operands[2]));
                    elements(operands[0]) * (4 + 2 * u128::from(width))
                }
                Op::Gradient(Gradient::Unary(f)) => elements(operands[0]) * elementwise::flops_gradient(*f),
                Op::Fused(fused) => fused.flops(space, operands, results),
                Op::RotateAppend(rotated) => rotated.flops(space, operands),
                Op::Coalesced(members) => match members.first().map(|member| member.info().flops) {
                    Some(Flops::Results(n)) => sum(results) * u128::from(n),
                    Some(_) | None => 0,
                },
                _ => unreachable!("`{}` declares FLOPs of its own, which are missing here", self.name()),
            },
        };
        let bytes = |types: &[&TensorType]| {
            types.iter().map(|ty| u128::from(space.max_local_bytes(ty))).sum::<u128>()
        };
        let bytes = match self {
            Op::Param(_) | Op::Input(_) | Op::State(_) | Op::Call { .. } => 0,
            // Of a table only the rows that occur are read.
            Op::Embed { .. } => linear::bytes_embed(space, operands, results[0]),
            // Of the operand only the result is read.
            Op::Take { .. }
            | Op::Select { .. }
            | Op::Cache(Cache::LastToken { .. } | Cache::GatherPages { .. }) => 2 * bytes(results),
            // Of the cache only the new rows are written.
            Op::Cache(Cache::Append { .. } | Cache::AppendPages { .. }) => {
                2 * u128::from(space.max_local_bytes(operands[1]))
            }
            Op::RotateAppend(rotated) => rotated.bytes(space, operands),
            // Of the pages only the tokens of sequences are read.
            Op::AttendPages { attention, pages, slots } => {
                attention.of_gathered(space, [*pages, *slots], operands, |seen| bytes(seen) + bytes(results))
            }
            _ => bytes(operands) + bytes(results),
        };
        Cost { flops, bytes }
    }
}
