//! When things run in a layer whose weights are there: kernels one after another, collectives beside them.

use std::collections::BTreeSet;

use ithaca_ir::Space;
use ithaca_ir::entity::Entity;
use ithaca_ir::module::Function;
use ithaca_pass::Prices;

use super::parts::Parts;

/// The seconds of each node of a function on the busiest rank.
pub(super) fn seconds(space: &Space, function: &Function, prices: &dyn Prices) -> Vec<f64> {
    let each = function.nodes.iter().map(|node| {
        prices.op_seconds(space, &node.op, &function.operand_types(node), &function.result_types(node))
    });
    each.collect()
}

/// The same where kernels take `stretch` times as long, as they do when they wait for what travels.
pub(super) fn stretched(function: &Function, seconds: &[f64], stretch: f64) -> Vec<f64> {
    let each = function.nodes.iter().zip(seconds);
    each.map(|(node, &seconds)| if node.op.is_communication() { seconds } else { stretch * seconds })
        .collect()
}

/// When kernels and collectives run, but for gathers, which take no time here.
#[derive(Clone, Debug)]
pub(super) struct Timeline {
    /// When each node starts.
    pub(super) start: Vec<f64>,
    /// When it ends.
    pub(super) finish: Vec<f64>,
    /// When the last kernel ends that does not belong to a tail.
    pub(super) end: f64,
    /// When the communication stream is taken, ascending.
    busy: Vec<(f64, f64)>,
}

impl Timeline {
    /// The timeline of `function`, whose communication stream begins with `lead` seconds of what another layer left;
    /// `left_out` are nodes that run elsewhere.
    pub(super) fn of(
        function: &Function,
        parts: &Parts,
        seconds: &[f64],
        left_out: &BTreeSet<usize>,
        lead: f64,
    ) -> Timeline {
        let gathers = parts.of_gathers();
        let in_tails: BTreeSet<usize> =
            parts.tails.iter().flat_map(|t| t.reduction.iter().chain(&t.assignment).copied()).collect();
        let n = function.nodes.len();
        let mut ready = vec![0.0f64; function.values.len()];
        let (mut start, mut finish) = (vec![0.0; n], vec![0.0; n]);
        let (mut compute, mut communication, mut end) = (0.0f64, lead, 0.0f64);
        let mut busy = Vec::new();
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
                start[i] = given.max(communication);
                communication = start[i] + seconds[i];
                finish[i] = communication;
                busy.push((start[i], finish[i]));
            } else if in_tails.contains(&i) {
                (start[i], finish[i]) = (given.max(compute), given.max(compute) + seconds[i]);
            } else {
                start[i] = given.max(compute);
                compute = start[i] + seconds[i];
                finish[i] = compute;
                end = end.max(compute);
            }
            node.results.iter().for_each(|v| ready[v.index()] = finish[i]);
        }
        Timeline { start, finish, end, busy }
    }

    /// Before which node something is issued that is to start at a time: the kernel that runs then, or the first collective
    /// that starts later if it stands before that.
    pub(super) fn position(
        &self,
        function: &Function,
        parts: &Parts,
        left_out: &BTreeSet<usize>,
        at: f64,
    ) -> usize {
        let gathers = parts.of_gathers();
        let mut kernel = 0;
        let mut collective = function.nodes.len();
        for (i, node) in function.nodes.iter().enumerate() {
            if gathers.contains(&i) || left_out.contains(&i) {
                continue;
            }
            match (node.op.is_communication(), self.start[i]) {
                (true, start) if start >= at => collective = collective.min(i),
                (false, start) if start <= at => kernel = i,
                (true | false, _) => {}
            }
        }
        kernel.min(collective)
    }

    /// Before which node something is issued that waits for what ends at a time: the first kernel behind it.
    pub(super) fn position_from(
        &self,
        function: &Function,
        parts: &Parts,
        left_out: &BTreeSet<usize>,
        at: f64,
    ) -> usize {
        let gathers = parts.of_gathers();
        let kernel = |i: &usize| {
            let elsewhere = gathers.contains(i) || left_out.contains(i);
            !elsewhere && !function.nodes[*i].op.is_communication() && self.start[*i] >= at
        };
        (0..function.nodes.len()).find(kernel).unwrap_or(function.nodes.len())
    }

    /// When each gather starts: as late as it may without being waited for, on a stream that does nothing else then, in
    /// order of first use. What starts before this layer does is negative, and no earlier than one layer before. None
    /// where the stream has no such time left.
    pub(super) fn gathers(&self, parts: &Parts, seconds: &[f64]) -> Option<Vec<f64>> {
        let mut busy: Vec<(f64, f64)> = self.busy.clone();
        busy.extend(self.busy.iter().map(|&(a, b)| (a - self.end, b - self.end)));
        // Streams meet between two layers, so nothing travels from one into the other.
        busy.push((0.0, 0.0));
        let mut starts = vec![0.0; parts.gathers.len()];
        let mut before = self.end;
        for (n, gather) in parts.gathers.iter().enumerate().rev() {
            let takes = seconds[gather.node];
            let due = before.min(self.start[gather.used]);
            let at = latest(&busy, due, takes).filter(|&at| at >= -self.end)?;
            let image = if at < 0.0 { at + self.end } else { at - self.end };
            busy.push((at, at + takes));
            busy.push((image, image + takes));
            starts[n] = at;
            before = at;
        }
        Some(starts)
    }

    /// When each gather starts where the stream has no time for all: as much ahead of the next one as it takes.
    pub(super) fn crowded(&self, parts: &Parts, seconds: &[f64]) -> Vec<f64> {
        let mut starts = vec![0.0; parts.gathers.len()];
        let mut before = self.end;
        for (n, gather) in parts.gathers.iter().enumerate().rev() {
            let due = before.min(self.start[gather.used]);
            starts[n] = (due - seconds[gather.node]).max(-self.end);
            before = starts[n];
        }
        starts
    }
}

/// The latest start of something that takes so long and ends by `due`, while nothing else runs.
fn latest(busy: &[(f64, f64)], due: f64, takes: f64) -> Option<f64> {
    let mut end = due;
    loop {
        let start = end - takes;
        // Of what overlaps the one that starts first: nothing ends later than where it starts.
        let overlapping = busy.iter().filter(|&&(a, b)| a < end && start < b);
        match overlapping.map(|&(a, _)| a).reduce(f64::min) {
            None => return start.is_finite().then_some(start),
            Some(first) if first < end => end = first,
            Some(_) => return None,
        }
    }
}
