//! Schedules: tasks on streams, events between them, buffers at fixed offsets.
//!
//! One schedule serves all ranks. A [`Frame`] is a lowered function: its tasks in order of issue and its buffers,
//! at offsets from wherever its caller puts it; a loop over layers is one task of its caller. What differs by rank
//! (local extents, peers) is derived from types and the rank, as [`crate::boxes`] and [`Space`] do.
//!
//! Tasks of one stream run in order. Tasks of different streams are ordered by events only; at the start and at the
//! end of a frame that communicates the streams that it uses have met. To every other stream such a call is one task of
//! the compute stream, as is a call of a frame that does not communicate.

mod buffer;
pub mod integers;
mod reach;
mod streams;
mod task;
mod text;
mod verify;

pub use buffer::{Buffer, BufferId, Content, Place};
pub use reach::{Operand, reaches, reaches_part};
pub use streams::{Stream, Streams};
pub use task::{EventId, FrameId, Task, Transfer, Work};
pub use text::{parse, print};
pub use verify::{Party, Verified, verify, verify_meaning, verify_together};

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use crate::boxes::Side;
use crate::entity::{Arena, Entity};
use crate::handles::Layers;
use crate::layers::{self, Call, Runs};
use crate::layout::At;
use crate::mesh::Rank;
use crate::message::Parcel;
use crate::ops::table::experts::{Deal, Experts};
use crate::ops::table::op::Op;
use crate::ops::table::structure::Stage;
use crate::phase::Phase;
use crate::space::Space;
use crate::strided::{self, Strided};

/// Alignment of buffers, bytes.
pub const ALIGNMENT: u64 = 256;

/// `bytes` rounded up to [`ALIGNMENT`].
pub fn aligned(bytes: u64) -> u64 {
    bytes.next_multiple_of(ALIGNMENT)
}

/// For each frame the streams that it and its callees use, the compute stream always, where callees come before their
/// callers; in time linear in tasks.
pub fn used_streams(frames: &Arena<FrameId, Frame>) -> Vec<Streams> {
    let mut all: Vec<Streams> = Vec::with_capacity(frames.len());
    for frame in frames.values() {
        let used = |task: &Task| {
            let own = Streams::only(task.stream);
            let callee = task.work.callee().and_then(|callee| all.get(callee.index()));
            callee.map_or(own, |&callee| own.and(callee))
        };
        let compute = Streams::only(Stream::Compute);
        all.push(frame.tasks.iter().map(used).fold(compute, Streams::and));
    }
    all
}

/// The program that every rank executes.
#[derive(Clone, Debug, PartialEq)]
pub struct Schedule {
    /// The model's name.
    pub name: String,
    /// The passes that made it.
    pub pipeline: Vec<String>,
    /// Dimensions and mesh.
    pub space: Space,
    /// Frames; a callee comes before its callers, `main` is the last.
    pub frames: Arena<FrameId, Frame>,
}

impl Schedule {
    /// The frame that runs first, if there is one.
    pub fn main(&self) -> Option<FrameId> {
        self.frames.ids().next_back()
    }

    /// For each frame its runs, by the ranks that run it.
    fn runs(&self) -> Vec<BTreeMap<Option<At>, Runs>> {
        layers::runs_by_place(self.frames.len(), self.main().map(Entity::index), |caller| {
            self.frames[FrameId::new(caller)].tasks.iter().filter_map(|task| match &task.work {
                Work::Call { callee, layers, stride, stage, .. } => {
                    Some(Call { callee: callee.index(), layers, stride: *stride, stage: *stage })
                }
                Work::Compute(_) | Work::Pack(_) | Work::Exchange(_) | Work::Unpack(_) | Work::Copy => None,
            })
        })
    }

    /// For each frame the layers that it runs for, as ascending ranges that do not touch, and the ranks that run it; all of
    /// them where there is no place. `main` runs for layer 0, and a frame that nobody calls for none.
    pub fn layers_by_place(&self) -> Vec<Vec<(Layers, Option<At>)>> {
        layers::by_place(self.runs())
    }

    /// For each frame how often ranks of each place run it in one run of `main`; layers count.
    pub fn runs_by_place(&self) -> Vec<BTreeMap<Option<At>, u64>> {
        let counts = |runs: BTreeMap<_, Runs>| runs.into_iter().map(|(at, runs)| (at, runs.count)).collect();
        self.runs().into_iter().map(counts).collect()
    }

    /// The places in which not all tasks of `main` run, ascending; none where every rank runs every task.
    pub fn stages(&self) -> Vec<At> {
        self.main().map_or_else(Vec::new, |id| self.frames[id].stages())
    }

    /// The deal of slots whose bound a run may exceed, if there is one; all of a model have the same groups.
    pub fn bounded_deal(&self) -> Option<&Deal> {
        let mut tasks = self.frames.values().flat_map(|frame| &frame.tasks);
        tasks.find_map(|task| match &task.work {
            Work::Compute(Op::Experts(Experts::Deal(deal))) => deal.bound.map(|_| deal),
            _ => None,
        })
    }

    /// Bytes of the arena: the frame of `main`, which holds those of its callees.
    pub fn arena_bytes(&self) -> u64 {
        self.main().map_or(0, |id| self.frames[id].bytes)
    }

    /// Bytes of the arena on the ranks of a place: the frame of `main`, callees included.
    pub fn arena_bytes_at(&self, at: At) -> u64 {
        self.main().map_or(0, |id| self.frame_bytes_at(&self.frames[id], at))
    }

    /// The end of the last buffer and callee that the ranks of a place have in a frame, aligned.
    fn frame_bytes_at(&self, frame: &Frame, at: At) -> u64 {
        let mut bytes = 0;
        for task in frame.tasks.iter().filter(|task| frame.runs_at(task, at)) {
            for buffer in task.reads.iter().chain(&task.writes).map(|&b| frame.holder(b)) {
                let here = frame.at(buffer).is_none_or(|there| there == at);
                if let (Place::Frame(offset), true) = (&frame.buffers[buffer].place, here) {
                    bytes = bytes.max(offset + aligned(frame.buffers[buffer].bytes(&self.space)));
                }
            }
            if let Work::Call { callee, base, .. } = &task.work {
                bytes = bytes.max(base + self.frame_bytes_at(&self.frames[*callee], at));
            }
        }
        bytes
    }
}

/// A function as tasks.
#[derive(Clone, Debug, PartialEq, Default)]
pub struct Frame {
    /// The function's name, without its `@`.
    pub name: String,
    /// When in a step it runs.
    pub phase: Phase,
    /// Number of arguments; argument `i` is the buffer placed at [`Place::Argument`]`(i)`.
    pub n_arguments: usize,
    /// The results of the frame: the name in `main`, and the buffer that holds it. A buffer that is placed at
    /// [`Place::Result`] belongs to the caller; in `main` results lie in the frame.
    pub outputs: Vec<FrameOutput>,
    /// Buffers.
    pub buffers: Arena<BufferId, Buffer>,
    /// Tasks, in order of issue.
    pub tasks: Vec<Task>,
    /// Number of events.
    pub n_events: usize,
    /// Bytes of the frame, those of callees included.
    pub bytes: u64,
}

impl Frame {
    /// The ranks that hold a buffer; all of them when absent.
    pub fn at(&self, buffer: BufferId) -> Option<At> {
        match self.buffers.get(buffer).map(|b| &b.content) {
            Some(Content::Tensor(ty)) => ty.layout.at,
            Some(Content::Wire { .. }) | None => None,
        }
    }

    /// The ranks that have part in a task, in one or two places; all of them where one place is absent.
    pub fn places(&self, task: &Task) -> [Option<At>; 2] {
        match &task.work {
            Work::Call { stage, .. } => [stage.and_then(Stage::at); 2],
            Work::Pack(t) | Work::Exchange(t) | Work::Unpack(t) => {
                let Parcel { from, to, .. } = t.first();
                [from.layout.at, to.layout.at]
            }
            Work::Compute(_) | Work::Copy => {
                [task.reads.iter().chain(&task.writes).find_map(|&b| self.at(b)); 2]
            }
        }
    }

    /// The first exchange from or to a wire, and the side of the exchange that the wire is.
    pub fn carried(&self, wire: BufferId) -> Option<(&Transfer, Side)> {
        self.tasks.iter().find_map(|task| {
            let transfer = task.work.exchange()?;
            let side = if task.reads.contains(&wire) { Side::Sent } else { Side::Received };
            (side == Side::Sent || task.writes.contains(&wire)).then_some((transfer, side))
        })
    }

    /// The places of the elements of a buffer inside of another; none for other buffers, and where no kernel could address them.
    pub fn strided(&self, space: &Space, buffer: BufferId) -> Option<Strided> {
        let Buffer { content, place, .. } = self.buffers.get(buffer)?;
        let &Place::Inside { whole, part } = place else { return None };
        match (&self.buffers.get(whole)?.content, content) {
            (Content::Wire { .. }, _) => {
                let (transfer, side) = self.carried(whole)?;
                Strided::of(space, transfer.parcels(), side, part)
            }
            (Content::Tensor(whole), Content::Tensor(part)) => Strided::of_part(space, whole, part),
            (Content::Tensor(_), Content::Wire { .. }) => None,
        }
    }

    /// The bytes of a tensor that a part of it has, from its start, where these are one piece.
    pub fn piece(&self, space: &Space, buffer: BufferId) -> Option<Range<u64>> {
        let own = self.buffers.get(buffer)?;
        self.buffers.get(self.holder(buffer))?.tensor()?;
        let strided = self.strided(space, buffer).filter(|strided| strided.cut.is_none())?;
        let start = strided.start * own.dtype().bytes();
        Some(start..start + own.bytes(space))
    }

    /// The number of tensors that a wire or a tensor consists of, where others are inside.
    pub fn n_parts(&self, space: &Space, whole: BufferId) -> usize {
        match self.buffers.get(whole).map(|buffer| &buffer.content) {
            Some(Content::Wire { .. }) => {
                self.carried(whole).map_or(0, |(transfer, _)| transfer.parcels().len())
            }
            Some(Content::Tensor(of)) => {
                let mut parts = self.buffers.ids().filter(|&b| b != whole && self.holder(b) == whole);
                let ty = parts.next().and_then(|b| self.buffers[b].tensor());
                ty.and_then(|ty| strided::part_of(space, of, ty)).map_or(0, |(_, part)| part.count as usize)
            }
            None => 0,
        }
    }

    /// The buffer whose bytes a buffer has: the one that contains it, or itself.
    pub fn holder(&self, buffer: BufferId) -> BufferId {
        match self.buffers.get(buffer).map(|b| &b.place) {
            Some(Place::Inside { whole, .. }) => *whole,
            Some(_) | None => buffer,
        }
    }

    /// Whether the ranks of a place run a task.
    pub fn runs_at(&self, task: &Task, at: At) -> bool {
        self.places(task).iter().any(|place| place.is_none_or(|place| place == at))
    }

    /// Whether `rank` runs a task.
    pub fn runs(&self, space: &Space, task: &Task, rank: Rank) -> bool {
        self.places(task).iter().any(|place| place.is_none_or(|at| at.has(&space.mesh, rank)))
    }

    /// The places in which not all tasks run, ascending; none where every rank runs every task.
    pub fn stages(&self) -> Vec<At> {
        let buffers = self.buffers.ids().filter_map(|b| self.at(b));
        let tasks = self.tasks.iter().flat_map(|task| self.places(task)).flatten();
        let mut stages: Vec<At> = buffers.chain(tasks).collect();
        stages.sort_unstable();
        stages.dedup();
        stages
    }

    /// The frame as the ranks of a place run it: without the tasks, buffers and events of others.
    pub fn only(&self, at: At) -> Frame {
        let Frame { name, phase, n_arguments, outputs, buffers, tasks, n_events, bytes } = self;
        let mut frame = Frame {
            name: name.clone(),
            phase: *phase,
            n_arguments: *n_arguments,
            outputs: outputs.clone(),
            buffers: buffers.clone(),
            tasks: tasks.iter().filter(|task| self.runs_at(task, at)).cloned().collect(),
            n_events: *n_events,
            bytes: *bytes,
        };
        let held = |b: &BufferId| self.at(*b).is_none_or(|there| there == at);
        for task in &mut frame.tasks {
            task.reads.retain(held);
            task.writes.retain(held);
        }
        let elsewhere = |o: &FrameOutput| self.at(o.buffer).is_some_and(|other| other != at);
        frame.outputs.retain(|output| !elsewhere(output));
        let recorded: BTreeSet<EventId> = frame.tasks.iter().filter_map(|task| task.records).collect();
        for task in &mut frame.tasks {
            task.waits.retain(|event| recorded.contains(event));
        }
        frame
    }
}

/// A returned buffer.
#[derive(Clone, Debug, PartialEq)]
pub struct FrameOutput {
    /// The name, in `main`.
    pub name: Option<String>,
    /// The buffer.
    pub buffer: BufferId,
}
