//! Tensors in other buffers: in the wire of one exchange, as its parcel of that number, or in a tensor, as that part of its first
//! dimension, where all tasks that use them can address them; `S14`.
//!
//! The place of a tensor in the wire follows from the exchange, and that of a part from its dimension, so nothing else has to
//! agree. A tensor that has parts is written either by part or whole.

use std::collections::{BTreeMap, BTreeSet};

use crate::boxes::Side;
use crate::diagnostic::{Diagnostics, MAX_DIAGNOSTICS};
use crate::ops::error::OpError;
use crate::schedule::verify::partner::{in_task, with_users};
use crate::schedule::verify::report::{in_frame, name};
use crate::schedule::{
    BufferId, Content, Frame, Operand, Place, Schedule, Task, Transfer, Work, reaches, reaches_part,
};
use crate::strided::{self, Strided, VECTOR};
use crate::text::show::show;

/// A tensor in a wire, or in a tensor.
struct Inside<'s> {
    whole: BufferId,
    part: usize,
    /// The side of the exchange whose wire it is.
    side: Option<Side>,
    ty: &'s crate::types::TensorType,
    strided: Strided,
}

/// Adds the mistakes in tensors of a frame that are in other buffers.
pub(super) fn check(schedule: &Schedule, frame: &Frame, found: &mut Diagnostics) {
    let mut inside: BTreeMap<BufferId, Inside<'_>> = BTreeMap::new();
    let mut taken: BTreeMap<(BufferId, usize), BufferId> = BTreeMap::new();
    let carried = carried(frame);
    for (id, buffer) in frame.buffers.iter() {
        let Place::Inside { whole, part } = buffer.place else { continue };
        let placed = match frame.buffers[whole].content {
            Content::Wire { .. } => in_wire(schedule, frame, (id, whole, part), &carried),
            Content::Tensor(_) => in_tensor(schedule, frame, (id, whole, part)),
        };
        let placed = placed.and_then(|placed| match taken.insert((whole, part), id) {
            None => Ok(placed),
            Some(other) => {
                let (other, whole) = (name(frame, other), name(frame, whole));
                Err(format!("`${other}` is part {part} of `${whole}` already"))
            }
        });
        match placed {
            Ok(placed) => drop(inside.insert(id, placed)),
            Err(message) => {
                let message = format!("buffer `${}`: {message}", buffer.name);
                let message = with_users(frame, id, &message);
                found.push(in_frame(frame, OpError::new("S14", message)));
            }
        }
    }
    if inside.is_empty() {
        return;
    }
    let written: BTreeSet<BufferId> = frame.tasks.iter().flat_map(|task| &task.writes).copied().collect();
    for (i, task) in frame.tasks.iter().enumerate() {
        if found.len() >= MAX_DIAGNOSTICS {
            return;
        }
        let reads = task.reads.iter().enumerate().map(|(n, &b)| (Operand::Read(n), b));
        let writes = task.writes.iter().enumerate().map(|(n, &b)| (Operand::Write(n), b));
        for (operand, buffer) in reads.chain(writes) {
            let Some(placed) = inside.get(&buffer) else { continue };
            let used = match placed.side {
                Some(side) => used(schedule, frame, task, operand, (placed, side)),
                None => used_part(schedule, frame, task, operand, (placed, &written)),
            };
            if let Err(message) = used {
                let within = if placed.side.is_some() { "a wire" } else { "another tensor" };
                let message = format!("`${}` lies in {within}, {message}", name(frame, buffer));
                found.push(in_task(frame, i, OpError::new("S14", message)));
            }
        }
    }
}

/// For each wire the exchanges that have it.
fn carried(frame: &Frame) -> BTreeMap<BufferId, Vec<(&Transfer, Side)>> {
    let mut carried: BTreeMap<BufferId, Vec<(&Transfer, Side)>> = BTreeMap::new();
    for task in &frame.tasks {
        let Work::Exchange(transfer) = &task.work else { continue };
        for (buffers, side) in [(&task.reads, Side::Sent), (&task.writes, Side::Received)] {
            buffers.iter().for_each(|&b| carried.entry(b).or_default().push((transfer, side)));
        }
    }
    carried
}

/// A tensor as a part of another.
fn in_tensor<'s>(
    schedule: &Schedule,
    frame: &'s Frame,
    (id, whole, part): (BufferId, BufferId, usize),
) -> Result<Inside<'s>, String> {
    let space = &schedule.space;
    let shown = name(frame, whole);
    let (Content::Tensor(ty), Content::Tensor(of)) =
        (&frame.buffers[id].content, &frame.buffers[whole].content)
    else {
        return Err("blocks lie in a tensor".to_owned());
    };
    let declared = strided::part_of(space, of, ty).map(|(_, declared)| declared.index);
    if declared != Some(part as u64) {
        let (of, ty) = (show(space, of), show(space, ty));
        return Err(format!("{ty} is not part {part} of a dimension of `${shown}`, {of}"));
    }
    let parts = frame.buffers.ids().filter(|&b| b != id && b != whole && frame.holder(b) == whole);
    let mut dims = parts.filter_map(|b| frame.buffers[b].tensor());
    let dim = |ty| strided::part_of(space, of, ty).map(|(place, part)| (place, part.count, part.runs));
    if dims.any(|other| dim(other) != dim(ty)) {
        return Err(format!("`${shown}` has parts of another dimension, or of another number"));
    }
    let strided = Strided::of_part(space, of, ty)
        .ok_or_else(|| format!("part {part} of `${shown}` does not lie there in equal blocks"))?;
    if strided.is_aligned(ty.dtype.bytes()) {
        Ok(Inside { whole, part, side: None, ty, strided })
    } else {
        Err(format!("part {part} of `${shown}` does not begin at multiples of {VECTOR} bytes"))
    }
}

fn used_part(
    schedule: &Schedule,
    frame: &Frame,
    task: &Task,
    operand: Operand,
    (placed, written): (&Inside<'_>, &BTreeSet<BufferId>),
) -> Result<(), String> {
    let whole = name(frame, placed.whole);
    if let Operand::Write(_) = operand {
        if written.contains(&placed.whole) {
            return Err(format!("and `${whole}` is written whole"));
        }
        if !matches!(frame.buffers[placed.whole].place, Place::Frame(_)) {
            return Err(format!("and `${whole}` is not the frame's to write"));
        }
    }
    if reaches_part(frame, &schedule.space, task, operand, (placed.ty, &placed.strided)) {
        Ok(())
    } else {
        Err(format!("where this task does not address it: `${whole}`"))
    }
}

fn in_wire<'s>(
    schedule: &Schedule,
    frame: &'s Frame,
    (id, wire, part): (BufferId, BufferId, usize),
    carried: &BTreeMap<BufferId, Vec<(&'s Transfer, Side)>>,
) -> Result<Inside<'s>, String> {
    let space = &schedule.space;
    let Content::Tensor(ty) = &frame.buffers[id].content else {
        return Err("blocks lie in a wire".to_owned());
    };
    let shown = name(frame, wire);
    let [(transfer, side)] = carried.get(&wire).map_or(&[][..], Vec::as_slice) else {
        return Err(format!("`${shown}` is not the wire of one exchange"));
    };
    let Some(parcel) = transfer.parcels().get(part) else {
        return Err(format!("`${shown}` has {} parts, and no part {part}", transfer.parcels().len()));
    };
    let carried = strided::end(parcel, *side);
    if *carried != **ty {
        let (carried, ty) = (show(space, carried), show(space, ty));
        return Err(format!("part {part} of `${shown}` is {carried}, not {ty}"));
    }
    let strided = Strided::of(space, transfer.parcels(), *side, part)
        .ok_or_else(|| format!("part {part} of `${shown}` is not cut into equal blocks"))?;
    if strided.is_aligned(ty.dtype.bytes()) {
        Ok(Inside { whole: wire, part, side: Some(*side), ty, strided })
    } else {
        Err(format!("part {part} of `${shown}` does not begin at multiples of {VECTOR} bytes"))
    }
}

fn its_part(number: usize, part: usize) -> Result<(), String> {
    if number == part {
        Ok(())
    } else {
        Err(format!("as part {part}, and it is tensor {number} of the message"))
    }
}

fn used(
    schedule: &Schedule,
    frame: &Frame,
    task: &Task,
    operand: Operand,
    (placed, side): (&Inside<'_>, Side),
) -> Result<(), String> {
    let wire = name(frame, placed.whole);
    match (&task.work, operand, side) {
        // A tensor at the place it is packed to, or unpacked from, stays there.
        (Work::Pack(_), Operand::Read(n), Side::Sent) if task.writes.contains(&placed.whole) => {
            return its_part(n, placed.part);
        }
        (Work::Unpack(_), Operand::Write(n), Side::Received) if task.reads.first() == Some(&placed.whole) => {
            return its_part(n, placed.part);
        }
        (_, Operand::Write(_), Side::Received) => {
            return Err(format!("and only the exchange writes what is received in `${wire}`"));
        }
        _ => {}
    }
    if reaches(frame, &schedule.space, task, operand, (placed.ty, &placed.strided)) {
        Ok(())
    } else {
        Err(format!("where this task does not address it: `${wire}`"))
    }
}
