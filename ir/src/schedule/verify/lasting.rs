//! Weights and states as regions of memory: which are written, and what each frame reads and writes of them, its
//! callees included; `S13`.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

use crate::diagnostic::{Diagnostic, Diagnostics};
use crate::entity::Entity;
use crate::ops::error::OpError;
use crate::ops::table::source::{Binding, Target};
use crate::schedule::{BufferId, Content, Frame, FrameId, Place, Schedule, Work};
use crate::verify::states::{self, Use};

/// Every weight and state that some task writes, and which frames touch it.
pub(super) struct Lasting<'s> {
    /// By target and name, those written: how they are bound, and their number.
    written: BTreeMap<(Target, &'s str), Vec<(&'s Binding, usize)>>,
    /// For each frame, callees included.
    effects: Vec<Effects>,
}

/// Numbers of written weights and states that a frame reads and writes.
#[derive(Clone, Debug, Default)]
pub(super) struct Effects {
    pub(super) reads: BTreeSet<usize>,
    pub(super) writes: BTreeSet<usize>,
}

impl<'s> Lasting<'s> {
    /// What lasts in a schedule whose references are sound.
    pub(super) fn of(schedule: &'s Schedule) -> Self {
        let mut lasting = Self { written: BTreeMap::new(), effects: Vec::new() };
        let mut n = 0;
        for frame in schedule.frames.values() {
            for &buffer in frame.tasks.iter().flat_map(|task| &task.writes) {
                let Some((target, binding)) = home(frame, buffer) else { continue };
                let named = lasting.written.entry((target, binding.name.as_str())).or_default();
                if !named.iter().any(|(known, _)| *known == binding) {
                    named.push((binding, n));
                    n += 1;
                }
            }
        }
        for frame in schedule.frames.values() {
            let mut effects = Effects::default();
            for task in &frame.tasks {
                effects.reads.extend(task.reads.iter().filter_map(|&b| lasting.number(frame, b)));
                effects.writes.extend(task.writes.iter().filter_map(|&b| lasting.number(frame, b)));
                if let Work::Call { callee, .. } = task.work
                    && let Some(called) = lasting.effects.get(callee.index())
                {
                    effects.reads.extend(&called.reads);
                    effects.writes.extend(&called.writes);
                }
            }
            lasting.effects.push(effects);
        }
        lasting
    }

    /// The number of the written weight or state that a buffer is.
    pub(super) fn number(&self, frame: &Frame, buffer: BufferId) -> Option<usize> {
        let (target, binding) = home(frame, buffer)?;
        let named = self.written.get(&(target, binding.name.as_str()))?;
        named.iter().find(|(known, _)| *known == binding).map(|(_, n)| *n)
    }

    /// What a run of `frame` touches.
    pub(super) fn effects(&self, frame: FrameId) -> &Effects {
        &self.effects[frame.index()]
    }
}

fn home(frame: &Frame, buffer: BufferId) -> Option<(Target, &Binding)> {
    match &frame.buffers.get(buffer)?.place {
        Place::Weight(binding) => Some((Target::Param, binding)),
        Place::State(binding) => Some((Target::State, binding)),
        Place::Frame(_) | Place::Wire { .. } | Place::Argument(_) | Place::Result(_) | Place::Input(_) => {
            None
        }
    }
}

/// Adds weights and states that are written, and bound in ways that contradict each other.
pub(super) fn check(schedule: &Schedule, found: &mut Diagnostics) {
    let layers = layers_of(schedule);
    let mut uses = Vec::new();
    let mut frames = Vec::new();
    for (id, frame) in schedule.frames.iter() {
        let assigned: BTreeSet<BufferId> =
            frame.tasks.iter().flat_map(|t| t.writes.iter().copied()).collect();
        for (buffer_id, buffer) in frame.buffers.iter() {
            let Some((target, binding)) = home(frame, buffer_id) else { continue };
            let Content::Tensor(ty) = &buffer.content else { continue };
            let is_assigned = assigned.contains(&buffer_id);
            uses.push(Use { target, binding, ty, layers: &layers[id.index()], is_assigned });
            frames.push((&frame.name, &buffer.name));
        }
    }
    for (i, OpError { message, .. }) in states::conflicts(&schedule.space, &uses) {
        let (frame, buffer) = frames[i];
        found.push(Diagnostic::new("S13", format!("frame `@{frame}`: buffer `${buffer}`: {message}")));
    }
}

/// The layers that each frame runs for, indexed by frame.
fn layers_of(schedule: &Schedule) -> Vec<Vec<Range<u64>>> {
    let runs = schedule.layers_by_place();
    let mut layers: Vec<Vec<Range<u64>>> =
        runs.into_iter().map(|runs| runs.into_iter().map(|(layers, _)| layers).collect()).collect();
    if let Some(main) = schedule.main() {
        layers[main.index()].push(0..1);
    }
    layers
}
