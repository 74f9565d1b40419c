//! Which tasks happen before which: `S05`.
//!
//! Each task gets a clock: for each stream, how many of its tasks have ended before this one starts. A call of a
//! frame that communicates meets both streams before and after it, as the frame does.

use std::collections::BTreeMap;

use super::in_task;
use crate::diagnostic::Diagnostics;
use crate::entity::Entity;
use crate::ops::OpError;
use crate::schedule::{Frame, Schedule, Stream, Task, Work, communicates};

/// For each stream, in order of [`Stream::ALL`], a number of its tasks.
type Clock = [usize; Stream::ALL.len()];

/// The order of the tasks of a frame.
pub(super) struct Order {
    /// For each task, what has ended when it starts.
    starts: Vec<Clock>,
    /// For each stream, its tasks in order.
    streams: [Vec<usize>; Stream::ALL.len()],
}

impl Order {
    /// The tasks issued before `task` that may still run while it does.
    pub(super) fn concurrent(&self, task: usize) -> impl Iterator<Item = usize> + '_ {
        let ended = self.starts[task];
        self.streams.iter().zip(ended).flat_map(move |(tasks, ended)| {
            tasks[ended..].iter().copied().take_while(move |&other| other < task)
        })
    }
}

/// Orders the tasks, and adds events that are recorded twice or waited for too early.
pub(super) fn check(schedule: &Schedule, frame: &Frame, found: &mut Diagnostics) -> Order {
    let mut recorded: BTreeMap<usize, Clock> = BTreeMap::new();
    let mut ends: [Clock; Stream::ALL.len()] = Default::default();
    let mut order = Order { starts: Vec::with_capacity(frame.tasks.len()), streams: Default::default() };
    for (i, task) in frame.tasks.iter().enumerate() {
        let Task { stream, work, waits, records, .. } = task;
        let stream = *stream as usize;
        let meets = matches!(work, Work::Call { callee, .. } if communicates(&schedule.frames, *callee));
        let mut start = ends[stream];
        if meets {
            ends.iter().for_each(|end| join(&mut start, end));
        }
        for event in waits {
            match recorded.get(&event.index()) {
                Some(clock) => join(&mut start, clock),
                None => {
                    let message = format!("it waits for e{}, which nothing before it records", event.index());
                    found.push(in_task(frame, i, OpError::new("S05", message)));
                }
            }
        }
        order.starts.push(start);
        order.streams[stream].push(i);
        let mut end = start;
        end[stream] = order.streams[stream].len();
        ends[stream] = end;
        if meets {
            ends = [end; Stream::ALL.len()];
        }
        if let Some(event) = records
            && recorded.insert(event.index(), end).is_some()
        {
            let message = format!("e{} is recorded a second time", event.index());
            found.push(in_task(frame, i, OpError::new("S05", message)));
        }
    }
    order
}

fn join(clock: &mut Clock, other: &Clock) {
    for (mine, theirs) in clock.iter_mut().zip(other) {
        *mine = (*mine).max(*theirs);
    }
}
