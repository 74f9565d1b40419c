//! Ways to break a schedule. Each gives the schedule with one thing changed, where there is something to change.

mod messages;

use ithaca_ir::boxes;
use ithaca_ir::entity::Entity;
use ithaca_ir::layout::At;
use ithaca_ir::message::Parcel;
use ithaca_ir::ops::ScanOrder;
use ithaca_ir::schedule::{
    BufferId, Content, EventId, Frame, FrameId, Place, Schedule, Stream, Task, Transfer, Work,
};

use crate::fuzz::Choices;
use messages::{
    change_axis, change_dim, change_part, change_transfer, change_wire, drop_parcel, reverse_permute,
    reverse_permute_and_buffer, swap_parcels, swap_parts, swap_tensors,
};

/// A changed schedule.
pub(super) struct Mutant {
    pub(super) schedule: Schedule,
    /// The frame that was changed.
    pub(super) frame: FrameId,
    /// For each task of that frame its number before.
    pub(super) before: Vec<usize>,
}

/// A way to change a schedule.
pub(super) type Mutator = fn(&Schedule, &mut Choices) -> Option<Mutant>;

/// Every way to change a schedule that all ranks run.
pub(super) const MUTATORS: &[(&str, Mutator)] = &[
    ("drop a wait", drop_wait),
    ("drop a record", drop_record),
    ("wait for another event", wait_for_another),
    ("swap two tasks of a stream", swap_in_stream),
    ("swap two collectives", swap_collectives),
    ("move a task to another stream", change_stream),
    ("shift a buffer", shift_buffer),
    ("put a buffer where another is", overlap),
    ("shrink the frame", shrink_frame),
    ("shrink a wire", shrink_wire),
    ("shrink a buffer", shrink_buffer),
    ("reverse a permute", reverse_permute),
    ("reverse a permute and its buffer", reverse_permute_and_buffer),
    ("change the axis of a collective", change_axis),
    ("change a dimension of a collective", change_dim),
    ("exchange another transfer", change_transfer),
    ("drop an unpack", drop_unpack),
    ("drop a pack", drop_pack),
    ("drop a task", drop_task),
    ("read before it is written", read_early),
    ("read another buffer", read_another),
    ("write another buffer", write_another),
    ("change the order of a scan", change_scan),
    ("change the layers of a call", change_layers),
    ("change the stride of a call", change_stride),
    ("swap two tensors of a message", swap_parcels),
    ("pack or unpack another tensor", swap_tensors),
    ("forget a tensor of a message", drop_parcel),
    ("put a tensor in another part of its wire", change_part),
    ("swap two tensors in a wire", swap_parts),
    ("put a tensor in another wire", change_wire),
    ("retarget an assignment", retarget),
    ("move the frame of a callee", change_base),
];

impl Mutant {
    /// A copy in which one frame is changed.
    fn of(schedule: &Schedule, frame: FrameId, change: impl FnOnce(&mut Frame)) -> Option<Mutant> {
        let mut schedule = schedule.clone();
        let before = (0..schedule.frames[frame].tasks.len()).collect();
        change(&mut schedule.frames[frame]);
        Some(Mutant { schedule, frame, before })
    }

    fn order(mut self, before: Vec<usize>) -> Option<Mutant> {
        self.before = before;
        Some(self)
    }
}

/// A frame and a task for which `wanted` holds.
fn task(
    schedule: &Schedule,
    choices: &mut Choices,
    wanted: impl Fn(&Frame, &Task) -> bool,
) -> Option<(FrameId, usize)> {
    let all: Vec<(FrameId, usize)> = schedule
        .frames
        .iter()
        .flat_map(|(id, frame)| frame.tasks.iter().enumerate().map(move |(i, task)| (id, frame, i, task)))
        .filter(|(_, frame, _, task)| wanted(frame, task))
        .map(|(id, _, i, _)| (id, i))
        .collect();
    (!all.is_empty()).then(|| choices.one_of(&all))
}

/// A frame and a buffer for which `wanted` holds.
fn buffer(
    schedule: &Schedule,
    choices: &mut Choices,
    wanted: impl Fn(&Frame, BufferId) -> bool,
) -> Option<(FrameId, BufferId)> {
    let all: Vec<(FrameId, BufferId)> = schedule
        .frames
        .iter()
        .flat_map(|(id, frame)| frame.buffers.ids().map(move |b| (id, frame, b)))
        .filter(|(_, frame, b)| wanted(frame, *b))
        .map(|(id, _, b)| (id, b))
        .collect();
    (!all.is_empty()).then(|| choices.one_of(&all))
}

fn lies_in_frame(frame: &Frame, buffer: BufferId) -> bool {
    matches!(frame.buffers[buffer].place, Place::Frame(_))
}

fn is_exchange(task: &Task) -> bool {
    matches!(task.work, Work::Exchange(_))
}

fn transfer(task: &Task) -> Option<&Transfer> {
    match &task.work {
        Work::Pack(t) | Work::Exchange(t) | Work::Unpack(t) => Some(t),
        Work::Compute(_) | Work::Copy | Work::Call { .. } => None,
    }
}

fn transfer_mut(task: &mut Task) -> Option<&mut Transfer> {
    match &mut task.work {
        Work::Pack(t) | Work::Exchange(t) | Work::Unpack(t) => Some(t),
        Work::Compute(_) | Work::Copy | Work::Call { .. } => None,
    }
}

/// Changes one of the tensors of a transfer.
fn change_parcel(task: &mut Task, number: usize, change: impl FnOnce(&mut Parcel)) {
    let Some(transfer) = transfer_mut(task) else { return };
    let mut parcels = transfer.parcels().to_vec();
    let n = number % parcels.len();
    change(&mut parcels[n]);
    *transfer = Transfer::of(parcels).expect("there are as many as before");
}

fn drop_wait(schedule: &Schedule, choices: &mut Choices) -> Option<Mutant> {
    let (frame, i) = task(schedule, choices, |_, t| !t.waits.is_empty())?;
    let n = choices.below(schedule.frames[frame].tasks[i].waits.len());
    Mutant::of(schedule, frame, |f| {
        let _ = f.tasks[i].waits.remove(n);
    })
}

fn drop_record(schedule: &Schedule, choices: &mut Choices) -> Option<Mutant> {
    let (frame, i) = task(schedule, choices, |_, t| t.records.is_some())?;
    Mutant::of(schedule, frame, |f| f.tasks[i].records = None)
}

fn wait_for_another(schedule: &Schedule, choices: &mut Choices) -> Option<Mutant> {
    let (frame, i) = task(schedule, choices, |f, t| !t.waits.is_empty() && f.n_events > 1)?;
    let event = EventId::new(choices.below(schedule.frames[frame].n_events));
    Mutant::of(schedule, frame, |f| f.tasks[i].waits[0] = event)
}

/// Swaps task `i` with a later one.
pub(super) fn swap(schedule: &Schedule, frame: FrameId, i: usize, j: usize) -> Option<Mutant> {
    let mut before: Vec<usize> = (0..schedule.frames[frame].tasks.len()).collect();
    before.swap(i, j);
    Mutant::of(schedule, frame, |f| f.tasks.swap(i, j))?.order(before)
}

fn next(frame: &Frame, i: usize, wanted: impl Fn(&Task) -> bool) -> Option<usize> {
    (i + 1..frame.tasks.len()).find(|&j| wanted(&frame.tasks[j]))
}

fn swap_in_stream(schedule: &Schedule, choices: &mut Choices) -> Option<Mutant> {
    let (frame, i) = task(schedule, choices, |f, _| f.tasks.len() > 1)?;
    let tasks = &schedule.frames[frame];
    let j = next(tasks, i, |t| t.stream == tasks.tasks[i].stream)?;
    swap(schedule, frame, i, j)
}

fn swap_collectives(schedule: &Schedule, choices: &mut Choices) -> Option<Mutant> {
    let (frame, i) = task(schedule, choices, |_, t| is_exchange(t))?;
    let j = next(&schedule.frames[frame], i, is_exchange)?;
    swap(schedule, frame, i, j)
}

fn change_stream(schedule: &Schedule, choices: &mut Choices) -> Option<Mutant> {
    let (frame, i) = task(schedule, choices, |_, t| !matches!(t.work, Work::Call { .. }))?;
    Mutant::of(schedule, frame, |f| {
        f.tasks[i].stream = match f.tasks[i].stream {
            Stream::Compute => Stream::Comm,
            Stream::ForwardEven => Stream::BackwardOdd,
            Stream::Weights => Stream::Comm,
            Stream::Comm
            | Stream::Down
            | Stream::Host
            | Stream::ToHost
            | Stream::ForwardOdd
            | Stream::BackwardEven
            | Stream::BackwardOdd
            | Stream::ForwardWrap
            | Stream::BackwardWrap => Stream::Compute,
        };
    })
}

fn shift_buffer(schedule: &Schedule, choices: &mut Choices) -> Option<Mutant> {
    let (frame, b) = buffer(schedule, choices, lies_in_frame)?;
    let by = choices.one_of(&[256, 512, 4096, 16, u64::MAX - 255]);
    Mutant::of(schedule, frame, |f| {
        if let Place::Frame(offset) = &mut f.buffers[b].place {
            *offset = offset.wrapping_add(by);
        }
    })
}

fn overlap(schedule: &Schedule, choices: &mut Choices) -> Option<Mutant> {
    let (frame, b) = buffer(schedule, choices, lies_in_frame)?;
    let others: Vec<BufferId> = {
        let f = &schedule.frames[frame];
        f.buffers.ids().filter(|&o| lies_in_frame(f, o) && f.buffers[o].place != f.buffers[b].place).collect()
    };
    if others.is_empty() {
        return None;
    }
    let other = choices.one_of(&others);
    Mutant::of(schedule, frame, |f| f.buffers[b].place = f.buffers[other].place.clone())
}

fn shrink_frame(schedule: &Schedule, choices: &mut Choices) -> Option<Mutant> {
    let frames: Vec<FrameId> =
        schedule.frames.iter().filter(|(_, f)| f.bytes > 0).map(|(id, _)| id).collect();
    if frames.is_empty() {
        return None;
    }
    let frame = choices.one_of(&frames);
    Mutant::of(schedule, frame, |f| f.bytes -= 256)
}

fn shrink_wire(schedule: &Schedule, choices: &mut Choices) -> Option<Mutant> {
    let is_wire = |f: &Frame, b: BufferId| matches!(f.buffers[b].content, Content::Wire { .. });
    let (frame, b) = buffer(schedule, choices, is_wire)?;
    Mutant::of(schedule, frame, |f| {
        if let Content::Wire { elements, .. } = &mut f.buffers[b].content {
            *elements -= 1;
        }
    })
}

fn shrink_buffer(schedule: &Schedule, choices: &mut Choices) -> Option<Mutant> {
    let mesh = &schedule.space.mesh;
    let axis = mesh.axes.ids().find(|&a| mesh.size(a) > 1)?;
    let can = |f: &Frame, b: BufferId| match &f.buffers[b].content {
        Content::Tensor(ty) => {
            lies_in_frame(f, b)
                && !ty.dims.is_empty()
                && !ty.layout.axes().any(|a| a == axis)
                && schedule.space.can_split(ty.dims[0], &[axis])
                && ty.layout.split[0].is_empty()
                && schedule.space.size(ty.dims[0]) > 1
        }
        Content::Wire { .. } => false,
    };
    let (frame, b) = buffer(schedule, choices, can)?;
    Mutant::of(schedule, frame, |f| {
        if let Content::Tensor(ty) = &mut f.buffers[b].content {
            std::sync::Arc::make_mut(ty).layout.split[0].push(axis);
        }
    })
}

/// A call runs for other layers where its caller runs for several.
fn change_stride(schedule: &Schedule, choices: &mut Choices) -> Option<Mutant> {
    let (frame, i) = task(schedule, choices, |_, t| matches!(t.work, Work::Call { .. }))?;
    Mutant::of(schedule, frame, |f| {
        if let Work::Call { stride, .. } = &mut f.tasks[i].work {
            *stride += 1;
        }
    })
}

/// Without one task, and without its event.
fn without(schedule: &Schedule, frame: FrameId, i: usize) -> Option<Mutant> {
    let before = (0..schedule.frames[frame].tasks.len()).filter(|&j| j != i).collect();
    Mutant::of(schedule, frame, |f| {
        let task = f.tasks.remove(i);
        if let Some(event) = task.records {
            f.tasks.iter_mut().for_each(|t| t.waits.retain(|&e| e != event));
        }
    })?
    .order(before)
}

fn drop_unpack(schedule: &Schedule, choices: &mut Choices) -> Option<Mutant> {
    let (frame, i) = task(schedule, choices, |_, t| matches!(t.work, Work::Unpack(_)))?;
    without(schedule, frame, i)
}

fn drop_pack(schedule: &Schedule, choices: &mut Choices) -> Option<Mutant> {
    let (frame, i) = task(schedule, choices, |_, t| matches!(t.work, Work::Pack(_)))?;
    without(schedule, frame, i)
}

fn drop_task(schedule: &Schedule, choices: &mut Choices) -> Option<Mutant> {
    let (frame, i) = task(schedule, choices, |_, _| true)?;
    without(schedule, frame, i)
}

fn read_early(schedule: &Schedule, choices: &mut Choices) -> Option<Mutant> {
    let frames: Vec<FrameId> = schedule.frames.ids().collect();
    let frame = choices.one_of(&frames);
    let tasks = &schedule.frames[frame].tasks;
    let pairs: Vec<(usize, usize)> = tasks
        .iter()
        .enumerate()
        .flat_map(|(j, reader)| {
            let writes = |t: &Task| t.writes.iter().any(|b| reader.reads.contains(b));
            let writer = (0..j).rev().find(|&i| writes(&tasks[i]));
            writer.map(|i| (i, j))
        })
        .collect();
    if pairs.is_empty() {
        return None;
    }
    let (i, j) = choices.one_of(&pairs);
    let mut before: Vec<usize> = (0..tasks.len()).collect();
    before.remove(j);
    before.insert(i, j);
    Mutant::of(schedule, frame, |f| {
        let task = f.tasks.remove(j);
        f.tasks.insert(i, task);
    })?
    .order(before)
}

/// Another buffer of the same content, at least.
fn alike(frame: &Frame, buffer: BufferId, choices: &mut Choices) -> Option<BufferId> {
    let of = |b: BufferId| (&frame.buffers[b].content, matches!(frame.buffers[b].place, Place::Argument(_)));
    let others: Vec<BufferId> =
        frame.buffers.ids().filter(|&b| b != buffer && of(b).0 == of(buffer).0).collect();
    (!others.is_empty()).then(|| choices.one_of(&others))
}

fn read_another(schedule: &Schedule, choices: &mut Choices) -> Option<Mutant> {
    let (frame, i) = task(schedule, choices, |_, t| !t.reads.is_empty())?;
    let n = choices.below(schedule.frames[frame].tasks[i].reads.len());
    let other = alike(&schedule.frames[frame], schedule.frames[frame].tasks[i].reads[n], choices)?;
    Mutant::of(schedule, frame, |f| f.tasks[i].reads[n] = other)
}

fn write_another(schedule: &Schedule, choices: &mut Choices) -> Option<Mutant> {
    let (frame, i) = task(schedule, choices, |_, t| !t.writes.is_empty())?;
    let n = choices.below(schedule.frames[frame].tasks[i].writes.len());
    let other = alike(&schedule.frames[frame], schedule.frames[frame].tasks[i].writes[n], choices)?;
    Mutant::of(schedule, frame, |f| f.tasks[i].writes[n] = other)
}

fn change_scan(schedule: &Schedule, choices: &mut Choices) -> Option<Mutant> {
    let (frame, i) = task(schedule, choices, |_, t| matches!(t.work, Work::Call { scan: Some(_), .. }))?;
    Mutant::of(schedule, frame, |f| {
        if let Work::Call { scan: Some(scan), .. } = &mut f.tasks[i].work {
            scan.order = match scan.order {
                ScanOrder::Ascending => ScanOrder::Descending,
                ScanOrder::Descending => ScanOrder::Ascending,
            };
        }
    })
}

fn change_layers(schedule: &Schedule, choices: &mut Choices) -> Option<Mutant> {
    let (frame, i) = task(schedule, choices, |_, t| matches!(t.work, Work::Call { .. }))?;
    let grows = choices.below(2) == 0;
    Mutant::of(schedule, frame, |f| {
        if let Work::Call { layers, .. } = &mut f.tasks[i].work {
            if grows { layers.end += 1 } else { *layers = layers.start + 1..layers.end + 1 }
        }
    })
}

fn retarget(schedule: &Schedule, choices: &mut Choices) -> Option<Mutant> {
    let lasts = |f: &Frame, b: &BufferId| matches!(f.buffers[*b].place, Place::Weight(_) | Place::State(_));
    let (frame, i) = task(schedule, choices, |f, t| t.writes.iter().any(|b| lasts(f, b)))?;
    let f = &schedule.frames[frame];
    let n = f.tasks[i].writes.iter().position(|b| lasts(f, b))?;
    let written = f.tasks[i].writes[n];
    let Content::Tensor(ty) = &f.buffers[written].content else { return None };
    let same =
        |b: &BufferId| *b != written && lasts(f, b) && f.buffers[*b].content == Content::Tensor(ty.clone());
    let others: Vec<BufferId> = f.buffers.ids().filter(same).collect();
    if others.is_empty() {
        return None;
    }
    let other = choices.one_of(&others);
    Mutant::of(schedule, frame, |f| f.tasks[i].writes[n] = other)
}

fn change_base(schedule: &Schedule, choices: &mut Choices) -> Option<Mutant> {
    let (frame, i) = task(schedule, choices, |_, t| matches!(t.work, Work::Call { .. }))?;
    let by = choices.one_of(&[256u64, 512, 1024, 0u64.wrapping_sub(256), 0u64.wrapping_sub(1024), 8]);
    Mutant::of(schedule, frame, |f| {
        if let Work::Call { base, .. } = &mut f.tasks[i].work {
            *base = base.wrapping_add(by);
        }
    })
}

/// Schedules of which the ranks at one coordinate run another than all others do.
pub(super) struct Odd {
    pub(super) axis: ithaca_ir::AxisId,
    pub(super) mutant: Schedule,
}

impl Odd {
    /// The place of the ranks that run the changed one.
    pub(super) fn at(&self, coordinate: u64) -> At {
        At { axis: self.axis, coordinate }
    }
}

/// The axes along which an exchange takes place, of more ranks than one.
fn axes_of(schedule: &Schedule, task: &Task) -> Vec<ithaca_ir::AxisId> {
    let Some(transfer) = transfer(task).filter(|_| is_exchange(task)) else { return Vec::new() };
    let Parcel { op, from, to } = transfer.first();
    let axes = boxes::axes(&schedule.space, op, from, to);
    axes.iter().copied().filter(|&a| schedule.space.mesh.size(a) > 1).collect()
}

/// Two collectives on one communicator, of an axis and a stream, come in another order on some of its ranks.
pub(super) fn swap_on_one_rank(schedule: &Schedule, choices: &mut Choices) -> Option<Odd> {
    let (frame, i) = task(schedule, choices, |_, t| !axes_of(schedule, t).is_empty())?;
    let f = &schedule.frames[frame];
    let axis = axes_of(schedule, &f.tasks[i])[0];
    let j = next(f, i, |t| t.stream == f.tasks[i].stream && axes_of(schedule, t).contains(&axis))?;
    let everywhere = |i: usize| Some(transfer(&f.tasks[i])?.first().from.layout.at.is_none());
    let others = everywhere(i)? && everywhere(j)?;
    let mutant = swap(schedule, frame, i, j)?.schedule;
    others.then_some(Odd { axis, mutant })
}

/// A collective is not there on some ranks of its axis.
pub(super) fn drop_on_one_rank(schedule: &Schedule, choices: &mut Choices) -> Option<Odd> {
    let (frame, i) = task(schedule, choices, |_, t| !axes_of(schedule, t).is_empty())?;
    let axis = axes_of(schedule, &schedule.frames[frame].tasks[i])[0];
    let places = transfer(&schedule.frames[frame].tasks[i])?.first();
    let others = places.from.layout.at.is_none() && places.to.layout.at.is_none();
    let mutant = without(schedule, frame, i)?.schedule;
    others.then_some(Odd { axis, mutant })
}

/// Ranks of one stage call another function, or leave a task out that is theirs.
pub(super) fn drop_on_one_stage(schedule: &Schedule, choices: &mut Choices) -> Option<Odd> {
    let at = |t: &Task| match &t.work {
        Work::Exchange(t) => {
            let Parcel { from, to, .. } = t.first();
            if from.layout.at == to.layout.at { None } else { to.layout.at }
        }
        _ => None,
    };
    let (frame, i) = task(schedule, choices, |_, t| at(t).is_some_and(|at| at.coordinate == 0))?;
    let axis = at(&schedule.frames[frame].tasks[i])?.axis;
    Some(Odd { axis, mutant: without(schedule, frame, i)?.schedule })
}
