//! In which order a dimension has the two axes.

use std::collections::BTreeSet;

use ithaca_ir::entity::Entity;
use ithaca_ir::{AxisId, DimId, Module, Op, TensorType};

/// The axis that a dimension's pair ends in, by which collectives begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ends {
    /// In the axis across nodes.
    Across,
    /// In the axis inside a node.
    Inside,
}

impl Ends {
    fn other(self) -> Ends {
        match self {
            Ends::Across => Ends::Inside,
            Ends::Inside => Ends::Across,
        }
    }
}

/// For each dimension the order of its pair. Dimensions that an operation takes to be one have one order; those between
/// which parts travel along `axis` have opposite ones, where that is possible.
pub(super) fn ends(module: &Module, axis: AxisId) -> Vec<Ends> {
    let n = module.space.dims.len();
    let mut same = Same((0..n).collect());
    let mut travels: BTreeSet<(DimId, DimId)> = BTreeSet::new();
    for function in module.functions.values() {
        for node in &function.nodes {
            let (operands, results) = (function.operand_types(node), function.result_types(node));
            if node.op == Op::Reshard {
                let of = |ty: &TensorType| ty.dims.iter().copied().find(|&d| ty.axes_of(d).contains(&axis));
                if let (Some(from), Some(to)) = (of(operands[0]), of(results[0])) {
                    travels.insert((from, to));
                }
            } else if let Some(rule) = node.op.rule(&operands, &results) {
                let mut first: Vec<Option<DimId>> = vec![None; rule.factors.len()];
                for (ty, of) in operands.iter().zip(&rule.operands).chain(results.iter().zip(&rule.results)) {
                    for (&dim, &factor) in ty.dims.iter().zip(of) {
                        let known = *first[factor].get_or_insert(dim);
                        same.join(known.index(), dim.index());
                    }
                }
            }
        }
    }
    let mut ends: Vec<Option<Ends>> = vec![None; n];
    // Each pass settles what a settled dimension meets; the first of those that meet nobody settled ends across nodes.
    for (from, _) in &travels {
        settle(&mut same, &travels, &mut ends, from.index());
    }
    (0..n).map(|dim| ends[same.root(dim)].unwrap_or(Ends::Across)).collect()
}

/// Gives a dimension an order, and what it is connected with.
fn settle(same: &mut Same, travels: &BTreeSet<(DimId, DimId)>, ends: &mut [Option<Ends>], dim: usize) {
    let root = same.root(dim);
    if ends[root].is_some() {
        return;
    }
    ends[root] = Some(Ends::Across);
    let mut open = vec![root];
    while let Some(root) = open.pop() {
        let other = ends[root].unwrap_or(Ends::Across).other();
        for (a, b) in travels {
            let (a, b) = (same.root(a.index()), same.root(b.index()));
            for (here, there) in [(a, b), (b, a)] {
                if here == root && ends[there].is_none() {
                    ends[there] = Some(other);
                    open.push(there);
                }
            }
        }
    }
}

/// Which dimensions are one.
struct Same(Vec<usize>);

impl Same {
    fn root(&mut self, mut dim: usize) -> usize {
        while self.0[dim] != dim {
            self.0[dim] = self.0[self.0[dim]];
            dim = self.0[dim];
        }
        dim
    }

    fn join(&mut self, a: usize, b: usize) {
        let (a, b) = (self.root(a), self.root(b));
        self.0[a.max(b)] = a.min(b);
    }
}
