//! Timelines: the tasks of a schedule on ranks and streams, simulated or measured.
//!
//! One form for both, so that a plan and its run lie side by side in one viewer.

use std::collections::{BTreeMap, BTreeSet};

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

/// Runs that a timeline does not list one by one: those of one stream, one after another.
#[derive(Clone, Debug, PartialEq)]
pub struct Fold {
    /// The rank.
    pub rank: Rank,
    /// The stream.
    pub stream: Stream,
    /// The frame and the layers, from the first to the last: `@block, layers 3 to 30`.
    pub name: String,
    /// The runs.
    pub runs: u64,
    /// When the first of them starts, seconds.
    pub start: f64,
    /// When the last of them ends.
    pub end: f64,
    /// Seconds in which one of them runs.
    pub busy: f64,
    /// Seconds of them that no kernel hides.
    pub exposed: f64,
}

/// A time in which a listed run of a stream that communicates is exposed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Exposed {
    /// The rank.
    pub rank: Rank,
    /// The stream.
    pub stream: Stream,
    /// Seconds from the start of the step.
    pub start: f64,
    /// The end.
    pub end: f64,
}

/// Ranks of a timeline that do the same at the same time; one of them is in it.
#[derive(Clone, Debug, PartialEq)]
pub struct Alike {
    /// The first of them.
    pub first: Rank,
    /// Their number.
    pub ranks: u64,
    /// Sums of the whole step, whether its runs are listed or folded.
    pub summary: Summary,
    /// When each task of `main` runs, by its number: from its first run to the last. None where its runs are not in the timeline.
    pub within: Vec<(usize, (f64, f64))>,
}

/// A step: ranks that do alike once, and of what repeats some.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Timeline {
    /// All ranks, by class.
    pub ranks: Vec<Alike>,
    /// The runs that are listed.
    pub spans: Vec<Span>,
    /// The other runs.
    pub folds: Vec<Fold>,
    /// When listed runs are exposed.
    pub exposed: Vec<Exposed>,
}

impl Timeline {
    /// Every run of every rank.
    pub fn of(spans: Vec<Span>) -> Self {
        let alike = |summary: Summary| {
            let first = summary.rank;
            Alike { first, ranks: 1, summary, within: Vec::new() }
        };
        let ranks = summaries(&spans).into_iter().map(alike).collect();
        Self { ranks, spans, folds: Vec::new(), exposed: Vec::new() }
    }

    /// What it leaves out, for its reader; nothing where it lists every run of every rank.
    pub fn left_out(&self) -> Option<String> {
        let mut parts = Vec::new();
        let listed: BTreeSet<Rank> = self.spans.iter().map(|span| span.rank).collect();
        let all: u64 = self.ranks.iter().map(|alike| alike.ranks).sum();
        if all > listed.len() as u64 {
            let classes = self.ranks.len();
            parts.push(format!("{} of {all} ranks, for ranks that do alike are listed once", listed.len()));
            if classes > listed.len() {
                parts.push(format!("{} of {classes} kinds of ranks", listed.len()));
            }
        }
        let folded: u64 = self.folds.iter().map(|fold| fold.runs).sum();
        if folded > 0 {
            let of = folded + self.spans.len() as u64;
            parts.push(format!("{} of their {of} runs of tasks, the others folded", self.spans.len()));
        }
        (!parts.is_empty()).then(|| parts.join("; "))
    }
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
    /// The other streams that have tasks, at work or waiting for other ranks, seconds.
    pub streams: Vec<(Stream, f64)>,
    /// The rank's collectives by frame and task.
    pub collectives: Vec<Collective>,
}

/// All runs of one task of a stream that communicates.
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
    let mut ranks: BTreeMap<Rank, [Vec<&Span>; Stream::COUNT]> = BTreeMap::new();
    for span in spans {
        ranks.entry(span.rank).or_default()[span.stream as usize].push(span);
    }
    ranks.into_iter().map(|(rank, streams)| summary(rank, streams)).collect()
}

fn summary(rank: Rank, streams: [Vec<&Span>; Stream::COUNT]) -> Summary {
    let streams = streams.map(|mut spans| {
        spans.sort_by(|a, b| a.start.total_cmp(&b.start));
        spans
    });
    let length = |spans: &[&Span]| spans.iter().map(|s| s.end - s.start).sum::<f64>();
    let mut collectives: BTreeMap<(&str, usize), Collective> = BTreeMap::new();
    let compute = &streams[Stream::Compute as usize];
    let mut covered = Covered::by(compute.iter().map(|s| (s.start, s.end)).collect());
    for spans in &streams[1..] {
        let times: Vec<(f64, f64)> = spans.iter().map(|s| (s.start, s.end)).collect();
        for (span, exposed) in spans.iter().zip(covered.exposed(&times)) {
            let (frame, name) = (span.frame.clone(), span.name.clone());
            let one = Collective { frame, name, count: 0, seconds: 0.0, exposed: 0.0 };
            let one = collectives.entry((&span.frame, span.task)).or_insert(one);
            one.count += 1;
            one.seconds += span.end - span.start;
            one.exposed += exposed;
        }
        covered.add(times);
    }
    let communication = Stream::ALL.into_iter().zip(&streams).skip(1).filter(|(_, spans)| !spans.is_empty());
    Summary {
        rank,
        seconds: streams.iter().flatten().map(|s| s.end).fold(0.0, f64::max),
        compute: length(compute),
        streams: communication.map(|(stream, spans)| (stream, length(spans))).collect(),
        collectives: collectives.into_values().collect(),
    }
}

/// The times at which a rank computes, or at which a stream communicates whose time counts as exposed already. Where several
/// streams communicate and none computes, the time is exposed on the first of them.
#[derive(Clone, Debug)]
pub struct Covered(Vec<(f64, f64)>);

impl Covered {
    /// Covered by intervals that are in order and free of overlaps.
    pub fn by(intervals: Vec<(f64, f64)>) -> Self {
        Covered(intervals)
    }

    /// The uncovered seconds of each of some intervals in order; one sweep.
    pub fn exposed(&self, intervals: &[(f64, f64)]) -> Vec<f64> {
        let mut first = 0;
        let exposed = |&(start, end): &(f64, f64)| {
            while first < self.0.len() && self.0[first].1 <= start {
                first += 1;
            }
            let during = self.0[first..].iter().take_while(|c| c.0 < end);
            let hidden: f64 = during.map(|c| c.1.min(end) - c.0.max(start)).sum();
            (end - start - hidden).max(0.0)
        };
        intervals.iter().map(exposed).collect()
    }

    /// The parts of an interval that are uncovered, in order.
    pub fn uncovered(&self, (start, end): (f64, f64)) -> Vec<(f64, f64)> {
        let from = self.0.partition_point(|covered| covered.1 <= start);
        let (mut at, mut parts) = (start, Vec::new());
        for &(covered, until) in self.0[from..].iter().take_while(|covered| covered.0 < end) {
            if covered > at {
                parts.push((at, covered));
            }
            at = at.max(until);
        }
        if end > at {
            parts.push((at, end));
        }
        parts
    }

    /// Covers more intervals.
    pub fn add(&mut self, intervals: Vec<(f64, f64)>) {
        if intervals.is_empty() {
            return;
        }
        self.0.extend(intervals);
        self.0.sort_by(|a, b| a.0.total_cmp(&b.0));
        let mut union: Vec<(f64, f64)> = Vec::with_capacity(self.0.len());
        for &(start, end) in &self.0 {
            match union.last_mut() {
                Some(last) if start <= last.1 => last.1 = last.1.max(end),
                Some(_) | None => union.push((start, end)),
            }
        }
        self.0 = union;
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
        assert_eq!((one.rank, one.seconds, one.compute), (Rank(1), 7.0, 4.0));
        assert_eq!(one.streams, [(Stream::Comm, 7.0)]);
        let rows: Vec<(u64, f64, f64)> =
            one.collectives.iter().map(|c| (c.count, c.seconds, c.exposed)).collect();
        assert_eq!(rows, [(2, 4.0, 2.0), (1, 3.0, 1.0)]);
    }
}
