//! When the buffers of a frame are alive, and for what.

use std::collections::BTreeSet;
use std::ops::Range;

use ithaca_ir::entity::Entity;
use ithaca_ir::phase::Phase;
use ithaca_ir::schedule::{BufferId, Content, Frame, Place, Schedule};

/// For each buffer in the frame, the tasks from its first use to its last; an output lives to the end.
pub(crate) fn lives(frame: &Frame) -> Vec<(BufferId, Range<usize>)> {
    let mut used: Vec<Option<Range<usize>>> = vec![None; frame.buffers.len()];
    for (i, task) in frame.tasks.iter().enumerate() {
        for buffer in task.reads.iter().chain(&task.writes).map(|&b| frame.holder(b)) {
            used[buffer.index()].get_or_insert(i..i).end = i + 1;
        }
    }
    for output in &frame.outputs {
        if let Some(tasks) = &mut used[output.buffer.index()] {
            tasks.end = frame.tasks.len();
        }
    }
    let in_frame = frame.buffers.iter().filter(|(_, b)| matches!(b.place, Place::Frame(_)));
    in_frame.filter_map(|(id, _)| Some((id, used[id.index()].clone()?))).collect()
}

/// Bytes of such buffers that are alive during each task.
pub(crate) fn alive_bytes(
    schedule: &Schedule,
    frame: &Frame,
    lives: &[(BufferId, Range<usize>)],
) -> Vec<u64> {
    let mut alive = vec![0; frame.tasks.len()];
    for (buffer, tasks) in lives {
        let bytes = frame.buffers[*buffer].bytes(&schedule.space);
        alive[tasks.clone()].iter_mut().for_each(|sum| *sum += bytes);
    }
    alive
}

/// The buffers of a frame while it runs.
pub(super) struct Alive<'a> {
    schedule: &'a Schedule,
    frame: &'a Frame,
    pub(super) lives: Vec<(BufferId, Range<usize>)>,
    /// Results of calls of the forward pass.
    made: BTreeSet<BufferId>,
    /// Operands of calls of the backward pass.
    read: BTreeSet<BufferId>,
}

/// The purpose of a buffer of the arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// A wire.
    Communication,
    /// A result of the forward pass that waits for the backward pass.
    Saved,
    Other,
}

impl<'a> Alive<'a> {
    pub(super) fn of(schedule: &'a Schedule, frame: &'a Frame) -> Self {
        let mut alive =
            Self { schedule, frame, lives: lives(frame), made: BTreeSet::new(), read: BTreeSet::new() };
        for (i, task) in frame.tasks.iter().enumerate() {
            match alive.callee(i).map(|frame| frame.phase) {
                Some(Phase::Forward) => alive.made.extend(&task.writes),
                Some(Phase::Backward) => alive.read.extend(&task.reads),
                Some(Phase::Update) | None => {}
            }
        }
        alive
    }

    pub(super) fn callee(&self, task: usize) -> Option<&'a Frame> {
        self.frame.tasks[task].work.callee().map(|callee| &self.schedule.frames[callee])
    }

    /// Bytes that are alive during each task, callees included.
    pub(super) fn bytes(&self) -> Vec<u64> {
        let mut held = alive_bytes(self.schedule, self.frame, &self.lives);
        for (task, sum) in held.iter_mut().enumerate() {
            *sum += self.callee(task).map_or(0, |frame| frame.bytes);
        }
        held
    }

    /// The buffers that are alive during a task.
    pub(super) fn at(&self, task: usize) -> impl Iterator<Item = BufferId> {
        self.lives.iter().filter(move |(_, tasks)| tasks.contains(&task)).map(|(id, _)| *id)
    }

    pub(super) fn kind(&self, buffer: BufferId) -> Kind {
        match self.frame.buffers[buffer].content {
            Content::Wire { .. } => Kind::Communication,
            Content::Tensor(_) if self.made.contains(&buffer) && self.read.contains(&buffer) => Kind::Saved,
            Content::Tensor(_) => Kind::Other,
        }
    }
}
