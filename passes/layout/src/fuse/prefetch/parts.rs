//! The movable parts of a function: gathers of weights, and reductions of gradients.
//!
//! A *gather* is an all-gather, or a message of several, whose operands come from weights by local operations, or from other
//! gathers, or a copy of a state in host memory: it can start at any time before its use. A *tail* is a reduction of gradients with all operations that follow from it, up
//! to the assignments: nothing else waits for it, so it can run later.

use std::collections::{BTreeMap, BTreeSet};

use ithaca_ir::Op;
use ithaca_ir::module::{Function, Node, ValueId};
use ithaca_ir::ops::{Binding, Cache, Target};

use crate::fuse::graph::{Flow, Graph};
use crate::lower::is_light;

/// A message of weights.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Gather {
    /// The collective.
    pub(super) node: usize,
    /// The nodes that make its operands, ascending; those that are results of other gathers are made by no node.
    pub(super) sources: Vec<usize>,
    /// The first node that reads its results, or what other gathers make of them.
    pub(super) used: usize,
}

impl Gather {
    /// All its nodes.
    pub(super) fn nodes(&self) -> impl Iterator<Item = usize> + '_ {
        self.sources.iter().copied().chain([self.node])
    }
}

/// A reduction of gradients and the operations that follow from it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Tail {
    /// Collectives and the nodes between them, ascending.
    pub(super) reduction: Vec<usize>,
    /// The nodes that use the sums, including assignments and the states that they read, ascending.
    pub(super) assignment: Vec<usize>,
    /// The operands: values of other nodes.
    pub(super) inputs: Vec<ValueId>,
    /// The sums, from the reduction to the assignment.
    pub(super) sums: Vec<ValueId>,
}

impl Tail {
    /// All its nodes.
    pub(super) fn nodes(&self) -> impl Iterator<Item = usize> + '_ {
        self.reduction.iter().chain(&self.assignment).copied()
    }
}

/// The parts of a function.
#[derive(Clone, Debug, Default)]
pub(super) struct Parts {
    /// In order of first use.
    pub(super) gathers: Vec<Gather>,
    /// In order of their first collective.
    pub(super) tails: Vec<Tail>,
    /// The reductions of gradients, those of tails among them.
    pub(super) reductions: BTreeSet<usize>,
}

impl Parts {
    /// The gathers and tails of `function`; none if it calls functions, which may assign weights.
    pub(super) fn of(function: &Function) -> Parts {
        if function.nodes.iter().any(|node| matches!(node.op, Op::Call { .. })) {
            return Parts::default();
        }
        let flow = Flow::of(function);
        let mut gathers = gathers(function, &flow);
        gathers.sort_by_key(|gather| (gather.used, gather.node));
        let reductions = late(function, &flow, |_| true).into_iter();
        let reductions = reductions.filter(|&i| is_reduction(&function.nodes[i].op)).collect();
        Parts { gathers, tails: tails(function, &flow), reductions }
    }

    /// The part of a tail from a node on; `None` if that is no tail.
    pub(super) fn tail_from(&self, function: &Function, tail: usize, from: usize) -> Option<Tail> {
        let members: BTreeSet<usize> = self.tails.get(tail)?.nodes().filter(|&n| n >= from).collect();
        members
            .iter()
            .any(|&n| is_reduction(&function.nodes[n].op))
            .then(|| self::tail(function, &members))?
    }

    /// The nodes of all gathers.
    pub(super) fn of_gathers(&self) -> BTreeSet<usize> {
        self.gathers.iter().flat_map(Gather::nodes).collect()
    }
}

fn gathers(function: &Function, flow: &Flow<'_>) -> Vec<Gather> {
    let nodes = &function.nodes;
    let is_gather = |i: &usize| nodes[*i].op.collective_name() == "all_gather" || is_upload(&nodes[*i].op);
    if !(0..nodes.len()).any(|i| is_gather(&i)) {
        return Vec::new();
    }
    let graph = Graph::of(function);
    // The function assigns this weight, so its value changes.
    let is_written = |binding: &Binding| {
        let assigns =
            |op: &Op| matches!(op, Op::Assign { target: Target::Param, binding: b } if b == binding);
        nodes.iter().any(|node| assigns(&node.op))
    };
    let is_source = |n: usize| {
        let op = &nodes[n].op;
        let reads = match op {
            Op::Param(binding) => !is_written(binding),
            // What a step appends is not read from the copy.
            Op::State(binding) => binding.host,
            _ => false,
        };
        reads || matches!(op, Op::Cast { .. } | Op::Slice { .. } | Op::Scale { .. })
    };
    let is_given = |n: usize| nodes[n].operands.iter().any(|v| function.params.contains(v));
    let mut found: Vec<Gather> = Vec::new();
    for i in (0..nodes.len()).filter(is_gather) {
        // Along several axes a weight is gathered by one collective after another.
        let is_gathered = |n: usize| found.iter().any(|other| other.nodes().any(|o| o == n));
        let is_first = |n: &usize| !is_gathered(*n);
        let sources: Vec<usize> = graph.ancestors(i).into_iter().filter(is_first).collect();
        let fits = |&n: &usize| {
            is_source(n) && !is_given(n) && graph.ancestors(n).iter().all(|&n| is_source(n) && !is_given(n))
        };
        let sourced = sources.iter().all(fits) && !is_given(i);
        if let (true, false, Some(used)) = (sourced, flow.is_returned(i), flow.after(i).min()) {
            found.push(Gather { node: i, sources, used });
        }
    }
    // A shard with other consumers stays in place, and so does what is made of it.
    loop {
        let all: BTreeSet<usize> = found.iter().flat_map(Gather::nodes).collect();
        let alone = |&s: &usize| !flow.is_returned(s) && flow.after(s).all(|n| all.contains(&n));
        let n = found.len();
        found.retain(|gather| {
            gather.sources.iter().all(alone) && graph.ancestors(gather.node).iter().all(|n| all.contains(n))
        });
        if found.len() == n {
            break;
        }
    }
    // A copy is made before the step appends.
    for gather in found.iter_mut().filter(|gather| is_upload(&nodes[gather.node].op)) {
        let source = &nodes[gather.sources[0]].op;
        let appends = |(n, node): (usize, &Node)| (node.op == *source && n != gather.sources[0]).then_some(n);
        let appended = nodes.iter().enumerate().find_map(appends);
        gather.used = gather.used.min(appended.unwrap_or(usize::MAX));
    }
    for g in (0..found.len()).rev() {
        if is_upload(&nodes[found[g].node].op) {
            continue;
        }
        let used = |n: usize| found.iter().find(|other| other.node == n).map_or(n, |other| other.used);
        if let Some(first) = flow.after(found[g].node).map(used).min() {
            found[g].used = first;
        }
    }
    found
}

/// Whether it copies a state from host memory.
pub(super) fn is_upload(op: &Op) -> bool {
    matches!(op, Op::Cache(Cache::Upload))
}

/// Reductions and light nodes that lead to assignments of such states only, and these.
fn late(function: &Function, flow: &Flow<'_>, is_such: impl Fn(&Binding) -> bool) -> BTreeSet<usize> {
    let nodes = &function.nodes;
    // Scan from the end.
    let mut late: BTreeSet<usize> = BTreeSet::new();
    for i in (0..nodes.len()).rev() {
        let leads = flow.after(i).next().is_some() && flow.after(i).all(|n| late.contains(&n));
        let op = &nodes[i].op;
        let fits = if let Op::Assign { target: Target::State, binding } = op {
            is_such(binding)
        } else if let Op::State(binding) = op {
            is_such(binding) && leads
        } else {
            (is_reduction(op) || is_light(op)) && !flow.is_returned(i) && leads
        };
        if fits {
            late.insert(i);
        }
    }
    late
}

fn tails(function: &Function, flow: &Flow<'_>) -> Vec<Tail> {
    let nodes = &function.nodes;
    let mut assigned: BTreeMap<&str, usize> = BTreeMap::new();
    for node in nodes {
        if let Op::Assign { binding, .. } = &node.op {
            *assigned.entry(&binding.name).or_default() += 1;
        }
    }
    let is_once =
        |binding: &Binding| binding.is_per_layer() && assigned.get(binding.name.as_str()) == Some(&1);
    let late = late(function, flow, is_once);
    let mut taken: BTreeSet<usize> = BTreeSet::new();
    let mut tails = Vec::new();
    for &i in &late {
        if is_reduction(&nodes[i].op) && !taken.contains(&i) {
            let members = flow.connected(i, |n| late.contains(&n));
            taken.extend(&members);
            tails.extend(tail(function, &members));
        }
    }
    tails
}

/// The tail of these nodes; `None` if a state is read before the sum.
fn tail(function: &Function, members: &BTreeSet<usize>) -> Option<Tail> {
    let nodes = &function.nodes;
    let mut before: BTreeSet<usize> = BTreeSet::new();
    for &i in members.iter().rev() {
        let reads = |n: &usize| nodes[*n].operands.iter().any(|v| nodes[i].results.contains(v));
        let leads = before.iter().any(reads);
        if is_reduction(&nodes[i].op) || leads {
            before.insert(i);
        }
    }
    if before.iter().any(|&i| matches!(nodes[i].op, Op::State(_) | Op::Assign { .. })) {
        return None;
    }
    let (reduction, assignment): (Vec<usize>, Vec<usize>) = members.iter().partition(|i| before.contains(i));
    let made = |by: &[usize], v: ValueId| by.iter().any(|&n| nodes[n].results.contains(&v));
    // The values that these nodes read and do not make, each once.
    let read = |by: &[usize]| -> Vec<ValueId> {
        let mut seen = BTreeSet::new();
        let operands = by.iter().flat_map(|&n| nodes[n].operands.iter().copied());
        operands.filter(|&v| !made(by, v) && seen.insert(v)).collect()
    };
    let (inputs, sums) = (read(&reduction), read(&assignment));
    // Other operands of the assignment would have to be carried as well.
    let only_sums = sums.iter().all(|&v| made(&reduction, v));
    only_sums.then_some(Tail { inputs, sums, reduction, assignment })
}

fn is_reduction(op: &Op) -> bool {
    matches!(op.collective_name(), "reduce_scatter" | "all_reduce")
}
