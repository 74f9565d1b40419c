//! Weights and states as regions of memory: which are written, and what each frame reads and writes of them, its
//! callees included; `S13`.

use std::collections::BTreeSet;

use crate::diagnostic::{Diagnostic, Diagnostics};
use crate::entity::Entity;
use crate::handles::Layers;
use crate::layout::At;
use crate::ops::error::OpError;
use crate::schedule::verify::homes::Homes;
use crate::schedule::{BufferId, Content, Frame, FrameId, Schedule};
use crate::verify::states::{self, Use};

/// Every weight and state that some task writes, and which frames touch it.
pub(super) struct Lasting<'s> {
    /// Those written, with their numbers.
    written: Homes<'s, usize>,
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
    /// The weights and states of a schedule whose references are sound.
    pub(super) fn of(schedule: &'s Schedule) -> Self {
        let mut lasting = Self { written: Homes::default(), effects: Vec::new() };
        let mut n = 0;
        for frame in schedule.frames.values() {
            for &buffer in frame.tasks.iter().flat_map(|task| &task.writes) {
                if let Some(home) = frame.buffers[buffer].place.home()
                    && lasting.written.get(home).is_none()
                {
                    lasting.written.set(home, n);
                    n += 1;
                }
            }
        }
        for frame in schedule.frames.values() {
            let mut effects = Effects::default();
            for task in &frame.tasks {
                effects.reads.extend(task.reads.iter().filter_map(|&b| lasting.number_of_layer(frame, b)));
                effects.writes.extend(task.writes.iter().filter_map(|&b| lasting.number(frame, b)));
                if let Some(called) = task.work.callee().and_then(|f| lasting.effects.get(f.index())) {
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
        self.written.get(frame.buffers.get(frame.holder(buffer))?.place.home()?)
    }

    /// The same, and of one of the next layer that of the layer: callers run frames for many layers.
    fn number_of_layer(&self, frame: &Frame, buffer: BufferId) -> Option<usize> {
        let (target, binding) = frame.buffers.get(frame.holder(buffer))?.place.home()?;
        self.written.get((target, &binding.of_own_layer().0))
    }

    /// The weights and states that a run of `frame` touches.
    pub(super) fn effects(&self, frame: FrameId) -> &Effects {
        &self.effects[frame.index()]
    }
}

/// Adds weights and states that are written, and bound in ways that contradict each other.
pub(super) fn check(schedule: &Schedule, found: &mut Diagnostics) {
    let runs = schedule.layers_by_place();
    let layers = |runs: &Vec<(Layers, Option<At>)>| runs.iter().map(|(layers, _)| layers.clone()).collect();
    let layers: Vec<Vec<Layers>> = runs.iter().map(layers).collect();
    let mut uses = Vec::new();
    let mut frames = Vec::new();
    for (id, frame) in schedule.frames.iter() {
        let assigned: BTreeSet<BufferId> =
            frame.tasks.iter().flat_map(|t| t.writes.iter().copied()).collect();
        for (buffer_id, buffer) in frame.buffers.iter() {
            let Some((target, binding)) = buffer.place.home() else { continue };
            let Content::Tensor(ty) = &buffer.content else { continue };
            let is_assigned = assigned.contains(&buffer_id);
            uses.push(Use { target, binding, ty, layers: &layers[id.index()], is_assigned });
            frames.push((&frame.name, &buffer.name));
        }
    }
    let lasting = Lasting::of(schedule);
    for frame in schedule.frames.values() {
        let called = frame.tasks.iter().filter_map(|task| task.work.callee());
        let written: BTreeSet<usize> = called
            .filter(|f| f.index() < lasting.effects.len())
            .flat_map(|f| lasting.effects(f).writes.clone())
            .collect();
        for (id, buffer) in frame.buffers.iter() {
            let of_next = buffer.place.home().is_some_and(|(_, binding)| binding.is_of_next_layer());
            if of_next && lasting.number_of_layer(frame, id).is_some_and(|n| written.contains(&n)) {
                let message = "a frame that it calls writes that of the next layer";
                let message = format!("frame `@{}`: buffer `${}`: {message}", frame.name, buffer.name);
                found.push(Diagnostic::new("S13", message));
            }
        }
    }
    for (i, OpError { message, .. }) in states::conflicts(&schedule.space, &uses) {
        let (frame, buffer) = frames[i];
        found.push(Diagnostic::new("S13", format!("frame `@{frame}`: buffer `${buffer}`: {message}")));
    }
}
