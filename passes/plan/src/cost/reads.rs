//! The bytes that a step of decoding cannot avoid: its weights and caches, each read once.

use std::collections::BTreeMap;

use ithaca_ir::Op;
use ithaca_ir::entity::Entity;
use ithaca_ir::ops::{Appended, Cache, Unit};
use ithaca_ir::schedule::{Buffer, BufferId, Frame, Place, Schedule, Stream, Task, Work};
use ithaca_layout::shard::strategy::STAGE_AXIS;

use super::{FilledSlots, attention};
use crate::cluster::Cluster;

/// What a step must read.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Reads {
    /// The time in which it is read.
    pub(crate) seconds: f64,
    /// Bytes of weights of the busiest rank, or of all stages.
    pub(crate) weights: f64,
    /// Bytes of caches in its memory.
    pub(crate) caches: f64,
}

/// Seconds in which the busiest rank reads, at the whole bandwidth of its memory, the weights that are multiplied and the states;
/// of a pipeline, the ranks of all stages one after another, or, of micro-batches, each of which reads the weights, with as little
/// waiting as there can be. Of experts those count that some token chose, of caches the tokens that some query sees. Caches in host memory are read
/// at the bandwidth of the host, beside the others. Nothing where attention reads no caches.
pub(crate) fn reads(cluster: &Cluster, schedule: &Schedule, micro_batches: u64) -> Option<Reads> {
    let mut tasks = schedule.frames.values().flat_map(|frame| &frame.tasks);
    let reads_caches = |op: &Op| match op {
        Op::Attention(attention) => attention.starts,
        op => matches!(op, Op::AttendPages { .. }),
    };
    tasks.find(|task| matches!(&task.work, Work::Compute(op) if reads_caches(op)))?;
    let filled = FilledSlots::of(cluster, schedule);
    let runs = schedule.layers_by_place();
    let bytes = |of: &dyn Fn(&Frame) -> f64| -> f64 {
        let each = schedule.frames.iter().map(|(id, frame)| {
            let times = runs[id.index()].iter().map(|(layers, _)| layers.end - layers.start).sum::<u64>();
            times as f64 * of(frame)
        });
        each.sum()
    };
    let weights = bytes(&|frame| weights_of(&filled, schedule, frame));
    let caches = bytes(&|frame| states_of(schedule, frame));
    let of_device = (weights + caches) / cluster.accelerator.memory_bandwidth.value;
    let of_host = cluster.accelerator.host_bandwidth.as_ref();
    let of_host = of_host.map(|rate| bytes(&|frame| of_uploads(schedule, frame)) / rate.value);
    let mesh = &schedule.space.mesh;
    let (p, m) = (mesh.axis(STAGE_AXIS).map_or(1, |axis| mesh.size(axis)) as f64, micro_batches as f64);
    let seconds = of_device.max(of_host.unwrap_or_default()) * (m + p - 1.0) / (m * p);
    Some(Reads { seconds, weights, caches })
}

/// Bytes that one run of a frame copies from host memory.
fn of_uploads(schedule: &Schedule, frame: &Frame) -> f64 {
    let uploads = frame.tasks.iter().filter(|task| task.stream == Stream::Host);
    uploads.flat_map(|task| &task.reads).map(|&id| frame.buffers[id].bytes(&schedule.space) as f64).sum()
}

/// The part of a state that a step reads: of pages as many as the sequences have room for.
fn in_use(schedule: &Schedule, frame: &Frame, state: &Buffer) -> f64 {
    let space = &schedule.space;
    let tables = frame.tasks.iter().filter_map(|task| {
        let Work::Compute(op) = &task.work else { return None };
        let Appended { by: Cache::AppendPages { pages, .. }, start } = op.appended()? else { return None };
        let is_read = task.reads.iter().any(|&id| frame.buffers[frame.holder(id)].place == state.place);
        let (cache, table) = (state.tensor()?, frame.buffers[*task.reads.get(start + 2)?].tensor()?);
        let held = space.max_extent(pages, cache.axes_of(pages));
        is_read.then(|| space.max_local_elements(table) as f64 / held.max(1) as f64)
    });
    { tables }.next().map_or(1.0, |part| part.min(1.0))
}

/// The part of a state that the attention of a frame must read.
fn seen(schedule: &Schedule, frame: &Frame, state: &Buffer) -> f64 {
    let space = &schedule.space;
    let of_task = |task: &Task| {
        let Work::Compute(op) = &task.work else { return None };
        let is_read = task.reads.iter().any(|&id| frame.buffers[frame.holder(id)].place == state.place);
        let operands: Vec<_> = task.reads.iter().filter_map(|&id| frame.buffers[id].tensor()).collect();
        is_read.then(|| attention::seen_keys(space, op, &operands)).flatten()
    };
    frame.tasks.iter().find_map(of_task).unwrap_or(1.0)
}

/// Bytes of the states that one run of a frame reads.
fn states_of(schedule: &Schedule, frame: &Frame) -> f64 {
    let is_state = |buffer: &&Buffer| matches!(buffer.place, Place::State(_)) && !buffer.is_in_host_memory();
    let of_state = |state: &Buffer| {
        let bytes = state.bytes(&schedule.space) as f64;
        bytes * in_use(schedule, frame, state) * seen(schedule, frame, state)
    };
    frame.buffers.values().filter(is_state).map(of_state).sum()
}

/// Bytes of the weights that products of one run of a frame read.
fn weights_of(filled: &FilledSlots, schedule: &Schedule, frame: &Frame) -> f64 {
    let space = &schedule.space;
    let tensor = |id| frame.buffers[id].tensor();
    let is_product = |work: &Work| matches!(work, Work::Compute(op) if op.info().unit == Unit::Matmul);
    // Of each part of a weight the bytes, and the chance that no product reads one: products of parts of the tokens read
    // a weight again, which a product of all of them would not.
    let mut parts: BTreeMap<(BufferId, BufferId), (f64, f64)> = BTreeMap::new();
    for task in frame.tasks.iter().filter(|task| is_product(&task.work)) {
        let types: Vec<_> = task.reads.iter().chain(&task.writes).filter_map(|&id| tensor(id)).collect();
        for &id in &task.reads {
            let holder = frame.holder(id);
            if let (Place::Weight(_), Some(ty)) = (&frame.buffers[holder].place, tensor(id)) {
                let bytes = space.max_local_bytes(ty) as f64;
                let (_, unread) = parts.entry((holder, id)).or_insert((bytes, 1.0));
                *unread *= 1.0 - filled.weights(space, ty, &types);
            }
        }
    }
    let mut weights: BTreeMap<BufferId, f64> = BTreeMap::new();
    for ((holder, _), (bytes, unread)) in parts {
        *weights.entry(holder).or_default() += bytes * (1.0 - unread);
    }
    let held = |id: BufferId| frame.buffers[id].bytes(space) as f64;
    weights.into_iter().map(|(id, bytes)| bytes.min(held(id))).sum()
}
