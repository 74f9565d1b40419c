//! Links that messages on their way at the same time share evenly.

use super::program::{Program, Shared};
use crate::cluster::Way;

/// The flows over shared links.
#[derive(Default)]
pub(super) struct Links {
    flows: Vec<Flow>,
    /// When the flows were last brought up to date.
    at: f64,
    /// Whether flows have come or gone since.
    changed: bool,
}

/// A load on its way over a shared link.
struct Flow {
    /// The class and stream whose message it is part of.
    of: (usize, usize),
    load: Shared,
    /// Seconds that are left if it has the link to itself.
    left: f64,
    /// Flows that it shares the link with, itself counted.
    among: f64,
}

impl Flow {
    fn end(&self, at: f64) -> f64 {
        at + self.left * self.among
    }
}

impl Links {
    /// Sends the loads of a message off.
    pub(super) fn send(&mut self, now: f64, of: (usize, usize), loads: &[Shared]) {
        self.advance(now);
        let flow = |&load: &Shared| Flow { of, load, left: load.seconds, among: 1.0 };
        self.flows.extend(loads.iter().map(flow));
        self.changed = true;
    }

    /// Whether shares must be worked out again.
    pub(super) fn have_changed(&self) -> bool {
        self.changed
    }

    /// Computes the shares of links, and returns the time at which the next flow ends.
    pub(super) fn share(&mut self, now: f64, program: &Program) -> Option<f64> {
        self.advance(now);
        self.changed = false;
        let crosses = |class: usize, level: usize, way: Way| {
            self.flows.iter().any(|f| f.of.0 == class && f.load.level == level && f.load.way == way)
        };
        let among = |class: usize, level: usize, way: Way| -> f64 {
            let sharers =
                program.sharers[class][level].iter().filter(|(other, _)| crosses(*other, level, way));
            let n: f64 = sharers.map(|(_, n)| n).sum();
            n.min(program.contention[level]).max(1.0)
        };
        let shares: Vec<f64> = self
            .flows
            .iter()
            .map(|Flow { of, load, .. }| {
                let far = load.far.map_or(1.0, |far| among(far, load.level, load.way.back()));
                among(of.0, load.level, load.way).max(far)
            })
            .collect();
        self.flows.iter_mut().zip(shares).for_each(|(flow, among)| flow.among = among);
        self.flows.iter().map(|flow| flow.end(self.at)).min_by(f64::total_cmp)
    }

    /// Removes the flows that have ended, and returns the messages without flows.
    pub(super) fn ended(&mut self, now: f64) -> Vec<(usize, usize)> {
        let at = self.at;
        let (gone, kept): (Vec<Flow>, Vec<Flow>) =
            std::mem::take(&mut self.flows).into_iter().partition(|flow| flow.end(at) <= now);
        self.flows = kept;
        self.advance(now);
        self.changed = true;
        let mut of: Vec<(usize, usize)> = gone.into_iter().map(|flow| flow.of).collect();
        of.sort_unstable();
        of.dedup();
        of.retain(|of| !self.flows.iter().any(|flow| flow.of == *of));
        of
    }

    fn advance(&mut self, now: f64) {
        for flow in &mut self.flows {
            flow.left = (flow.left - (now - self.at) / flow.among).max(0.0);
        }
        self.at = now;
    }
}
