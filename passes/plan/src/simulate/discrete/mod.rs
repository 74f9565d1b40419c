//! Discrete-event simulation of a cluster, with links that messages share.
//!
//! Each rank has streams that run their tasks in order. A task starts when the one before it has ended and the events
//! that it waits for have happened. A collective starts on a rank when all with whom it meets there are ready; a message
//! between two ranks concerns these two. It takes its latency, then the time of its links: each level of the topology has a
//! link for either direction, all of them work at the same time, and messages that cross a link at the same time have equal
//! shares of it, as the cluster's `contention` says which devices share one. Of a message between two ranks the slower end
//! counts. The streams that a frame uses meet at its ends if it communicates, as they do when it runs; where ranks
//! share all cores of one machine, its streams take turns.
//!
//! Ranks that cannot be told apart are simulated once (`alike`), which loses nothing; all layers of all loops are run. So
//! this is exact where [`super::simulate`] repeats the last of many layers, and assumes that all neighbours of a shared link
//! cross it at once; a search over hundreds of layouts can afford that one only.

mod alike;
mod detail;
mod engine;
mod links;
mod overlap;
mod program;
mod walk;

#[cfg(test)]
mod tests;

pub use engine::Record;
pub use overlap::{Exposure, Obstacle, Overlap, TaskAt, WaitPoint};

use ithaca_ir::Rank;
use ithaca_ir::entity::Entity;
use ithaca_ir::schedule::{Schedule, Stream};
use ithaca_ir::timeline::{self, Collective, Exposed, Fold, Span, Summary, Timeline};

use super::simulation::Simulation;
use super::steps::key;
use crate::cluster::Cluster;
use alike::{Alike, FrameSeconds};
use detail::Written;
use engine::Engine;
use program::Program;
use walk::Time;

/// A simulated step.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// One entry for all ranks that are alike, in order of their first ranks.
    pub classes: Vec<Class>,
    /// The runs of tasks on the first rank of each class, if they are recorded.
    pub spans: Vec<Span>,
    /// The runs that are not among them.
    pub folds: Vec<Fold>,
    /// When those among them are exposed.
    pub exposed: Vec<Exposed>,
}

/// Ranks that do the same at the same time.
#[derive(Clone, Debug)]
pub struct Class {
    /// The first of them.
    pub rank: Rank,
    /// How many they are.
    pub ranks: u64,
    /// The time of each of them.
    pub time: Simulation,
    /// Its collectives, in the order of the schedule; each takes from when the rank is ready until it ends.
    pub collectives: Vec<Collective>,
    /// The compute stream while its collectives run, by frame and task, if it is recorded.
    pub overlaps: Vec<Overlap>,
    /// When each task of `main` runs, from its first run to its last, if runs are recorded.
    pub within: Vec<(usize, (f64, f64))>,
}

/// Combinations of coordinates whose work may differ, at most: beyond, a contiguous ring of thousands, pricing each rank's
/// masks would take longer than anybody waits.
const COMBINATIONS: usize = 1024;

impl Outcome {
    /// The class that ends last; of several the one that computes most.
    pub fn last(&self) -> Option<&Class> {
        let key = |class: &Class| (class.time.seconds, class.time.compute);
        self.classes.iter().reduce(|a, b| if key(b) > key(a) { b } else { a })
    }
}

/// Simulates a schedule that the schedule verifier accepts; nothing where more than 1 024 ranks may have work of their own.
pub fn simulate(cluster: &Cluster, schedule: &Schedule, record: Record) -> Option<Outcome> {
    let (alike, seconds) = Alike::of(cluster, schedule, COMBINATIONS, alike::by_peers)?;
    run(cluster, schedule, record, (&alike, &seconds))
}

impl Outcome {
    /// As a timeline.
    pub fn timeline(self) -> Timeline {
        let alike = |class: Class| {
            let Class { rank, ranks, time, collectives, overlaps: _, within } = class;
            let Simulation { seconds, compute, streams, communication: _ } = time;
            let streams = streams.into_iter().collect();
            let summary = Summary { rank, seconds, compute, streams, collectives };
            timeline::Alike { first: rank, ranks, summary, within }
        };
        let Self { classes, spans, folds, exposed } = self;
        Timeline { ranks: classes.into_iter().map(alike).collect(), spans, folds, exposed }
    }
}

/// Simulates one rank of each class.
fn run(
    cluster: &Cluster,
    schedule: &Schedule,
    record: Record,
    (alike, seconds): (&Alike, &[FrameSeconds]),
) -> Option<Outcome> {
    let main = schedule.main()?.index();
    let program = Program::of(cluster, schedule, alike, seconds);
    let mut engine = Engine::new(&program, main, (schedule, &alike.ranks), record);
    engine.run();
    let ran = engine.finish();
    let mut outcome = Outcome::default();
    for ((&rank, &ranks), ran) in alike.ranks.iter().zip(&alike.sizes).zip(ran) {
        let mut class = Class {
            rank,
            ranks,
            time: Simulation::default(),
            collectives: Vec::new(),
            overlaps: Vec::new(),
            within: Vec::new(),
        };
        (class.time.seconds, class.time.compute) = (ran.end, ran.busy[Stream::Compute as usize]);
        let busy = Stream::ALL.into_iter().zip(ran.busy).skip(1);
        class.time.streams = busy.filter(|(_, seconds)| *seconds > 0.0).collect();
        for (frame, times) in schedule.frames.values().zip(&ran.tasks) {
            for (i, (task, time)) in frame.tasks.iter().zip(times).enumerate() {
                let Time { count: count @ 1.., total: seconds, exposed } = *time else { continue };
                let row = class.time.communication.entry(key(&schedule.space, task)).or_default();
                row.total += seconds;
                row.exposed += exposed;
                let (name, _) = timeline::title(frame, i);
                let frame = frame.name.clone();
                class.collectives.push(Collective { frame, name, count, seconds, exposed });
            }
        }
        let time = |frame: usize, task: usize| {
            let Time { count, total, exposed: _ } = ran.tasks[frame][task];
            (count, total)
        };
        class.overlaps = ran.overlaps.map(|all| all.finish(schedule, &alike.ranks, time)).unwrap_or_default();
        let Written { spans, folds, exposed, within } =
            ran.writer.map(|writer| writer.finish(schedule, rank)).unwrap_or_default();
        outcome.spans.extend(spans);
        outcome.folds.extend(folds);
        outcome.exposed.extend(exposed);
        class.within = within;
        outcome.classes.push(class);
    }
    Some(outcome)
}
