//! The time of each frame of a schedule when it runs alone.

use std::collections::BTreeMap;

use ithaca_ir::entity::Entity;
use ithaca_ir::schedule::{Frame, FrameId, Schedule, Stream, Streams, Task, used_streams};

use super::classes::Classes;
use super::shared::Link;
use super::simulation::Simulation;
use super::steps::{Part, Step, steps};
use super::{World, last};
use crate::cluster::Cluster;

/// A frame that runs alone.
pub(crate) struct Alone {
    /// Its time, on the rank that ends last.
    pub(crate) simulation: Simulation,
    /// Seconds for which its own messages use the busiest link of a rank at each level, of links that several streams share.
    pub(crate) links: Vec<f64>,
    /// Seconds without the tasks that a second run leaves out.
    pub(crate) without: Option<f64>,
}

/// The frames of a schedule, to run alone.
pub(crate) struct Frames<'a> {
    cluster: &'a Cluster,
    schedule: &'a Schedule,
    classes: Classes,
    steps: Vec<Vec<Step>>,
    used: Vec<Streams>,
}

impl<'a> Frames<'a> {
    /// The frames of a schedule; tasks for which `is_left` holds take no time.
    pub(crate) fn of(
        cluster: &'a Cluster,
        schedule: &'a Schedule,
        is_left: &dyn Fn(&Frame, &Task) -> bool,
    ) -> Self {
        let classes = Classes::of(cluster, schedule);
        let mut steps = steps(cluster, schedule, &classes);
        for (frame, steps) in schedule.frames.values().zip(&mut steps) {
            leave(steps, frame.tasks.iter().map(|task| is_left(frame, task)));
        }
        Self { cluster, schedule, classes, steps, used: used_streams(&schedule.frames) }
    }

    /// The time of each frame. Those in `leaves` run a second time without the tasks that are marked there. The last frame is the
    /// step, as [`simulate`](super::simulate) times it.
    pub(crate) fn alone(&self, leaves: &BTreeMap<FrameId, Vec<bool>>) -> Vec<Alone> {
        let mut fewer = self.steps.clone();
        for (id, left) in leaves {
            leave(&mut fewer[id.index()], left.iter().copied());
        }
        let [whole, fewer] = [&self.steps, &fewer].map(|steps| self.world(steps));
        let alone = |id: FrameId| Alone {
            simulation: self.run(&whole, id),
            links: self.busiest(&self.steps[id.index()]),
            without: leaves.contains_key(&id).then(|| self.run(&fewer, id).seconds),
        };
        self.schedule.frames.ids().map(alone).collect()
    }

    /// Seconds of a frame in which no kernel waits for messages of weights and gradients, and the other messages wait for those that
    /// they meet on a link; `None` for a frame without messages of weights.
    pub(crate) fn beside_weights(&self, id: FrameId) -> Option<f64> {
        let of_weights = || self.schedule.frames[id].tasks.iter().map(|task| task.stream == Stream::Weights);
        let alone = |step: &Step| self.busiest(std::slice::from_ref(step));
        let messages = of_weights().zip(&self.steps[id.index()]);
        let messages = messages.filter(|(is_of_weights, _)| *is_of_weights);
        let messages: Vec<Vec<f64>> = messages.map(|(_, step)| alone(step)).collect();
        if messages.is_empty() {
            return None;
        }
        let mut steps = self.steps.clone();
        leave(&mut steps[id.index()], of_weights());
        let seconds = self.run(&self.world(&steps), id).seconds;
        // In T seconds each of n other messages begins during a message of m seconds with chance m / T, but no more than one of them
        // waits for it, on average for its half.
        let others: Vec<Vec<f64>> = steps[id.index()].iter().map(alone).collect();
        let wait = |level: usize| {
            let n = others.iter().filter(|m| m[level] > 0.0).count().max(1) as f64;
            let of_all = messages.iter().map(|m| (n * m[level] / seconds).min(1.0) * m[level] / 2.0);
            of_all.sum::<f64>() / n
        };
        let waits: Vec<f64> = (0..self.cluster.levels.len()).map(wait).collect();
        for step in &mut steps[id.index()] {
            let delayed = |part: &Part| {
                let waits = part.loads.links.iter().map(|&((level, ..), _)| waits[level]);
                Part { seconds: part.seconds + waits.fold(0.0, f64::max), ..part.clone() }
            };
            step.parts = step.parts.iter().map(delayed).collect();
        }
        Some(self.run(&self.world(&steps), id).seconds)
    }

    fn world<'b>(&'b self, steps: &'b [Vec<Step>]) -> World<'b> {
        World {
            schedule: self.schedule,
            steps,
            used: &self.used,
            ranks: self.classes.ranks(),
            in_turn: self.cluster.has_no_idle_core(self.schedule.space.mesh.ranks()),
            known: Default::default(),
        }
    }

    /// The time of a frame, which all ranks enter at once.
    fn run(&self, world: &World<'_>, id: FrameId) -> Simulation {
        let n = world.ranks.len();
        last(world.frame(id, (&vec![0.0; n], &vec![true; n])).ranks)
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
}

/// Makes steps take no time.
fn leave(steps: &mut [Step], left: impl Iterator<Item = bool>) {
    let left = steps.iter_mut().zip(left).filter(|(_, is_left)| *is_left);
    left.for_each(|(step, _)| step.parts = [Part::default()].into());
}
