//! Events: where a task must wait for one of the other stream.
//!
//! Two tasks must be ordered when one writes memory that the other reads or writes. Within a stream they are. Across
//! streams it is enough to wait for the last such task of the other stream, and for none that was waited for before. A
//! call of a frame that communicates starts and ends with both streams met, so it needs no events; any other call is a task
//! that touches the memory of its frame.

use std::ops::Range;

use ithaca_ir::entity::Entity;
use ithaca_ir::ops::{Binding, Target};
use ithaca_ir::schedule::{BufferId, EventId, Frame, FrameId, Place, Task, Work, communicates};
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
    fn of(frames: &'a Arena<FrameId, Frame>, frame: &'a Frame, space: &Space, task: &Task) -> Effects<'a> {
        let memory = |ids: &[BufferId]| ids.iter().filter_map(|&id| Memory::of(frame, space, id)).collect();
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
pub(super) fn insert(frame: &mut Frame, space: &Space, frames: &Arena<FrameId, Frame>) {
    let before = frame.clone();
    let effects: Vec<Effects<'_>> =
        before.tasks.iter().map(|t| Effects::of(frames, &before, space, t)).collect();
    let meets: Vec<bool> = before
        .tasks
        .iter()
        .map(|t| matches!(t.work, Work::Call { callee, .. } if communicates(frames, callee)))
        .collect();
    let stages = before.stages();
    if stages.is_empty() {
        insert_for(frame, &effects, &meets, |_| true);
    }
    for at in stages {
        insert_for(frame, &effects, &meets, |i| before.runs_at(&before.tasks[i], at));
    }
}

/// Inserts events for ranks that run the tasks for which `runs` holds; `meets` says at which both streams meet.
fn insert_for(frame: &mut Frame, effects: &[Effects<'_>], meets: &[bool], runs: impl Fn(usize) -> bool) {
    // For each stream, its tasks so far, and how many of the other's it is known to come after.
    let mut issued: [Vec<usize>; 2] = [Vec::new(), Vec::new()];
    let mut met = [0usize; 2];
    let mut events = frame.n_events;
    for i in (0..frame.tasks.len()).filter(|&i| runs(i)) {
        if meets[i] {
            met = [issued[1].len(), issued[0].len()];
            issued[frame.tasks[i].stream as usize].push(i);
            met[1] = issued[0].len();
            continue;
        }
        let own = frame.tasks[i].stream as usize;
        let other = 1 - own;
        let conflict =
            (met[own]..issued[other].len()).rev().find(|&n| effects[i].conflicts(&effects[issued[other][n]]));
        if let Some(n) = conflict {
            let earlier = issued[other][n];
            let event = *frame.tasks[earlier].records.get_or_insert_with(|| {
                events += 1;
                EventId::new(events - 1)
            });
            let waits = &mut frame.tasks[i].waits;
            if !waits.contains(&event) {
                waits.push(event);
            }
            met[own] = n + 1;
        }
        issued[own].push(i);
    }
    frame.n_events = events;
}
