//! Events: where a task must wait for one of another stream.
//!
//! Two tasks must be ordered when one writes memory that the other reads or writes. Within a stream they are. Across
//! streams it is enough to wait for the last such task of each other stream, and for none that is known to have ended: a
//! wait brings all that the other task came after. A call of a frame that communicates starts and ends with the streams
//! that it uses met, so among these it needs no events; to any other stream a call is a task that touches the memory of its
//! frame.

use std::ops::Range;

use ithaca_ir::entity::Entity;
use ithaca_ir::layout::At;
use ithaca_ir::ops::{Binding, Target};
use ithaca_ir::schedule::{BufferId, EventId, Frame, FrameId, Place, Stream, Streams, Task, Work};
use ithaca_ir::{Arena, Space};

/// Memory that a task touches.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Memory<'a> {
    /// Bytes of the frame.
    Frame(Range<u64>),
    /// Argument and result of one number, which may be one place.
    Slot(usize),
    /// A weight or a state.
    Lasting(Target, &'a Binding),
}

impl<'a> Memory<'a> {
    fn of(frame: &'a Frame, space: &Space, id: BufferId) -> Option<Memory<'a>> {
        let buffer = &frame.buffers[frame.holder(id)];
        match &buffer.place {
            Place::Frame(offset) => Some(Memory::Frame(*offset..offset + buffer.bytes(space))),
            Place::Argument(i) | Place::Result(i) => Some(Memory::Slot(*i)),
            Place::Weight(binding) => Some(Memory::Lasting(Target::Param, binding)),
            Place::State(binding) => Some(Memory::Lasting(Target::State, binding)),
            // No task writes inputs, and a wire is part of the frame.
            Place::Input(_) | Place::Wire { .. } => None,
        }
    }

    fn meets(&self, other: &Memory<'_>) -> bool {
        match (self, other) {
            (Memory::Frame(a), Memory::Frame(b)) => a.start < b.end && b.start < a.end,
            (Memory::Slot(a), Memory::Slot(b)) => a == b,
            (Memory::Lasting(..), Memory::Lasting(..)) => self == other,
            (Memory::Frame(_) | Memory::Slot(_) | Memory::Lasting(..), _) => false,
        }
    }
}

struct Effects<'a> {
    reads: Vec<Memory<'a>>,
    writes: Vec<Memory<'a>>,
}

impl<'a> Effects<'a> {
    fn of(
        frames: &'a Arena<FrameId, Frame>,
        (frame, at): (&'a Frame, Option<At>),
        space: &Space,
        task: &Task,
    ) -> Effects<'a> {
        let is_held = |&&id: &&BufferId| at.is_none() || frame.at(id).is_none_or(|there| Some(there) == at);
        let memory = |ids: &[BufferId]| {
            ids.iter().filter(is_held).filter_map(|&id| Memory::of(frame, space, id)).collect()
        };
        let mut effects = Effects { reads: memory(&task.reads), writes: memory(&task.writes) };
        if let Work::Call { callee, base, .. } = task.work {
            effects.writes.push(Memory::Frame(base..base + frames[callee].bytes));
            effects.add_lasting(frames, callee);
        }
        effects
    }

    /// Adds the weights and states that a frame reads and writes, callees included.
    fn add_lasting(&mut self, frames: &'a Arena<FrameId, Frame>, frame: FrameId) {
        for (id, buffer) in frames[frame].buffers.iter() {
            let memory = match &buffer.place {
                Place::Weight(binding) => Memory::Lasting(Target::Param, binding),
                Place::State(binding) => Memory::Lasting(Target::State, binding),
                Place::Frame(_)
                | Place::Wire { .. }
                | Place::Argument(_)
                | Place::Result(_)
                | Place::Input(_) => continue,
            };
            let is_written = frames[frame].tasks.iter().any(|task| task.writes.contains(&id));
            if is_written { self.writes.push(memory) } else { self.reads.push(memory) }
        }
        for task in &frames[frame].tasks {
            if let Work::Call { callee, .. } = task.work {
                self.add_lasting(frames, callee);
            }
        }
    }

    fn conflicts(&self, other: &Effects<'_>) -> bool {
        let meet = |a: &[Memory<'_>], b: &[Memory<'_>]| a.iter().any(|x| b.iter().any(|y| x.meets(y)));
        meet(&self.writes, &other.writes)
            || meet(&self.writes, &other.reads)
            || meet(&self.reads, &other.writes)
    }
}

/// Inserts events into the tasks of `frame`, for the ranks of each stage as far as these run different tasks.
pub(super) fn insert(frame: &mut Frame, space: &Space, (frames, used): (&Arena<FrameId, Frame>, &[Streams])) {
    let before = frame.clone();
    // A rank touches only the buffers of its stage.
    let effects = |at: Option<At>| -> Vec<Effects<'_>> {
        before.tasks.iter().map(|t| Effects::of(frames, (&before, at), space, t)).collect()
    };
    let meets = |t: &Task| {
        let used = t.work.callee().map(|callee| used[callee.index()]);
        used.filter(|used| used.communicates()).unwrap_or_default()
    };
    let meets: Vec<Streams> = before.tasks.iter().map(meets).collect();
    let stages = before.stages();
    if stages.is_empty() {
        insert_for(frame, &effects(None), &meets, |_| true);
    }
    for at in stages {
        insert_for(frame, &effects(Some(at)), &meets, |i| before.runs_at(&before.tasks[i], at));
    }
}

/// For each stream, how many of its tasks have ended.
type Clock = [usize; Stream::COUNT];

fn join(clock: &mut Clock, other: &Clock) {
    clock.iter_mut().zip(other).for_each(|(mine, theirs)| *mine = (*mine).max(*theirs));
}

/// Inserts events for ranks that run the tasks for which `runs` holds; `meets` says which streams meet at each.
fn insert_for(frame: &mut Frame, effects: &[Effects<'_>], meets: &[Streams], runs: impl Fn(usize) -> bool) {
    // For each stream its tasks so far, each with what has ended when it ends.
    let mut issued: [Vec<(usize, Clock)>; Stream::COUNT] = Default::default();
    // For each stream what has ended when its next task starts.
    let mut starts: [Clock; Stream::COUNT] = Default::default();
    let mut events = frame.n_events;
    for i in (0..frame.tasks.len()).filter(|&i| runs(i)) {
        let own = frame.tasks[i].stream as usize;
        let mut start = starts[own];
        meets[i].iter().for_each(|stream| join(&mut start, &starts[stream as usize]));
        let is_other = |&other: &usize| other != own && !meets[i].has(Stream::ALL[other]);
        let conflict = |other: usize| {
            let issued = &issued[other];
            (start[other]..issued.len()).rev().find(|&n| effects[i].conflicts(&effects[issued[n].0]))
        };
        let others = (0..Stream::COUNT).filter(is_other);
        let mut conflicts: Vec<(usize, usize, Clock)> =
            others.filter_map(|other| conflict(other).map(|n| (other, n, issued[other][n].1))).collect();
        // The task that was issued last may come after the others.
        conflicts.sort_by_key(|&(other, n, _)| std::cmp::Reverse(issued[other][n].0));
        for (other, n, end) in conflicts {
            if n < start[other] {
                continue;
            }
            let earlier = issued[other][n].0;
            let event = *frame.tasks[earlier].records.get_or_insert_with(|| {
                events += 1;
                EventId::new(events - 1)
            });
            let waits = &mut frame.tasks[i].waits;
            if !waits.contains(&event) {
                waits.push(event);
            }
            join(&mut start, &end);
        }
        let mut end = start;
        end[own] = issued[own].len() + 1;
        issued[own].push((i, end));
        starts[own] = end;
        meets[i].iter().for_each(|stream| starts[stream as usize] = end);
    }
    frame.n_events = events;
}
