//! The timeline of a layer whose weights are present: kernels one after another, collectives in parallel.

use std::collections::BTreeSet;

use ithaca_ir::Space;
use ithaca_ir::entity::Entity;
use ithaca_ir::module::Function;
use ithaca_pass::Prices;

use super::parts::{Parts, Tail};

/// The seconds of each node of a function on the busiest rank.
pub(super) fn seconds(space: &Space, function: &Function, prices: &dyn Prices) -> Vec<f64> {
    let each = function.nodes.iter().map(|node| {
        prices.op_seconds(space, &node.op, &function.operand_types(node), &function.result_types(node))
    });
    each.collect()
}

/// The seconds if kernels take `stretch` times as long, as they do when they wait for communication.
pub(super) fn stretched(function: &Function, seconds: &[f64], stretch: f64) -> Vec<f64> {
    let each = function.nodes.iter().zip(seconds);
    each.map(|(node, &seconds)| if node.op.is_communication() { seconds } else { stretch * seconds })
        .collect()
}

/// The timeline of kernels and collectives; gathers take no time in it.
#[derive(Clone, Debug)]
pub(super) struct Timeline {
    /// The start of each node.
    pub(super) start: Vec<f64>,
    /// The end of each node.
    pub(super) finish: Vec<f64>,
    /// The end of the last kernel that does not belong to a tail.
    pub(super) end: f64,
    /// The busy intervals of the stream of weights and gradients.
    busy: Vec<(f64, f64)>,
    /// The start of the last gather among these, or 0.
    last_gather: f64,
    /// The kernels with their starts, without gathers and nodes that run elsewhere.
    kernels: Vec<(usize, f64)>,
    /// The collectives with their starts, likewise.
    collectives: Vec<(usize, f64)>,
}

impl Timeline {
    /// The timeline of `function`; the stream of weights and gradients starts with `lead` seconds of another layer's reductions,
    /// and the nodes `left_out` run elsewhere.
    pub(super) fn of(
        function: &Function,
        parts: &Parts,
        seconds: &[f64],
        left_out: &BTreeSet<usize>,
        lead: f64,
    ) -> Timeline {
        let gathers = parts.of_gathers();
        let in_tails: BTreeSet<usize> = parts.tails.iter().flat_map(Tail::nodes).collect();
        let n = function.nodes.len();
        let mut ready = vec![0.0f64; function.values.len()];
        let (mut start, mut finish) = (vec![0.0; n], vec![0.0; n]);
        // Of activations, and of weights and gradients.
        let (mut compute, mut queues, mut end) = (0.0f64, [0.0f64, lead], 0.0f64);
        let (mut busy, mut kernels, mut collectives) = (Vec::new(), Vec::new(), Vec::new());
        if lead > 0.0 {
            busy.push((0.0, lead));
        }
        for (i, node) in function.nodes.iter().enumerate() {
            if gathers.contains(&i) || left_out.contains(&i) {
                (start[i], finish[i]) = (compute, compute);
                continue;
            }
            let given = node.operands.iter().map(|v| ready[v.index()]).fold(0.0, f64::max);
            if node.op.is_communication() {
                let of_gradients = parts.reductions.contains(&i);
                let queue = &mut queues[usize::from(of_gradients)];
                start[i] = given.max(*queue);
                *queue = start[i] + seconds[i];
                finish[i] = *queue;
                if of_gradients {
                    busy.push((start[i], finish[i]));
                }
                collectives.push((i, start[i]));
            } else {
                start[i] = given.max(compute);
                finish[i] = start[i] + seconds[i];
                kernels.push((i, start[i]));
                if !in_tails.contains(&i) {
                    compute = finish[i];
                    end = end.max(compute);
                }
            }
            node.results.iter().for_each(|v| ready[v.index()] = finish[i]);
        }
        Timeline { start, finish, end, busy, last_gather: 0.0, kernels, collectives }
    }

    /// The node before which an operation is issued to start at a given time: the kernel that runs then, or an earlier
    /// node: the first collective that starts later.
    pub(super) fn position(&self, at: f64) -> usize {
        let kernel = self.kernels.iter().rev().find(|(_, start)| *start <= at);
        let collective = self.collectives.iter().find(|(_, start)| *start >= at);
        let [kernel, collective] = [kernel, collective].map(|found| found.map(|(node, _)| *node));
        kernel.unwrap_or(0).min(collective.unwrap_or(self.start.len()))
    }

    /// The node before which an operation is issued that needs a result of a given time: the first kernel that starts
    /// later.
    pub(super) fn position_from(&self, at: f64) -> usize {
        self.kernels.iter().find(|(_, start)| *start >= at).map_or(self.start.len(), |(node, _)| *node)
    }

    /// The start of each gather: as late as possible without delaying a kernel, on an otherwise idle stream, in order
    /// of first use. A negative start is in the previous layer, and at most one layer early. `None` if the stream has
    /// no such idle time.
    pub(super) fn gathers(&self, parts: &Parts, seconds: &[f64]) -> Option<Vec<f64>> {
        let mut busy: Vec<(f64, f64)> = self.busy.clone();
        busy.extend(self.busy.iter().map(|&(a, b)| (a - self.end, b - self.end)));
        // Streams synchronise between layers, so no message spans two of them.
        busy.push((0.0, 0.0));
        self.backwards(parts, seconds, |due, takes| {
            let at = latest(&busy, due, takes).filter(|&at| at >= -self.end)?;
            let image = if at < 0.0 { at + self.end } else { at - self.end };
            busy.extend([(at, at + takes), (image, image + takes)]);
            Some(at)
        })
    }

    /// The start of each gather if the stream lacks idle time: each starts early enough to end when the next one
    /// starts.
    pub(super) fn crowded(&self, parts: &Parts, seconds: &[f64]) -> Vec<f64> {
        let starts = self.backwards(parts, seconds, |due, takes| Some((due - takes).max(-self.end)));
        starts.expect("every gather has a start")
    }

    /// The same with the gathers that start in the layer itself.
    pub(super) fn with_gathers(&self, starts: &[f64], parts: &Parts, seconds: &[f64]) -> Timeline {
        let own = parts.gathers.iter().zip(starts).filter(|&(_, &at)| at >= 0.0);
        let own: Vec<(f64, f64)> = own.map(|(gather, &at)| (at, at + seconds[gather.node])).collect();
        let last_gather = own.iter().map(|&(at, _)| at).fold(self.last_gather, f64::max);
        let busy = self.busy.iter().copied().chain(own).collect();
        Timeline { busy, last_gather, ..self.clone() }
    }

    /// The start of each gather after a layer of another function, as in [`gathers`](Self::gathers). Where the stream has no idle
    /// time it follows the gathers of the layer before, which are needed earlier.
    pub(super) fn gathers_after(&self, before: &Timeline, parts: &Parts, seconds: &[f64]) -> Vec<f64> {
        let mut busy = self.busy.clone();
        busy.extend(before.busy.iter().map(|&(a, b)| (a - before.end, b - before.end)));
        // Streams synchronise between layers, so no message spans two of them.
        busy.push((0.0, 0.0));
        let earliest = before.last_gather - before.end;
        let starts = self.backwards(parts, seconds, |due, takes| {
            let idle = latest(&busy, due, takes).filter(|&at| at >= -before.end);
            let at = idle.unwrap_or((due - takes).max(earliest.min(due)));
            busy.push((at, at + takes));
            Some(at)
        });
        starts.expect("every gather has a start")
    }

    /// The starts of gathers, from the last one: each by its due time and its duration.
    fn backwards(
        &self,
        parts: &Parts,
        seconds: &[f64],
        mut start: impl FnMut(f64, f64) -> Option<f64>,
    ) -> Option<Vec<f64>> {
        let mut starts = vec![0.0; parts.gathers.len()];
        let mut before = self.end;
        for (n, gather) in parts.gathers.iter().enumerate().rev() {
            before = start(before.min(self.start[gather.used]), seconds[gather.node])?;
            starts[n] = before;
        }
        Some(starts)
    }
}

/// The latest start of an operation of this duration that ends by `due` while the stream is idle.
fn latest(busy: &[(f64, f64)], due: f64, takes: f64) -> Option<f64> {
    let mut end = due;
    loop {
        let start = end - takes;
        // The first interval that overlaps: the operation must end before its start.
        let overlapping = busy.iter().filter(|&&(a, b)| a < end && start < b);
        match overlapping.map(|&(a, _)| a).reduce(f64::min) {
            None => return start.is_finite().then_some(start),
            Some(first) if first < end => end = first,
            Some(_) => return None,
        }
    }
}
