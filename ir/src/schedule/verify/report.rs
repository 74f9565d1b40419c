//! Frames, tasks and buffers in messages.

use crate::diagnostic::Diagnostic;
use crate::entity::Entity;
use crate::ops::error::OpError;
use crate::schedule::{BufferId, Frame, Task};

/// The diagnostic about a frame.
pub(super) fn in_frame(frame: &Frame, error: OpError) -> Diagnostic {
    OpError { message: format!("frame `@{}`: {}", frame.name, error.message), ..error }.into()
}

/// A task for messages: its number, its stream and its work.
pub(super) fn describe(frame: &Frame, index: usize) -> String {
    let Task { stream, work, .. } = &frame.tasks[index];
    format!("task {index} (`{stream}: {}`)", work.name())
}

/// A buffer's name for messages.
pub(super) fn name(frame: &Frame, buffer: BufferId) -> &str {
    frame.buffers.get(buffer).map_or("?", |b| b.name.as_str())
}

/// Whether a handle belongs to an arena of `n` items.
pub(super) fn in_range(id: impl Entity, n: usize) -> bool {
    id.index() < n
}
