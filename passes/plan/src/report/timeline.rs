//! One step, run by run, in numbers that are short to write.

use std::collections::BTreeMap;

use ithaca_ir::Rank;
use ithaca_ir::schedule::{Schedule, Stream};
use ithaca_ir::timeline::{Alike, Fold, Span, Timeline};
use serde::Serialize;

/// One step.
#[derive(Clone, Debug, Serialize)]
pub struct Steps {
    /// Seconds until the last rank ends.
    pub seconds: f64,
    /// Kinds of ranks; the listed ones first, then by rank. None where too many ranks differ for a simulation of events.
    pub ranks: Vec<RankRow>,
    /// What is not listed, in words; empty where everything is.
    pub left_out: String,
    /// Names of runs.
    pub names: Vec<String>,
    /// The streams of ranks, in order.
    pub lanes: Vec<Lane>,
}

/// Ranks that do alike.
#[derive(Clone, Debug, Serialize)]
pub struct RankRow {
    /// The first of them.
    pub rank: u64,
    /// Their number.
    pub ranks: u64,
    /// Coordinates of the first.
    pub place: String,
    /// Seconds until it ends.
    pub seconds: f64,
    /// Seconds of kernels.
    pub compute: f64,
    /// Seconds of exposed communication.
    pub exposed: f64,
    /// Names of other streams with the part of the step in which they are at work.
    pub streams: Vec<(&'static str, f64)>,
}

/// A stream of a rank.
#[derive(Clone, Debug, Serialize)]
pub struct Lane {
    /// The number of its rank among the rows.
    pub rank: usize,
    /// Its name.
    pub stream: &'static str,
    /// Runs: start and length, microseconds; the number of the name; the layer; the kind.
    pub runs: Vec<(f64, f64, usize, u64, u8)>,
    /// Folded runs: start and length, microseconds; the number of the name; how many; busy and exposed microseconds.
    pub folds: Vec<(f64, f64, usize, u64, f64, f64)>,
    /// When runs are exposed: start and length, microseconds.
    pub exposed: Vec<(f64, f64)>,
}

/// Kinds of runs, by number.
const PRODUCT: u8 = 0;
const ATTENTION: u8 = 1;
const OTHER: u8 = 2;
const COPY: u8 = 3;
const COMMUNICATION: u8 = 4;

fn kind(span: &Span) -> u8 {
    match span.kind {
        "compute" if span.name.starts_with("attention") => ATTENTION,
        "compute" if span.name.starts_with("einsum") || span.name.contains("product") => PRODUCT,
        "compute" => OTHER,
        "copy" | "pack" | "unpack" => COPY,
        _ => COMMUNICATION,
    }
}

/// Microseconds, to a tenth of a nanosecond.
fn micro(seconds: f64) -> f64 {
    (seconds * 1e10).round() / 1e4
}

/// Microseconds that a picture can show, to ten nanoseconds.
fn coarse(seconds: f64) -> f64 {
    (seconds * 1e8).round() / 1e2
}

impl Steps {
    pub(super) fn new(schedule: &Schedule, timeline: &Timeline, step_seconds: f64) -> Self {
        let mut names: Vec<String> = Vec::new();
        let mut numbers: BTreeMap<String, usize> = BTreeMap::new();
        let mut number = |name: String| {
            *numbers.entry(name).or_insert_with_key(|name| {
                names.push(name.clone());
                names.len() - 1
            })
        };
        let mesh = &schedule.space.mesh;
        let row = |alike: &Alike| {
            let summary = &alike.summary;
            let at = |axis: ithaca_ir::AxisId| {
                format!("{}={}", mesh.axes[axis].name, mesh.coordinate(alike.first, axis))
            };
            let part = |seconds: f64| if summary.seconds > 0.0 { seconds / summary.seconds } else { 0.0 };
            RankRow {
                rank: alike.first.0,
                ranks: alike.ranks,
                place: mesh.axes.ids().map(at).collect::<Vec<_>>().join(" "),
                seconds: summary.seconds,
                compute: summary.compute,
                exposed: summary.collectives.iter().map(|c| c.exposed).sum(),
                streams: summary.streams.iter().map(|(s, busy)| (s.name(), part(*busy))).collect(),
            }
        };
        let is_listed = |rank: Rank| timeline.spans.iter().any(|span| span.rank == rank);
        let (listed, others): (Vec<&Alike>, Vec<&Alike>) =
            timeline.ranks.iter().partition(|alike| is_listed(alike.first));
        let mut lanes = Vec::new();
        for (i, alike) in listed.iter().enumerate() {
            for stream in Stream::ALL {
                let on = |rank: Rank, other: Stream| rank == alike.first && other == stream;
                let spans = timeline.spans.iter().filter(|s| on(s.rank, s.stream));
                let run = |s: &Span| {
                    let name = number(format!("{} (@{})", s.name, s.frame));
                    (coarse(s.start), coarse(s.end - s.start), name, s.layer, kind(s))
                };
                let runs: Vec<_> = spans.map(run).collect();
                let folds = timeline.folds.iter().filter(|f| on(f.rank, f.stream));
                let fold = |f: &Fold| {
                    let name = number(f.name.clone());
                    let (start, length) = (coarse(f.start), coarse(f.end - f.start));
                    (start, length, name, f.runs, micro(f.busy), micro(f.exposed))
                };
                let folds: Vec<_> = folds.map(fold).collect();
                if runs.is_empty() && folds.is_empty() {
                    continue;
                }
                let exposed = timeline.exposed.iter().filter(|e| on(e.rank, e.stream));
                let exposed = exposed.map(|e| (coarse(e.start), coarse(e.end - e.start))).collect();
                lanes.push(Lane { rank: i, stream: stream.name(), runs, folds, exposed });
            }
        }
        Self {
            seconds: timeline
                .ranks
                .iter()
                .map(|a| a.summary.seconds)
                .reduce(f64::max)
                .unwrap_or(step_seconds),
            ranks: listed.into_iter().chain(others).map(row).collect(),
            left_out: timeline.left_out().unwrap_or_default(),
            names,
            lanes,
        }
    }
}
