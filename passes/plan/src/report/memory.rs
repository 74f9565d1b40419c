//! Memory over the step, by kind.

use ithaca_ir::schedule::{Schedule, Stream};
use ithaca_ir::timeline::Timeline;
use serde::Serialize;

use crate::cluster::Cluster;
use crate::memory::{Moment, Profile, profile};

/// Memory of the busiest rank over the step.
#[derive(Clone, Debug, Serialize)]
pub struct MemoryOverTime {
    /// The stage of a pipeline, as `pp=0`; empty where all ranks are alike.
    pub place: String,
    /// Held for the whole step.
    pub lasting: Vec<Part>,
    /// Bytes that are reserved for what `moments` have.
    pub arena: u64,
    /// Everything: the sum of the two.
    pub total: u64,
    /// Memory of a device without its reserve.
    pub usable: u64,
    /// From and until, seconds; communication buffers, saved activations and other activations, bytes.
    pub moments: Vec<(f64, f64, u64, u64, u64)>,
    /// The largest tensors at the peak: name, layers that have one, bytes.
    pub largest: Vec<(String, u64, u64)>,
}

/// A part of the memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Part {
    /// Its name.
    pub name: &'static str,
    /// Its bytes.
    pub bytes: u64,
}

impl MemoryOverTime {
    pub(super) fn new(cluster: &Cluster, schedule: &Schedule, timeline: &Timeline) -> Option<Self> {
        let Profile { at, memory, moments } = profile(cluster, schedule)?;
        let mesh = &schedule.space.mesh;
        let here = timeline.ranks.iter().filter(|alike| !alike.within.is_empty());
        let of_place = here.clone().find(|alike| at.is_none_or(|at| at.has(mesh, alike.first)));
        let within = of_place.map(|alike| alike.within.as_slice()).unwrap_or_default();
        let main = &schedule.frames[schedule.main()?];
        // What a transfer between stages waits for says nothing of the time at which memory is held.
        let computes = |task: usize| main.tasks[task].stream == Stream::Compute;
        let timed = |&(task, moment): &(usize, Moment)| {
            if !computes(task) {
                return None;
            }
            let at = within.binary_search_by_key(&task, |(task, _)| *task).ok()?;
            let (start, end) = within[at].1;
            Some((start, end, moment.communication, moment.saved, moment.activations))
        };
        let mut timed: Vec<_> = moments.iter().filter_map(timed).collect();
        timed.sort_by(|a, b| a.0.total_cmp(&b.0));
        timed.dedup_by(|next, last| {
            let is_same = (next.2, next.3, next.4) == (last.2, last.3, last.4);
            if is_same {
                last.1 = last.1.max(next.1);
            }
            is_same
        });
        let lasting = [
            ("parameters", memory.parameters),
            ("gradients", memory.gradients),
            ("optimizer states", memory.optimizer),
            ("caches and other states", memory.states),
            ("inputs", memory.inputs),
            ("scores of attention", memory.scores),
        ];
        let lasting = lasting.into_iter().filter(|(_, bytes)| *bytes > 0);
        Some(Self {
            place: at.map(|at| format!("{}={}", mesh.axes[at.axis].name, at.coordinate)).unwrap_or_default(),
            lasting: lasting.map(|(name, bytes)| Part { name, bytes }).collect(),
            arena: memory.arena,
            total: memory.total,
            usable: memory.usable,
            moments: timed,
            largest: memory.largest.into_iter().map(|held| (held.name, held.count, held.bytes)).collect(),
        })
    }
}
