//! Messages: the tensors that one collective carries, and how their blocks lie on the wire.
//!
//! A collective carries one tensor, or several that were coalesced. The wire of several has, for each peer in order,
//! the blocks of its tensors one after another; where all peers are sent the same, or a rank keeps the sum, it has the
//! local tensors one after another. All of them have one element type, so nothing lies between blocks and what travels
//! is what is counted. The blocks themselves are those of [`boxes::exchange`].

use std::collections::BTreeSet;

use crate::boxes::{self, Region, Side};
use crate::mesh::{AxisId, Rank};
use crate::ops::table::op::Op;
use crate::space::Space;
use crate::types::TensorType;

/// One tensor of a message: the collective, and the tensor's types on both sides of it.
#[derive(Clone, Debug, PartialEq)]
pub struct Parcel {
    /// The collective; never itself several.
    pub op: Op,
    /// The type before.
    pub from: TensorType,
    /// The type after.
    pub to: TensorType,
}

/// The parcels of what `op` sends, in order of its operands; none where nothing is sent.
pub fn parcels(op: &Op, operands: &[&TensorType], results: &[&TensorType]) -> Vec<Parcel> {
    let parcel = |(op, (&from, &to)): (&Op, (&&TensorType, &&TensorType))| Parcel {
        op: op.clone(),
        from: from.clone(),
        to: to.clone(),
    };
    let ends = operands.iter().zip(results);
    match op {
        Op::Coalesced(members) => members.iter().zip(ends).map(parcel).collect(),
        op if op.is_communication() => std::iter::repeat(op).zip(ends).map(parcel).collect(),
        _ => Vec::new(),
    }
}

/// A block of one parcel on the wire.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// The number of the parcel.
    pub parcel: usize,
    /// Of its tensor before the collective where it is sent, after it where it was received.
    pub region: Region,
}

/// What a rank has on the wire of a message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wire {
    /// The ranks that take parcel, in order.
    pub group: Vec<Rank>,
    /// For each member of the group, what lies on the wire for it or from it; one list for all of them where
    /// [`is_shared`] says so.
    pub blocks: Vec<Vec<Piece>>,
    /// Elements that go to each member or come from it.
    pub elements: Vec<u64>,
}

/// Whether one side of the wire of `op` is whole tensors, the same for all members: what is sent by a gather or a
/// permute, what is left of a sum.
pub fn is_shared(op: &Op, side: Side) -> bool {
    match (op, side) {
        (Op::AllGather { .. } | Op::Permute, Side::Sent)
        | (Op::ReduceScatter { .. }, Side::Received)
        | (Op::AllReduce { .. }, Side::Sent | Side::Received) => true,
        (_, Side::Sent | Side::Received) => false,
    }
}

/// One side of the wire of a message, as `rank` has it.
pub fn wire(space: &Space, parcels: &[Parcel], side: Side, rank: Rank) -> Wire {
    let mut wire = Wire { group: Vec::new(), blocks: Vec::new(), elements: Vec::new() };
    for (number, Parcel { op, from, to }) in parcels.iter().enumerate() {
        let exchange = boxes::exchange(space, op, from, to, rank);
        let (own, regions) = match side {
            Side::Sent => (from, exchange.send),
            Side::Received => (to, exchange.recv),
        };
        wire.group = exchange.group;
        wire.elements.resize(wire.group.len(), 0);
        for (n, block) in wire.elements.iter_mut().zip(&regions) {
            *n += boxes::block_elements(block);
        }
        let piece = |region| Piece { parcel: number, region };
        if is_shared(op, side) {
            wire.blocks.resize(1, Vec::new());
            let region = space.holds(own, rank).then(|| space.local_box(own, rank));
            let region = region.filter(|region| boxes::elements(region) > 0);
            wire.blocks[0].extend(region.map(piece));
        } else {
            wire.blocks.resize(wire.group.len(), Vec::new());
            for (block, regions) in wire.blocks.iter_mut().zip(regions) {
                block.extend(regions.into_iter().map(piece));
            }
        }
    }
    wire
}

/// Elements on one side of the wire, own blocks included, on the busiest rank.
pub fn wire_elements(space: &Space, parcels: &[Parcel], side: Side) -> u64 {
    parcels.iter().map(|parcel| boxes::wire_elements(space, &parcel.op, &parcel.from, &parcel.to, side)).sum()
}

/// Bytes that `rank` sends to others; several sums are taken as that of one tensor.
pub fn bytes_sent(space: &Space, parcels: &[Parcel], rank: Rank) -> u64 {
    if let [Parcel { op: Op::AllReduce { axis }, from, .. }, _, ..] = parcels {
        let held = parcels.iter().filter(|parcel| space.holds(&parcel.from, rank));
        let local: u64 = held.map(|parcel| boxes::elements(&space.local_box(&parcel.from, rank))).sum();
        return boxes::all_reduce_elements(space, *axis, local, rank) * from.dtype.bytes();
    }
    parcels.iter().map(|parcel| boxes::bytes_sent(space, &parcel.op, &parcel.from, &parcel.to, rank)).sum()
}

/// Bytes that each of `ranks` sends to others.
pub fn bytes_sent_by(space: &Space, parcels: &[Parcel], ranks: &[Rank]) -> Vec<u64> {
    match parcels {
        [Parcel { op, from, to }] => boxes::bytes_sent_by(space, op, from, to, ranks),
        _ => ranks.iter().map(|&rank| bytes_sent(space, parcels, rank)).collect(),
    }
}

/// Bytes that the busiest rank sends to others.
pub fn busiest_bytes(space: &Space, parcels: &[Parcel]) -> u64 {
    let ranks =
        standing_for_all(space, &[parcels]).into_iter().filter(|&rank| takes_part(space, parcels, rank));
    ranks.map(|rank| bytes_sent(space, parcels, rank)).max().unwrap_or(0)
}

/// Whether a rank has anything to do with a message.
pub(crate) fn takes_part(space: &Space, parcels: &[Parcel], rank: Rank) -> bool {
    parcels.first().is_some_and(|parcel| boxes::takes_part(space, &parcel.from, &parcel.to, rank))
}

/// Ranks among which there is, for each rank, one that sends as many bytes of each of these messages: all of them where
/// parts differ, and otherwise one at each place, for nothing else tells ranks apart.
pub(crate) fn standing_for_all(space: &Space, messages: &[&[Parcel]]) -> Vec<Rank> {
    if messages.iter().any(|parcels| is_uneven(space, parcels)) {
        return space.mesh.iter_ranks().collect();
    }
    let types = messages.iter().copied().flatten().flat_map(|parcel| [&parcel.from, &parcel.to]);
    let places: BTreeSet<AxisId> = types.filter_map(|ty| ty.layout.at).map(|at| at.axis).collect();
    space.mesh.group_along(Rank(0), &Vec::from_iter(places))
}

/// Whether ranks that take part may send different numbers of bytes.
pub(crate) fn is_ragged(space: &Space, parcels: &[Parcel]) -> bool {
    let moves = |parcel: &Parcel| parcel.from.layout.at != parcel.to.layout.at;
    is_uneven(space, parcels) || parcels.iter().any(moves)
}

/// Whether ranks at one place may send different numbers of bytes.
fn is_uneven(space: &Space, parcels: &[Parcel]) -> bool {
    let uneven = |ty: &TensorType| ty.dims.iter().any(|&d| space.dims[d].uneven);
    let ragged = |Parcel { op, from, to }: &Parcel| match *op {
        Op::AllReduce { axis } => {
            let local: u64 = parcels.iter().map(|parcel| space.max_local_elements(&parcel.from)).sum();
            !local.is_multiple_of(space.mesh.size(axis))
        }
        // Where all parts travel alike, one rank stands for all.
        Op::Permute => {
            let some = |ty: &TensorType| ty.layout.moved.iter().any(|m| m.only.is_some());
            from.layout.split != to.layout.split || some(from) || some(to)
        }
        Op::Fetch { .. } | Op::FetchSum { .. } => true,
        _ => false,
    };
    parcels.iter().any(|parcel| uneven(&parcel.from) || uneven(&parcel.to) || ragged(parcel))
}
