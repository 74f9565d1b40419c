//! When the buffers of a frame are alive.

use std::ops::Range;

use ithaca_ir::entity::Entity;
use ithaca_ir::schedule::{BufferId, Frame, Place, Schedule};

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
