//! The bytes that a step of decoding cannot avoid: its weights and caches, each read once.

use ithaca_ir::Op;
use ithaca_ir::entity::Entity;
use ithaca_ir::ops::Unit;
use ithaca_ir::schedule::{Content, Frame, Place, Schedule, Work};

use super::FilledSlots;
use crate::cluster::Cluster;

/// Seconds in which the busiest rank reads, at the whole bandwidth of its memory, the weights that are multiplied and the states;
/// of a pipeline, the ranks of all stages one after another. Of experts those count that some token chose. Nothing where
/// attention reads no caches.
pub(crate) fn read_seconds(cluster: &Cluster, schedule: &Schedule) -> Option<f64> {
    let mut tasks = schedule.frames.values().flat_map(|frame| &frame.tasks);
    tasks.find(|task| matches!(&task.work, Work::Compute(Op::Attention(a)) if a.starts))?;
    let filled = FilledSlots::of(cluster, schedule);
    let runs = schedule.layers_by_place();
    let bytes = schedule.frames.iter().map(|(id, frame)| {
        let times = runs[id.index()].iter().map(|(layers, _)| layers.end - layers.start).sum::<u64>();
        times as f64 * of_frame(&filled, schedule, frame)
    });
    Some(bytes.sum::<f64>() / cluster.accelerator.memory_bandwidth.value)
}

/// Bytes of one run of a frame.
fn of_frame(filled: &FilledSlots, schedule: &Schedule, frame: &Frame) -> f64 {
    let space = &schedule.space;
    let tensor = |id| match &frame.buffers[id].content {
        Content::Tensor(ty) => Some(ty),
        Content::Wire { .. } => None,
    };
    let states = frame.buffers.values().filter(|buffer| matches!(buffer.place, Place::State(_)));
    let states = states.map(|buffer| buffer.bytes(space) as f64);
    let is_product = |work: &Work| matches!(work, Work::Compute(op) if op.info().unit == Unit::Matmul);
    let products = frame.tasks.iter().filter(|task| is_product(&task.work));
    let weights = products.flat_map(|task| {
        let types: Vec<_> = task.reads.iter().chain(&task.writes).filter_map(|&id| tensor(id)).collect();
        let read = task.reads.iter().filter(|&&id| matches!(frame.buffers[id].place, Place::Weight(_)));
        let bytes = read
            .filter_map(|&id| tensor(id))
            .map(|ty| space.max_local_bytes(ty) as f64 * filled.weights(space, ty, &types));
        bytes.collect::<Vec<f64>>()
    });
    states.sum::<f64>() + weights.sum::<f64>()
}
