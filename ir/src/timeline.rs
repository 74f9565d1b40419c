//! Timelines: the tasks of a schedule on ranks and streams, simulated or measured.
//!
//! One form for both, so that a plan and its run lie side by side in one viewer.

use std::collections::BTreeMap;

use crate::boxes;
use crate::mesh::Rank;
use crate::message::Parcel;
use crate::schedule::{Frame, Stream, Work};
use crate::space::Space;

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
    /// Its work and its first buffer: `attention $o`.
    pub name: String,
    /// The kind of work: `compute`, `copy`, `pack`, `unpack`, or the name of a collective.
    pub kind: &'static str,
    /// When it starts, seconds from the start of the run; a collective starts when its rank is ready for it.
    pub start: f64,
    /// When it ends.
    pub end: f64,
}

/// Whether a task is a collective that sends nothing, of one rank or between equal places: no timeline shows it.
pub fn is_alone(space: &Space, work: &Work) -> bool {
    let Work::Exchange(transfer) = work else { return false };
    let Parcel { op, from, to } = transfer.first();
    space.mesh.degree(&boxes::axes(space, op, from, to)) == 1
}

/// The summary of one rank's timeline.
#[derive(Clone, Debug, PartialEq)]
pub struct Summary {
    /// The rank.
    pub rank: Rank,
    /// From the start of the run to the end of the rank's last task, seconds.
    pub seconds: f64,
    /// The compute stream at work, seconds.
    pub compute: f64,
    /// The communication stream at work or waiting for other ranks, seconds.
    pub comm: f64,
    /// The rank's collectives by frame and task.
    pub collectives: Vec<Collective>,
}

/// All runs of one task of the communication stream.
#[derive(Clone, Debug, PartialEq)]
pub struct Collective {
    /// The frame of the task.
    pub frame: String,
    /// Its work and its first buffer: `all_to_all $q1`.
    pub name: String,
    /// Runs.
    pub count: u64,
    /// Seconds in all.
    pub seconds: f64,
    /// Seconds in which the compute stream stood still.
    pub exposed: f64,
}

/// The summary of each rank's timeline, by rank. Spans of one stream of a rank must not overlap.
pub fn summaries(spans: &[Span]) -> Vec<Summary> {
    let mut ranks: BTreeMap<Rank, [Vec<&Span>; 2]> = BTreeMap::new();
    for span in spans {
        let [compute, comm] = ranks.entry(span.rank).or_default();
        match span.stream {
            Stream::Compute => compute.push(span),
            Stream::Comm => comm.push(span),
        }
    }
    ranks.into_iter().map(|(rank, streams)| summary(rank, streams)).collect()
}

fn summary(rank: Rank, streams: [Vec<&Span>; 2]) -> Summary {
    let [compute, comm] = streams.map(|mut spans| {
        spans.sort_by(|a, b| a.start.total_cmp(&b.start));
        spans
    });
    let length = |spans: &[&Span]| spans.iter().map(|s| s.end - s.start).sum::<f64>();
    let mut collectives: BTreeMap<(&str, usize), Collective> = BTreeMap::new();
    let mut first = 0;
    for span in &comm {
        while first < compute.len() && compute[first].end <= span.start {
            first += 1;
        }
        let during = compute[first..].iter().take_while(|c| c.start < span.end);
        let hidden: f64 = during.map(|c| c.end.min(span.end) - c.start.max(span.start)).sum();
        let (frame, name) = (span.frame.clone(), span.name.clone());
        let one = Collective { frame, name, count: 0, seconds: 0.0, exposed: 0.0 };
        let one = collectives.entry((&span.frame, span.task)).or_insert(one);
        one.count += 1;
        one.seconds += span.end - span.start;
        one.exposed += (span.end - span.start - hidden).max(0.0);
    }
    Summary {
        rank,
        seconds: compute.iter().chain(&comm).map(|s| s.end).fold(0.0, f64::max),
        compute: length(&compute),
        comm: length(&comm),
        collectives: collectives.into_values().collect(),
    }
}

/// The label of a task in a timeline, and its kind.
pub fn title(frame: &Frame, task: usize) -> (String, &'static str) {
    let task = &frame.tasks[task];
    let name = task.work.name();
    let (what, kind) = match &task.work {
        Work::Compute(_) => (name, "compute"),
        Work::Exchange(t) => (t.first().op.name(), t.first().op.name()),
        Work::Pack(t) | Work::Unpack(t) => (t.first().op.name(), name),
        Work::Copy | Work::Call { .. } => (name, name),
    };
    let written = task.writes.first().and_then(|&b| frame.buffers.get(b));
    match written {
        Some(buffer) => (format!("{what} ${}", buffer.name), kind),
        None => (what.to_owned(), kind),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_no_kernel_covers_is_exposed() {
        let span = |stream, task, (start, end): (f64, f64)| Span {
            rank: Rank(1),
            stream,
            frame: "block".into(),
            layer: 0,
            task,
            name: format!("task {task}"),
            kind: "compute",
            start,
            end,
        };
        // Kernels from 1 to 3 and from 4 to 6; one collective from 0 to 2 and again from 5 to 7, another from 2 to 5.
        let spans = [
            span(Stream::Comm, 0, (0.0, 2.0)),
            span(Stream::Comm, 0, (5.0, 7.0)),
            span(Stream::Compute, 1, (4.0, 6.0)),
            span(Stream::Compute, 1, (1.0, 3.0)),
            span(Stream::Comm, 2, (2.0, 5.0)),
        ];
        let [one] = summaries(&spans).try_into().unwrap();
        assert_eq!((one.rank, one.seconds, one.compute, one.comm), (Rank(1), 7.0, 4.0, 7.0));
        let rows: Vec<(u64, f64, f64)> =
            one.collectives.iter().map(|c| (c.count, c.seconds, c.exposed)).collect();
        assert_eq!(rows, [(2, 4.0, 2.0), (1, 3.0, 1.0)]);
    }
}
