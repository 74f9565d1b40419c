//! Names of tasks, for messages and tables.

use ithaca_ir::schedule::{Schedule, Work};

use super::claims::TaskRun;

/// The kind of work of a task.
pub(crate) fn describe(schedule: &Schedule, work: &Work) -> String {
    match work {
        Work::Compute(op) => op.name().to_owned(),
        Work::Pack(t) => format!("pack of {}", t.first().op.name()),
        Work::Exchange(t) => t.first().op.name().to_owned(),
        Work::Unpack(t) => format!("unpack of {}", t.first().op.name()),
        Work::Copy => "copy".to_owned(),
        Work::Call { callee, .. } => {
            format!("call of {}", schedule.frames.get(*callee).map_or("?", |f| f.name.as_str()))
        }
    }
}

/// A run of a task, with its place in the schedule.
pub(super) fn task_run(schedule: &Schedule, run: TaskRun) -> String {
    let TaskRun { frame, layer, task } = run;
    let frame = &schedule.frames[frame];
    let work = describe(schedule, &frame.tasks[task].work);
    format!("task {task} of `{}` at layer {layer} ({work})", frame.name)
}
