//! Which runs of tasks a timeline lists one by one, so that it stays as small as its reader asks.
//!
//! A timeline lists at most so many runs. Where a step has more, the first layers of a loop and the last stand for those between,
//! the first calls of a function for later ones, and the ends of a long frame for its middle. Runs that are not listed are *folded*:
//! those of one stream during one task of `main` are one entry, with their number and their seconds. Sums stay exact.

use std::collections::BTreeMap;

use ithaca_ir::Rank;
use ithaca_ir::entity::Entity;
use ithaca_ir::schedule::{FrameId, Schedule, Stream, Work};
use ithaca_ir::timeline::{self, Exposed, Fold, Span};

use crate::simulate::simulation::span;

/// Which runs are listed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Detail {
    /// Layers of a loop from its start; the last is listed too.
    layers: u64,
    /// Calls of a frame.
    calls: u64,
    /// Tasks of a stream in a frame, half of them at either end.
    tasks: usize,
}

impl Detail {
    /// Everything.
    pub(super) const ALL: Self = Self { layers: u64::MAX, calls: u64::MAX, tasks: usize::MAX };

    /// From everything to little.
    const STEPS: [Self; 8] = [
        Self::ALL,
        Self { layers: 8, ..Self::ALL },
        Self { layers: 2, ..Self::ALL },
        Self { layers: 2, calls: 16, tasks: 4096 },
        Self { layers: 2, calls: 4, tasks: 1024 },
        Self { layers: 1, calls: 2, tasks: 512 },
        Self { layers: 1, calls: 1, tasks: 128 },
        Self { layers: 1, calls: 1, tasks: 32 },
    ];

    /// The most detail with which these ranks have about `most` runs, and of every how many of them runs are listed.
    pub(super) fn within(schedule: &Schedule, ranks: &[Rank], most: usize, listed: usize) -> (Self, usize) {
        let every = ranks.len().div_ceil(listed.max(1)).max(1);
        let most = most as u64;
        let of_all = |detail: Self, every: usize| {
            let runs = ranks.iter().step_by(every).map(|&rank| detail.runs(schedule, rank));
            runs.fold(0, u64::saturating_add)
        };
        if let Some(detail) = Self::STEPS.into_iter().find(|&detail| of_all(detail, every) <= most) {
            return (detail, every);
        }
        let least = Self::STEPS[Self::STEPS.len() - 1];
        let times = of_all(least, every).div_ceil(most.max(1));
        (least, every.saturating_mul(usize::try_from(times).unwrap_or(usize::MAX)).min(ranks.len().max(1)))
    }

    /// About how many runs of a rank are listed.
    fn runs(self, schedule: &Schedule, rank: Rank) -> u64 {
        let mut of: Vec<u64> = Vec::with_capacity(schedule.frames.len());
        for frame in schedule.frames.values() {
            let mut tasks = [0usize; Stream::COUNT];
            let (mut inside, mut calls) = (0u64, BTreeMap::<FrameId, u64>::new());
            for task in frame.tasks.iter().filter(|task| frame.runs(&schedule.space, task, rank)) {
                let Work::Call { callee, layers, .. } = &task.work else {
                    tasks[task.stream as usize] += 1;
                    continue;
                };
                let called = calls.entry(*callee).or_default();
                *called += 1;
                let shown = (layers.end - layers.start).min(self.layers.saturating_add(1));
                let runs = if *called <= self.calls { shown * of[callee.index()] } else { 2 };
                inside = inside.saturating_add(runs);
            }
            let own: u64 = tasks.iter().map(|&n| n.min(self.tasks.saturating_add(1)) as u64).sum();
            of.push(own.saturating_add(inside));
        }
        of.last().copied().unwrap_or(0)
    }

    /// Whether a layer is listed, of a loop of so many, `done` of them done.
    pub(super) fn shows_layer(self, done: u64, layers: u64) -> bool {
        done < self.layers || done + 1 == layers
    }

    /// Whether a call is listed before which a frame was called so often.
    pub(super) fn shows_call(self, before: u64) -> bool {
        before < self.calls
    }

    /// Whether the task at a position among so many is listed.
    pub(super) fn shows_task(self, position: usize, of: usize) -> bool {
        let half = (self.tasks / 2).max(1);
        of <= self.tasks || position < half || position + half >= of
    }
}

/// One run of a task.
#[derive(Clone, Copy, Debug)]
pub(super) struct Run {
    /// The task of `main` during which it runs, or itself.
    pub(super) within: usize,
    pub(super) frame: usize,
    pub(super) task: usize,
    pub(super) layer: u64,
    pub(super) start: f64,
    pub(super) end: f64,
}

/// The runs of one rank as they come, in order on each stream.
#[derive(Clone, Debug)]
pub(super) struct Writer {
    /// Whether runs are listed or folded; else only when each task of `main` ran is.
    writes: bool,
    runs: Vec<Run>,
    folded: Vec<Folded>,
    /// The folded runs of each stream that may go on.
    open: [Option<Folded>; Stream::COUNT],
    /// When the run of each stream was exposed so far.
    pending: [Vec<(f64, f64)>; Stream::COUNT],
    exposed: Vec<Exposed>,
    /// When each task of `main` ran, from its first run to its last.
    within: BTreeMap<usize, (f64, f64)>,
}

/// Runs that are not listed.
#[derive(Clone, Debug)]
pub(super) struct Folded {
    stream: Stream,
    first: Run,
    last: Run,
    runs: u64,
    busy: f64,
    exposed: f64,
}

/// What a writer has.
#[derive(Clone, Debug, Default)]
pub(super) struct Written {
    pub(super) spans: Vec<Span>,
    pub(super) folds: Vec<Fold>,
    pub(super) exposed: Vec<Exposed>,
    pub(super) within: Vec<(usize, (f64, f64))>,
}

impl Writer {
    /// A writer of a rank whose runs are in the timeline, or are not.
    pub(super) fn new(writes: bool) -> Self {
        Self {
            writes,
            runs: Vec::new(),
            folded: Vec::new(),
            open: Default::default(),
            pending: Default::default(),
            exposed: Vec::new(),
            within: BTreeMap::new(),
        }
    }

    /// The run of a stream was exposed for a while.
    pub(super) fn expose(&mut self, stream: Stream, (start, end): (f64, f64)) {
        if !self.writes {
            return;
        }
        let pending = &mut self.pending[stream as usize];
        match pending.last_mut().filter(|last| last.1 >= start) {
            Some(last) => last.1 = end,
            None => pending.push((start, end)),
        }
    }

    /// A run has ended.
    pub(super) fn write(&mut self, rank: Rank, stream: Stream, run: Run, is_listed: bool) {
        let within = self.within.entry(run.within).or_insert((run.start, run.end));
        *within = (within.0.min(run.start), within.1.max(run.end));
        if !self.writes {
            return;
        }
        let exposed = std::mem::take(&mut self.pending[stream as usize]);
        let open = &mut self.open[stream as usize];
        if is_listed {
            self.folded.extend(open.take());
            self.runs.push(run);
            let exposed = exposed.into_iter();
            self.exposed.extend(exposed.map(|(start, end)| Exposed { rank, stream, start, end }));
            return;
        }
        if open.as_ref().is_some_and(|open| open.last.within != run.within) {
            self.folded.extend(open.take());
        }
        let new = Folded { stream, first: run, last: run, runs: 0, busy: 0.0, exposed: 0.0 };
        let open = open.get_or_insert(new);
        open.last = run;
        open.runs += 1;
        open.busy += run.end - run.start;
        open.exposed += exposed.iter().map(|(start, end)| end - start).sum::<f64>();
    }

    /// Everything, by the names of a schedule.
    pub(super) fn finish(mut self, schedule: &Schedule, rank: Rank) -> Written {
        self.folded.extend(self.open.iter_mut().filter_map(Option::take));
        let frame = |number: usize| &schedule.frames[FrameId::new(number)];
        let spans = self.runs.iter().map(|&Run { frame: f, task, layer, start, end, within: _ }| {
            span(frame(f), task, rank, layer, (start, end))
        });
        let fold = |folded: &Folded| {
            let Folded { stream, first, last, runs, busy, exposed } = folded;
            let (from, to) = (&frame(first.frame).name, &frame(last.frame).name);
            let name = if *runs == 1 {
                timeline::title(frame(first.frame), first.task).0
            } else if from != to {
                format!("@{from} to @{to}")
            } else if first.layer == last.layer {
                format!("@{from}")
            } else {
                format!("@{from}, layers {} to {}", first.layer, last.layer)
            };
            let (rank, stream) = (rank, *stream);
            let (start, end) = (first.start, last.end);
            Fold { rank, stream, name, runs: *runs, start, end, busy: *busy, exposed: *exposed }
        };
        Written {
            spans: spans.collect(),
            folds: self.folded.iter().map(fold).collect(),
            exposed: self.exposed,
            within: self.within.into_iter().collect(),
        }
    }
}
