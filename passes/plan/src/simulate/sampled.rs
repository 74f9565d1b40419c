//! The timeline of a sample of ranks, by steps, where more ranks differ than are simulated event by event.

use std::cell::RefCell;
use std::collections::BTreeMap;

use ithaca_ir::Rank;
use ithaca_ir::entity::Entity;
use ithaca_ir::schedule::{Frame, FrameId, Schedule, Stream};
use ithaca_ir::timeline::{self, Collective, Covered, Exposed, Summary, Timeline};

use super::classes::Classes;
use super::detail::{Detail, Run, Writer, Written};
use super::simulation::Simulation;
use crate::cluster::Cluster;

/// Ranks of a sample whose runs are written, at most.
const LISTED: usize = 8;

/// When each task runs on some of the ranks, about `most` runs one by one.
pub(super) fn timeline(cluster: &Cluster, schedule: &Schedule, most: usize) -> Timeline {
    let classes = Classes::of(schedule);
    let ranks = classes.ranks();
    let (detail, every) = Detail::within(schedule, ranks, most, LISTED);
    let rank = |c: usize| Recorded {
        writer: c.is_multiple_of(every).then(Writer::default),
        called: vec![0; schedule.frames.len()],
        is_listed: true,
        within: 0,
        times: BTreeMap::new(),
    };
    let ranks = (0..ranks.len()).map(rank).collect();
    let recorder = RefCell::new(Recorder { detail, depth: 0, ranks });
    let times = super::run(cluster, schedule, Some(&recorder));
    let mut timeline = Timeline::default();
    for ((rank, time), recorded) in times.into_iter().zip(recorder.into_inner().ranks) {
        let Simulation { seconds, compute, streams, communication: _ } = time;
        let collective = |((frame, task), Times { count, seconds, exposed }): ((usize, usize), Times)| {
            let of = &schedule.frames[FrameId::new(frame)];
            let (name, _) = timeline::title(of, task);
            Collective { frame: of.name.clone(), name, count, seconds, exposed }
        };
        let collectives = recorded.times.into_iter().map(collective).collect();
        let streams = streams.into_iter().collect();
        let summary = Summary { rank, seconds, compute, streams, collectives };
        let written = recorded.writer.map(|writer| writer.finish(schedule, rank)).unwrap_or_default();
        timeline.exposed.extend(exposed(&written, rank));
        let Written { spans, folds, exposed: _, within } = written;
        timeline.ranks.push(timeline::Alike { first: rank, ranks: None, summary, within });
        timeline.spans.extend(spans);
        timeline.folds.extend(folds);
    }
    timeline
}

/// When no kernel, no folded run and no earlier stream hides the listed runs of a rank.
fn exposed(written: &Written, rank: Rank) -> Vec<Exposed> {
    let on = |stream: Stream| {
        let spans = written.spans.iter().filter(move |s| s.stream == stream).map(|s| (s.start, s.end));
        let mut on: Vec<(f64, f64)> = spans.collect();
        on.sort_by(|a, b| a.0.total_cmp(&b.0));
        on
    };
    let mut covered = Covered::by(on(Stream::Compute));
    covered.add(written.folds.iter().map(|fold| (fold.start, fold.end)).collect());
    let mut exposed = Vec::new();
    for stream in Stream::ALL.into_iter().skip(1) {
        let runs = on(stream);
        let parts = runs.iter().flat_map(|&run| covered.uncovered(run));
        exposed.extend(parts.map(|(start, end)| Exposed { rank, stream, start, end }));
        covered.add(runs);
    }
    exposed
}

/// The runs of the simulated ranks.
pub(super) struct Recorder {
    detail: Detail,
    /// The calls around the runs of now.
    depth: usize,
    ranks: Vec<Recorded>,
}

/// The runs of one rank.
struct Recorded {
    /// Absent where its runs are not in the timeline.
    writer: Option<Writer>,
    /// How often each frame was called.
    called: Vec<u64>,
    /// Whether the runs of the innermost frame are listed.
    is_listed: bool,
    /// The task of `main` at which it is.
    within: usize,
    /// By frame and task of a collective.
    times: BTreeMap<(usize, usize), Times>,
}

/// All runs of a collective.
#[derive(Default)]
struct Times {
    count: u64,
    seconds: f64,
    exposed: f64,
}

/// Whether the runs of each rank are listed.
pub(super) type Listed = Vec<bool>;

impl Recorder {
    fn listed(&self) -> Listed {
        self.ranks.iter().map(|rank| rank.is_listed).collect()
    }

    /// As before a call or a layer.
    pub(super) fn list(&mut self, before: &Listed) {
        self.ranks.iter_mut().zip(before).for_each(|(rank, &before)| rank.is_listed = before);
    }

    /// Ranks enter a frame, called by the task of this number.
    pub(super) fn enter(&mut self, callee: FrameId, number: usize, runs: &[bool]) -> Listed {
        let before = self.listed();
        for (rank, _) in self.ranks.iter_mut().zip(runs).filter(|(_, runs)| **runs) {
            if self.depth == 0 {
                rank.within = number;
            }
            let called = &mut rank.called[callee.index()];
            rank.is_listed &= self.detail.shows_call(*called);
            *called += 1;
        }
        self.depth += 1;
        before
    }

    /// Ranks leave a frame.
    pub(super) fn leave(&mut self, before: &Listed) {
        self.depth -= 1;
        self.list(before);
    }

    /// Ranks begin a layer of so many, `done` of them done.
    pub(super) fn layer(&mut self, done: u64, layers: u64) -> Listed {
        let before = self.listed();
        let shown = self.detail.shows_layer(done, layers);
        self.ranks.iter_mut().for_each(|rank| rank.is_listed &= shown);
        before
    }

    /// A run has ended on a rank.
    pub(super) fn write(&mut self, (c, rank): (usize, Rank), frame: &Frame, run: Run) {
        let Recorded { writer: Some(writer), is_listed, within, .. } = &mut self.ranks[c] else { return };
        let within = if self.depth == 0 { run.task } else { *within };
        let is_listed = *is_listed && self.detail.shows_task(run.task, frame.tasks.len());
        writer.write(rank, frame.tasks[run.task].stream, Run { within, ..run }, is_listed);
    }

    /// A run of a collective took so long, and was exposed for so long.
    pub(super) fn count(&mut self, c: usize, task: (usize, usize), (seconds, exposed): (f64, f64)) {
        let times = self.ranks[c].times.entry(task).or_default();
        *times = Times {
            count: times.count + 1,
            seconds: times.seconds + seconds,
            exposed: times.exposed + exposed,
        };
    }
}
