//! The time of each frame of a schedule by itself, as if the others were far away.

use std::collections::BTreeMap;

use ithaca_ir::entity::Entity;
use ithaca_ir::schedule::{Frame, FrameId, Schedule, Stream, Task, used_streams};

use super::classes::Classes;
use super::shared::Link;
use super::simulation::Simulation;
use super::steps::{Part, Step, steps};
use super::{World, last};
use crate::cluster::Cluster;

/// A frame that is run by itself.
pub(crate) struct Alone {
    /// Its time, on the rank that ends last.
    pub(crate) simulation: Simulation,
    /// Seconds for which its own messages use the busiest link of a rank at each level, where several streams may.
    pub(crate) links: Vec<f64>,
    /// Seconds if its messages of weights and gradients are sent by the frames beside it, and it sends as many of theirs.
    pub(crate) beside_weights: f64,
    /// Seconds without the tasks that a second run leaves out.
    pub(crate) without: Option<f64>,
}

/// Runs each frame of a schedule by itself, without the tasks of frames that `is_left`, and frames that `leaves` says a second time
/// without these of their tasks as well. The last frame is the step, as [`simulate`](super::simulate) times it.
pub(crate) fn simulate_frames(
    cluster: &Cluster,
    schedule: &Schedule,
    is_left: &dyn Fn(&Frame, &Task) -> bool,
    leaves: &BTreeMap<FrameId, Vec<bool>>,
) -> Vec<Alone> {
    let classes = Classes::of(cluster, schedule);
    let mut steps = steps(cluster, schedule, &classes);
    for (frame, steps) in schedule.frames.values().zip(&mut steps) {
        leave(steps, frame.tasks.iter().map(|task| is_left(frame, task)));
    }
    let frames = Frames { cluster, schedule, classes };
    let alone = |id: FrameId| {
        let simulation = frames.run(&steps, id);
        let beside_weights = frames.beside_weights(&steps, id).unwrap_or(simulation.seconds);
        let links = frames.busiest(&steps[id.index()]);
        Alone { simulation, links, beside_weights, without: None }
    };
    let mut all: Vec<Alone> = schedule.frames.ids().map(alone).collect();
    let mut fewer = steps.clone();
    for (id, left) in leaves {
        leave(&mut fewer[id.index()], left.iter().copied());
    }
    for &id in leaves.keys() {
        all[id.index()].without = Some(frames.run(&fewer, id).seconds);
    }
    all
}

/// The frames of a schedule.
struct Frames<'a> {
    cluster: &'a Cluster,
    schedule: &'a Schedule,
    classes: Classes,
}

impl Frames<'_> {
    /// The time of a frame, which all ranks enter at once.
    fn run(&self, steps: &[Vec<Step>], id: FrameId) -> Simulation {
        let ranks = self.classes.ranks();
        let world = World {
            schedule: self.schedule,
            steps,
            used: &used_streams(&self.schedule.frames),
            ranks,
            in_turn: self.cluster.has_no_idle_core(self.schedule.space.mesh.ranks()),
            known: Default::default(),
        };
        last(world.frame(id, (&vec![0.0; ranks.len()], &vec![true; ranks.len()])).ranks)
    }

    /// Seconds for which steps use the busiest link of a rank at each level.
    fn busiest(&self, steps: &[Step]) -> Vec<f64> {
        let mut busiest = vec![0.0_f64; self.cluster.levels.len()];
        for c in 0..self.classes.ranks().len() {
            let mut links: BTreeMap<Link, f64> = BTreeMap::new();
            for &(link, seconds) in steps.iter().flat_map(|step| &step.part(c).loads.links) {
                *links.entry(link).or_default() += seconds;
            }
            for ((level, ..), seconds) in links {
                busiest[level] = busiest[level].max(seconds);
            }
        }
        busiest
    }

    /// Seconds of a frame in which no kernel waits for messages of weights and gradients, and the other messages wait for those that
    /// they meet on a link; nothing of a frame without messages of weights.
    fn beside_weights(&self, steps: &[Vec<Step>], id: FrameId) -> Option<f64> {
        let of_weights = || self.schedule.frames[id].tasks.iter().map(|task| task.stream == Stream::Weights);
        let messages: Vec<Vec<f64>> = of_weights()
            .zip(&steps[id.index()])
            .filter(|(is_of_weights, _)| *is_of_weights)
            .map(|(_, step)| self.busiest(std::slice::from_ref(step)))
            .collect();
        if messages.is_empty() {
            return None;
        }
        let mut steps = steps.to_vec();
        leave(&mut steps[id.index()], of_weights());
        let seconds = self.run(&steps, id).seconds;
        let all: Vec<Vec<f64>> =
            steps[id.index()].iter().map(|step| self.busiest(std::slice::from_ref(step))).collect();
        // The chance to meet a message is its part of the time, and half of it is left on average; however many follow it, one meets it.
        let wait = |level: usize| {
            let others = all.iter().filter(|m| m[level] > 0.0).count().max(1) as f64;
            let met = |m: &Vec<f64>| (others * m[level] / seconds).min(1.0) * m[level] / 2.0;
            messages.iter().map(met).sum::<f64>() / others
        };
        let waits: Vec<f64> = (0..self.cluster.levels.len()).map(wait).collect();
        for step in &mut steps[id.index()] {
            let late = |part: &Part| {
                let waits = part.loads.links.iter().map(|&((level, ..), _)| waits[level]);
                Part { seconds: part.seconds + waits.fold(0.0, f64::max), ..part.clone() }
            };
            step.parts = step.parts.iter().map(late).collect();
        }
        Some(self.run(&steps, id).seconds)
    }
}

/// Makes steps take no time.
fn leave(steps: &mut [Step], left: impl Iterator<Item = bool>) {
    let left = steps.iter_mut().zip(left).filter(|(_, is_left)| *is_left);
    left.for_each(|(step, _)| step.parts = [Part::default()].into());
}
