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
    // For each dimension the first of those that share its order.
    let mut shared: Vec<usize> = (0..n).collect();
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
                        let (a, b) = (shared[known.index()], shared[dim.index()]);
                        shared.iter_mut().filter(|d| **d == a.max(b)).for_each(|d| *d = a.min(b));
                    }
                }
            }
        }
    }
    let mut last_axes: Vec<Option<LastAxis>> = vec![None; n];
    // Assign orders component by component; the first dimension of a component ends across nodes.
    let exchanges = exchanges.into_iter().map(|(a, b)| (shared[a.index()], shared[b.index()]));
    let exchanges: Vec<(usize, usize)> = exchanges.collect();
    for &(from, _) in &exchanges {
        if last_axes[from].is_some() {
            continue;
        }
        last_axes[from] = Some(LastAxis::Across);
        let mut open = vec![from];
        while let Some(dim) = open.pop() {
            let other = last_axes[dim].map(LastAxis::other);
            for (here, there) in exchanges.iter().flat_map(|&(a, b)| [(a, b), (b, a)]) {
                if here == dim && last_axes[there].is_none() {
                    last_axes[there] = other;
                    open.push(there);
                }
            }
        }
    }
    shared.into_iter().map(|dim| last_axes[dim].unwrap_or(LastAxis::Across)).collect()
}
