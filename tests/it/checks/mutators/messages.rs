//! Ways to break messages: their ranks, their dimensions, their tensors and the wires that these lie in.

use ithaca_ir::Op;
use ithaca_ir::message::Parcel;
use ithaca_ir::schedule::{BufferId, Content, Frame, FrameId, Place, Schedule, Task, Transfer, Work};

use super::{Mutant, buffer, change_parcel, is_exchange, task, transfer, transfer_mut};
use crate::fuzz::Choices;

/// A permute whose parts go round by something that has a reverse.
fn ring(schedule: &Schedule, choices: &mut Choices) -> Option<(FrameId, usize)> {
    task(schedule, choices, |_, t| {
        let moves = |t: &Transfer| {
            let reversed =
                |m: &ithaca_ir::layout::Move| 2 * m.by != schedule.space.mesh.size(m.axis) && m.by > 0;
            t.first().to.layout.moved.iter().any(reversed)
        };
        is_exchange(t) && transfer(t).is_some_and(moves)
    })
}

fn reverse(transfer: &Transfer, schedule: &Schedule) -> Transfer {
    let mut parcels = transfer.parcels().to_vec();
    for m in parcels.iter_mut().flat_map(|parcel| &mut parcel.to.layout.moved) {
        let n = schedule.space.mesh.size(m.axis);
        m.by = (n - m.by) % n;
    }
    Transfer::of(parcels).expect("there are as many as before")
}

pub(super) fn reverse_permute(schedule: &Schedule, choices: &mut Choices) -> Option<Mutant> {
    let (frame, i) = ring(schedule, choices)?;
    Mutant::of(schedule, frame, |f| {
        if let Work::Exchange(t) = &mut f.tasks[i].work {
            *t = reverse(t, schedule);
        }
    })
}

/// Of several tensors, all tasks that have to do with the message, and all that it is unpacked to.
pub(super) fn reverse_permute_and_buffer(schedule: &Schedule, choices: &mut Choices) -> Option<Mutant> {
    let (frame, i) = ring(schedule, choices)?;
    let was = transfer(&schedule.frames[frame].tasks[i])?.clone();
    let reversed = reverse(&was, schedule);
    Mutant::of(schedule, frame, |f| {
        for j in 0..f.tasks.len() {
            let task = &mut f.tasks[j];
            let concerned = match was.only() {
                Some(_) => j == i,
                None => transfer(task) == Some(&was),
            };
            if !concerned {
                continue;
            }
            if let Some(t) = transfer_mut(task) {
                *t = reversed.clone();
            }
            let written = f.tasks[j].writes.clone();
            for (b, parcel) in written.into_iter().zip(reversed.parcels()) {
                if let Content::Tensor(ty) = &mut f.buffers[b].content {
                    *ty = parcel.to.clone().into();
                }
            }
        }
    })
}

pub(super) fn change_axis(schedule: &Schedule, choices: &mut Choices) -> Option<Mutant> {
    let mesh = &schedule.space.mesh;
    let (frame, i) = task(schedule, choices, |_, t| transfer(t).is_some() && mesh.axes.len() > 1)?;
    let n = choices.below(mesh.axes.len() - 1);
    let other = |axis| mesh.axes.ids().filter(|a| *a != axis).nth(n).expect("there are more axes");
    let which = choices.below(64);
    Mutant::of(schedule, frame, |f| {
        change_parcel(&mut f.tasks[i], which, |parcel| match &mut parcel.op {
            Op::AllToAll { axis, .. } => *axis = other(*axis),
            Op::AllGather { axis, .. } | Op::ReduceScatter { axis, .. } | Op::AllReduce { axis } => {
                *axis = if let [axis] = **axis { other(axis) } else { axis[n % axis.len()] }.into();
            }
            _ => parcel.to = parcel.from.clone(),
        });
    })
}

pub(super) fn change_dim(schedule: &Schedule, choices: &mut Choices) -> Option<Mutant> {
    let has_dim = |parcel: &Parcel| {
        let has = matches!(parcel.op, Op::AllToAll { .. } | Op::AllGather { .. } | Op::ReduceScatter { .. });
        has && parcel.from.dims.len() > 1
    };
    let (frame, i) =
        task(schedule, choices, |_, t| transfer(t).is_some_and(|t| t.parcels().iter().all(has_dim)))?;
    let n = choices.below(7);
    let which = choices.below(64);
    Mutant::of(schedule, frame, |f| {
        change_parcel(&mut f.tasks[i], which, |parcel| {
            if let Op::AllToAll { split: dim, .. }
            | Op::AllGather { dim, .. }
            | Op::ReduceScatter { dim, .. } = &mut parcel.op
            {
                let others: Vec<_> = parcel.from.dims.iter().copied().filter(|d| d != dim).collect();
                *dim = others[n % others.len()];
            }
        });
    })
}

fn several(task: &Task) -> bool {
    transfer(task).is_some_and(|t| t.only().is_none())
}

/// One task takes two tensors of a message in another order than the others.
pub(super) fn swap_parcels(schedule: &Schedule, choices: &mut Choices) -> Option<Mutant> {
    let (frame, i) = task(schedule, choices, |_, t| several(t))?;
    let all = transfer(&schedule.frames[frame].tasks[i])?.parcels().to_vec();
    let (a, b) = (choices.below(all.len()), choices.below(all.len()));
    Mutant::of(schedule, frame, |f| {
        if let Some(t) = transfer_mut(&mut f.tasks[i]) {
            let mut parcels = all;
            parcels.swap(a, b);
            *t = Transfer::of(parcels).expect("there are as many as before");
        }
    })
}

/// Where a buffer lies in another.
fn inside(frame: &Frame, buffer: BufferId) -> Option<(BufferId, usize)> {
    match frame.buffers[buffer].place {
        Place::Inside { whole: wire, part } => Some((wire, part)),
        _ => None,
    }
}

pub(super) fn change_part(schedule: &Schedule, choices: &mut Choices) -> Option<Mutant> {
    let (frame, b) = buffer(schedule, choices, |f, b| inside(f, b).is_some())?;
    let other = choices.below(4);
    Mutant::of(schedule, frame, |f| {
        if let Place::Inside { part, .. } = &mut f.buffers[b].place {
            *part = other;
        }
    })
}

/// Two tensors of one type change places in their wire.
pub(super) fn swap_parts(schedule: &Schedule, choices: &mut Choices) -> Option<Mutant> {
    let twin = |f: &Frame, b: BufferId| {
        let (wire, _) = inside(f, b)?;
        let alike = |other: &BufferId| {
            *other != b
                && inside(f, *other).is_some_and(|(w, _)| w == wire)
                && f.buffers[*other].content == f.buffers[b].content
        };
        f.buffers.ids().find(alike)
    };
    let (frame, b) = buffer(schedule, choices, |f, b| twin(f, b).is_some())?;
    let other = twin(&schedule.frames[frame], b)?;
    Mutant::of(schedule, frame, |f| {
        let place = f.buffers[b].place.clone();
        f.buffers[b].place = std::mem::replace(&mut f.buffers[other].place, place);
    })
}

pub(super) fn change_wire(schedule: &Schedule, choices: &mut Choices) -> Option<Mutant> {
    let (frame, b) = buffer(schedule, choices, |f, b| inside(f, b).is_some())?;
    let f = &schedule.frames[frame];
    let holds = |b: &BufferId| {
        let is_wire = matches!(f.buffers[*b].content, Content::Wire { .. });
        is_wire || f.buffers.ids().any(|other| other != *b && f.holder(other) == *b)
    };
    let holders: Vec<BufferId> = f.buffers.ids().filter(holds).collect();
    let other = choices.one_of(&holders);
    Mutant::of(schedule, frame, |f| {
        if let Place::Inside { whole, .. } = &mut f.buffers[b].place {
            *whole = other;
        }
    })
}

/// Two tensors are packed, or unpacked, one in place of the other.
pub(super) fn swap_tensors(schedule: &Schedule, choices: &mut Choices) -> Option<Mutant> {
    let (frame, i) = task(schedule, choices, |_, t| several(t) && !is_exchange(t))?;
    let n = transfer(&schedule.frames[frame].tasks[i])?.parcels().len();
    let (a, b) = (choices.below(n), choices.below(n));
    Mutant::of(schedule, frame, |f| {
        let Task { work, reads, writes, .. } = &mut f.tasks[i];
        if matches!(work, Work::Pack(_)) { reads.swap(a, b) } else { writes.swap(a, b) }
    })
}

/// One task forgets a tensor of a message.
pub(super) fn drop_parcel(schedule: &Schedule, choices: &mut Choices) -> Option<Mutant> {
    let (frame, i) = task(schedule, choices, |_, t| several(t))?;
    let mut parcels = transfer(&schedule.frames[frame].tasks[i])?.parcels().to_vec();
    let n = choices.below(parcels.len());
    parcels.remove(n);
    Mutant::of(schedule, frame, |f| {
        let Task { work, reads, writes, .. } = &mut f.tasks[i];
        match work {
            Work::Pack(_) => drop(reads.remove(n)),
            Work::Unpack(_) => drop(writes.remove(n)),
            Work::Exchange(_) | Work::Compute(_) | Work::Copy | Work::Call { .. } => {}
        }
        if let (Some(t), Some(fewer)) = (transfer_mut(&mut f.tasks[i]), Transfer::of(parcels)) {
            *t = fewer;
        }
    })
}

pub(super) fn change_transfer(schedule: &Schedule, choices: &mut Choices) -> Option<Mutant> {
    let (frame, i) = task(schedule, choices, |_, t| transfer(t).is_some())?;
    let mine = transfer(&schedule.frames[frame].tasks[i])?.clone();
    let others: Vec<Transfer> = schedule
        .frames
        .values()
        .flat_map(|f| &f.tasks)
        .filter_map(transfer)
        .filter(|t| **t != mine)
        .cloned()
        .collect();
    if others.is_empty() {
        return None;
    }
    let other = choices.one_of(&others);
    Mutant::of(schedule, frame, |f| {
        if let Some(t) = transfer_mut(&mut f.tasks[i]) {
            *t = other;
        }
    })
}
