//! Parts of tensors that kernels and collectives use where they are in the tensor, so that nothing takes them from there or joins
//! them.
//!
//! A part that is taken stays in its tensor, if nothing overwrites the tensor before the last read of the part. Parts that are
//! joined are written in the joined tensor, all of them or none.

use std::collections::BTreeMap;

use ithaca_ir::entity::Entity;
use ithaca_ir::ops::Unit;
use ithaca_ir::schedule::{BufferId, Frame, Operand, Place, Work, reaches_part};
use ithaca_ir::strided::{self, Strided};
use ithaca_ir::{DimId, Op, Part, Space};

use super::arena::UNPLACED;
use super::fold::{is_large, users};

/// The buffer of a part of a tensor, and the part.
type Placed = (BufferId, Part);

/// Puts parts in their tensors, in a frame whose buffers have no offsets yet; returns which tasks nothing needs then.
pub(super) fn fold(frame: &mut Frame, space: &Space) -> Vec<bool> {
    let users = users(frame);
    // For each tensor the dimension that is cut, its runs, and the parts that are inside.
    let mut there: BTreeMap<BufferId, (DimId, u64, Vec<bool>)> = BTreeMap::new();
    let mut folded = vec![false; frame.tasks.len()];
    for (i, is_folded) in folded.iter_mut().enumerate() {
        let (reads, writes) = (&frame.tasks[i].reads, &frame.tasks[i].writes);
        let (whole, parts) = match &frame.tasks[i].work {
            Work::Compute(Op::Take { .. }) => (reads[0], taken(frame, space, &users, i)),
            Work::Compute(Op::Join { .. }) => (writes[0], joined(frame, space, &users, i)),
            _ => continue,
        };
        let Some(parts) = parts else { continue };
        let Part { of, count, runs, .. } = parts[0].1;
        let (dim, own_runs, taken) =
            there.entry(whole).or_insert_with(|| (of, runs, vec![false; count as usize]));
        let is_free = |(_, part): &Placed| taken.get(part.index as usize) == Some(&false);
        if (*dim, *own_runs, taken.len() as u64) != (of, runs, count) || !parts.iter().all(is_free) {
            continue;
        }
        for (buffer, Part { index, .. }) in parts {
            taken[index as usize] = true;
            frame.buffers[buffer].place = Place::Inside { whole, part: index as usize };
        }
        *is_folded = true;
    }
    folded
}

/// The part that a task takes, if all its readers can address it in its tensor.
fn taken(frame: &Frame, space: &Space, users: &[Vec<usize>], take: usize) -> Option<Vec<Placed>> {
    let (whole, part) = (frame.tasks[take].reads[0], frame.tasks[take].writes[0]);
    let (found, strided) = place(frame, space, whole, part)?;
    let (first, readers) = users[part.index()].split_first()?;
    let reads =
        |&i: &usize| !frame.tasks[i].writes.contains(&part) && can_use(frame, space, (i, part), &strided);
    let fits = *first == take && readers.iter().all(reads);
    (fits && stays(frame, whole, (take, *readers.last()?))).then(|| vec![(part, found)])
}

/// The parts that a task joins, if all their makers and readers can address them in the joined tensor.
fn joined(frame: &Frame, space: &Space, users: &[Vec<usize>], join: usize) -> Option<Vec<Placed>> {
    let (parts, whole) = (&frame.tasks[join].reads, frame.tasks[join].writes[0]);
    let is_made_here = |&i: &usize| i == join || !frame.tasks[i].writes.contains(&whole);
    if frame.buffers[whole].place != UNPLACED || !users[whole.index()].iter().all(is_made_here) {
        return None;
    }
    let placed = parts.iter().map(|&part| {
        let (found, strided) = place(frame, space, whole, part)?;
        let once = parts.iter().filter(|&&other| other == part).count() == 1;
        let (maker, readers) = users[part.index()].split_first()?;
        let makes = |i: usize| frame.tasks[i].writes.contains(&part);
        let is_made_once = makes(*maker) && !readers.iter().any(|&i| makes(i));
        let mut others = users[part.index()].iter().filter(|&&i| i != join);
        let fits = others.all(|&i| can_use(frame, space, (i, part), &strided));
        (once && is_made_once && fits).then_some((part, found))
    });
    placed.collect()
}

/// The part of a tensor that a buffer is, and its place there, if the buffer may leave its own.
fn place(frame: &Frame, space: &Space, whole: BufferId, part: BufferId) -> Option<(Part, Strided)> {
    let (of, own) = (frame.buffers[whole].tensor()?, frame.buffers[part].tensor()?);
    let is_free = frame.buffers[part].place == UNPLACED && frame.outputs.iter().all(|o| o.buffer != part);
    let (_, found) = strided::part_of(space, of, own)?;
    let strided = Strided::of_part(space, of, own)?;
    (is_free && own.dtype.is_float() && strided.is_aligned(own.dtype.bytes())).then_some((found, strided))
}

/// Whether a task can use a part in this place, in all its operands.
fn can_use(frame: &Frame, space: &Space, (task, part): (usize, BufferId), strided: &Strided) -> bool {
    let Some(ty) = frame.buffers[part].tensor() else { return false };
    let task = &frame.tasks[task];
    let operands = |buffers: &[BufferId], operand: fn(usize) -> Operand| -> Vec<Operand> {
        (0..buffers.len()).filter(|&n| buffers[n] == part).map(operand).collect()
    };
    let used = [operands(&task.reads, Operand::Read), operands(&task.writes, Operand::Write)].concat();
    let is_product = matches!(&task.work, Work::Compute(op) if op.info().unit == Unit::Matmul);
    (!is_product || is_large(frame, space, task, (ty, strided)))
        && used.into_iter().all(|operand| reaches_part(frame, space, task, operand, (ty, strided)))
}

/// Whether a tensor can contain others, and keeps its elements from one task to another.
fn stays(frame: &Frame, whole: BufferId, (first, last): (usize, usize)) -> bool {
    let place = &frame.buffers[whole].place;
    let overwrites = |b: &BufferId| match (place, &frame.buffers[*b].place) {
        (Place::Argument(i), Place::Result(n)) => i == n,
        (Place::Weight(_), other) => place == other,
        _ => *b == whole,
    };
    let between = &frame.tasks[first + 1..=last];
    match place {
        Place::Weight(_) if between.iter().any(|task| task.work.callee().is_some()) => false,
        Place::Weight(_) | Place::Argument(_) | Place::Result(_) | Place::Frame(_) => {
            !between.iter().flat_map(|task| &task.writes).any(overwrites)
        }
        _ => false,
    }
}
