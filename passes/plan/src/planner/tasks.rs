//! The work of the tasks of a frame, in seconds and bytes, as estimates need it.

use std::collections::BTreeSet;

use ithaca_ir::ops::Fused;
use ithaca_ir::schedule::{BufferId, Frame, Place, Schedule, Stream, Task, Work};
use ithaca_ir::{Op, TensorType};

use crate::cluster::Cluster;
use crate::cost::op_seconds;
use crate::memory::{alive_bytes, lives};

/// Bytes of the states that a frame copies from host memory.
pub(super) fn copied(schedule: &Schedule, frame: &Frame) -> u64 {
    let uploads = frame.tasks.iter().filter(|task| task.stream == Stream::Host);
    uploads.flat_map(|task| &task.reads).map(|&b| frame.buffers[b].bytes(&schedule.space)).sum()
}

/// The tasks of a forward function that compute nothing but results which it hands on, the first `carried`: its backward pass, where
/// it computes the function again, leaves them out.
pub(super) fn last_tasks(frame: &Frame, carried: usize) -> Vec<bool> {
    let is_saved = |b: BufferId| matches!(frame.buffers[b].place, Place::Result(i) if i >= carried);
    let mut needed: BTreeSet<BufferId> = BTreeSet::new();
    let mut last = vec![false; frame.tasks.len()];
    for (task, is_last) in frame.tasks.iter().zip(&mut last).rev() {
        let writes = |b: &BufferId| is_saved(*b) || needed.contains(&frame.holder(*b));
        *is_last = !task.writes.iter().any(writes);
        if !*is_last {
            needed.extend(task.reads.iter().map(|&b| frame.holder(b)));
        }
    }
    last
}

/// The tasks of a backward function that only make gradients f32, which the sums of several micro-batches are already.
pub(super) fn casts(frame: &Frame) -> Vec<bool> {
    let read: BTreeSet<BufferId> = frame.tasks.iter().flat_map(|task| &task.reads).copied().collect();
    let is_cast = |task: &Task| {
        matches!(task.work, Work::Compute(Op::Cast { .. })) && task.writes.iter().all(|b| !read.contains(b))
    };
    frame.tasks.iter().map(is_cast).collect()
}

/// A gradient of weights that a backward function computes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Gradient {
    /// When it is known, as a part of the time of all kernels.
    pub(super) at: f64,
    pub(super) bytes: u64,
    /// Seconds by which a product that adds it to a sum in f32 takes longer than one of which the result is cast to it.
    pub(super) adding: f64,
}

/// The gradients of weights that `casts` of a backward function make f32, in the order in which they are known.
pub(super) fn gradients(
    cluster: &Cluster,
    schedule: &Schedule,
    frame: &Frame,
    casts: &[bool],
) -> Vec<Gradient> {
    let ty = |b: &BufferId| frame.buffers[*b].tensor();
    let price = |op: &Op, reads: &[&TensorType], writes: &[&TensorType]| {
        op_seconds(cluster, &schedule.space, op, reads, writes)
    };
    let mut now = 0.0;
    // Each kernel with the time at its end.
    let mut made: Vec<(&Task, f64)> = Vec::new();
    for (task, _) in frame.tasks.iter().zip(casts).filter(|(_, is_cast)| !**is_cast) {
        let types = |buffers: &[BufferId]| buffers.iter().map(ty).collect::<Option<Vec<_>>>();
        if let (Work::Compute(op), Some(reads), Some(writes)) =
            (&task.work, types(&task.reads), types(&task.writes))
        {
            now += price(op, &reads, &writes);
            made.push((task, now));
        }
    }
    let gradient = |(cast, _): (&Task, &bool)| -> Option<Gradient> {
        let (from, to) = (ty(cast.reads.first()?)?, ty(cast.writes.first()?)?);
        let is_of = |ty: &&TensorType| ty.dims == from.dims;
        let found = made.iter().rev().find_map(|&(task, end)| {
            let result = task.writes.iter().filter_map(ty).find(is_of)?;
            Some((task, result, end))
        });
        let (task, result, end) = found?;
        let factors = match &task.work {
            Work::Compute(Op::Einsum) => Some([0, 1]),
            Work::Compute(Op::Fused(Fused::ProductPair)) => Some([0, 2]),
            _ => None,
        };
        let factors = factors.and_then(|[x, y]| Some([ty(task.reads.get(x)?)?, ty(task.reads.get(y)?)?]));
        let adding = factors.map_or(0.0, |[x, y]| {
            price(&Op::AccumulateProduct, &[x, y, to], &[to]) - price(&Op::Einsum, &[x, y], &[result])
        });
        Some(Gradient { at: end / now, bytes: schedule.space.max_local_bytes(from), adding })
    };
    let mut found: Vec<Gradient> =
        frame.tasks.iter().zip(casts).filter(|(_, is_cast)| **is_cast).filter_map(gradient).collect();
    found.sort_by(|a, b| a.at.total_cmp(&b.at));
    found
}

/// The most bytes of a backward function that are alive at once, without the gradients that `casts` make f32 and their messages.
pub(super) fn peak_without_gradients(schedule: &Schedule, frame: &Frame, casts: &[bool]) -> u64 {
    let dims = |b: &BufferId| frame.buffers[*b].tensor().map(|ty| &ty.dims);
    let cast = frame.tasks.iter().zip(casts).filter(|(_, is_cast)| **is_cast);
    let of_weights: BTreeSet<_> = cast.flat_map(|(task, _)| &task.reads).filter_map(dims).collect();
    let mut gradients: BTreeSet<BufferId> = BTreeSet::new();
    for task in &frame.tasks {
        let moves = !matches!(task.work, Work::Compute(_) | Work::Call { .. });
        let is_moved = moves && task.reads.iter().any(|&b| gradients.contains(&frame.holder(b)));
        let is_gradient = |b: &&BufferId| is_moved || dims(b).is_some_and(|dims| of_weights.contains(dims));
        gradients.extend(task.writes.iter().filter(is_gradient).map(|&b| frame.holder(b)));
    }
    let mut others = lives(frame);
    others.retain(|(buffer, _)| !gradients.contains(buffer));
    alive_bytes(schedule, frame, &others).into_iter().max().unwrap_or(0)
}

/// Bytes that the tasks of a backward function read which no gradient of an argument needs, and those of them that it computes.
pub(super) fn deferred(schedule: &Schedule, (frame, carried): (&Frame, usize)) -> (u64, u64) {
    let is_argument = |b: BufferId| matches!(frame.buffers[b].place, Place::Result(i) if i < carried);
    let mut needed: BTreeSet<BufferId> = BTreeSet::new();
    let mut read: BTreeSet<BufferId> = BTreeSet::new();
    for task in frame.tasks.iter().rev() {
        let reads = task.reads.iter().map(|&b| frame.holder(b));
        if task.writes.iter().any(|&b| is_argument(frame.holder(b)) || needed.contains(&frame.holder(b))) {
            needed.extend(reads);
        } else {
            // What only such tasks read, they also compute.
            task.writes.iter().for_each(|&b| _ = read.remove(&frame.holder(b)));
            read.extend(reads);
        }
    }
    let place = |b: &BufferId| &frame.buffers[frame.holder(*b)].place;
    let is_lasting = |b: &BufferId| matches!(place(b), Place::Weight(_) | Place::State(_));
    let is_saved = |b: &BufferId| matches!(place(b), Place::Argument(_));
    let bytes = |of: &dyn Fn(&&BufferId) -> bool| -> u64 {
        read.iter().filter(of).map(|b| frame.buffers[*b].bytes(&schedule.space)).sum()
    };
    (bytes(&|b| !is_lasting(b)), bytes(&|b| !is_lasting(b) && !is_saved(b)))
}

/// Seconds of the products of a frame with weights.
pub(super) fn products(cluster: &Cluster, schedule: &Schedule, frame: &Frame) -> f64 {
    let reads_weight = |task: &Task| {
        task.reads.iter().any(|&b| matches!(frame.buffers[frame.holder(b)].place, Place::Weight(_)))
    };
    let is_product = |task: &Task, op: &Op| {
        let is_fused = matches!(op, Op::Fused(Fused::ProductPair | Fused::BiasProduct { .. }));
        (is_fused || matches!(op, Op::Einsum)) && reads_weight(task)
    };
    seconds_of(cluster, schedule, frame, is_product)
}

/// Seconds of the attention of a frame.
pub(super) fn attention(cluster: &Cluster, schedule: &Schedule, frame: &Frame) -> f64 {
    seconds_of(cluster, schedule, frame, |_, op| matches!(op, Op::Attention(_)))
}

/// Bytes of the results of the largest attention of a frame.
pub(super) fn attended(schedule: &Schedule, frame: &Frame) -> u64 {
    let bytes = |task: &Task| match &task.work {
        Work::Compute(Op::Attention(_)) => {
            task.writes.iter().map(|&b| frame.buffers[b].bytes(&schedule.space)).sum()
        }
        _ => 0,
    };
    frame.tasks.iter().map(bytes).max().unwrap_or(0)
}

/// Seconds of the operations of a frame that are meant.
fn seconds_of(
    cluster: &Cluster,
    schedule: &Schedule,
    frame: &Frame,
    is_meant: impl Fn(&Task, &Op) -> bool,
) -> f64 {
    let seconds = |task: &Task| {
        let types = |buffers: &[BufferId]| -> Option<Vec<_>> {
            buffers.iter().map(|&b| frame.buffers[b].tensor()).collect()
        };
        match (&task.work, types(&task.reads), types(&task.writes)) {
            (Work::Compute(op), Some(reads), Some(writes)) if is_meant(task, op) => {
                op_seconds(cluster, &schedule.space, op, &reads, &writes)
            }
            _ => 0.0,
        }
    };
    frame.tasks.iter().map(seconds).sum()
}
