//! The order of the two axes in each dimension.

use std::collections::BTreeSet;

use ithaca_ir::entity::Entity;
use ithaca_ir::{AxisId, DimId, Module, Op, TensorType};

/// The last axis of a dimension's pair, which collectives take first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum LastAxis {
    /// The axis across nodes.
    Across,
    /// The axis inside a node.
    Inside,
}

impl LastAxis {
    fn other(self) -> LastAxis {
        match self {
            LastAxis::Across => LastAxis::Inside,
            LastAxis::Inside => LastAxis::Across,
        }
    }
}

/// The last axis of each dimension. Dimensions that an operation identifies share one order; dimensions that exchange
/// parts along `axis` have opposite orders if possible.
pub(super) fn last_axes(module: &Module, axis: AxisId) -> Vec<LastAxis> {
    let n = module.space.dims.len();
    let mut sets = DisjointSets((0..n).collect());
    let mut exchanges: BTreeSet<(DimId, DimId)> = BTreeSet::new();
    for function in module.functions.values() {
        for node in &function.nodes {
            let (operands, results) = (function.operand_types(node), function.result_types(node));
            if node.op == Op::Reshard {
                let of = |ty: &TensorType| ty.dims.iter().copied().find(|&d| ty.axes_of(d).contains(&axis));
                if let (Some(from), Some(to)) = (of(operands[0]), of(results[0])) {
                    exchanges.insert((from, to));
                }
            } else if let Some(rule) = node.op.rule(&operands, &results) {
                let mut first: Vec<Option<DimId>> = vec![None; rule.factors.len()];
                for (ty, of) in operands.iter().zip(&rule.operands).chain(results.iter().zip(&rule.results)) {
                    for (&dim, &factor) in ty.dims.iter().zip(of) {
                        let known = *first[factor].get_or_insert(dim);
                        sets.join(known.index(), dim.index());
                    }
                }
            }
        }
    }
    let mut last_axes: Vec<Option<LastAxis>> = vec![None; n];
    // Assign orders component by component; the first dimension of a component ends across nodes.
    for (from, _) in &exchanges {
        assign(&mut sets, &exchanges, &mut last_axes, from.index());
    }
    (0..n).map(|dim| last_axes[sets.root(dim)].unwrap_or(LastAxis::Across)).collect()
}

/// Assigns an order to a dimension and to all dimensions connected with it.
fn assign(
    sets: &mut DisjointSets,
    exchanges: &BTreeSet<(DimId, DimId)>,
    last_axes: &mut [Option<LastAxis>],
    dim: usize,
) {
    let root = sets.root(dim);
    if last_axes[root].is_some() {
        return;
    }
    last_axes[root] = Some(LastAxis::Across);
    let mut open = vec![root];
    while let Some(root) = open.pop() {
        let other = last_axes[root].unwrap_or(LastAxis::Across).other();
        for (a, b) in exchanges {
            let (a, b) = (sets.root(a.index()), sets.root(b.index()));
            for (here, there) in [(a, b), (b, a)] {
                if here == root && last_axes[there].is_none() {
                    last_axes[there] = Some(other);
                    open.push(there);
                }
            }
        }
    }
}

/// Disjoint sets of dimensions.
struct DisjointSets(Vec<usize>);

impl DisjointSets {
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
