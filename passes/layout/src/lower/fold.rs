//! Tensors that kernels write where they are sent from, and read where they were received, so that nothing packs or
//! unpacks them.
//!
//! A sent tensor is placed in the wire if one kernel makes it and can write it there, and only the message reads it.
//! A received tensor stays in the wire if all its readers can read it there. As long as one tensor is needed all of its
//! wire is held, so of a message that was received more is left in place than is unpacked, or none.

use ithaca_ir::boxes::Side;
use ithaca_ir::entity::Entity;
use ithaca_ir::ops::Unit;
use ithaca_ir::schedule::{BufferId, Content, Frame, Operand, Place, Task, Transfer, Work, reaches};
use ithaca_ir::strided::Strided;
use ithaca_ir::{Space, TensorType};

use super::arena::UNPLACED;

/// Folds packing and unpacking, in a frame whose buffers have no offsets yet, and of which `folded` tasks are not needed.
pub(super) fn fold(frame: &mut Frame, space: &Space, mut folded: Vec<bool>) {
    let users = users(frame);
    for exchange in 0..frame.tasks.len() {
        let task = &frame.tasks[exchange];
        let (Work::Exchange(transfer), &[from], &[to]) = (&task.work, &*task.reads, &*task.writes) else {
            continue;
        };
        let transfer = transfer.clone();
        if let Some(pack) = packing(frame, &users[from.index()], exchange) {
            folded[pack] = sent(frame, space, &users, (from, pack), &transfer);
        }
        if let Some(unpack) = unpacking(frame, &users[to.index()], to) {
            folded[unpack] = received(frame, space, &users, (to, unpack), &transfer);
        }
    }
    let mut number = 0;
    frame.tasks.retain(|_| {
        number += 1;
        !folded[number - 1]
    });
}

/// The task that packs a wire which one exchange sends, if nothing else uses it.
fn packing(frame: &Frame, users: &[usize], exchange: usize) -> Option<usize> {
    let &[pack, sent] = users else { return None };
    (sent == exchange && matches!(frame.tasks[pack].work, Work::Pack(_))).then_some(pack)
}

/// The task that unpacks a wire, if nothing but the exchange uses it beside.
fn unpacking(frame: &Frame, users: &[usize], wire: BufferId) -> Option<usize> {
    let &[_, unpack] = users else { return None };
    let is_unpack = matches!(frame.tasks[unpack].work, Work::Unpack(_));
    (is_unpack && frame.tasks[unpack].reads == [wire]).then_some(unpack)
}

/// For each buffer the tasks that read or write it, in order.
pub(super) fn users(frame: &Frame) -> Vec<Vec<usize>> {
    let mut users: Vec<Vec<usize>> = vec![Vec::new(); frame.buffers.len()];
    for (i, task) in frame.tasks.iter().enumerate() {
        for buffer in task.reads.iter().chain(&task.writes) {
            let of = &mut users[buffer.index()];
            if of.last() != Some(&i) {
                of.push(i);
            }
        }
    }
    users
}

/// The place of a buffer in a wire, if it may leave its place in the frame.
fn in_wire(
    frame: &Frame,
    space: &Space,
    buffer: BufferId,
    (transfer, side, part): (&Transfer, Side, usize),
) -> Option<Strided> {
    let found = &frame.buffers[buffer];
    let Content::Tensor(ty) = &found.content else { return None };
    let strided = Strided::of(space, transfer.parcels(), side, part)?;
    let contains = |b: BufferId| b != buffer && frame.holder(b) == buffer;
    let is_free = found.place == UNPLACED
        && frame.outputs.iter().all(|output| output.buffer != buffer)
        && !frame.buffers.ids().any(contains);
    (is_free && strided.is_aligned(ty.dtype.bytes())).then_some(strided)
}

/// Whether a task can use a buffer in this place, in all its operands.
fn can_use(frame: &Frame, space: &Space, task: usize, buffer: BufferId, strided: &Strided) -> bool {
    let Content::Tensor(ty) = &frame.buffers[buffer].content else { return false };
    let task = &frame.tasks[task];
    let reads = task.reads.iter().enumerate().filter(|(_, b)| **b == buffer).map(|(n, _)| Operand::Read(n));
    let writes =
        task.writes.iter().enumerate().filter(|(_, b)| **b == buffer).map(|(n, _)| Operand::Write(n));
    let is_product = matches!(&task.work, Work::Compute(op) if op.info().unit == Unit::Matmul);
    let stays_large = !is_product || is_large(frame, space, task, (ty, strided));
    stays_large && reads.chain(writes).all(|operand| reaches(frame, space, task, operand, (ty, strided)))
}

/// Whether a matrix product that is cut with its result is one batch of products that are large enough for the tiles of a
/// device: of the rows, or columns, that are cut none are looped over outside of the blocks, and a block has enough.
pub(super) fn is_large(
    frame: &Frame,
    space: &Space,
    task: &Task,
    (ty, strided): (&TensorType, &Strided),
) -> bool {
    const LEAST: u64 = 64;
    let Some(cut) = strided.cut else { return true };
    let has = |b: &BufferId, dim| match &frame.buffers[*b].content {
        Content::Tensor(ty) => ty.has(dim),
        Content::Wire { .. } => false,
    };
    let factors = || task.reads.iter().take(2);
    let alike = |d: usize| factors().all(|b| has(b, ty.dims[d]) == has(b, ty.dims[cut.place]));
    let shape = space.max_local_shape(ty);
    let of = |places: std::ops::Range<usize>| places.filter(|&d| alike(d)).map(|d| shape[d]).product::<u64>();
    of(0..cut.place) == 1 && cut.len * of(cut.place + 1..shape.len()) >= LEAST
}

/// Places the tensors that a message sends in its wire; returns whether all are there.
fn sent(
    frame: &mut Frame,
    space: &Space,
    users: &[Vec<usize>],
    (wire, pack): (BufferId, usize),
    transfer: &Transfer,
) -> bool {
    let tensors = frame.tasks[pack].reads.clone();
    for (part, &buffer) in tensors.iter().enumerate() {
        let Some(strided) = in_wire(frame, space, buffer, (transfer, Side::Sent, part)) else { continue };
        let once = tensors.iter().filter(|b| **b == buffer).count() == 1;
        let made = match &*users[buffer.index()] {
            &[maker, packed] if packed == pack && once => {
                frame.tasks[maker].writes.contains(&buffer) && can_use(frame, space, maker, buffer, &strided)
            }
            _ => false,
        };
        if made {
            frame.buffers[buffer].place = Place::Inside { whole: wire, part };
        }
    }
    tensors.iter().all(|&b| frame.holder(b) == wire)
}

/// Leaves received tensors in the wire, most of them or none; returns whether all are there.
fn received(
    frame: &mut Frame,
    space: &Space,
    users: &[Vec<usize>],
    (wire, unpack): (BufferId, usize),
    transfer: &Transfer,
) -> bool {
    let tensors = frame.tasks[unpack].writes.clone();
    let stays = |part: usize, buffer: BufferId| {
        let strided = in_wire(frame, space, buffer, (transfer, Side::Received, part))?;
        let only_reads = |&i: &usize| !frame.tasks[i].writes.contains(&buffer);
        let mut readers = users[buffer.index()].iter().filter(|&&i| i != unpack);
        let fits = readers.all(|i| only_reads(i) && can_use(frame, space, *i, buffer, &strided));
        fits.then_some((buffer, part))
    };
    let staying: Vec<(BufferId, usize)> =
        tensors.iter().enumerate().filter_map(|(part, &buffer)| stays(part, buffer)).collect();
    let elements = |buffers: &mut dyn Iterator<Item = BufferId>| -> u64 {
        buffers.map(|b| frame.buffers[b].bytes(space)).sum()
    };
    let (left, all) =
        (elements(&mut staying.iter().map(|(b, _)| *b)), elements(&mut tensors.iter().copied()));
    if 2 * left <= all {
        return false;
    }
    for &(buffer, part) in &staying {
        frame.buffers[buffer].place = Place::Inside { whole: wire, part };
    }
    staying.len() == tensors.len()
}
