//! Events: where a task must wait for one of another stream.
//!
//! Two tasks must be ordered when one writes memory that the other reads or writes. Within a stream they are. Across
//! streams it is enough to wait for the last such task of each other stream, and for none that is known to have ended: a
//! wait brings all that the other task came after. A call of a frame that communicates starts and ends with the streams
//! that it uses met, so among these it needs no events; to any other stream a call is a task that touches the memory of its
//! frame.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use ithaca_ir::entity::Entity;
use ithaca_ir::layout::At;
use ithaca_ir::ops::{Binding, Target};
use ithaca_ir::schedule::{BufferId, EventId, Frame, FrameId, Place, Stream, Streams, Task, Work};
use ithaca_ir::{Arena, Space};
use rangemap::RangeMap;
use rayon::prelude::*;

/// Where memory is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Within {
    /// The frame, by byte.
    Frame,
    /// Arguments and results, by number: those of one number may be one place.
    Slots,
    /// Weights and states, by number.
    Lasting,
}

/// Memory that a task touches.
type Memory = Range<(Within, u64)>;

/// Memory from one byte or number to another.
fn memory(within: Within, Range { start, end }: Range<u64>) -> Memory {
    (within, start)..(within, end)
}

/// An argument and result, or a weight or state.
fn numbered(within: Within, number: usize) -> Memory {
    memory(within, number as u64..number as u64 + 1)
}

/// A weight or a state, and its number.
type Numbered<'a> = (Cow<'a, Binding>, usize);

/// What frames do to memory, as far as it was asked.
struct Touched<'a> {
    frames: &'a Arena<FrameId, Frame>,
    space: &'a Space,
    /// Weights and states of each name, with their numbers.
    lasting: BTreeMap<(Target, String), Vec<Numbered<'a>>>,
    n_lasting: usize,
    /// The weights and states of frames that are called.
    called: BTreeMap<FrameId, Effects>,
}

impl<'a> Touched<'a> {
    fn memory(&mut self, frame: &'a Frame, id: BufferId) -> Option<Memory> {
        let buffer = &frame.buffers[frame.holder(id)];
        match &buffer.place {
            Place::Frame(offset) => {
                // A part that is one piece of a tensor touches no other part.
                let piece = frame.piece(self.space, id).unwrap_or(0..buffer.bytes(self.space));
                Some(memory(Within::Frame, offset + piece.start..offset + piece.end))
            }
            Place::Argument(i) | Place::Result(i) => Some(numbered(Within::Slots, *i)),
            place => self.lasting(place, Cow::Borrowed),
        }
    }

    /// A weight or a state, as `bound` binds it.
    fn lasting(&mut self, place: &'a Place, bound: fn(&'a Binding) -> Cow<'a, Binding>) -> Option<Memory> {
        let (target, binding) = match place {
            Place::Weight(binding) => (Target::Param, binding),
            Place::State(binding) => (Target::State, binding),
            // No task writes inputs, and a holder is in no other buffer.
            Place::Frame(_)
            | Place::Argument(_)
            | Place::Result(_)
            | Place::Input(_)
            | Place::Inside { .. } => return None,
        };
        let binding = bound(binding);
        let known = self.lasting.entry((target, binding.name.clone())).or_default();
        let number = known.iter().find(|(other, _)| *other == binding).map(|(_, number)| *number);
        let number = number.unwrap_or_else(|| {
            known.push((binding, self.n_lasting));
            self.n_lasting += 1;
            self.n_lasting - 1
        });
        Some(numbered(Within::Lasting, number))
    }

    /// The weights and states that a frame reads and writes, callees included.
    fn called(&mut self, id: FrameId) -> &Effects {
        if !self.called.contains_key(&id) {
            let frame = &self.frames[id];
            let written: BTreeSet<BufferId> = frame.tasks.iter().flat_map(|t| &t.writes).copied().collect();
            let mut effects = Effects::default();
            for (id, buffer) in frame.buffers.iter() {
                let list = if written.contains(&id) { &mut effects.writes } else { &mut effects.reads };
                // Callers run frames for many layers.
                list.extend(self.lasting(&buffer.place, |binding| binding.of_own_layer().0));
            }
            for callee in frame.tasks.iter().filter_map(|task| task.work.callee()) {
                effects.add(self.called(callee));
            }
            self.called.insert(id, effects);
        }
        &self.called[&id]
    }

    fn effects(&mut self, (frame, at): (&'a Frame, Option<At>), task: &Task) -> Effects {
        let is_held = |id: BufferId| at.is_none() || frame.at(id).is_none_or(|there| Some(there) == at);
        let mut touched = |ids: &[BufferId]| -> Vec<Memory> {
            ids.iter().filter(|&&id| is_held(id)).filter_map(|&id| self.memory(frame, id)).collect()
        };
        let mut effects = Effects { reads: touched(&task.reads), writes: touched(&task.writes) };
        if let Work::Call { callee, base, .. } = task.work {
            effects.writes.push(memory(Within::Frame, base..base + self.frames[callee].bytes));
            effects.add(self.called(callee));
        }
        effects
    }
}

/// What a task or a frame reads and writes.
#[derive(Clone, Debug, Default)]
struct Effects {
    reads: Vec<Memory>,
    writes: Vec<Memory>,
}

impl Effects {
    fn add(&mut self, other: &Effects) {
        self.reads.extend_from_slice(&other.reads);
        self.writes.extend_from_slice(&other.writes);
    }
}

/// The tasks of a stream that touched memory last, by their number.
#[derive(Default)]
struct Latest {
    read: RangeMap<(Within, u64), usize>,
    written: RangeMap<(Within, u64), usize>,
}

impl Latest {
    fn add(&mut self, effects: &Effects, task: usize) {
        let set = |map: &mut RangeMap<_, _>, touched: &[Memory]| {
            touched.iter().filter(|memory| !memory.is_empty()).for_each(|m| map.insert(m.clone(), task));
        };
        set(&mut self.read, &effects.reads);
        set(&mut self.written, &effects.writes);
    }

    /// The last task that must be ordered before one with these effects.
    fn conflict(&self, effects: &Effects) -> Option<usize> {
        let last = |map: &RangeMap<_, usize>, touched: &[Memory]| {
            let touched = touched.iter().filter(|memory| !memory.is_empty());
            touched.flat_map(|memory| map.overlapping(memory)).map(|(_, &task)| task).max()
        };
        let read = last(&self.read, &effects.writes);
        read.max(last(&self.written, &effects.writes)).max(last(&self.written, &effects.reads))
    }
}

/// Inserts events into the tasks of `frame`, for the ranks of each stage as far as these run different tasks.
pub(super) fn insert(frame: &mut Frame, space: &Space, (frames, used): (&Arena<FrameId, Frame>, &[Streams])) {
    let mut touched =
        Touched { frames, space, lasting: BTreeMap::new(), n_lasting: 0, called: BTreeMap::new() };
    let meets = |t: &Task| {
        let used = t.work.callee().map(|callee| used[callee.index()]);
        used.filter(|used| used.communicates()).unwrap_or_default()
    };
    let meets: Vec<Streams> = frame.tasks.iter().map(meets).collect();
    let stages = frame.stages();
    // A rank touches only the buffers of its stage.
    let ranks = if stages.is_empty() { vec![None] } else { stages.into_iter().map(Some).collect::<Vec<_>>() };
    let mut effects = |at: Option<At>| -> Vec<(usize, Effects)> {
        let runs = |task: &Task| at.is_none_or(|at| frame.runs_at(task, at));
        let tasks = frame.tasks.iter().enumerate().filter(|(_, task)| runs(task));
        tasks.map(|(i, task)| (i, touched.effects((frame, at), task))).collect()
    };
    let of_ranks: Vec<Vec<(usize, Effects)>> = ranks.into_iter().map(&mut effects).collect();
    let waits: Vec<Vec<Wait>> = of_ranks.par_iter().map(|tasks| waits(&frame.tasks, tasks, &meets)).collect();
    let mut n = 0;
    for Wait { task, earlier } in waits.into_iter().flatten() {
        let event = *frame.tasks[earlier].records.get_or_insert_with(|| {
            n += 1;
            EventId::new(n - 1)
        });
        let waits = &mut frame.tasks[task].waits;
        if !waits.contains(&event) {
            waits.push(event);
        }
    }
    frame.n_events = n;
}

/// For each stream, how many of its tasks have ended.
type Clock = [usize; Stream::COUNT];

fn join(clock: &mut Clock, other: &Clock) {
    clock.iter_mut().zip(other).for_each(|(mine, theirs)| *mine = (*mine).max(*theirs));
}

/// A task that waits for an earlier one, by their numbers.
struct Wait {
    task: usize,
    earlier: usize,
}

/// The waits of ranks that run the tasks of these numbers; `meets` says which streams meet at each task.
fn waits(all: &[Task], tasks: &[(usize, Effects)], meets: &[Streams]) -> Vec<Wait> {
    let mut found = Vec::new();
    let stream = |(i, _): &(usize, Effects)| all[*i].stream;
    // Tasks of one stream are in order.
    if tasks.windows(2).all(|pair| stream(&pair[0]) == stream(&pair[1])) {
        return found;
    }
    // For each stream its tasks so far, by their place in `tasks`, each with what has ended when it ends.
    let mut issued: [Vec<(usize, Clock)>; Stream::COUNT] = Default::default();
    let mut latest: [Latest; Stream::COUNT] = Default::default();
    // For each stream what has ended when its next task starts.
    let mut starts: [Clock; Stream::COUNT] = Default::default();
    for (place, (i, effects)) in tasks.iter().enumerate() {
        let i = *i;
        let own = all[i].stream as usize;
        let mut start = starts[own];
        meets[i].iter().for_each(|stream| join(&mut start, &starts[stream as usize]));
        let is_other = |&other: &usize| other != own && !meets[i].has(Stream::ALL[other]);
        let conflict = |other: usize| {
            let has_open = issued[other].len() > start[other];
            has_open.then(|| latest[other].conflict(effects)).flatten().filter(|&n| n >= start[other])
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
            let earlier = tasks[issued[other][n].0].0;
            found.push(Wait { task: i, earlier });
            join(&mut start, &end);
        }
        let mut end = start;
        latest[own].add(effects, issued[own].len());
        end[own] = issued[own].len() + 1;
        issued[own].push((place, end));
        starts[own] = end;
        meets[i].iter().for_each(|stream| starts[stream as usize] = end);
    }
    found
}
