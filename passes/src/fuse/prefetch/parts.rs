//! What of a function may run at another time: gathers of weights, and what becomes of gradients.
//!
//! A *gather* is an all-gather, or a message of several, of which all that is sent comes from weights by changes that need
//! no other rank: it can travel as early as one likes. A *tail* is a reduction of gradients with all that follows from it, down
//! to the assignments: nothing else waits for it, so it can travel as late as one likes.

use std::collections::BTreeSet;

use ithaca_ir::Op;
use ithaca_ir::entity::Entity;
use ithaca_ir::module::{Function, ValueId};
use ithaca_ir::ops::{Binding, Target};

use crate::fuse::graph::Graph;

/// A message of weights.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Gather {
    /// The collective.
    pub(super) node: usize,
    /// What makes the parts that it sends, ascending.
    pub(super) sources: Vec<usize>,
    /// The first node that reads what it brought.
    pub(super) used: usize,
    /// The last one.
    pub(super) last: usize,
}

/// A reduction of gradients and what follows from it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Tail {
    /// Collectives and what stands between them, ascending.
    pub(super) reduction: Vec<usize>,
    /// What is done with the sums, assignments and the states that they read included, ascending.
    pub(super) assignment: Vec<usize>,
    /// What it is given: values that other nodes made.
    pub(super) given: Vec<ValueId>,
    /// What the reduction hands to the assignment.
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
}

impl Parts {
    /// The gathers and tails of `function`.
    pub(super) fn of(function: &Function) -> Parts {
        let mut gathers = gathers(function);
        gathers.sort_by_key(|gather| (gather.used, gather.node));
        Parts { gathers, tails: tails(function) }
    }

    /// Nodes that gathers or nothing else needs: the gathers and what makes their parts.
    pub(super) fn of_gathers(&self) -> BTreeSet<usize> {
        self.gathers.iter().flat_map(|g| g.sources.iter().copied().chain([g.node])).collect()
    }
}

fn gathers(function: &Function) -> Vec<Gather> {
    let graph = Graph::of(function);
    // A weight that is written here is another one before and after.
    let is_written = |binding: &Binding| {
        let assigns =
            |op: &Op| matches!(op, Op::Assign { target: Target::Param, binding: b } if b == binding);
        function.nodes.iter().any(|node| assigns(&node.op))
    };
    let is_source = |n: usize| {
        let op = &function.nodes[n].op;
        let reads = matches!(op, Op::Param(binding) if !is_written(binding));
        reads || matches!(op, Op::Cast { .. } | Op::Slice { .. } | Op::Scale { .. })
    };
    let given: BTreeSet<ValueId> = function.params.iter().copied().collect();
    let mut found = Vec::new();
    for (i, node) in function.nodes.iter().enumerate() {
        if node.op.collective_name() != "all_gather" {
            continue;
        }
        let sources: Vec<usize> = graph.ancestors(i).into_iter().collect();
        let sourced = sources.iter().all(|&n| is_source(n))
            && sources
                .iter()
                .chain([&i])
                .all(|&n| !function.nodes[n].operands.iter().any(|v| given.contains(v)));
        let uses = || (i + 1..function.nodes.len()).filter(|&n| reads_any(function, n, &node.results));
        let returned = function.outputs.iter().any(|o| node.results.contains(&o.value));
        if let (true, false, Some(used), Some(last)) = (sourced, returned, uses().next(), uses().next_back())
        {
            found.push(Gather { node: i, sources, used, last });
        }
    }
    // What else reads a part keeps it where it is.
    let all: BTreeSet<usize> = found.iter().flat_map(|g| g.sources.iter().copied().chain([g.node])).collect();
    found.retain(|g| {
        g.sources.iter().all(|&s| {
            let results = &function.nodes[s].results;
            let elsewhere =
                (0..function.nodes.len()).any(|n| !all.contains(&n) && reads_any(function, n, results));
            !elsewhere && !function.outputs.iter().any(|o| results.contains(&o.value))
        })
    });
    found
}

fn tails(function: &Function) -> Vec<Tail> {
    let nodes = &function.nodes;
    // From the end: what leads to assignments of states only, by what is light.
    let mut late: BTreeSet<usize> = BTreeSet::new();
    let users = |i: usize| (i + 1..nodes.len()).filter(move |&n| reads_any(function, n, &nodes[i].results));
    let returned = |i: usize| function.outputs.iter().any(|o| nodes[i].results.contains(&o.value));
    for i in (0..nodes.len()).rev() {
        let only_late = users(i).next().is_some() && users(i).all(|n| late.contains(&n));
        let op = &nodes[i].op;
        let fits = if let Op::Assign { target: Target::State, binding } = op {
            let assigns = |op: &Op| matches!(op, Op::Assign { binding: b, .. } if b == binding);
            binding.is_per_layer() && nodes.iter().filter(|n| assigns(&n.op)).count() == 1
        } else if let Op::State(binding) = op {
            binding.is_per_layer() && only_late
        } else {
            (is_reduction(op) || is_light(op)) && !returned(i) && only_late
        };
        if fits {
            late.insert(i);
        }
    }
    let mut taken: BTreeSet<usize> = BTreeSet::new();
    let mut tails = Vec::new();
    for i in 0..nodes.len() {
        if late.contains(&i) && is_reduction(&nodes[i].op) && !taken.contains(&i) {
            let members = connected(function, &late, i);
            taken.extend(&members);
            tails.extend(tail(function, &members));
        }
    }
    tails
}

/// All of `late` that values join with node `start`.
fn connected(function: &Function, late: &BTreeSet<usize>, start: usize) -> BTreeSet<usize> {
    let nodes = &function.nodes;
    let (mut found, mut open) = (BTreeSet::from([start]), vec![start]);
    while let Some(i) = open.pop() {
        for &n in late {
            let joined =
                reads_any(function, n, &nodes[i].results) || reads_any(function, i, &nodes[n].results);
            if joined && found.insert(n) {
                open.push(n);
            }
        }
    }
    found
}

/// The tail of these nodes; none where a state is read before the sum is taken.
fn tail(function: &Function, members: &BTreeSet<usize>) -> Option<Tail> {
    let nodes = &function.nodes;
    let mut before: BTreeSet<usize> = BTreeSet::new();
    for &i in members.iter().rev() {
        let leads =
            members.range(i + 1..).any(|n| before.contains(n) && reads_any(function, *n, &nodes[i].results));
        if is_reduction(&nodes[i].op) || leads {
            before.insert(i);
        }
    }
    if before.iter().any(|&i| matches!(nodes[i].op, Op::State(_) | Op::Assign { .. })) {
        return None;
    }
    let (reduction, assignment): (Vec<usize>, Vec<usize>) = members.iter().partition(|i| before.contains(i));
    let made = |by: &[usize], v: ValueId| by.iter().any(|&n| nodes[n].results.contains(&v));
    let distinct = |values: Vec<ValueId>| {
        let mut seen = BTreeSet::new();
        values.into_iter().filter(|v| seen.insert(v.index())).collect::<Vec<_>>()
    };
    let read = |by: &[usize]| by.iter().flat_map(|&n| nodes[n].operands.iter().copied()).collect::<Vec<_>>();
    let given: Vec<ValueId> = read(&reduction).into_iter().filter(|&v| !made(&reduction, v)).collect();
    let sums: Vec<ValueId> = read(&assignment).into_iter().filter(|&v| !made(&assignment, v)).collect();
    // What the assignment reads beside sums would have to be handed on as well.
    let only_sums = sums.iter().all(|&v| made(&reduction, v));
    only_sums.then(|| Tail { given: distinct(given), sums: distinct(sums), reduction, assignment })
}

fn is_reduction(op: &Op) -> bool {
    matches!(op.collective_name(), "reduce_scatter" | "all_reduce")
}

/// What is done with a gradient that was reduced, element by element.
fn is_light(op: &Op) -> bool {
    matches!(op, Op::Cast { .. } | Op::Scale { .. } | Op::Accumulate | Op::Binary(_) | Op::Slice { .. })
}

pub(super) fn reads_any(function: &Function, node: usize, values: &[ValueId]) -> bool {
    function.nodes[node].operands.iter().any(|v| values.contains(v))
}
