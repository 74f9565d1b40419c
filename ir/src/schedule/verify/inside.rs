//! Tensors in wires: in the wire of one exchange, as its parcel of that number, where all tasks that use them can
//! address them; `S14`.
//!
//! The place of a tensor in the wire follows from the exchange, so nothing else has to agree.

use std::collections::BTreeMap;

use crate::boxes::Side;
use crate::diagnostic::{Diagnostics, MAX_DIAGNOSTICS};
use crate::ops::error::OpError;
use crate::schedule::verify::partner::{in_task, with_users};
use crate::schedule::verify::report::{in_frame, name};
use crate::schedule::{BufferId, Content, Frame, Operand, Place, Schedule, Task, Transfer, Work, reaches};
use crate::strided::{self, Strided, VECTOR};
use crate::text::show::show;

/// A tensor in a wire.
struct Inside<'s> {
    wire: BufferId,
    part: usize,
    side: Side,
    ty: &'s crate::types::TensorType,
    strided: Strided,
}

/// Adds the mistakes in tensors of a frame that are in wires.
pub(super) fn check(schedule: &Schedule, frame: &Frame, found: &mut Diagnostics) {
    let mut inside: BTreeMap<BufferId, Inside<'_>> = BTreeMap::new();
    let mut taken: BTreeMap<(BufferId, usize), BufferId> = BTreeMap::new();
    let carried = carried(frame);
    for (id, buffer) in frame.buffers.iter() {
        let Place::Wire { wire, part } = buffer.place else { continue };
        let placed = place(schedule, frame, (id, wire, part), &carried);
        let placed = placed.and_then(|placed| match taken.insert((wire, part), id) {
            None => Ok(placed),
            Some(other) => {
                let (other, wire) = (name(frame, other), name(frame, wire));
                Err(format!("`${other}` is part {part} of `${wire}` already"))
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
    for (i, task) in frame.tasks.iter().enumerate() {
        if found.len() >= MAX_DIAGNOSTICS {
            return;
        }
        let reads = task.reads.iter().enumerate().map(|(n, &b)| (Operand::Read(n), b));
        let writes = task.writes.iter().enumerate().map(|(n, &b)| (Operand::Write(n), b));
        for (operand, buffer) in reads.chain(writes) {
            let Some(placed) = inside.get(&buffer) else { continue };
            if let Err(message) = used(schedule, frame, task, operand, placed) {
                let message = format!("`${}` lies in a wire, {message}", name(frame, buffer));
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

fn place<'s>(
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
        Ok(Inside { wire, part, side: *side, ty, strided })
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
    placed: &Inside<'_>,
) -> Result<(), String> {
    let wire = name(frame, placed.wire);
    match (&task.work, operand, placed.side) {
        // A tensor at the place it is packed to, or unpacked from, stays there.
        (Work::Pack(_), Operand::Read(n), Side::Sent) if task.writes.contains(&placed.wire) => {
            return its_part(n, placed.part);
        }
        (Work::Unpack(_), Operand::Write(n), Side::Received) if task.reads.first() == Some(&placed.wire) => {
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
