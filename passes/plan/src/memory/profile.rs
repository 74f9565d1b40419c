//! Memory over a step: the buffers that are alive during each task of `main`.

use std::collections::BTreeMap;

use ithaca_ir::entity::Entity;
use ithaca_ir::layout::At;
use ithaca_ir::schedule::{Frame, Schedule};

use super::{Alive, Kind, Memory, at_peak_of, of_places, places};
use crate::cluster::Cluster;

/// The arena of a rank during a task of `main`, bytes. The rest of the arena is free, or between buffers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Moment {
    /// Wire buffers.
    pub communication: u64,
    /// Results of the forward pass that wait for the backward pass.
    pub saved: u64,
    /// Other activations and outputs.
    pub activations: u64,
}

impl Moment {
    /// All of them.
    pub fn total(&self) -> u64 {
        self.communication + self.saved + self.activations
    }

    fn add(&mut self, kind: Kind, bytes: u64) {
        match kind {
            Kind::Communication => self.communication += bytes,
            Kind::Saved => self.saved += bytes,
            Kind::Other => self.activations += bytes,
        }
    }
}

/// The memory of the ranks of a place over a step.
#[derive(Clone, Debug, PartialEq)]
pub struct Profile {
    /// The stage of a pipeline; none where every rank runs every task.
    pub at: Option<At>,
    /// What is held for the whole step, and the peak.
    pub memory: Memory,
    /// The tasks of `main` that these ranks run, by number, and their moments: of a call the fullest.
    pub moments: Vec<(usize, Moment)>,
}

/// The memory of the busiest ranks over a step; of a pipeline, of the busiest stage, as [`of_schedule`](super::of_schedule) says.
pub fn profile(cluster: &Cluster, schedule: &Schedule) -> Option<Profile> {
    let stages = places(schedule).into_iter().zip(of_places(cluster, schedule));
    let (at, memory) = stages.reduce(|a, b| if b.1.total > a.1.total { b } else { a })?;
    let memory = at_peak_of(schedule, at, memory);
    let whole = &schedule.frames[schedule.main()?];
    let runs = |i: &usize| at.is_none_or(|at| whole.runs_at(&whole.tasks[*i], at));
    let numbers: Vec<usize> = (0..whole.tasks.len()).filter(runs).collect();
    let own = at.map(|at| whole.only(at));
    let frame = own.as_ref().unwrap_or(whole);
    let moments = moments(schedule, frame, &mut BTreeMap::new());
    Some(Profile { at, memory, moments: numbers.into_iter().zip(moments).collect() })
}

/// The moments of the tasks of a frame; `fullest` has those of callees that are known.
fn moments(schedule: &Schedule, frame: &Frame, fullest: &mut BTreeMap<usize, Moment>) -> Vec<Moment> {
    let alive = Alive::of(schedule, frame);
    let mut found = vec![Moment::default(); frame.tasks.len()];
    for (buffer, tasks) in &alive.lives {
        let (kind, bytes) = (alive.kind(*buffer), frame.buffers[*buffer].bytes(&schedule.space));
        found[tasks.clone()].iter_mut().for_each(|moment| moment.add(kind, bytes));
    }
    for (moment, task) in found.iter_mut().zip(&frame.tasks) {
        let Some(callee) = task.work.callee() else { continue };
        let inside = match fullest.get(&callee.index()) {
            Some(known) => *known,
            None => {
                let inside = moments(schedule, &schedule.frames[callee], fullest);
                let most = inside.into_iter().max_by_key(Moment::total).unwrap_or_default();
                fullest.insert(callee.index(), most);
                most
            }
        };
        moment.communication += inside.communication;
        moment.saved += inside.saved;
        moment.activations += inside.activations;
    }
    found
}
