//! The timeline of a sample of ranks, by steps, where more ranks differ than are simulated event by event.

use std::collections::BTreeMap;

use ithaca_ir::Rank;
use ithaca_ir::entity::Entity;
use ithaca_ir::schedule::{Frame, FrameId, Schedule, Stream};
use ithaca_ir::timeline::{self, Collective, Covered, Exposed, Summary, Timeline};

use super::classes::Classes;
use super::detail::{Detail, Folded, Run, Writer, Written};
use super::simulation::Simulation;
use crate::cluster::Cluster;

/// Ranks of a sample whose runs are written, at most.
const LISTED: usize = 8;

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
    writer: Writer,
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
#[derive(Clone, Copy, Default)]
pub(super) struct Times {
    count: u64,
    seconds: f64,
    exposed: f64,
}

/// Whether the runs of each rank are listed.
pub(super) type Listed = Vec<bool>;

/// What a rank has recorded before a layer: its open folds, and the times of its collectives.
pub(super) type Before = ([Option<Folded>; Stream::COUNT], BTreeMap<(usize, usize), Times>);

impl Recorder {
    /// Nothing yet; about `most` runs will be listed one by one.
    pub(super) fn new(cluster: &Cluster, schedule: &Schedule, most: usize) -> Self {
        let classes = Classes::of(cluster, schedule);
        let ranks = classes.ranks();
        let (detail, every) = Detail::within(schedule, ranks, most, LISTED);
        let rank = |c: usize| Recorded {
            writer: Writer::new(c.is_multiple_of(every)),
            called: vec![0; schedule.frames.len()],
            is_listed: true,
            within: 0,
            times: BTreeMap::new(),
        };
        Self { detail, depth: 0, ranks: (0..ranks.len()).map(rank).collect() }
    }

    /// The timeline of the recorded runs of ranks that took so long.
    pub(super) fn timeline(self, schedule: &Schedule, times: Vec<(Rank, Simulation)>) -> Timeline {
        let mut timeline = Timeline::default();
        for ((rank, time), recorded) in times.into_iter().zip(self.ranks) {
            let Simulation { seconds, compute, streams, communication: _ } = time;
            let collective = |((frame, task), Times { count, seconds, exposed }): ((usize, usize), Times)| {
                let of = &schedule.frames[FrameId::new(frame)];
                let (name, _) = timeline::title(of, task);
                Collective { frame: of.name.clone(), name, count, seconds, exposed }
            };
            let collectives = recorded.times.into_iter().map(collective).collect();
            let streams = streams.into_iter().collect();
            let summary = Summary { rank, seconds, compute, streams, collectives };
            let written = recorded.writer.finish(schedule, rank);
            timeline.exposed.extend(exposed(&written, rank));
            let Written { spans, folds, exposed: _, within } = written;
            timeline.ranks.push(timeline::Alike { first: rank, ranks: None, summary, within });
            timeline.spans.extend(spans);
            timeline.folds.extend(folds);
        }
        timeline
    }

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

    /// What ranks have recorded, where the layer before which they stand, `done` of so many done, is folded.
    pub(super) fn before(&self, done: u64, layers: u64) -> Option<Vec<Before>> {
        let is_folded = !self.detail.shows_layer(done, layers);
        is_folded.then(|| self.ranks.iter().map(|rank| (rank.writer.open(), rank.times.clone())).collect())
    }

    /// The layer since `before` is repeated so many times, up to a layer, on the ranks that run; it takes each so long.
    pub(super) fn repeat(
        &mut self,
        before: &[Before],
        (times, layer): (u64, u64),
        (took, runs): (&[f64], &[bool]),
    ) {
        let ranks = self.ranks.iter_mut().zip(before).zip(took.iter().zip(runs));
        for ((rank, (open, counted)), (&took, _)) in ranks.filter(|(_, (_, runs))| **runs) {
            rank.writer.repeat(open, (times, layer), took);
            for (task, now) in &mut rank.times {
                let Times { count, seconds, exposed } = counted.get(task).copied().unwrap_or_default();
                now.count += times * (now.count - count);
                now.seconds += times as f64 * (now.seconds - seconds);
                now.exposed += times as f64 * (now.exposed - exposed);
            }
        }
    }

    /// A run has ended on a rank.
    pub(super) fn write(&mut self, (c, rank): (usize, Rank), frame: &Frame, run: Run) {
        let Recorded { writer, is_listed, within, .. } = &mut self.ranks[c];
        let within = if self.depth == 0 { run.task } else { *within };
        let is_listed = *is_listed && self.detail.shows_task(run.task, frame.tasks.len());
        writer.write(rank, frame.tasks[run.task].stream, Run { within, ..run }, is_listed);
    }

    /// A run of a collective took so long, and was exposed for so long.
    pub(super) fn count(
        &mut self,
        c: usize,
        (stream, task): (Stream, (usize, usize)),
        (seconds, exposed): (f64, f64),
    ) {
        if !self.ranks[c].is_listed {
            self.ranks[c].writer.expose_folded(stream, exposed);
        }
        let times = self.ranks[c].times.entry(task).or_default();
        *times = Times {
            count: times.count + 1,
            seconds: times.seconds + seconds,
            exposed: times.exposed + exposed,
        };
    }
}

#[cfg(test)]
mod tests {
    use ithaca_import::{Workload, program};
    use ithaca_layout::compile::compile;
    use ithaca_layout::shard::{ShardOptions, parse_mesh};
    use serde_json::json;

    use super::*;
    use crate::cluster::Cluster;
    use crate::simulate::timeline_of_sample;

    /// Folded layers count as if each was listed, whether they are run or repeated.
    #[test]
    fn a_sample_keeps_sums() {
        let config = json!({
            "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 12,
            "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 128, "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0, "max_position_embeddings": 4096, "torch_dtype": "bfloat16",
        });
        let module = program(&config, "m", &Workload::prefill(1, 4096)).unwrap();
        let cluster = Cluster::named("dgx-h100").unwrap();
        let options = ShardOptions::new("ring", parse_mesh("ring=16").unwrap());
        let schedule = compile(&module, &options, &cluster).unwrap().schedule;
        let all = timeline_of_sample(&cluster, &schedule, usize::MAX);
        let few = timeline_of_sample(&cluster, &schedule, 200);
        assert!(all.folds.is_empty() && !few.folds.is_empty());
        assert!(few.spans.len() < 600, "{}", few.spans.len());
        for (all, few) in all.ranks.iter().zip(&few.ranks) {
            let close = |a: f64, b: f64| (a - b).abs() <= 1e-9 * all.summary.seconds;
            assert!(close(all.summary.seconds, few.summary.seconds), "{all:?} {few:?}");
            for (a, b) in all.summary.collectives.iter().zip(&few.summary.collectives) {
                assert_eq!((a.count, &a.name), (b.count, &b.name));
                assert!(close(a.seconds, b.seconds) && close(a.exposed, b.exposed), "{a:?} {b:?}");
            }
        }
        let runs: u64 = few.folds.iter().map(|fold| fold.runs).sum();
        let ranks: Vec<Rank> = few.spans.iter().map(|span| span.rank).collect();
        let listed = all.spans.iter().filter(|span| ranks.contains(&span.rank)).count() as u64;
        assert_eq!(runs + few.spans.len() as u64, listed);
    }
}
