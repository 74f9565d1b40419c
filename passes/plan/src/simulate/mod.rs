//! The time of a schedule, rank by rank: streams run in order, events order them, exchanges make ranks wait for
//! each other.
//!
//! A task starts when its stream has finished the task before it and every event it waits for has happened; a collective
//! starts when all that take part in it on this rank's side are ready: its group, or for parts that travel and tokens
//! that are fetched the ranks that it sends to or receives from. So a task that only some ranks have costs the others
//! nothing, and a rank that is late holds up its neighbours and, step by step, theirs. Ranks that differ along no axis
//! that matters are simulated once (`classes`): up to 64 exactly, of more a sample. The streams that a frame uses meet at its
//! ends if it communicates; to other streams it is a task of the compute stream. A loop is run layer by layer until every rank is as far behind the others as a layer before, which the
//! layers that are left repeat.
//!
//! Messages of several streams of a rank over one link take turns (`shared`); of a frame that communicates and its caller
//! those between stages count as if they had links of their own.
//!
//! The result is that of the rank that ends last. At any moment one of its streams works, or waits in a collective,
//! hence step time = compute + exposed communication, exactly. Streams do not slow each other down: Galvatron measured
//! 1.13 for work that overlaps, which matters once schedules overlap more than packing. Only where ranks share all cores of one
//! machine, a transfer takes time from kernels, so streams take turns.

mod classes;
pub mod discrete;
mod frames;
mod shared;
mod simulation;
mod steps;

#[cfg(test)]
mod measured_tests;
#[cfg(test)]
mod tests;

use std::cell::RefCell;
use std::collections::HashMap;

use ithaca_ir::Rank;
use ithaca_ir::entity::Entity;
use ithaca_ir::module::Layers;
use ithaca_ir::schedule::{Frame, FrameId, Schedule, Stream, Streams, Work, used_streams};
use ithaca_ir::timeline::{Covered, Timeline};

use crate::cluster::Cluster;
use classes::Classes;
pub(crate) use frames::{Alone, Frames};
pub use simulation::{CommTime, Simulation};
pub(crate) use steps::copied_bytes;

use discrete::Record;
use shared::Links;
use steps::{Part, Step, steps};

/// Times a schedule that the schedule verifier accepts, on the rank that ends last; of several the one that computes
/// the most.
pub fn simulate(cluster: &Cluster, schedule: &Schedule) -> Simulation {
    last(simulate_ranks(cluster, schedule).into_iter().map(|(_, time)| time).collect())
}

/// Times a schedule on each simulated rank, as [`simulate`] does.
pub fn simulate_ranks(cluster: &Cluster, schedule: &Schedule) -> Vec<(Rank, Simulation)> {
    let classes = Classes::of(cluster, schedule);
    let Some(main) = schedule.main() else { return Vec::new() };
    let steps = steps(cluster, schedule, &classes);
    let used = used_streams(&schedule.frames);
    let (ranks, n) = (classes.ranks(), classes.ranks().len());
    let in_turn = cluster.has_no_idle_core(schedule.space.mesh.ranks());
    let world = World { schedule, steps: &steps, used: &used, ranks, in_turn, known: RefCell::default() };
    let run = world.frame(main, (&vec![0.0; n], &vec![true; n]));
    ranks.iter().copied().zip(run.ranks).collect()
}

/// How far apart the times may be, in parts, that two schedules have more than the one before.
const STEADY: f64 = 1e-3;

/// Times a schedule that repeats `times` more what the last of three shorter ones has more than the second; nothing where that is
/// not what the second has more than the first.
pub(crate) fn simulate_continued(
    cluster: &Cluster,
    shorter: [&Schedule; 3],
    times: u64,
) -> Option<Simulation> {
    let [first, second, third] = shorter.map(|schedule| simulate_ranks(cluster, schedule));
    let ranks = first.into_iter().zip(second).zip(third);
    let ranks = ranks.map(|(((_, first), (_, second)), (_, third))| {
        let (before, more) = (second.seconds - first.seconds, third.seconds - second.seconds);
        let mut all = Simulation::default();
        all.add(&third, 1.0 + times as f64);
        all.add(&second, -(times as f64));
        ((before - more).abs() <= STEADY * more).then_some(all)
    });
    Some(last(ranks.collect::<Option<_>>()?))
}

/// The time of the rank that ends last; of several the one that computes the most.
fn last(ranks: Vec<Simulation>) -> Simulation {
    let later = |a: &Simulation, b: &Simulation| {
        a.seconds.total_cmp(&b.seconds).then(a.compute.total_cmp(&b.compute)).is_gt()
    };
    ranks.into_iter().reduce(|a, b| if later(&b, &a) { b } else { a }).unwrap_or_default()
}

/// When each task runs, by discrete events: ranks that do the same at the same time once, and about `most` runs one by one; the
/// others are folded. Nothing where more ranks differ than [`discrete::simulate`] takes.
pub fn timeline(cluster: &Cluster, schedule: &Schedule, most: usize) -> Option<Timeline> {
    discrete::simulate(cluster, schedule, Record::Spans { most }).map(discrete::Outcome::timeline)
}

/// Layers of a loop that are run one by one; the rest repeat the last of them.
const LAYERS: u64 = 64;

/// The context of a run.
struct World<'a> {
    schedule: &'a Schedule,
    /// The steps of each frame.
    steps: &'a [Vec<Step>],
    /// The streams that each frame uses.
    used: &'a [Streams],
    /// The ranks that are simulated.
    ranks: &'a [Rank],
    /// Whether the streams of a rank take turns, in order of issue, on cores of which none is idle.
    in_turn: bool,
    /// Calls that were run.
    known: RefCell<HashMap<Called, Took>>,
}

/// The seconds of a call and the time of each rank in it.
type Took = (Vec<f64>, Vec<Simulation>);

/// A call, as far as its time depends on it: the frame, the layers, and how far behind the first rank each rank is that runs.
#[derive(PartialEq, Eq, Hash)]
struct Called {
    callee: FrameId,
    layers: Layers,
    behind: Vec<(usize, u64)>,
}

/// One run of a frame.
struct Run {
    /// The time of each rank from its start to its end.
    ranks: Vec<Simulation>,
    /// When each rank ended.
    ends: Vec<f64>,
}

/// A rank on its way through a frame.
struct Clock {
    /// When each stream has ended its last task.
    ready: [f64; Stream::COUNT],
    events: Vec<f64>,
    /// The tasks of the compute stream.
    compute: Vec<(f64, f64)>,
    /// Calls at which streams meet.
    calls: Vec<(f64, f64)>,
    /// The links as far as messages of the frame use them.
    links: Links,
    /// The tasks of the other streams, by stream.
    comm: [Vec<Busy>; Stream::COUNT],
    total: Simulation,
}

/// A task of a stream that communicates: its start, its end and its number.
struct Busy {
    start: f64,
    end: f64,
    task: usize,
}

impl Clock {
    fn new(start: f64, frame: &Frame) -> Self {
        Self {
            ready: [start; Stream::COUNT],
            events: vec![start; frame.n_events],
            compute: Vec::new(),
            calls: Vec::new(),
            links: Links::default(),
            comm: Default::default(),
            total: Simulation::default(),
        }
    }

    fn all_ready(&self) -> f64 {
        self.ready.into_iter().fold(0.0, f64::max)
    }
}

impl World<'_> {
    /// Runs a frame that each rank enters at its own time, on the ranks that are `here`.
    fn frame(&self, id: FrameId, (starts, here): (&[f64], &[bool])) -> Run {
        let (frame, steps) = (&self.schedule.frames[id], &self.steps[id.index()]);
        let own = self.used[id.index()];
        let communicating = || own.iter().filter(|&stream| stream != Stream::Compute);
        let shares = communicating().count() > 1;
        let mut clocks: Vec<Clock> = starts.iter().map(|&start| Clock::new(start, frame)).collect();
        for (number, (task, step)) in frame.tasks.iter().zip(steps).enumerate() {
            let waited = |c: &Clock| task.waits.iter().map(|e| c.events[e.index()]).fold(0.0, f64::max);
            let used = task.work.callee().map(|callee| self.used[callee.index()]);
            let used = used.filter(|used| used.communicates());
            let meets = used.is_some();
            // What such a frame and its caller send over one link is told apart by time alone.
            let used = used.map(|used| used.and(own.without_stages()));
            // The streams that meet, or the task's own.
            let streams = if self.in_turn {
                Stream::ALL.into_iter().fold(Streams::default(), |all, s| all.and(Streams::only(s)))
            } else {
                used.unwrap_or_default().and(Streams::only(task.stream))
            };
            let ready = |c: &Clock| streams.iter().map(|s| c.ready[s as usize]).fold(0.0, f64::max);
            let runs = |(&rank, &here): (&Rank, &bool)| here && frame.runs(&self.schedule.space, task, rank);
            let runs: Vec<bool> = self.ranks.iter().zip(here).map(runs).collect();
            let ready: Vec<f64> = clocks.iter().map(|c| ready(c).max(waited(c))).collect();
            let ends = match &task.work {
                Work::Call { callee, layers, .. } => {
                    let (ends, done) = self.layers(*callee, layers, (&ready, &runs));
                    // The callee has accounted for its own streams; of one that only computes the time is all.
                    for (clock, done) in clocks.iter_mut().zip(&done).filter(|_| meets) {
                        clock.total.add(done, 1.0);
                    }
                    ends
                }
                Work::Compute(_) | Work::Pack(_) | Work::Exchange(_) | Work::Unpack(_) | Work::Copy => {
                    let mut late = vec![0.0; self.ranks.len()];
                    if shares && matches!(task.work, Work::Exchange(_)) {
                        for c in (0..self.ranks.len()).filter(|&c| runs[c]) {
                            let past = communicating().map(|s| clocks[c].ready[s as usize]);
                            let past = past.fold(f64::INFINITY, f64::min);
                            let start = step.start(c, &ready);
                            late[c] = clocks[c].links.send(task.stream, &step.part(c).loads, start, past);
                        }
                    }
                    (0..self.ranks.len()).map(|c| step.end(c, &ready, &late)).collect()
                }
            };
            // The other ranks continue.
            for (c, clock) in clocks.iter_mut().enumerate().filter(|&(c, _)| runs[c]) {
                let (start, end) = (ready[c], ends[c]);
                streams.iter().for_each(|stream| clock.ready[stream as usize] = end);
                match task.stream {
                    _ if meets => clock.calls.push((start, end)),
                    Stream::Compute => clock.compute.push((start, end)),
                    other => clock.comm[other as usize].push(Busy { start, end, task: number }),
                }
                if let Some(event) = task.records {
                    clock.events[event.index()] = end;
                }
            }
        }
        let ends: Vec<f64> = clocks.iter().map(Clock::all_ready).collect();
        let finish = |(clock, start): (Clock, &f64)| finish(clock, *start, steps);
        Run { ranks: clocks.into_iter().zip(starts).map(finish).collect(), ends }
    }

    /// Runs a frame once for each layer; returns the end and the time of each rank.
    ///
    /// Micro-batches of a pipeline call the same frames, which then take as long.
    fn layers(
        &self,
        callee: FrameId,
        layers: &Layers,
        (starts, runs): (&[f64], &[bool]),
    ) -> (Vec<f64>, Vec<Simulation>) {
        let running = (0..starts.len()).filter(|&c| runs[c]);
        let first = running.clone().map(|c| starts[c]).fold(f64::INFINITY, f64::min);
        let first = if first.is_finite() { first } else { 0.0 };
        let behind = running.map(|c| (c, (starts[c] - first).to_bits())).collect();
        let key = Called { callee, layers: layers.clone(), behind };
        let known = self.known.borrow().get(&key).cloned();
        let (took, totals) = known.unwrap_or_else(|| {
            let from: Vec<f64> = starts.iter().map(|start| start - first).collect();
            let (ends, totals) = self.each_layer(callee, layers, (&from, runs));
            let took: Vec<f64> = ends.iter().zip(&from).map(|(end, start)| end - start).collect();
            self.known.borrow_mut().insert(key, (took.clone(), totals.clone()));
            (took, totals)
        });
        (starts.iter().zip(&took).map(|(start, took)| start + took).collect(), totals)
    }

    fn each_layer(
        &self,
        callee: FrameId,
        layers: &Layers,
        (starts, runs): (&[f64], &[bool]),
    ) -> (Vec<f64>, Vec<Simulation>) {
        let n = layers.end - layers.start;
        let mut totals = vec![Simulation::default(); starts.len()];
        let mut at = starts.to_vec();
        let mut layer = 0;
        while layer < n {
            let run = self.frame(callee, (&at, runs));
            let took: Vec<f64> = run.ends.iter().zip(&at).map(|(end, start)| end - start).collect();
            let running = took.iter().zip(runs).filter(|(_, runs)| **runs).map(|(t, _)| t);
            let (least, most) = running.fold((f64::MAX, 0.0f64), |(l, m), &t| (l.min(t), m.max(t)));
            // Ranks that stay as far apart as they were do so from now on.
            let alike = most - least <= 1e-9 * most || layer + 1 == LAYERS;
            let times = if alike { n - layer } else { 1 };
            let ranks = totals.iter_mut().zip(&run.ranks).zip(at.iter_mut().zip(&took)).zip(runs);
            for (((total, done), (at, took)), _) in ranks.filter(|(_, runs)| **runs) {
                let busy = Simulation { seconds: 0.0, ..done.clone() };
                total.add(&busy, times as f64);
                *at += times as f64 * took;
            }
            layer += times;
        }
        (at, totals)
    }
}

/// The time of a rank in a frame that it entered at `start`.
fn finish(clock: Clock, start: f64, steps: &[Step]) -> Simulation {
    let seconds = clock.all_ready() - start;
    let Clock { compute, calls, comm, mut total, .. } = clock;
    total.seconds = seconds;
    total.compute += compute.iter().map(|(start, end)| end - start).sum::<f64>();
    // During a call some stream that meets there is at work, and its time is accounted for.
    let mut covered = Covered::by(compute);
    covered.add(calls);
    for (stream, comm) in Stream::ALL.into_iter().zip(comm).filter(|(_, comm)| !comm.is_empty()) {
        let times: Vec<(f64, f64)> = comm.iter().map(|busy| (busy.start, busy.end)).collect();
        for (Busy { start, end, task }, exposed) in comm.into_iter().zip(covered.exposed(&times)) {
            let time = total.communication.entry(steps[task].key.clone()).or_default();
            time.total += end - start;
            time.exposed += exposed;
            *total.streams.entry(stream).or_default() += end - start;
        }
        covered.add(times);
    }
    total
}

impl Step {
    fn part(&self, c: usize) -> &Part {
        &self.parts[c.min(self.parts.len() - 1)]
    }

    /// When rank `c` begins the task, if each rank could begin it when `ready` says.
    fn start(&self, c: usize, ready: &[f64]) -> f64 {
        self.part(c).with.iter().map(|&peer| ready[peer]).fold(ready[c], f64::max)
    }

    /// When rank `c` ends it; `late` says by how much its links and those of its peers delay it.
    fn end(&self, c: usize, ready: &[f64], late: &[f64]) -> f64 {
        let part = self.part(c);
        let late = part.with.iter().map(|&peer| late[peer]).fold(late[c], f64::max);
        let runs = part.seconds > 0.0 || !part.with.is_empty();
        if runs { self.start(c, ready) + part.seconds + late } else { ready[c] }
    }
}
