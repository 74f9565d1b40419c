//! What of a function may run at another time: gathers of weights, and what becomes of gradients.
//!
//! A *gather* is an all-gather, or a message of several, of which all that is sent comes from weights by changes that need
//! no other rank: it can travel as early as one likes. A *tail* is a reduction of gradients with all that follows from it, down
//! to the assignments: nothing else waits for it, so it can travel as late as one likes.

use std::collections::{BTreeMap, BTreeSet};

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
}

impl Gather {
    /// All its nodes.
    fn nodes(&self) -> impl Iterator<Item = usize> + '_ {
        self.sources.iter().copied().chain([self.node])
    }
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
    /// The gathers and tails of `function`; none where it calls others, which may write weights.
    pub(super) fn of(function: &Function) -> Parts {
        if function.nodes.iter().any(|node| matches!(node.op, Op::Call { .. })) {
            return Parts::default();
        }
        let uses = Uses::of(function);
        let mut gathers = gathers(function, &uses);
        gathers.sort_by_key(|gather| (gather.used, gather.node));
        Parts { gathers, tails: tails(function, &uses) }
    }

    /// The nodes of all gathers.
    pub(super) fn of_gathers(&self) -> BTreeSet<usize> {
        self.gathers.iter().flat_map(Gather::nodes).collect()
    }
}

/// For each node those that read its results, ascending, and whether the function returns one.
struct Uses {
    by: Vec<Vec<usize>>,
    returned: Vec<bool>,
    /// For each node those whose results it reads.
    of: Vec<Vec<usize>>,
}

impl Uses {
    fn of(function: &Function) -> Uses {
        let n = function.nodes.len();
        let mut maker = vec![None; function.values.len()];
        let mut uses = Uses { by: vec![Vec::new(); n], returned: vec![false; n], of: vec![Vec::new(); n] };
        for (i, node) in function.nodes.iter().enumerate() {
            for made in node.operands.iter().filter_map(|v| maker[v.index()]) {
                if !uses.of[i].contains(&made) {
                    uses.by[made].push(i);
                    uses.of[i].push(made);
                }
            }
            node.results.iter().for_each(|v| maker[v.index()] = Some(i));
        }
        for made in function.outputs.iter().filter_map(|o| maker[o.value.index()]) {
            uses.returned[made] = true;
        }
        uses
    }
}

fn gathers(function: &Function, uses: &Uses) -> Vec<Gather> {
    let nodes = &function.nodes;
    let is_gather = |i: &usize| nodes[*i].op.collective_name() == "all_gather";
    if !(0..nodes.len()).any(|i| is_gather(&i)) {
        return Vec::new();
    }
    let graph = Graph::of(function);
    // A weight that is written here is another one before and after.
    let is_written = |binding: &Binding| {
        let assigns =
            |op: &Op| matches!(op, Op::Assign { target: Target::Param, binding: b } if b == binding);
        nodes.iter().any(|node| assigns(&node.op))
    };
    let is_source = |n: usize| {
        let op = &nodes[n].op;
        let reads = matches!(op, Op::Param(binding) if !is_written(binding));
        reads || matches!(op, Op::Cast { .. } | Op::Slice { .. } | Op::Scale { .. })
    };
    let is_given = |n: usize| nodes[n].operands.iter().any(|v| function.params.contains(v));
    let mut found = Vec::new();
    for i in (0..nodes.len()).filter(is_gather) {
        let sources: Vec<usize> = graph.ancestors(i).into_iter().collect();
        let sourced = sources.iter().all(|&n| is_source(n) && !is_given(n)) && !is_given(i);
        if let (true, false, &[used, ..]) = (sourced, uses.returned[i], &uses.by[i][..]) {
            found.push(Gather { node: i, sources, used });
        }
    }
    // What else reads a part keeps it where it is.
    let all: BTreeSet<usize> = found.iter().flat_map(Gather::nodes).collect();
    let alone = |&s: &usize| !uses.returned[s] && uses.by[s].iter().all(|n| all.contains(n));
    found.retain(|gather| gather.sources.iter().all(alone));
    found
}

fn tails(function: &Function, uses: &Uses) -> Vec<Tail> {
    let nodes = &function.nodes;
    let mut assigned: BTreeMap<&str, usize> = BTreeMap::new();
    for node in nodes {
        if let Op::Assign { binding, .. } = &node.op {
            *assigned.entry(&binding.name).or_default() += 1;
        }
    }
    // From the end: what leads to assignments of states only, by what is light.
    let mut late: BTreeSet<usize> = BTreeSet::new();
    for i in (0..nodes.len()).rev() {
        let leads = !uses.by[i].is_empty() && uses.by[i].iter().all(|n| late.contains(n));
        let op = &nodes[i].op;
        let fits = if let Op::Assign { target: Target::State, binding } = op {
            binding.is_per_layer() && assigned[binding.name.as_str()] == 1
        } else if let Op::State(binding) = op {
            binding.is_per_layer() && leads
        } else {
            (is_reduction(op) || is_light(op)) && !uses.returned[i] && leads
        };
        if fits {
            late.insert(i);
        }
    }
    let mut taken: BTreeSet<usize> = BTreeSet::new();
    let mut tails = Vec::new();
    for &i in &late {
        if is_reduction(&nodes[i].op) && !taken.contains(&i) {
            let members = connected(uses, &late, i);
            taken.extend(&members);
            tails.extend(tail(function, &members));
        }
    }
    tails
}

/// All of `late` that values join with node `start`.
fn connected(uses: &Uses, late: &BTreeSet<usize>, start: usize) -> BTreeSet<usize> {
    let (mut found, mut open) = (BTreeSet::from([start]), vec![start]);
    while let Some(i) = open.pop() {
        for &n in uses.by[i].iter().chain(&uses.of[i]) {
            if late.contains(&n) && found.insert(n) {
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

fn reads_any(function: &Function, node: usize, values: &[ValueId]) -> bool {
    function.nodes[node].operands.iter().any(|v| values.contains(v))
}
