//! Regions: operations around collectives that are parallel in one dimension.

use std::collections::BTreeSet;

use ithaca_ir::layout::AxisList;
use ithaca_ir::module::{Function, Node};
use ithaca_ir::ops::Unit;
use ithaca_ir::order::Order;
use ithaca_ir::rule::FactorKind;
use ithaca_ir::{DimId, Op, Space, TensorType, ValueId};

use crate::fuse::graph::Flow;

/// Operations that are chunked together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Region {
    /// The operations, ascending.
    pub(super) nodes: Vec<usize>,
    /// The dimension to cut; for attention, both head dimensions, which count as one.
    pub(super) dims: Vec<DimId>,
    /// The axes that split the dimension, where anything does.
    axes: AxisList,
    /// The number of shards of the dimension at its highest degree; each shard is cut.
    pub(super) runs: u64,
}

/// The first collective that can be chunked together with a kernel that hides it: its region, and the number of chunks.
pub(super) fn find(space: &Space, function: &Function, most: u64) -> Option<(Region, u64)> {
    let flow = Flow::of(function);
    let awaited = awaited(&flow, function);
    let is_part = |&v: &ValueId| function.ty(v).dims.iter().any(|&d| space.dims[d].part.is_some());
    for (seed, node) in function.nodes.iter().enumerate().filter(|(_, n)| n.op.is_communication()) {
        // An operand that all chunks need is sent complete before them.
        let feeds_chunks = || flow.after(seed).any(|p| function.nodes[p].operands.iter().any(is_part));
        // A step of a ring already overlaps with other steps.
        let is_step = node.op == Op::Permute;
        if is_step || !awaited[seed] || node.operands.iter().any(is_part) || feeds_chunks() {
            continue;
        }
        // Heads first: of a collective's dimensions, attention is parallel only in them.
        for dims in heads(function).into_iter().chain(singles(function, node)) {
            let found = Region::around(space, function, &flow, seed, &dims);
            let Some(region) = found else { continue };
            if let Some(chunks) = region.chunks(space, most) {
                return Some((region, chunks));
            }
        }
    }
    None
}

/// The operations whose results a heavy kernel or the caller reads, directly or through light ones; saved values do not
/// count.
fn awaited(flow: &Flow<'_>, function: &Function) -> Vec<bool> {
    let mut awaited = vec![false; function.nodes.len()];
    for i in (0..function.nodes.len()).rev() {
        let leads = flow.after(i).any(|p| awaited[p] || is_heavy(&function.nodes[p].op));
        awaited[i] = leads || flow.is_returned(i);
    }
    awaited
}

/// The query and key/value heads of each attention as one dimension; also its query heads only, for ranks with one
/// key/value head.
fn heads(function: &Function) -> Vec<Vec<DimId>> {
    let mut found: Vec<Vec<DimId>> = Vec::new();
    for node in &function.nodes {
        if let Op::Attention(a) | Op::AttentionBackward(a) = &node.op {
            let mut both = vec![a.heads, a.kv_heads];
            both.dedup();
            for dims in [both, vec![a.heads]] {
                if !found.contains(&dims) {
                    found.push(dims);
                }
            }
        }
    }
    found
}

/// Each dimension of a collective's operand by itself.
fn singles(function: &Function, node: &Node) -> Vec<Vec<DimId>> {
    let operand = node.operands.first().map(|&v| function.ty(v));
    operand.map_or_else(Vec::new, |ty| ty.dims.iter().map(|&d| vec![d]).collect())
}

impl Region {
    fn around(
        space: &Space,
        function: &Function,
        flow: &Flow<'_>,
        seed: usize,
        dims: &[DimId],
    ) -> Option<Self> {
        let axes = axes(space, function, &function.nodes[seed], dims)?;
        let runs = if axes.is_empty() { 1 } else { space.mesh.degree(&axes) };
        let mut region = Region { nodes: Vec::new(), dims: dims.to_vec(), axes, runs };
        let fits = |i: usize| region.is_parallel(space, function, flow, &function.nodes[i]);
        if !fits(seed) {
            return None;
        }
        let mut near = flow.connected(seed, fits);
        loop {
            region.nodes = trimmed(function, flow, &near);
            let hides = region.nodes.iter().any(|&i| is_heavy(&function.nodes[i].op));
            if !hides || !region.nodes.contains(&seed) {
                return None;
            }
            // Operations that need an outside operation that needs the region form another region.
            let Some(first) = region.beyond_others(function, flow) else { return Some(region) };
            near = region.nodes.iter().copied().filter(|&i| i < first).collect();
        }
    }

    /// Whether an operation can run on each part of the dimensions separately.
    fn is_parallel(&self, space: &Space, function: &Function, flow: &Flow<'_>, node: &Node) -> bool {
        let (dims, runs) = (self.dims.as_slice(), self.runs);
        let has = |ty: &TensorType| ty.dims.iter().any(|d| dims.contains(d));
        let (operands, results) = (function.operand_types(node), function.result_types(node));
        // Weights are not cut, which would copy them, but for a batch of products, each with its own piece.
        let is_batch = || is_heavy(&node.op) && operands.iter().chain(&results).all(|ty| has(ty));
        let is_piece = |ty: &TensorType| {
            ty.dims.first().is_some_and(|d| dims.contains(d) && ty.axes_of(*d) == self.axes.as_slice())
        };
        let copies = |v: &ValueId| {
            let ty = function.ty(*v);
            has(ty)
                && match flow.maker(*v).map(|i| &function.nodes[i].op) {
                    Some(Op::Param(_)) => !is_piece(ty) || !is_batch(),
                    // It is written in its place.
                    Some(Op::State(_)) => true,
                    _ => false,
                }
        };
        if results.is_empty() || !results.iter().all(|ty| has(ty)) || node.operands.iter().any(copies) {
            return false;
        }
        let splits = |ty: &&TensorType| dims.iter().all(|&d| self.axes.starts_with(ty.axes_of(d)));
        if !operands.iter().chain(&results).all(splits) {
            return false;
        }
        match &node.op {
            Op::AllToAll { .. }
            | Op::AllGather { .. }
            | Op::ReduceScatter { .. }
            | Op::AllReduce { .. }
            | Op::Slice { .. } => true,
            // Moved parts belong to another dimension.
            Op::Permute => {
                let moved = operands.iter().chain(&results).flat_map(|ty| &ty.layout.moved);
                let axes: Vec<_> = moved.map(|m| m.axis).collect();
                let splits =
                    |ty: &&TensorType| dims.iter().any(|&d| ty.axes_of(d).iter().any(|a| axes.contains(a)));
                let at = operands.iter().chain(&results).any(|ty| ty.layout.at.is_some());
                !at && !operands.iter().chain(&results).any(splits)
            }
            Op::Attention(a) if !dims.contains(&a.kv_heads) => {
                let has_one = space.size(a.kv_heads) == runs;
                dims.contains(&a.heads) && has_one && a.movement.is_none()
            }
            Op::Attention(a) | Op::AttentionBackward(a) => {
                dims.contains(&a.heads) && dims.contains(&a.kv_heads) && a.movement.is_none()
            }
            Op::Einsum
            | Op::AccumulateProduct
            | Op::Sum
            | Op::Expand
            | Op::Unary(_)
            | Op::Binary(_)
            | Op::Scale { .. }
            | Op::Clamp { .. }
            | Op::Cast { .. }
            | Op::RmsNorm { .. }
            | Op::RmsScale { .. }
            | Op::LayerNorm { .. }
            | Op::Fused(_)
            | Op::Rotary(_)
            | Op::Merge
            | Op::Accumulate => by_rule(node, &operands, &results, dims),
            _ => false,
        }
    }

    /// The largest number of chunks, up to `most`, that splits the granules of each dimension equally on every rank.
    fn chunks(&self, space: &Space, most: u64) -> Option<u64> {
        let divides = |n: u64| {
            self.dims.iter().all(|&d| {
                let dim = &space.dims[d];
                let is_torn = dim.size == self.runs * dim.granule && dim.granule.is_multiple_of(n);
                is_torn || (dim.size / dim.granule).is_multiple_of(self.runs * n)
            })
        };
        (2..=most).rev().find(|&n| divides(n))
    }

    /// The first operation that needs an outside operation that needs the region.
    fn beyond_others(&self, function: &Function, flow: &Flow<'_>) -> Option<usize> {
        let inside: BTreeSet<usize> = self.nodes.iter().copied().collect();
        let mut tainted = vec![false; function.nodes.len()];
        for i in 0..function.nodes.len() {
            if inside.contains(&i) {
                if flow.before(i).any(|p| tainted[p]) {
                    return Some(i);
                }
            } else {
                tainted[i] = flow.before(i).any(|p| tainted[p] || inside.contains(&p));
            }
        }
        None
    }
}

/// The axes that split the dimensions, if parts can be declared: of all values, or, where they disagree, of those of
/// all-to-alls.
fn axes(space: &Space, function: &Function, collective: &Node, dims: &[DimId]) -> Option<AxisList> {
    let plain = |d: &DimId| {
        let dim = &space.dims[*d];
        let own = dim.copies.is_none() && dim.fetched.is_none() && dim.part.is_none();
        own && !dim.uneven && dim.valid == dim.size && dim.order == Order::Contiguous
    };
    if !dims.iter().all(plain) {
        return None;
    }
    let lists = |ty: &'_ TensorType| dims.iter().map(|&d| AxisList::from(ty.axes_of(d))).collect::<Vec<_>>();
    let of_all: Vec<AxisList> = function.values.values().flat_map(|value| lists(&value.ty)).collect();
    let split = || of_all.iter().filter(|axes| !axes.is_empty());
    if split().all(|axes| Some(axes) == split().next()) {
        return Some(split().next().cloned().unwrap_or_default());
    }
    // Parts of the first dimension lie in the tensor, however many all-to-alls in turn split it.
    let is_exchange = |node: &Node| matches!(node.op, Op::AllToAll { .. });
    let is_first = |&v: &ValueId| function.ty(v).dims.first().is_some_and(|d| dims == [*d]);
    if !is_exchange(collective) || !collective.operands.iter().all(is_first) {
        return None;
    }
    let ends = function.nodes.iter().filter(|node| is_exchange(node));
    let ends = ends.flat_map(|node| node.operands.iter().chain(&node.results));
    let of_ends: Vec<AxisList> = ends.flat_map(|&v| lists(function.ty(v))).collect();
    let most = of_ends.iter().max_by_key(|axes| axes.len())?;
    of_ends.iter().all(|axes| most.starts_with(axes)).then(|| most.clone())
}

/// Whether the dimensions are one parallel factor of every result by the rule.
fn by_rule(node: &Node, operands: &[&TensorType], results: &[&TensorType], dims: &[DimId]) -> bool {
    let Some(rule) = node.op.rule(operands, results) else { return false };
    let mut factors = BTreeSet::new();
    for (ty, of) in operands.iter().zip(&rule.operands).chain(results.iter().zip(&rule.results)) {
        factors.extend(ty.dims.iter().zip(of).filter(|(d, _)| dims.contains(d)).map(|(_, &f)| f));
    }
    factors.len() == 1 && factors.iter().all(|&f| rule.factors[f] == FactorKind::Parallel)
}

/// Kernels that take long enough to hide communication.
fn is_heavy(op: &Op) -> bool {
    matches!(op.info().unit, Unit::Matmul | Unit::Attention)
}

/// Collectives, the operations between them, and the nearest heavy kernels before and after.
fn trimmed(function: &Function, flow: &Flow<'_>, near: &BTreeSet<usize>) -> Vec<usize> {
    let is_comm = |i: usize| function.nodes[i].op.is_communication();
    let heavy = |i: usize| is_heavy(&function.nodes[i].op);
    let inside = |nodes: Vec<usize>| nodes.into_iter().filter(|p| near.contains(p));
    let before = |i: usize| inside(flow.before(i).collect());
    let after = |i: usize| inside(flow.after(i).collect());
    // Whether a collective comes before a node, or after it: with no heavy kernel between, and at all.
    let n = function.nodes.len();
    let (mut follows, mut leads) = (vec![(false, false); n], vec![(false, false); n]);
    let reaches =
        |known: &[(bool, bool)], p: usize| (is_comm(p) || known[p].0 && !heavy(p), is_comm(p) || known[p].1);
    let either = |a: (bool, bool), b: (bool, bool)| (a.0 || b.0, a.1 || b.1);
    for &i in near {
        follows[i] = before(i).map(|p| reaches(&follows, p)).fold((false, false), either);
    }
    for &i in near.iter().rev() {
        leads[i] = after(i).map(|p| reaches(&leads, p)).fold((false, false), either);
    }
    // Light operations after a collective stay only if they lead to a heavy kernel, and the reverse.
    let (mut useful_after, mut useful_ahead) = (vec![false; n], vec![false; n]);
    for &i in near.iter().rev() {
        useful_after[i] = follows[i].0 && (heavy(i) || after(i).any(|p| useful_after[p]));
    }
    for &i in near {
        useful_ahead[i] = leads[i].0 && (heavy(i) || before(i).any(|p| useful_ahead[p]));
    }
    let keeps = |i: usize| is_comm(i) || (follows[i].1 && leads[i].1) || useful_after[i] || useful_ahead[i];
    let mut kept: BTreeSet<usize> = near.iter().copied().filter(|&i| keeps(i)).collect();
    // A product to which another is added in one kernel.
    for &i in near.iter().rev() {
        let node = &function.nodes[i];
        if kept.contains(&i) && node.op == Op::AccumulateProduct {
            let summand = flow.maker(node.operands[2]).filter(|p| near.contains(p) && heavy(*p));
            kept.extend(summand.filter(|&p| flow.after(p).count() == 1));
        }
    }
    kept.into_iter().collect()
}
