//! The bytes that a step of decoding cannot avoid: its weights and caches, each read once.

use ithaca_ir::Op;
use ithaca_ir::entity::Entity;
use ithaca_ir::ops::Unit;
use ithaca_ir::schedule::{Buffer, Frame, Place, Schedule, Stream, Work};
use ithaca_layout::shard::strategy::STAGE_AXIS;

use super::FilledSlots;
use crate::cluster::Cluster;

/// Seconds in which the busiest rank reads, at the whole bandwidth of its memory, the weights that are multiplied and the states;
/// of a pipeline, the ranks of all stages one after another, or, of micro-batches, each of which reads the weights, with as little
/// waiting as there can be. Of experts those count that some token chose. Caches in host memory are read at the bandwidth of the
/// host, beside the others. Nothing where attention reads no caches.
pub(crate) fn read_seconds(cluster: &Cluster, schedule: &Schedule, micro_batches: u64) -> Option<f64> {
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
    let of_device =
        bytes(&|frame| of_frame(&filled, schedule, frame)) / cluster.accelerator.memory_bandwidth.value;
    let of_host = cluster.accelerator.host_bandwidth.as_ref();
    let of_host = of_host.map(|rate| bytes(&|frame| of_uploads(schedule, frame)) / rate.value);
    let mesh = &schedule.space.mesh;
    let (p, m) = (mesh.axis(STAGE_AXIS).map_or(1, |axis| mesh.size(axis)) as f64, micro_batches as f64);
    Some(of_device.max(of_host.unwrap_or_default()) * (m + p - 1.0) / (m * p))
}

/// Bytes that one run of a frame copies from host memory.
fn of_uploads(schedule: &Schedule, frame: &Frame) -> f64 {
    let uploads = frame.tasks.iter().filter(|task| task.stream == Stream::Host);
    uploads.flat_map(|task| &task.reads).map(|&id| frame.buffers[id].bytes(&schedule.space) as f64).sum()
}

/// Bytes of one run of a frame.
fn of_frame(filled: &FilledSlots, schedule: &Schedule, frame: &Frame) -> f64 {
    let space = &schedule.space;
    let tensor = |id| frame.buffers[id].tensor();
    let is_state = |buffer: &&Buffer| matches!(buffer.place, Place::State(_)) && !buffer.is_in_host_memory();
    let states = frame.buffers.values().filter(is_state);
    let states = states.map(|buffer| buffer.bytes(space) as f64);
    let is_product = |work: &Work| matches!(work, Work::Compute(op) if op.info().unit == Unit::Matmul);
    let products = frame.tasks.iter().filter(|task| is_product(&task.work));
    let weights = products.flat_map(|task| {
        let types: Vec<_> = task.reads.iter().chain(&task.writes).filter_map(|&id| tensor(id)).collect();
        let read = task
            .reads
            .iter()
            .filter(|&&id| matches!(frame.buffers[frame.holder(id)].place, Place::Weight(_)));
        let bytes = read
            .filter_map(|&id| tensor(id))
            .map(|ty| space.max_local_bytes(ty) as f64 * filled.weights(space, ty, &types));
        bytes.collect::<Vec<f64>>()
    });
    states.sum::<f64>() + weights.sum::<f64>()
}
