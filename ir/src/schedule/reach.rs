//! The tasks that can use a tensor in a wire, or in another tensor.
//!
//! A tensor that is dense there is one like any other. Where a dimension is cut into blocks, a kernel must be told two
//! strides along it: those of attention, rotary embeddings, products and
//! parts of dimensions are, as far as stands here. Lowering asks before it
//! puts a tensor in a wire, the verifier asks again, and the runtimes rely on it.

use crate::boxes::Side;
use crate::dim::DimId;
use crate::message::{self, RunPlaces};
use crate::ops::table::fused::Fused;
use crate::ops::table::op::Op;
use crate::schedule::{BufferId, Content, Frame, Place, Task, Work};
use crate::space::Space;
use crate::strided::{Cut, Strided};
use crate::types::TensorType;

/// An operand or a result of a task, by number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operand {
    /// Something read.
    Read(usize),
    /// Something written.
    Write(usize),
}

/// Whether a task can use an operand of this type at this place.
pub fn reaches(
    frame: &Frame,
    space: &Space,
    task: &Task,
    operand: Operand,
    (ty, strided): (&TensorType, &Strided),
) -> bool {
    match (&task.work, strided.cut) {
        (Work::Compute(_) | Work::Copy, None) => true,
        (Work::Compute(op), Some(cut)) => {
            let behind = ty.dims.len().saturating_sub(cut.place);
            match (op, operand) {
                // Tokens or heads, which come before the width.
                (Op::Attention(_), Operand::Read(0..=2) | Operand::Write(0))
                | (Op::AttentionBackward(_), Operand::Read(0..=3) | Operand::Write(0..=2)) => {
                    behind == 2 || behind == 3
                }
                (Op::Rotary(rotary), Operand::Read(0) | Operand::Write(0)) => {
                    let other = match operand {
                        Operand::Read(_) => task.writes.first(),
                        Operand::Write(_) => task.reads.first(),
                    };
                    // After the cut elements are dense.
                    let is_behind = ty.position(rotary.over).is_some_and(|over| cut.place < over);
                    is_behind && other.is_some_and(|&b| !is_cut(frame, space, b))
                }
                (Op::Einsum | Op::Fused(Fused::BiasProduct { .. }), Operand::Write(0)) => {
                    task.reads.iter().all(|&b| !is_cut(frame, space, b))
                }
                // A part of a dimension goes in runs, which are cut as the blocks are.
                (Op::Take { to }, Operand::Write(0)) | (Op::Join { to }, Operand::Read(_)) => {
                    let other = match operand {
                        Operand::Read(_) => task.writes.first(),
                        Operand::Write(_) => task.reads.first(),
                    };
                    let place = match op {
                        Op::Join { .. } => other.and_then(|&b| position(frame, b, *to)),
                        _ => ty.position(*to),
                    };
                    other.is_some_and(|&b| !is_cut(frame, space, b))
                        && place.is_some_and(|place| place != cut.place || runs_fit(space, ty, &cut))
                }
                _ => false,
            }
        }
        (Work::Copy | Work::Pack(_) | Work::Exchange(_) | Work::Unpack(_) | Work::Call { .. }, _) => false,
    }
}

/// As [`reaches`], of a tensor that is a part of another. A collective takes it as it takes a tensor that is dense; one that sends
/// filled rows only sends and receives the blocks of its members wherever they are.
pub fn reaches_part(
    frame: &Frame,
    space: &Space,
    task: &Task,
    operand: Operand,
    (ty, strided): (&TensorType, &Strided),
) -> bool {
    let Work::Exchange(transfer) = &task.work else {
        return reaches(frame, space, task, operand, (ty, strided));
    };
    let Some(cut) = strided.cut else { return true };
    let (side, blocks) = match (operand, transfer.only().map(|parcel| &parcel.op)) {
        (Operand::Read(_), Some(Op::AllToAll { split, .. })) => (Side::Sent, ty.position(*split)),
        (Operand::Write(_), Some(Op::AllToAll { concat, .. })) => (Side::Received, ty.position(*concat)),
        _ => return false,
    };
    let parcel = transfer.only().filter(|_| message::runs_lie_in_tensor(space, transfer.parcels(), side));
    blocks == Some(cut.place)
        && parcel.is_some_and(|parcel| {
            RunPlaces::in_tensor(space, parcel, side, Some([cut.len, cut.stride])).is_some()
        })
}

/// The place of a dimension in the tensor of a buffer.
fn position(frame: &Frame, buffer: BufferId, dim: DimId) -> Option<usize> {
    match &frame.buffers.get(buffer)?.content {
        Content::Tensor(ty) => ty.position(dim),
        Content::Wire { .. } => None,
    }
}

/// Whether the blocks of a dimension that is part of another are whole runs of it, or its runs whole blocks.
fn runs_fit(space: &Space, ty: &TensorType, cut: &Cut) -> bool {
    let dim = ty.dims[cut.place];
    let Some(part) = space.dims[dim].part else { return false };
    let run = space.size(dim) / part.runs.max(1);
    run > 0 && (cut.len.is_multiple_of(run) || run.is_multiple_of(cut.len.max(1)))
}

/// Whether a buffer is in another, with a dimension cut into blocks.
fn is_cut(frame: &Frame, space: &Space, buffer: BufferId) -> bool {
    let Some(found) = frame.buffers.get(buffer) else { return false };
    let is_inside = matches!((&found.content, &found.place), (Content::Tensor(_), Place::Inside { .. }));
    is_inside && frame.strided(space, buffer).is_none_or(|strided| strided.cut.is_some())
}
