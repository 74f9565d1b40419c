//! The other task of a diagnostic: the writer of a buffer that a task reads, or the reader of one that it writes.
//!
//! A mistake in a task seldom concerns it alone, so messages name the task at the other end of its buffers.

use crate::diagnostic::Diagnostic;
use crate::ops::error::OpError;
use crate::schedule::verify::report::{describe, name};
use crate::schedule::{BufferId, Frame, Task};

/// The message about a task, with the task at the other end of its buffers where it names none.
pub(super) fn with_partner(frame: &Frame, index: usize, message: String) -> String {
    if message.contains("task ") {
        return message;
    }
    let Some(task) = frame.tasks.get(index) else { return message };
    match partner(frame, index, task) {
        Some(said) => format!("{message}; {said}"),
        None => message,
    }
}

/// The message about a buffer, with the first tasks that write and read it, the wire that contains it, and whether it is returned.
pub(super) fn with_users(frame: &Frame, buffer: BufferId, message: &str) -> String {
    let first = |does: &dyn Fn(&Task) -> bool| frame.tasks.iter().position(does);
    let writes = first(&|task| touches(frame, &task.writes, buffer)).map(|i| ("writes", i));
    let reads = first(&|task| touches(frame, &task.reads, buffer)).map(|i| ("reads", i));
    let said = writes.into_iter().chain(reads).map(|(does, i)| format!("{} {does} it", describe(frame, i)));
    let returned = frame.outputs.iter().any(|output| output.buffer == buffer);
    let last = match (returned, writes, reads) {
        (true, _, _) => Some("the frame returns it"),
        (false, Some(_), None) => Some("no task reads it"),
        (false, None, Some(_)) => Some("no task writes it"),
        (false, _, _) => None,
    };
    let said: Vec<String> = said.chain(last.map(str::to_owned)).collect();
    if said.is_empty() { message.to_owned() } else { format!("{message}; {}", said.join(", ")) }
}

/// Whether one of `all` is `buffer`, or is in one wire with it.
fn touches(frame: &Frame, all: &[BufferId], buffer: BufferId) -> bool {
    all.iter().any(|&other| frame.holder(other) == frame.holder(buffer))
}

/// The task that writes `buffer`, last before task `index` or first after it.
pub(super) fn writer(frame: &Frame, buffer: BufferId, index: usize) -> Option<usize> {
    let writes = |i: &usize| touches(frame, &frame.tasks[*i].writes, buffer);
    let n = frame.tasks.len();
    (0..index.min(n)).rev().find(writes).or_else(|| (index + 1..n).find(writes))
}

/// The description of the task at the other end: of another stream, if there is one.
fn partner(frame: &Frame, index: usize, task: &Task) -> Option<String> {
    let n = frame.tasks.len();
    let written = task.reads.iter().map(|&b| (writer(frame, b, index), "writes", b));
    let reader = |b: BufferId| (index + 1..n).find(|&i| touches(frame, &frame.tasks[i].reads, b));
    let read = task.writes.iter().map(|&b| (reader(b), "reads", b));
    let all: Vec<_> = written.chain(read).filter_map(|(i, does, b)| Some((i?, does, b))).collect();
    let elsewhere = all.iter().find(|(i, _, _)| frame.tasks[*i].stream != task.stream);
    let &(i, does, buffer) = elsewhere.or(all.first())?;
    Some(format!("{} {does} `${}`", describe(frame, i), name(frame, buffer)))
}

/// The diagnostic about a task, with the task at the other end, if there is one.
pub(super) fn in_task(frame: &Frame, index: usize, error: OpError) -> Diagnostic {
    let task = describe(frame, index);
    let message = with_partner(frame, index, error.message);
    OpError { message: format!("frame `@{}`, {task}: {message}", frame.name), ..error }.into()
}
