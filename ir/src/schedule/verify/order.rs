//! Which tasks happen before which: `S05`.
//!
//! Each task gets a clock: for each stream, how many of its tasks have ended before this one starts. A call of a
//! frame that communicates meets the streams that the frame uses before and after it; another call is one task of its
//! stream. An event is recorded before it is waited for in order of issue, so that order is one in which tasks can run,
//! and no task of a rank waits for itself.

use std::collections::BTreeMap;

use crate::diagnostic::{Diagnostics, MAX_DIAGNOSTICS};
use crate::entity::Entity;
use crate::ops::error::OpError;
use crate::schedule::verify::classes::Line;
use crate::schedule::verify::partner::in_task;
use crate::schedule::verify::report::describe;
use crate::schedule::{Frame, Stream, Streams, Task};

/// Number of streams.
pub(super) const STREAMS: usize = Stream::COUNT;

/// For each stream, in order of [`Stream::ALL`], a number of its tasks.
type Clock = [usize; STREAMS];

/// The order of the tasks that a class of ranks runs.
pub(super) struct Order {
    /// For each task of the frame its stream and its number there; none for those that others run.
    places: Vec<Option<(usize, usize)>>,
    /// For each task of the frame, the tasks that have ended when it starts.
    starts: Vec<Clock>,
}

impl Order {
    /// The order of a line of a frame whose events are sound; `used`: for each frame the streams that it uses.
    pub(super) fn of(line: &Line<'_>, used: &[Streams]) -> Self {
        let n = line.frame.tasks.len();
        let mut order = Order { places: vec![None; n], starts: vec![[0; STREAMS]; n] };
        let mut recorded: BTreeMap<usize, Clock> = BTreeMap::new();
        let mut ends = [[0; STREAMS]; STREAMS];
        let mut issued = [0; STREAMS];
        for &i in &line.tasks {
            let Task { stream, work, waits, records, .. } = &line.frame.tasks[i];
            let stream = *stream as usize;
            let meets = work.callee().map(|callee| used[callee.index()]).filter(|used| used.communicates());
            let mut start = ends[stream];
            for other in meets.unwrap_or_default().iter() {
                join(&mut start, &ends[other as usize]);
            }
            // Events of another class of ranks are not waited for.
            for clock in waits.iter().filter_map(|event| recorded.get(&event.index())) {
                join(&mut start, clock);
            }
            order.starts[i] = start;
            order.places[i] = Some((stream, issued[stream]));
            issued[stream] += 1;
            let mut end = start;
            end[stream] = issued[stream];
            ends[stream] = end;
            for other in meets.unwrap_or_default().iter() {
                ends[other as usize] = end;
            }
            if let Some(event) = records {
                recorded.insert(event.index(), end);
            }
        }
        order
    }

    /// Whether task `a` has ended when task `b`, issued later, starts.
    pub(super) fn before(&self, a: usize, b: usize) -> bool {
        self.places[a].is_some_and(|(stream, n)| n < self.starts[b][stream])
    }
}

/// Adds events that are recorded twice, or waited for before they are recorded.
pub(super) fn check_events(frame: &Frame, found: &mut Diagnostics) {
    let mut recorded: BTreeMap<usize, usize> = BTreeMap::new();
    for (i, task) in frame.tasks.iter().enumerate() {
        for event in task.waits.iter().filter(|event| !recorded.contains_key(&event.index())) {
            let later = frame.tasks[i..].iter().position(|t| t.records == Some(*event));
            let later = later.map_or(String::new(), |n| format!("; {} does", describe(frame, i + n)));
            let message = format!("it waits for e{}, which nothing before it records{later}", event.index());
            found.push(in_task(frame, i, OpError::new("S05", message)));
            if found.len() >= MAX_DIAGNOSTICS {
                return;
            }
        }
        if let Some(event) = task.records
            && let Some(first) = recorded.insert(event.index(), i)
        {
            let first = describe(frame, first);
            let message = format!("e{} is recorded a second time, after {first}", event.index());
            found.push(in_task(frame, i, OpError::new("S05", message)));
        }
    }
}

fn join(clock: &mut Clock, other: &Clock) {
    for (mine, theirs) in clock.iter_mut().zip(other) {
        *mine = (*mine).max(*theirs);
    }
}
