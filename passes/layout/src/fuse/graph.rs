//! The flow of values in a function, and its dependency graph, in which groups of nodes may become one.

use std::collections::{BTreeMap, BTreeSet};

use ithaca_ir::Op;
use ithaca_ir::entity::Entity;
use ithaca_ir::module::{Function, ValueId};
use ithaca_ir::ops::Target;

/// Producers and consumers of values.
pub(super) struct Flow<'a> {
    function: &'a Function,
    /// The node that makes each value; `None` for an argument.
    makers: Vec<Option<usize>>,
    /// The nodes that use each value, ascending.
    users: Vec<Vec<usize>>,
}

impl<'a> Flow<'a> {
    pub(super) fn of(function: &'a Function) -> Self {
        let mut makers = vec![None; function.values.len()];
        let mut users = vec![Vec::new(); function.values.len()];
        for (i, node) in function.nodes.iter().enumerate() {
            node.results.iter().for_each(|v| makers[v.index()] = Some(i));
            node.operands.iter().for_each(|v| users[v.index()].push(i));
        }
        Self { function, makers, users }
    }

    /// The node that makes a value; `None` for an argument.
    pub(super) fn maker(&self, value: ValueId) -> Option<usize> {
        self.makers[value.index()]
    }

    /// The nodes whose results `node` uses.
    pub(super) fn before(&self, node: usize) -> impl Iterator<Item = usize> + '_ {
        self.function.nodes[node].operands.iter().filter_map(|&v| self.maker(v))
    }

    /// The nodes that use results of `node`.
    pub(super) fn after(&self, node: usize) -> impl Iterator<Item = usize> + '_ {
        self.function.nodes[node].results.iter().flat_map(|v| self.users[v.index()].iter().copied())
    }

    /// Whether the function returns a result of `node`.
    pub(super) fn is_returned(&self, node: usize) -> bool {
        let results = &self.function.nodes[node].results;
        self.function.outputs.iter().any(|output| results.contains(&output.value))
    }

    /// The nodes connected with `seed` through nodes that satisfy `fits`.
    pub(super) fn connected(&self, seed: usize, fits: impl Fn(usize) -> bool) -> BTreeSet<usize> {
        let (mut found, mut open) = (BTreeSet::from([seed]), vec![seed]);
        while let Some(i) = open.pop() {
            for next in self.before(i).chain(self.after(i)) {
                if !found.contains(&next) && fits(next) {
                    found.insert(next);
                    open.push(next);
                }
            }
        }
        found
    }
}

/// The dependencies of each node: the nodes of its operands, and the nodes with which it must keep its order for
/// their effects.
#[derive(Clone, Debug)]
pub(super) struct Graph {
    needs: Vec<Vec<usize>>,
}

/// The last write of a weight or state, and the reads after it.
#[derive(Default)]
struct Accesses {
    written: Option<usize>,
    read: Vec<usize>,
}

impl Graph {
    /// Reads and writes of one weight or state stay in order, and calls stay in order with all of them.
    pub(super) fn of(function: &Function) -> Graph {
        let flow = Flow::of(function);
        let mut needs: Vec<Vec<usize>> = Vec::with_capacity(function.nodes.len());
        let mut call = None;
        // Since the last call.
        let mut homes: BTreeMap<(Target, &str), Accesses> = BTreeMap::new();
        for (i, node) in function.nodes.iter().enumerate() {
            let mut needed: Vec<usize> = flow.before(i).collect();
            let home = match &node.op {
                Op::Param(binding) => Some((Target::Param, binding)),
                Op::State(binding) => Some((Target::State, binding)),
                Op::Assign { target, binding } => Some((*target, binding)),
                _ => None,
            };
            if let Some((target, binding)) = home {
                let Accesses { written, read } = homes.entry((target, &binding.name)).or_default();
                needed.extend(written.or(call));
                if matches!(node.op, Op::Assign { .. }) {
                    needed.append(read);
                    *written = Some(i);
                } else {
                    read.push(i);
                }
            } else if matches!(node.op, Op::Call { .. }) {
                for Accesses { written, read } in std::mem::take(&mut homes).into_values() {
                    needed.extend(written.into_iter().chain(read));
                }
                needed.extend(call);
                call = Some(i);
            }
            needed.sort_unstable();
            needed.dedup();
            needs.push(needed);
        }
        Graph { needs }
    }

    #[cfg(test)]
    pub(super) fn of_needs(needs: Vec<Vec<usize>>) -> Graph {
        Graph { needs }
    }

    /// The nodes on which a node depends directly.
    pub(super) fn needs(&self, node: usize) -> &[usize] {
        &self.needs[node]
    }

    /// The transitive dependencies of `node`, without `node`.
    pub(super) fn ancestors(&self, node: usize) -> BTreeSet<usize> {
        let (mut found, mut open) = (BTreeSet::new(), vec![node]);
        while let Some(i) = open.pop() {
            open.extend(self.needs[i].iter().copied().filter(|&n| found.insert(n)));
        }
        found
    }

    /// For each node, whether all of its transitive dependencies satisfy `fits`.
    pub(super) fn all_before(&self, fits: impl Fn(usize) -> bool) -> Vec<bool> {
        let mut all = Vec::with_capacity(self.needs.len());
        for needs in &self.needs {
            all.push(needs.iter().all(|&n| all[n] && fits(n)));
        }
        all
    }

    /// The nodes that depend on each node directly.
    pub(super) fn users(&self) -> Vec<Vec<usize>> {
        let mut users = vec![Vec::new(); self.needs.len()];
        for (i, needs) in self.needs.iter().enumerate() {
            needs.iter().for_each(|&n| users[n].push(i));
        }
        users
    }

    /// The nodes before `end` that depend on any of `nodes`.
    pub(super) fn descendants(&self, nodes: &[usize], end: usize) -> BTreeSet<usize> {
        let mut found = BTreeSet::new();
        for i in nodes.iter().copied().min().unwrap_or(end)..end {
            if self.needs[i].iter().any(|n| nodes.contains(n) || found.contains(n)) {
                found.insert(i);
            }
        }
        found
    }

    /// A topological order in which each group is one unit; among ready nodes the lowest priority comes first. `None`
    /// if groups depend on each other.
    ///
    /// Returns the units as lists of nodes.
    pub(super) fn order(&self, groups: &[Vec<usize>], priority: &[usize]) -> Option<Vec<Vec<usize>>> {
        let n = self.needs.len();
        let mut unit: Vec<usize> = (0..n).collect();
        for group in groups {
            group.iter().for_each(|&i| unit[i] = group[0]);
        }
        let mut waits = vec![0usize; n];
        // Members of a group that depend on each other never become ready.
        let pairs = || {
            let needs = self.needs.iter().enumerate();
            needs
                .flat_map(|(i, needs)| needs.iter().map(move |&needed| (needed, i)))
                .map(|(a, b)| (unit[a], unit[b]))
        };
        // The units that `u` frees are those from `ends[u - 1]` to `ends[u]`: a pack tries an order for each collective.
        let mut ends = vec![0usize; n + 1];
        pairs().for_each(|(u, _)| ends[u + 1] += 1);
        (0..n).for_each(|u| ends[u + 1] += ends[u]);
        let mut freed = vec![0usize; ends[n]];
        for (u, by) in pairs() {
            freed[ends[u]] = by;
            ends[u] += 1;
            waits[by] += 1;
        }
        let frees = |u: usize| &freed[u.checked_sub(1).map_or(0, |u| ends[u])..ends[u]];
        let mut members: Vec<Vec<usize>> = vec![Vec::new(); n];
        (0..n).for_each(|i| members[unit[i]].push(i));
        let mut ready: BTreeSet<(usize, usize)> =
            (0..n).filter(|&i| unit[i] == i && waits[i] == 0).map(|i| (priority[i], i)).collect();
        let mut order = Vec::with_capacity(n);
        while let Some((_, next)) = ready.pop_first() {
            for &freed in frees(next) {
                waits[freed] -= 1;
                if waits[freed] == 0 {
                    ready.insert((priority[freed], freed));
                }
            }
            order.push(std::mem::take(&mut members[next]));
        }
        members.iter().all(Vec::is_empty).then_some(order)
    }
}
