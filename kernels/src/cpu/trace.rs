//! The times at which ranks ran their tasks.

use std::time::Duration;

use ithaca_ir::Rank;
use ithaca_ir::schedule::{FrameId, Schedule, Stream};
use ithaca_ir::timeline::{self, Span};
use serde::{Deserialize, Serialize};

use crate::error::RunError;

/// When a rank ran a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TaskSpan {
    /// The stream that ran it.
    pub stream: Stream,
    /// The frame.
    pub frame: FrameId,
    /// The layer that the frame ran for.
    pub layer: u64,
    /// The task's number in the frame.
    pub task: usize,
    /// When it began, from when the ranks of the process began.
    pub start: Duration,
    /// When it ended.
    pub end: Duration,
    /// Time in which its thread was on a processor, without the helpers of a kernel; of a GPU its time.
    pub busy: Duration,
}

/// The spans of all ranks, with the names that a timeline shows, and the seconds that their threads were on a processor.
pub(super) fn spans<'a>(
    schedule: &Schedule,
    ranks: impl Iterator<Item = (Rank, &'a [TaskSpan])>,
) -> Result<(Vec<Span>, Vec<f64>), RunError> {
    let (mut spans, mut on_processor) = (Vec::new(), Vec::new());
    for (rank, own) in ranks {
        for &TaskSpan { stream, frame, layer, task, start, end, busy } in own {
            let frame = schedule.frames.get(frame).filter(|frame| task < frame.tasks.len());
            let frame = frame
                .ok_or_else(|| RunError::invalid(format!("rank {} ran tasks of another schedule", rank.0)))?;
            if timeline::is_alone(&schedule.space, &frame.tasks[task].work) {
                continue;
            }
            let (name, kind) = timeline::title(frame, task);
            on_processor.push(busy.as_secs_f64());
            spans.push(Span {
                rank,
                stream,
                frame: frame.name.clone(),
                layer,
                task,
                name,
                kind,
                start: start.as_secs_f64(),
                end: end.as_secs_f64(),
            });
        }
    }
    Ok((spans, on_processor))
}
