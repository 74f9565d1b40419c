//! Verifies schedules: structure, work, order and memory, in this order; what comes later trusts what came before.
//!
//! A schedule has no source text of its own, so diagnostics name the frame and the task. The invariants are listed in
//! [`crate::codes::SCHEDULE`].

mod lasting;
mod memory;
mod order;
mod structure;
mod work;

use super::{Frame, Schedule, Task, Work};
use crate::diagnostic::{Diagnostic, Diagnostics};
use crate::entity::Entity;
use crate::ops::OpError;
use crate::verify::check_space;

/// After so many mistakes the verifier looks for no more.
const MAX_DIAGNOSTICS: usize = 64;

/// Checks a schedule: that tasks fit their buffers, that streams and events order what must be ordered, and that
/// memory holds what is read from it.
///
/// Time is near `n log n` in the tasks of a frame; tasks of one stream that no event orders against the other stream
/// are compared in pairs.
///
/// # Errors
/// `S` diagnostics; `V22` and `V23` for the space; at most 64.
pub fn verify(schedule: &Schedule) -> Result<(), Diagnostics> {
    let mut found = check_space(&schedule.space);
    if found.is_empty() {
        structure::check_frames(schedule, &mut found);
        for id in schedule.frames.ids() {
            structure::check_frame(schedule, id, &mut found);
            if found.len() >= MAX_DIAGNOSTICS {
                break;
            }
        }
    }
    if found.is_empty() {
        lasting::check(schedule, &mut found);
        let lasting = lasting::Lasting::of(schedule);
        for frame in schedule.frames.values() {
            let before = found.len();
            work::check(schedule, frame, &mut found);
            if found.len() == before {
                let stages = frame.stages();
                if stages.is_empty() {
                    let order = order::check(schedule, frame, &mut found);
                    memory::check(schedule, frame, &lasting, &order, &mut found);
                }
                // Each stage has an order and a memory of its own.
                for frame in stages.into_iter().map(|at| frame.only(at)) {
                    if found.len() == before {
                        let order = order::check(schedule, &frame, &mut found);
                        memory::check(schedule, &frame, &lasting, &order, &mut found);
                    }
                }
            }
            if found.len() >= MAX_DIAGNOSTICS {
                break;
            }
        }
    }
    found.truncate(MAX_DIAGNOSTICS);
    if found.is_empty() { Ok(()) } else { Err(found) }
}

/// The diagnostic about a frame.
fn in_frame(frame: &Frame, error: OpError) -> Diagnostic {
    let OpError { code, message } = error;
    Diagnostic::new(code, format!("frame `@{}`: {message}", frame.name))
}

/// The diagnostic about a task.
fn in_task(frame: &Frame, index: usize, error: OpError) -> Diagnostic {
    let OpError { code, message } = error;
    let task = describe(frame, index);
    Diagnostic::new(code, format!("frame `@{}`, {task}: {message}", frame.name))
}

/// A task for messages: its number, its stream and its work.
fn describe(frame: &Frame, index: usize) -> String {
    let Task { stream, work, .. } = &frame.tasks[index];
    format!("task {index} (`{stream}: {}`)", word(work))
}

fn word(work: &Work) -> &'static str {
    match work {
        Work::Compute(op) => op.name(),
        Work::Pack(_) => "pack",
        Work::Exchange(_) => "exchange",
        Work::Unpack(_) => "unpack",
        Work::Copy => "copy",
        Work::Call { .. } => "call",
    }
}

/// A buffer's name for messages.
fn name(frame: &Frame, buffer: super::BufferId) -> &str {
    frame.buffers.get(buffer).map_or("?", |b| b.name.as_str())
}

/// Whether a handle belongs to an arena of `n` items.
fn in_range(id: impl Entity, n: usize) -> bool {
    id.index() < n
}
