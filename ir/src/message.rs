//! Messages: the tensors that one collective carries, and how their blocks lie on the wire.
//!
//! A collective carries one tensor, or several that were coalesced. The wire of several has, for each peer in order,
//! the blocks of its tensors one after another; where all peers are sent the same, or a rank keeps the sum, it has the
//! local tensors one after another. All of them have one element type, so there is nothing between blocks and every byte sent is counted. The blocks themselves are those of [`boxes::exchange`].

use std::collections::BTreeSet;

use crate::boxes::{self, Region, Side};
use crate::dtype::DType;
use crate::mesh::{AxisId, Rank};
use crate::ops::table::experts::Rows;
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

/// The parcels that `op` sends, in order of its operands; none where nothing is sent.
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

/// The blocks of a rank on the wire of a message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wire {
    /// The ranks that take parcel, in order.
    pub group: Vec<Rank>,
    /// For each member of the group, the blocks on the wire to it or from it; one list for all of them where
    /// [`is_shared`].
    pub blocks: Vec<Vec<Piece>>,
    /// Elements that go to each member or come from it.
    pub elements: Vec<u64>,
}

/// Whether one side of the wire of `op` is whole tensors, the same for all members: the operand of a gather or a
/// permute, the result of a sum.
pub fn is_shared(op: &Op, side: Side) -> bool {
    match (op, side) {
        (Op::AllGather { .. } | Op::Permute, Side::Sent)
        | (Op::ReduceScatter { .. }, Side::Received)
        | (Op::AllReduce { .. }, Side::Sent | Side::Received) => true,
        (_, Side::Sent | Side::Received) => false,
    }
}

/// Bytes of a count of filled rows.
const COUNT_BYTES: u64 = DType::I32.bytes();

/// The rows of a ragged dimension in a block: runs, one after another, of rows that are filled and then rows of zeros.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Runs {
    /// Runs of a block; each has a count of filled rows.
    pub n: u64,
    /// Rows of a run.
    pub rows: u64,
    /// Elements of a row.
    pub width: u64,
}

/// Where the runs of each member's block are in a wire or in a tensor, in runs from its start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RunPlaces {
    /// Runs side by side; a block has others of them further on.
    pub adjacent: u64,
    /// From the first of them to the first of the next ones of the same block.
    pub again: u64,
    /// From the first run of a block to that of the next member's.
    pub member: u64,
}

impl RunPlaces {
    /// In a wire of blocks of `n` runs.
    pub fn in_order(n: u64) -> Self {
        Self { adjacent: n, again: n, member: n }
    }

    /// In the tensor of a parcel; `apart`, where it lies in pieces in another tensor, are the indices of a piece and the elements
    /// from one to the next. None where its rows are cut into blocks, too, or blocks are not whole pieces.
    pub fn in_tensor(space: &Space, parcel: &Parcel, side: Side, apart: Option<[u64; 2]>) -> Option<Self> {
        let &Op::AllToAll { axis, split, concat, .. } = &parcel.op else { return None };
        let (ty, dim) = match side {
            Side::Sent => (&parcel.from, split),
            Side::Received => (&parcel.to, concat),
        };
        let (shape, cut, ragged) =
            (space.max_local_shape(ty), ty.position(dim)?, ragged_position(space, ty)?);
        let inner: u64 = shape.get(cut + 1..ragged)?.iter().product();
        let members = space.mesh.size(axis);
        let block = shape[cut] / members;
        let Some([len, elements]) = apart else {
            return Some(Self { adjacent: block * inner, again: shape[cut] * inner, member: block * inner });
        };
        // A dimension that is cut into pieces comes first.
        let again = elements / shape[ragged..].iter().product::<u64>().max(1);
        let is_whole = len > 0 && block.is_multiple_of(len) && shape[..cut].iter().all(|&n| n == 1);
        is_whole.then(|| Self { adjacent: len * inner, again, member: block / len * again })
    }

    /// The place of run `run` of the block of `member`.
    pub fn of(&self, member: u64, run: u64) -> u64 {
        member * self.member + run / self.adjacent * self.again + run % self.adjacent
    }
}

/// Whether a message sends filled rows only, as [`counts_rows`] says of its tensor; it then has one.
pub fn sends_counts(space: &Space, parcels: &[Parcel]) -> bool {
    matches!(parcels, [Parcel { op, from, to }] if counts_rows(space, op, from, to))
}

/// Whether a collective sends filled rows only, and first their counts, in a message of the same layout: an all-to-all of
/// filled rows, of a tensor with a ragged dimension that is whole, in even parts.
pub fn counts_rows(space: &Space, op: &Op, from: &TensorType, to: &TensorType) -> bool {
    let even = |ty: &TensorType| {
        let mut dims = ty.dims.iter().zip(&ty.layout.split);
        dims.all(|(&dim, axes)| axes.is_empty() || space.dims[dim].divides_evenly(space.mesh.degree(axes)))
    };
    let whole = |ty: &TensorType| ragged_position(space, ty).is_some_and(|i| ty.layout.split[i].is_empty());
    matches!(op, Op::AllToAll { rows: Rows::Filled, .. })
        && from.dtype.is_float()
        && whole(from)
        && whole(to)
        && even(from)
        && even(to)
}

fn ragged_position(space: &Space, ty: &TensorType) -> Option<usize> {
    ty.dims.iter().position(|&dim| space.dims[dim].ragged.is_some())
}

/// Whether the runs of a message that [`sends_counts`] can be sent from the tensor itself, or received in it.
pub fn runs_lie_in_tensor(space: &Space, parcels: &[Parcel], side: Side) -> bool {
    let lie = |parcel| RunPlaces::in_tensor(space, parcel, side, None).is_some();
    sends_counts(space, parcels) && parcels.first().is_some_and(lie)
}

/// The runs of each block that `rank` sends or receives, in a message that [`sends_counts`].
pub fn runs(space: &Space, parcels: &[Parcel], rank: Rank) -> Option<Runs> {
    let [Parcel { op, from, to }] = parcels else { return None };
    let at = ragged_position(space, from).filter(|_| sends_counts(space, parcels))?;
    let exchange = boxes::exchange(space, op, from, to, rank);
    // Parts are even, so blocks are alike.
    let region = exchange.send.first()?.first()?;
    let lens: Vec<u64> = region.iter().map(|range| range.end.saturating_sub(range.start)).collect();
    Some(Runs { n: lens[..at].iter().product(), rows: lens[at], width: lens[at + 1..].iter().product() })
}

/// Bytes of the counts that `rank` sends to others.
fn bytes_of_counts(space: &Space, parcels: &[Parcel], rank: Rank) -> u64 {
    let Some((runs, first)) = runs(space, parcels, rank).zip(parcels.first()) else { return 0 };
    let group = boxes::group(space, &first.op, &first.from, &first.to, rank);
    runs.n * (group.len() as u64).saturating_sub(1) * COUNT_BYTES
}

/// The bytes of a message.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sent {
    /// With all rows of ragged dimensions.
    pub bound: u64,
    /// With the filled rows only, where a message [`sends_counts`].
    pub filled: Option<u64>,
}

impl std::ops::AddAssign for Sent {
    fn add_assign(&mut self, other: Self) {
        let filled = |sent: Sent| sent.filled.unwrap_or(sent.bound);
        let has_slots = self.filled.is_some() || other.filled.is_some();
        let filled = has_slots.then(|| filled(*self) + filled(other));
        *self = Self { bound: self.bound + other.bound, filled };
    }
}

impl Sent {
    /// The bytes of a message without ragged dimensions.
    pub fn all(bytes: u64) -> Self {
        Self { bound: bytes, filled: None }
    }

    /// The bytes of a message that has so many of rows, so many of them filled, and sends counts first.
    pub fn with_counts(counts: u64, rows: u64, filled: u64) -> Self {
        Self { bound: counts * COUNT_BYTES + rows, filled: Some(counts * COUNT_BYTES + filled) }
    }
}

/// Bytes of a message of which `rank` sends `rows` bytes if all rows are filled: the bound, and the expected bytes.
fn expected(space: &Space, parcels: &[Parcel], rank: Rank, rows: u64) -> Sent {
    if !sends_counts(space, parcels) {
        return Sent::all(rows);
    }
    let counts = bytes_of_counts(space, parcels, rank);
    // Tensors of one message have the slots of the same experts.
    let filled = parcels.first().map_or(1.0, |parcel| space.expected_share(&parcel.from));
    Sent { bound: counts + rows, filled: Some(counts + (rows as f64 * filled).round() as u64) }
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

/// Bytes that `rank` sends to others: the bound, and the expected bytes of a message that sends counts.
pub fn sent(space: &Space, parcels: &[Parcel], rank: Rank) -> Sent {
    expected(space, parcels, rank, bytes_sent(space, parcels, rank))
}

/// Bytes of tensors that `rank` sends to others; several sums are taken as that of one tensor.
pub fn bytes_sent(space: &Space, parcels: &[Parcel], rank: Rank) -> u64 {
    if let [Parcel { op: Op::AllReduce { axis }, from, .. }, _, ..] = parcels {
        let held = parcels.iter().filter(|parcel| space.holds(&parcel.from, rank));
        let local: u64 = held.map(|parcel| boxes::elements(&space.local_box(&parcel.from, rank))).sum();
        return boxes::all_reduce_elements(space, axis, local, rank) * from.dtype.bytes();
    }
    parcels.iter().map(|parcel| boxes::bytes_sent(space, &parcel.op, &parcel.from, &parcel.to, rank)).sum()
}

/// The same for each of `ranks`.
pub fn sent_by(space: &Space, parcels: &[Parcel], ranks: &[Rank]) -> Vec<Sent> {
    let bytes = match parcels {
        [Parcel { op, from, to }] => boxes::bytes_sent_by(space, op, from, to, ranks),
        _ => ranks.iter().map(|&rank| bytes_sent(space, parcels, rank)).collect(),
    };
    ranks.iter().zip(bytes).map(|(&rank, bytes)| expected(space, parcels, rank, bytes)).collect()
}

/// Bytes that the busiest rank sends to others.
pub fn busiest_bytes(space: &Space, parcels: &[Parcel]) -> u64 {
    let ranks =
        standing_for_all(space, &[parcels]).into_iter().filter(|&rank| participates(space, parcels, rank));
    ranks.map(|rank| bytes_sent(space, parcels, rank)).max().unwrap_or(0)
}

/// Whether a rank has anything to do with a message.
pub(crate) fn participates(space: &Space, parcels: &[Parcel], rank: Rank) -> bool {
    parcels.first().is_some_and(|parcel| boxes::participates(space, &parcel.from, &parcel.to, rank))
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
    let uneven = |ty: &TensorType| !space.deals_evenly(ty);
    let ragged = |Parcel { op, from, to }: &Parcel| match *op {
        Op::AllReduce { axis } => {
            let local: u64 = parcels.iter().map(|parcel| space.max_local_elements(&parcel.from)).sum();
            !local.is_multiple_of(space.mesh.degree(&axis))
        }
        // Where all parts move in the same way, one rank represents all.
        Op::Permute => {
            let some = |ty: &TensorType| ty.layout.moved.iter().any(|m| m.only.is_some());
            from.layout.split != to.layout.split || some(from) || some(to)
        }
        Op::Fetch { .. } | Op::FetchSum { .. } => true,
        _ => false,
    };
    parcels.iter().any(|parcel| uneven(&parcel.from) || uneven(&parcel.to) || ragged(parcel))
}
