//! The geometry of collectives: which elements go from which rank to which.
//!
//! A layout gives every rank a box of global indices. A collective moves intersections of boxes: packing, byte counts, the
//! oracle, the runtime and the emitted program take them from here.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::dim::DimId;
use crate::layout::AxisList;
use crate::mesh::{AxisId, Rank};
use crate::ops::table::op::Op;
use crate::space::Space;
use crate::types::TensorType;

/// A box of global indices, one range per dimension.
pub type Region = Vec<Range<u64>>;

/// The start and the end of a region along each dimension, which have an order.
pub(crate) type Corners = Vec<(u64, u64)>;

/// The corners of a region.
pub(crate) fn corners(region: &Region) -> Corners {
    region.iter().map(|r| (r.start, r.end)).collect()
}

/// The blocks that one rank sends to and receives from each member of its group, itself included.
///
/// A block is a list of regions, one after another; it has more than one for a fetch only. Blocks that are sent are
/// regions of the operand, blocks that are received are regions of the result, which differ where a fetch renames a
/// dimension; the `i`-th region sent is the `i`-th received. No region is empty.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Exchange {
    /// The ranks that take part, in order.
    pub group: Vec<Rank>,
    /// For each member, the elements sent to it.
    pub send: Vec<Vec<Region>>,
    /// For each member, the elements received from it.
    pub recv: Vec<Vec<Region>>,
}

/// Number of elements of a block.
pub fn block_elements(block: &[Region]) -> u64 {
    block.iter().map(elements).sum()
}

/// Number of elements of a region.
pub fn elements(region: &Region) -> u64 {
    region.iter().map(|r| r.end.saturating_sub(r.start)).product()
}

/// The intersection of `a` and `b`.
pub fn intersect(a: &Region, b: &Region) -> Region {
    a.iter()
        .zip(b)
        .map(|(a, b)| {
            let start = a.start.max(b.start);
            start..a.end.min(b.end).max(start)
        })
        .collect()
}

/// Whether a dense tensor of `whole`, row-major, is the regions of `parts` one after another.
pub fn is_contiguous_concatenation<'r>(whole: &Region, parts: impl IntoIterator<Item = &'r Region>) -> bool {
    let offset = |corner: &dyn Fn(&Range<u64>) -> u64, part: &Region| {
        let places = whole.iter().zip(part);
        places.fold(0, |at, (all, r)| at * (all.end - all.start) + (corner(r) - all.start))
    };
    let mut end = 0;
    for part in parts.into_iter().filter(|part| elements(part) > 0) {
        let (first, last) = (offset(&|r| r.start, part), offset(&|r| r.end - 1, part));
        // Offsets of a part ascend, so as many as lie between first and last are all there are.
        if first != end || last + 1 - first != elements(part) {
            return false;
        }
        end = last + 1;
    }
    end == elements(whole)
}

/// The `i`-th of `n` nearly equal parts of `0..elements`, the first parts longer.
pub fn chunk(elements: u64, n: u64, i: u64) -> Range<u64> {
    let (each, more) = (elements / n, elements % n);
    let start = i * each + i.min(more);
    start..start + each + u64::from(i < more)
}

/// The ranks among which `op` communicates to change `from` into `to`, seen from `rank`, itself included.
pub fn group(space: &Space, op: &Op, from: &TensorType, to: &TensorType, rank: Rank) -> Vec<Rank> {
    let mut group = space.mesh.group_along(rank, &axes(space, op, from, to));
    if from.layout.at != to.layout.at {
        group.retain(|&r| participates(space, from, to, r));
    }
    group
}

/// The axes along which `op` communicates; empty for local operations.
pub fn axes(space: &Space, op: &Op, from: &TensorType, to: &TensorType) -> AxisList {
    match *op {
        Op::AllToAll { axis, .. } => AxisList::from_slice(&[axis]),
        Op::AllGather { axis, .. } | Op::ReduceScatter { axis, .. } | Op::AllReduce { axis } => {
            AxisList::from_slice(&axis)
        }
        Op::Permute if from.layout.at != to.layout.at => {
            from.layout.at.or(to.layout.at).iter().map(|at| at.axis).collect()
        }
        Op::Permute => {
            // Ranks that differ along another axis hold other parts of dimensions split as before, or copies.
            let splits = from.layout.split.iter().zip(&to.layout.split).filter(|(a, b)| a != b);
            let resplit: AxisList = splits.flat_map(|(a, b)| a.iter().chain(b)).copied().collect();
            let moves = |a: AxisId| from.layout.moved_along(a) != to.layout.moved_along(a);
            space.mesh.axes.ids().filter(|a| resplit.contains(a) || moves(*a)).collect()
        }
        Op::Fetch { to: dim } => to.axes_of(dim).into(),
        Op::FetchSum { from: dim } => from.axes_of(dim).into(),
        _ => AxisList::new(),
    }
}

/// The blocks that `rank` sends and receives in the collective `op` from `from` to `to`.
///
/// For an all-reduce the regions are the whole local box on both sides; it is carried out by [`chunk`]s.
pub fn exchange(space: &Space, op: &Op, from: &TensorType, to: &TensorType, rank: Rank) -> Exchange {
    match *op {
        Op::Fetch { to: dim } => return fetch(space, dim, from, to, rank),
        Op::FetchSum { from: dim } => {
            let Exchange { group, send, recv } = fetch(space, dim, to, from, rank);
            return Exchange { group, send: recv, recv: send };
        }
        Op::Permute if from.layout.at != to.layout.at => return relocate(space, from, to, rank),
        Op::Permute if from.layout.split == to.layout.split => return travel(space, from, to, rank),
        Op::Permute => return Sources::of(space, from, to, rank).exchange(rank),
        _ => {}
    }
    let group = group(space, op, from, to, rank);
    let (mine, wanted) = (space.local_box(from, rank), space.local_box(to, rank));
    let block = |a: &Region, b: &Region| -> Vec<Region> {
        let part = intersect(a, b);
        if elements(&part) == 0 { Vec::new() } else { vec![part] }
    };
    let send = group.iter().map(|&peer| block(&mine, &space.local_box(to, peer))).collect();
    let recv = group.iter().map(|&peer| block(&space.local_box(from, peer), &wanted)).collect();
    Exchange { group, send, recv }
}

/// The ranks of one place send their blocks to those of another place, or to all, each along its own line.
fn relocate(space: &Space, from: &TensorType, to: &TensorType, rank: Rank) -> Exchange {
    let group = group(space, &Op::Permute, from, to, rank);
    let block = |giver: Rank, taker: Rank| -> Vec<Region> {
        let goes = space.holds(from, giver) && space.holds(to, taker);
        let own = goes.then(|| space.local_box(from, giver));
        own.into_iter().filter(|region| elements(region) > 0).collect()
    };
    let send = group.iter().map(|&peer| block(rank, peer)).collect();
    let recv = group.iter().map(|&peer| block(peer, rank)).collect();
    Exchange { group, send, recv }
}

/// Whether `rank` has anything to do with a change from `from` to `to`.
pub fn participates(space: &Space, from: &TensorType, to: &TensorType, rank: Rank) -> bool {
    space.holds(from, rank) || space.holds(to, rank)
}

/// Parts move along axes: each rank has one that it sends, and one rank that it receives from. The group is these alone: a ring
/// of thousands has as many steps.
fn travel(space: &Space, from: &TensorType, to: &TensorType, rank: Rank) -> Exchange {
    let mesh = &space.mesh;
    let receiver = from.layout.owner(mesh, rank).and_then(|owner| to.layout.holder(mesh, owner));
    let sender = to.layout.owner(mesh, rank).and_then(|owner| from.layout.holder(mesh, owner));
    let mut group: Vec<Rank> = [Some(rank), receiver, sender].into_iter().flatten().collect();
    group.sort_unstable();
    group.dedup();
    let block = |peer: Rank, other: Option<Rank>, ty: &TensorType| -> Vec<Region> {
        if other == Some(peer) { vec![space.local_box(ty, rank)] } else { Vec::new() }
    };
    let send = group.iter().map(|&peer| block(peer, receiver, from)).collect();
    let recv = group.iter().map(|&peer| block(peer, sender, to)).collect();
    Exchange { group, send, recv }
}

/// Every rank sends its own tokens that its peers need.
fn fetch(space: &Space, dim: DimId, from: &TensorType, to: &TensorType, rank: Rank) -> Exchange {
    let group = group(space, &Op::Fetch { to: dim }, from, to, rank);
    let fetched = space.dims[dim].fetched.as_ref().expect("a fetch is into a fetched dimension");
    let at = to.position(dim).expect("the result of a fetch has the fetched dimension");
    let axes = to.axes_of(dim);
    // The tokens of `giver` that `taker` needs: along the sequence, and their places once fetched.
    let block = |giver: Rank, taker: Rank| -> Vec<(Region, Region)> {
        let held = space.local_box(from, giver);
        let i = usize::try_from(space.mesh.coordinate_along(taker, axes)).expect("a coordinate is small");
        let mut first = fetched.part(i).start;
        let mut regions = Vec::new();
        for range in &fetched.parts()[i] {
            let (start, end) = (range.start.max(held[at].start), range.end.min(held[at].end));
            if start < end {
                let (mut source, mut target) = (held.clone(), held.clone());
                source[at] = start..end;
                target[at] = first + (start - range.start)..first + (end - range.start);
                if elements(&source) > 0 {
                    regions.push((source, target));
                }
            }
            first += range.end - range.start;
        }
        regions
    };
    let send = group.iter().map(|&peer| block(rank, peer).into_iter().map(|r| r.0).collect()).collect();
    let recv = group.iter().map(|&peer| block(peer, rank).into_iter().map(|r| r.1).collect()).collect();
    Exchange { group, send, recv }
}

/// The source of each block of a permute between different splits, among the ranks of one group.
///
/// Each block moves once: among the ranks that hold the same block, the `n`-th serves the `n`-th that wants it, a rank
/// serving itself where it can. Time is `n log n` in the ranks of the group.
#[derive(Clone, Debug)]
struct Sources<'a> {
    space: &'a Space,
    from: &'a TensorType,
    to: &'a TensorType,
    group: Vec<Rank>,
    /// For each member the member that serves it, by number.
    source: Vec<Option<usize>>,
}

impl<'a> Sources<'a> {
    /// The sources of the group of `rank` in a permute from `from` to `to`.
    fn of(space: &'a Space, from: &'a TensorType, to: &'a TensorType, rank: Rank) -> Self {
        let group = group(space, &Op::Permute, from, to, rank);
        let held: Vec<Corners> = group.iter().map(|&rank| corners(&space.local_box(from, rank))).collect();
        let mut holders: BTreeMap<&Corners, Vec<usize>> = BTreeMap::new();
        for (member, block) in held.iter().enumerate() {
            holders.entry(block).or_default().push(member);
        }
        // The number of members met before that must be sent a block.
        let mut served: BTreeMap<&Corners, usize> = BTreeMap::new();
        let source = |(member, &rank): (usize, &Rank)| {
            let wanted = corners(&space.local_box(to, rank));
            if wanted == held[member] {
                return Some(member);
            }
            let (block, holders) = holders.get_key_value(&wanted)?;
            let n = served.entry(block).or_default();
            *n += 1;
            Some(holders[(*n - 1) % holders.len()])
        };
        let source = group.iter().enumerate().map(source).collect();
        Self { space, from, to, group, source }
    }

    fn member(&self, rank: Rank) -> usize {
        self.group.binary_search(&rank).expect("a rank is a member of its group")
    }

    /// The blocks that `rank` sends to and receives from every member.
    fn exchange(&self, rank: Rank) -> Exchange {
        let own = self.member(rank);
        let block = |goes: bool, ty| if goes { whole(self.space, ty, rank) } else { Vec::new() };
        let send = self.source.iter().map(|source| block(*source == Some(own), self.from)).collect();
        let source = self.source[own];
        let recv = (0..self.group.len()).map(|member| block(source == Some(member), self.to)).collect();
        Exchange { group: self.group.clone(), send, recv }
    }

    /// Elements that `rank` sends to others.
    fn elements_sent(&self, rank: Rank) -> u64 {
        let own = self.member(rank);
        let takers =
            self.source.iter().enumerate().filter(|&(taker, source)| taker != own && *source == Some(own));
        takers.count() as u64 * elements(&self.space.local_box(self.from, rank))
    }
}

/// All that a rank holds, as a block.
fn whole(space: &Space, ty: &TensorType, rank: Rank) -> Vec<Region> {
    let own = space.local_box(ty, rank);
    if elements(&own) == 0 { Vec::new() } else { vec![own] }
}

/// An end of a collective.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Side {
    /// Blocks that are sent.
    Sent,
    /// Blocks that are received.
    Received,
}

/// Elements of the blocks of `op` on one side, own block included, on the busiest rank.
pub fn wire_elements(space: &Space, op: &Op, from: &TensorType, to: &TensorType, side: Side) -> u64 {
    let (dim, leaves) = match *op {
        Op::Fetch { to: dim } => (dim, Side::Sent),
        Op::FetchSum { from: dim } => (dim, Side::Received),
        _ => {
            return space.max_local_elements(match side {
                Side::Sent => from,
                Side::Received => to,
            });
        }
    };
    // A token leaves its owner once for each rank that needs it.
    let (of, fetched) = match op {
        Op::Fetch { .. } => (from, to),
        _ => (to, from),
    };
    if side != leaves {
        return space.max_local_elements(fetched);
    }
    let Some(fetched) = &space.dims[dim].fetched else { return 0 };
    let sequence = &fetched.of;
    let axes = of.axes_of(*sequence);
    let sent = |owner: Rank| -> u64 {
        let held = space.range(*sequence, axes, owner);
        let overlap = |r: &Range<u64>| r.end.min(held.end).saturating_sub(r.start.max(held.start));
        fetched.parts().iter().flatten().map(overlap).sum()
    };
    let tokens = space.mesh.group_along(Rank(0), axes).into_iter().map(sent).max().unwrap_or(0);
    tokens * (space.max_local_elements(of) / space.max_extent(*sequence, axes).max(1))
}

/// Elements that `rank` sends to others when `local` of them are summed over `axes`: a reduce-scatter of the chunks of
/// the others, then an all-gather of the own chunk.
pub fn all_reduce_elements(space: &Space, axes: &[AxisId], local: u64, rank: Rank) -> u64 {
    let n = space.mesh.degree(axes);
    let own = chunk(local, n, space.mesh.coordinate_along(rank, axes));
    let own = own.end - own.start;
    local - own + (n - 1) * own
}

/// Bytes that each of `ranks` sends to others for the collective `op` from `from` to `to`.
pub fn bytes_sent_by(space: &Space, op: &Op, from: &TensorType, to: &TensorType, ranks: &[Rank]) -> Vec<u64> {
    if !is_resplit(op, from, to) {
        return ranks.iter().map(|&rank| bytes_sent(space, op, from, to, rank)).collect();
    }
    let axes = axes(space, op, from, to);
    let mut of_groups: BTreeMap<Rank, Sources<'_>> = BTreeMap::new();
    let sent = |&rank: &Rank| {
        let first = axes.iter().fold(rank, |rank, &axis| space.mesh.with_coordinate(rank, axis, 0));
        let sources = of_groups.entry(first).or_insert_with(|| Sources::of(space, from, to, first));
        sources.elements_sent(rank) * from.dtype.bytes()
    };
    ranks.iter().map(sent).collect()
}

/// Whether `op` is a permute between different splits.
pub fn is_resplit(op: &Op, from: &TensorType, to: &TensorType) -> bool {
    *op == Op::Permute && from.layout.at == to.layout.at && from.layout.split != to.layout.split
}

/// Whether every rank has the part of a tensor that its coordinates name.
fn is_unmoved(ty: &TensorType) -> bool {
    ty.layout.moved.is_empty() && ty.layout.at.is_none()
}

/// Bytes that `rank` sends to others for the collective `op` from `from` to `to`.
pub fn bytes_sent(space: &Space, op: &Op, from: &TensorType, to: &TensorType, rank: Rank) -> u64 {
    let sent: u64 = match *op {
        _ if !space.holds(from, rank) => 0,
        _ if is_resplit(op, from, to) => Sources::of(space, from, to, rank).elements_sent(rank),
        Op::AllReduce { axis } => {
            all_reduce_elements(space, &axis, elements(&space.local_box(from, rank)), rank)
        }
        // At home, every other rank is sent all that this one has, or of this one's sums those that it keeps none of.
        Op::AllGather { axis, .. } if is_unmoved(from) && is_unmoved(to) => {
            space.local_elements(from, rank) * (space.mesh.degree(&axis) - 1)
        }
        Op::ReduceScatter { .. } if is_unmoved(from) && is_unmoved(to) => {
            space.local_elements(from, rank) - space.local_elements(to, rank)
        }
        _ => {
            let exchange = exchange(space, op, from, to, rank);
            let others = exchange.group.iter().zip(&exchange.send).filter(|&(&peer, _)| peer != rank);
            others.map(|(_, block)| block_elements(block)).sum()
        }
    };
    sent * from.dtype.bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_outer_splits_lie_in_order() {
        let whole = vec![2..6, 0..4];
        assert!(is_contiguous_concatenation(&whole, &[vec![2..4, 0..4], vec![4..6, 0..4]]));
        assert!(!is_contiguous_concatenation(&whole, &[vec![4..6, 0..4], vec![2..4, 0..4]]));
        assert!(!is_contiguous_concatenation(&whole, &[vec![2..6, 0..2], vec![2..6, 2..4]]));
        assert!(is_contiguous_concatenation(
            &vec![0..1, 0..4],
            &[vec![0..1, 0..2], vec![0..0, 0..4], vec![0..1, 2..4]]
        ));
        assert!(!is_contiguous_concatenation(&whole, &[vec![2..4, 0..4]]));
    }
}
