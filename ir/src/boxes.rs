//! The geometry of collectives: which elements go from which rank to which.
//!
//! A layout gives every rank a box of global indices. What a collective moves is an intersection of boxes, so packing,
//! byte counts, the oracle, the runtime and the emitted program all ask here.

use std::ops::Range;

use crate::mesh::{AxisId, Rank};
use crate::ops::Op;
use crate::space::Space;
use crate::types::TensorType;

/// A box of global indices, one range per dimension.
pub type Region = Vec<Range<u64>>;

/// What one rank sends to and receives from each member of its group, itself included.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Exchange {
    /// The ranks that take part, in order; for a permute along several axes every rank of the mesh.
    pub group: Vec<Rank>,
    /// For each member, the elements sent to it.
    pub send: Vec<Region>,
    /// For each member, the elements received from it.
    pub recv: Vec<Region>,
}

/// Number of elements of a region.
pub fn elements(region: &Region) -> u64 {
    region.iter().map(|r| r.end.saturating_sub(r.start)).product()
}

/// The part of `a` that lies in `b`.
pub fn intersect(a: &Region, b: &Region) -> Region {
    a.iter()
        .zip(b)
        .map(|(a, b)| {
            let start = a.start.max(b.start);
            start..a.end.min(b.end).max(start)
        })
        .collect()
}

/// The `i`-th of `n` nearly equal parts of `0..elements`, the first parts longer.
pub fn chunk(elements: u64, n: u64, i: u64) -> Range<u64> {
    let (each, more) = (elements / n, elements % n);
    let start = i * each + i.min(more);
    start..start + each + u64::from(i < more)
}

/// The ranks among which `op` communicates, seen from `rank`; empty when it does not communicate.
pub fn group(space: &Space, op: &Op, rank: Rank) -> Vec<Rank> {
    match communication_axis(op) {
        Some(axis) => space.mesh.group(rank, axis),
        None if matches!(op, Op::Permute) => space.mesh.iter_ranks().collect(),
        None => Vec::new(),
    }
}

/// The axis along which `op` communicates; none for local operations and for a permute.
pub fn communication_axis(op: &Op) -> Option<AxisId> {
    match *op {
        Op::AllToAll { axis, .. }
        | Op::AllGather { axis, .. }
        | Op::ReduceScatter { axis, .. }
        | Op::AllReduce { axis } => Some(axis),
        _ => None,
    }
}

/// What `rank` sends and receives for the collective `op` from `from` to `to`.
///
/// For an all-reduce the regions are the whole local box on both sides; it is carried out by [`chunk`]s.
pub fn exchange(space: &Space, op: &Op, from: &TensorType, to: &TensorType, rank: Rank) -> Exchange {
    let group = group(space, op, rank);
    let (mine, wanted) = (space.local_box(from, rank), space.local_box(to, rank));
    let send = group.iter().map(|&peer| intersect(&mine, &space.local_box(to, peer))).collect();
    let recv = group.iter().map(|&peer| intersect(&space.local_box(from, peer), &wanted)).collect();
    let mut exchange = Exchange { group, send, recv };
    if let Op::Permute = op {
        keep_one_source_each(space, from, to, rank, &mut exchange);
    }
    exchange
}

/// A permute moves each block once: among the ranks that hold the same block, the `n`-th serves the `n`-th that wants
/// it, a rank serving itself where it can.
fn keep_one_source_each(
    space: &Space,
    from: &TensorType,
    to: &TensorType,
    rank: Rank,
    exchange: &mut Exchange,
) {
    let nothing: Region = from.dims.iter().map(|_| 0..0).collect();
    let ranks: Vec<Rank> = space.mesh.iter_ranks().collect();
    let source = |wanting: Rank| {
        let block = space.local_box(to, wanting);
        let holders: Vec<Rank> =
            ranks.iter().copied().filter(|&r| space.local_box(from, r) == block).collect();
        if holders.contains(&wanting) {
            return Some(wanting);
        }
        let takers = ranks
            .iter()
            .copied()
            .filter(|&r| space.local_box(to, r) == block && space.local_box(from, r) != block);
        let n = takers.take_while(|&r| r != wanting).count();
        holders.get(n % holders.len().max(1)).copied()
    };
    let my_source = source(rank);
    for (i, &peer) in exchange.group.clone().iter().enumerate() {
        if my_source != Some(peer) {
            exchange.recv[i].clone_from(&nothing);
        }
        if source(peer) != Some(rank) {
            exchange.send[i].clone_from(&nothing);
        }
    }
}

/// Bytes that `rank` sends to others for the collective `op` from `from` to `to`.
pub fn bytes_sent(space: &Space, op: &Op, from: &TensorType, to: &TensorType, rank: Rank) -> u64 {
    let sent: u64 = match *op {
        Op::AllReduce { axis } => {
            // A reduce-scatter of the chunks of the others, then an all-gather of the own chunk.
            let n = space.mesh.size(axis);
            let local = elements(&space.local_box(from, rank));
            let own = chunk(local, n, space.mesh.coordinate(rank, axis));
            let own = own.end - own.start;
            local - own + (n - 1) * own
        }
        _ => {
            let exchange = exchange(space, op, from, to, rank);
            let others = exchange.group.iter().zip(&exchange.send).filter(|&(&peer, _)| peer != rank);
            others.map(|(_, region)| elements(region)).sum()
        }
    };
    sent * from.dtype.bytes()
}
