//! The dependency graph of a function, in which groups of nodes may become one.

use std::collections::BTreeSet;

use ithaca_ir::Op;
use ithaca_ir::entity::Entity;
use ithaca_ir::module::{Function, Node};

/// The dependencies of each node: the nodes of its operands, and the nodes whose effects must keep their order with it.
#[derive(Clone, Debug)]
pub(super) struct Graph {
    needs: Vec<Vec<usize>>,
}

impl Graph {
    /// Assignments and calls stay in order; a read of a weight or state stays between the same two of them.
    pub(super) fn of(function: &Function) -> Graph {
        let mut maker = vec![None; function.values.len()];
        let mut needs: Vec<Vec<usize>> = Vec::with_capacity(function.nodes.len());
        let (mut effect, mut reads) = (None, Vec::new());
        for (i, node) in function.nodes.iter().enumerate() {
            let mut needed: Vec<usize> = node.operands.iter().filter_map(|v| maker[v.index()]).collect();
            if has_effects(node) {
                needed.append(&mut reads);
                needed.extend(effect);
                effect = Some(i);
            } else if matches!(node.op, Op::Param(_) | Op::State(_)) {
                needed.extend(effect);
                reads.push(i);
            }
            needed.sort_unstable();
            needed.dedup();
            node.results.iter().for_each(|v| maker[v.index()] = Some(i));
            needs.push(needed);
        }
        Graph { needs }
    }

    /// The transitive dependencies of `node`, without `node`.
    pub(super) fn ancestors(&self, node: usize) -> BTreeSet<usize> {
        let (mut found, mut open) = (BTreeSet::new(), vec![node]);
        while let Some(i) = open.pop() {
            open.extend(self.needs[i].iter().copied().filter(|&n| found.insert(n)));
        }
        found
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
        let mut frees: Vec<Vec<usize>> = vec![Vec::new(); n];
        for (i, needs) in self.needs.iter().enumerate() {
            for &needed in needs {
                // Members of a group that depend on each other never become ready.
                frees[unit[needed]].push(unit[i]);
                waits[unit[i]] += 1;
            }
        }
        let mut members: Vec<Vec<usize>> = vec![Vec::new(); n];
        (0..n).for_each(|i| members[unit[i]].push(i));
        let mut ready: BTreeSet<(usize, usize)> =
            (0..n).filter(|&i| unit[i] == i && waits[i] == 0).map(|i| (priority[i], i)).collect();
        let mut order = Vec::with_capacity(n);
        while let Some((_, next)) = ready.pop_first() {
            for &freed in &frees[next] {
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

fn has_effects(node: &Node) -> bool {
    matches!(node.op, Op::Assign { .. } | Op::Call { .. })
}
