//! Offsets of buffers in a frame, from their lifetimes.
//!
//! A buffer lives from the task that writes it first to the task that uses it last, in order of issue. Buffers that are
//! never alive together may share memory (`fit`).
//!
//! A buffer that a collective touches is alive until a kernel waits for that collective or a later one anyway: a kernel that
//! took its memory sooner would wait for nothing but memory. A buffer that a stage sends is alive until the other stage reads
//! its copy. A receive buffer is alive from the start of the second last call that its stage makes before it: the sending stage
//! may be a call ahead, and does not wait for memory of the receiving stage.

use std::collections::{BTreeMap, VecDeque};

use ithaca_ir::entity::Entity;
use ithaca_ir::layout::At;
use ithaca_ir::ops::Stage;
use ithaca_ir::schedule::{BufferId, Content, Frame, FrameId, Place, Stream, Streams, Task, Work, aligned};
use ithaca_ir::{Arena, Space};

use super::fit::{self, Block};

/// In the frame, at an offset that is yet to be found.
pub(super) const UNPLACED: Place = Place::Frame(u64::MAX);

/// The owner of a block.
#[derive(Clone, Copy)]
enum Holder {
    /// A buffer of this frame.
    Buffer(BufferId),
    /// The frame of the callee of a task.
    Callee(usize),
}

/// Gives every buffer in the frame its offset and the frame its size.
pub(super) fn place(frame: &mut Frame, space: &Space, called: (&Arena<FrameId, Frame>, &[Streams])) {
    let (holders, blocks): (Vec<Holder>, Vec<Block>) = blocks(frame, space, called).into_iter().unzip();
    let offsets = fit::offsets(&blocks);
    let ends = blocks.iter().zip(&offsets).map(|(block, offset)| offset + block.bytes);
    frame.bytes = ends.max().unwrap_or(0);
    for (holder, offset) in holders.into_iter().zip(offsets) {
        match holder {
            Holder::Buffer(id) => frame.buffers[id].place = Place::Frame(offset),
            Holder::Callee(task) => {
                if let Work::Call { base, .. } = &mut frame.tasks[task].work {
                    *base = offset;
                }
            }
        }
    }
}

/// For each task the last one before memory that it touched may be taken: itself on the compute stream; of a
/// collective the task before the kernel that reads the result of it or of a later collective. Where another collective sends the
/// result on, that of the next collective counts.
fn met(frame: &Frame, used: &[Streams]) -> Vec<usize> {
    let mut met: Vec<usize> = (0..frame.tasks.len()).collect();
    let mut brought: Vec<Option<usize>> = vec![None; frame.buffers.len()];
    let brings = |brought: &[Option<usize>], task: &Task| -> Vec<usize> {
        task.reads.iter().filter_map(|b| brought[frame.holder(*b).index()]).collect()
    };
    // For each collective those whose results it sends on.
    let mut sent_on: Vec<Vec<usize>> = vec![Vec::new(); frame.tasks.len()];
    // Collectives that no kernel is known to come after, in order.
    let mut open: BTreeMap<Queue, VecDeque<usize>> = BTreeMap::new();
    for (i, task) in frame.tasks.iter().enumerate() {
        if task.stream != Stream::Compute {
            open.entry(Queue::of(frame, task)).or_default().push_back(i);
            sent_on[i] = brings(&brought, task);
            task.writes.iter().for_each(|b| brought[frame.holder(*b).index()] = Some(i));
            continue;
        }
        let mut end = |queue: &mut VecDeque<usize>, last: usize| {
            while let Some(done) = queue.pop_front_if(|done| *done <= last) {
                met[done] = i - 1;
            }
        };
        // A kernel that took the memory of a result that was just sent on would wait for it.
        let read = brings(&brought, task).into_iter().map(|last| (last, last));
        let mut past: Vec<(usize, usize)> = read.collect();
        while let Some((of, last)) = past.pop() {
            let queue = open.get_mut(&Queue::of(frame, &frame.tasks[of]));
            if let Some(queue) = queue.filter(|queue| queue.front().is_some_and(|done| *done <= last)) {
                end(queue, last);
                past.extend(sent_on[of].iter().map(|&before| (before, before.saturating_sub(1))));
            }
        }
        let meets = task.work.callee().map(|callee| used[callee.index()]).filter(|used| used.communicates());
        if let Some(used) = meets {
            open.iter_mut().filter(|(of, _)| used.has(of.stream)).for_each(|(_, queue)| end(queue, i));
        }
    }
    for task in open.into_values().flatten() {
        met[task] = frame.tasks.len();
    }
    met
}

/// Collectives that end in order.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Queue {
    stream: Stream,
    /// The stages that take part, of a transfer between two.
    places: Option<[Option<At>; 2]>,
}

impl Queue {
    fn of(frame: &Frame, task: &Task) -> Self {
        let places = task.stream.is_between_stages().then(|| frame.places(task));
        Queue { stream: task.stream, places }
    }
}

fn blocks(
    frame: &Frame,
    space: &Space,
    (frames, used): (&Arena<FrameId, Frame>, &[Streams]),
) -> Vec<(Holder, Block)> {
    let met = met(frame, used);
    let mut lives: Vec<Option<(usize, usize)>> = vec![None; frame.buffers.len()];
    for (i, task) in frame.tasks.iter().enumerate() {
        for id in task.reads.iter().chain(&task.writes).map(|&id| frame.holder(id)) {
            let (_, last) = lives[id.index()].get_or_insert((i, i));
            *last = (*last).max(met[i]);
        }
    }
    // The last two calls of each stage.
    let mut running: BTreeMap<Option<At>, [usize; 2]> = BTreeMap::new();
    for (i, task) in frame.tasks.iter().enumerate() {
        let [_, to] = frame.places(task);
        match (&task.work, running.get(&to)) {
            (Work::Call { .. }, before) => {
                let last = before.map_or(i, |&[_, last]| last);
                running.insert(to, [last, i]);
            }
            (_, Some(&[call, _])) if task.stream.is_between_stages() => {
                for id in &task.writes {
                    if let Some((first, _)) = lives[id.index()].as_mut().filter(|(first, _)| *first == i) {
                        *first = call;
                    }
                }
            }
            _ => {}
        }
    }
    for output in &frame.outputs {
        if let Some((_, last)) = &mut lives[output.buffer.index()] {
            *last = frame.tasks.len();
        }
    }
    let buffers = frame.buffers.iter().filter_map(|(id, buffer)| {
        let (first, last) = lives[id.index()]?;
        let bytes = match &buffer.content {
            Content::Tensor(_) | Content::Wire { .. } => aligned(buffer.bytes(space)),
        };
        matches!(buffer.place, Place::Frame(_))
            .then_some((Holder::Buffer(id), Block { bytes, first, last, at: frame.at(id) }))
    });
    let callees = frame.tasks.iter().enumerate().filter_map(|(i, task)| match &task.work {
        Work::Call { callee, stage, .. } => {
            let at = stage.and_then(Stage::at);
            Some((Holder::Callee(i), Block { bytes: frames[*callee].bytes, first: i, last: i, at }))
        }
        _ => None,
    });
    buffers.chain(callees).collect()
}
