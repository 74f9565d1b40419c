//! What ran when: the tasks of a schedule on ranks and streams, simulated or measured.
//!
//! One form for both, so that a plan and its run lie side by side in one viewer.

use crate::mesh::Rank;
use crate::schedule::{Frame, Stream, Work};

/// One run of one task on one rank.
#[derive(Clone, Debug, PartialEq)]
pub struct Span {
    /// The rank.
    pub rank: Rank,
    /// The stream.
    pub stream: Stream,
    /// The frame.
    pub frame: String,
    /// The layer of the loop that runs the frame.
    pub layer: u64,
    /// The number of the task in its frame.
    pub task: usize,
    /// What it does and to what: `attention $o`.
    pub name: String,
    /// The kind of work: `compute`, `copy`, `pack`, `unpack`, or the name of a collective.
    pub kind: &'static str,
    /// When it starts, seconds from the start of the run; a collective starts when its rank is ready for it.
    pub start: f64,
    /// When it ends.
    pub end: f64,
}

/// What a task is called in a timeline, and its kind.
pub fn title(frame: &Frame, task: usize) -> (String, &'static str) {
    let task = &frame.tasks[task];
    let (what, kind) = match &task.work {
        Work::Compute(op) => (op.name(), "compute"),
        Work::Pack(t) => (t.first().op.name(), "pack"),
        Work::Exchange(t) => (t.first().op.name(), t.first().op.name()),
        Work::Unpack(t) => (t.first().op.name(), "unpack"),
        Work::Copy => ("copy", "copy"),
        Work::Call { .. } => ("call", "call"),
    };
    let written = task.writes.first().and_then(|&b| frame.buffers.get(b));
    match written {
        Some(buffer) => (format!("{what} ${}", buffer.name), kind),
        None => (what.to_owned(), kind),
    }
}
