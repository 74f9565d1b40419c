//! Links that messages on their way at the same time share evenly: those of several devices, and those of several streams
//! of one device.

use std::collections::BTreeMap;

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
    /// By how much more than alone it takes, with the flows that it shares the link with.
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
        let mut own: BTreeMap<(usize, usize, Way, Option<u64>), f64> = BTreeMap::new();
        for Flow { of, load, .. } in &self.flows {
            *own.entry((of.0, load.level, load.way, load.own.map(|[there, _]| there))).or_default() += 1.0;
        }
        // Devices divide a link, and the streams of a device its part.
        let among = |class: usize, level: usize, way: Way, to: Option<u64>| -> f64 {
            let crosses = |&&(other, _): &&(usize, f64)| own.contains_key(&(other, level, way, to));
            let n: f64 = program.sharers[class][level].iter().filter(crosses).map(|(_, n)| n).sum();
            let devices = n.min(program.contention[level]).max(1.0);
            devices * own.get(&(class, level, way, to)).copied().unwrap_or(1.0)
        };
        let shares: Vec<f64> = self
            .flows
            .iter()
            .map(|Flow { of, load, .. }| {
                let [there, back] = [0, 1].map(|end| load.own.map(|own| own[end]));
                let far = load.far.map_or(1.0, |far| among(far, load.level, load.way.back(), back));
                among(of.0, load.level, load.way, there).max(far)
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
