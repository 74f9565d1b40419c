//! The elements of every rank after a collective, block by block: `S14`, `S15`.
//!
//! A type determines the elements that each rank holds, and the ranks whose parts of a pending sum it has. So types alone
//! determine the elements that a rank needs, and their owners; [`boxes`] gives the elements that are sent. As in MSCCL (Cowan et
//! al., ASPLOS 2023) each element that arrives has a name: its indices, and the ranks whose parts it sums. Both sides
//! must give the same names, each as often as the type requires, so that a wrong peer, axis, dimension or offset is found,
//! and each send meets its receive.
//!
//! Of a message of several tensors each is checked alone. Two ranks then exchange the blocks of the tensors one after
//! another on both sides, if all of them are sent between the same ranks, and if what is on the wire
//! once for all peers goes to each of them whole or not at all; this is looked at for the message.
//!
//! Ranks whose shares are cut alike represent each other: of each axis the first and the last ranks are checked, and
//! all of them where shares differ, up to a bound.

use std::collections::{BTreeMap, BTreeSet};

use crate::boxes::{self, Exchange, Region, Side};
use crate::dim::DimId;
use crate::mesh::{AxisId, Rank};
use crate::message::{self, Parcel};
use crate::ops::error::OpError;
use crate::ops::table::op::Op;
use crate::schedule::Transfer;
use crate::space::Space;
use crate::text::show::show;
use crate::types::TensorType;

/// Blocks that are looked at for one collective, about: ranks times the members of a group.
const BLOCKS: u64 = 1 << 16;

/// Coordinates that are checked along an axis whose ranks differ.
const COORDINATES: u64 = 64;

/// Elements of all blocks of a rank, its own included, on the busiest of the ranks that were looked at.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Volumes {
    pub(super) sent: u64,
    pub(super) received: u64,
}

/// Collectives that were checked already.
#[derive(Debug, Default)]
pub(super) struct Checked {
    known: BTreeMap<Key, Result<Volumes, OpError>>,
    /// Messages of several tensors.
    several: BTreeMap<Vec<Key>, Result<Volumes, OpError>>,
}

type Key = (&'static str, Vec<DimId>, Vec<AxisId>, TensorType, TensorType);

impl Checked {
    /// The elements that a collective moves, if each rank holds the elements of its type afterwards.
    ///
    /// # Errors
    /// `S15` with the rank that does not.
    pub(super) fn volumes(&mut self, space: &Space, transfer: &Transfer) -> Result<Volumes, OpError> {
        if let Some(parcel) = transfer.only() {
            return self.of_one(space, parcel);
        }
        let parcels = transfer.parcels();
        for parcel in parcels {
            self.of_one(space, parcel)?;
        }
        let keys = parcels.iter().map(key).collect();
        self.several.entry(keys).or_insert_with(|| check_together(space, parcels)).clone()
    }

    fn of_one(&mut self, space: &Space, parcel: &Parcel) -> Result<Volumes, OpError> {
        self.known.entry(key(parcel)).or_insert_with(|| check(space, parcel)).clone()
    }
}

fn key(parcel: &Parcel) -> Key {
    let Parcel { op, from, to } = parcel;
    let (dims, axes) = match *op {
        Op::AllToAll { axis, split, concat, rows: _ } => (vec![split, concat], vec![axis]),
        Op::AllGather { axis, dim } | Op::ReduceScatter { axis, dim } => (vec![dim], axis.to_vec()),
        Op::AllReduce { axis } => (vec![], axis.to_vec()),
        Op::Fetch { to } => (vec![to], vec![]),
        Op::FetchSum { from } => (vec![from], vec![]),
        _ => (vec![], vec![]),
    };
    (op.name(), dims, axes, from.clone(), to.clone())
}

/// The elements that a message of several tensors moves, if the blocks of each are right: all have the same peers, and a
/// block on the wire once for all peers is the block that each peer is sent.
fn check_together(space: &Space, parcels: &[Parcel]) -> Result<Volumes, OpError> {
    let mut volumes = Volumes::default();
    let ranks: BTreeSet<Rank> = parcels.iter().flat_map(|parcel| witnesses(space, parcel)).collect();
    // The group of a rank follows from these.
    let place =
        |Parcel { op, from, to }: &Parcel| (boxes::axes(space, op, from, to), from.layout.at, to.layout.at);
    let have_one_group = parcels.iter().all(|parcel| place(parcel) == place(&parcels[0]));
    for rank in ranks {
        let refuse = |what: String| {
            let kind = parcels.first().map_or("", |parcel| parcel.op.name());
            OpError::new("S15", format!("`{kind}` of {} tensors: {what}", parcels.len()))
        };
        let mut groups =
            parcels.iter().map(|Parcel { op, from, to }| boxes::group(space, op, from, to, rank));
        if !have_one_group && groups.next().is_some_and(|group| groups.any(|other| other != group)) {
            return Err(refuse(format!("rank {rank} would exchange some with other ranks than the others")));
        }
        for (side, most) in [(Side::Sent, &mut volumes.sent), (Side::Received, &mut volumes.received)] {
            let wire = message::wire(space, parcels, side, rank);
            let length =
                wire.blocks.iter().flatten().map(|piece| boxes::elements(&piece.region)).sum::<u64>();
            *most = (*most).max(length);
            if !parcels.iter().any(|parcel| message::is_shared(&parcel.op, side)) {
                continue;
            }
            if let Some((peer, n)) =
                wire.group.iter().zip(&wire.elements).find(|&(_, &n)| n != 0 && n != length)
            {
                let what = match side {
                    Side::Sent => format!("sends {n} of {length} elements to rank {peer}"),
                    Side::Received => format!("sums {n} of {length} elements from rank {peer}"),
                };
                return Err(refuse(format!("rank {rank} {what}, and the wire is one for all")));
            }
        }
    }
    Ok(volumes)
}

fn check(space: &Space, parcel: &Parcel) -> Result<Volumes, OpError> {
    let Parcel { op, from, to } = parcel;
    let exchange = |rank: Rank| boxes::exchange(space, op, from, to, rank);
    let mut volumes = Volumes::default();
    for rank in witnesses(space, parcel) {
        let mine = exchange(rank);
        let of = |blocks: &[Vec<Region>]| blocks.iter().map(|b| boxes::block_elements(b)).sum::<u64>();
        volumes.sent = volumes.sent.max(of(&mine.send));
        volumes.received = volumes.received.max(of(&mine.recv));
        let refuse = |what: String| {
            let types = format!("from {} to {}", show(space, from), show(space, to));
            OpError::new("S15", format!("`{}` {types}: {what}", op.name()))
        };
        ends_meet(space, parcel, rank, &mine, &exchange).map_err(refuse)?;
        if space.holds(to, rank) {
            Arrivals::of(space, parcel, rank, &mine).and_then(|all| all.check()).map_err(refuse)?;
        }
    }
    Ok(volumes)
}

/// The ranks that are checked: those at the ends of axes along which all are alike, all others where they are not.
fn witnesses(space: &Space, parcel: &Parcel) -> Vec<Rank> {
    let Parcel { op, from, to } = parcel;
    let mesh = &space.mesh;
    let members = mesh.degree(&boxes::axes(space, op, from, to));
    let mut ranks: Vec<Rank> = vec![Rank(0)];
    for axis in mesh.axes.ids() {
        let n = mesh.size(axis);
        let some = |ty: &TensorType| {
            let ragged = |(&d, axes): (&DimId, &crate::layout::AxisList)| {
                let even = space.dims[d].divides_evenly(mesh.degree(axes)) && space.dims[d].fetched.is_none();
                axes.contains(&axis) && !even
            };
            let moved = ty.layout.moved_along(axis).is_some_and(|m| m.only.is_some());
            moved || ty.dims.iter().zip(&ty.layout.split).any(ragged)
        };
        let mut coordinates: BTreeSet<u64> = [0, n - 1].into();
        if some(from) || some(to) {
            let step = n.div_ceil(COORDINATES).max(1);
            coordinates.extend((0..n).step_by(usize::try_from(step).unwrap_or(1)));
        }
        for ty in [from, to] {
            coordinates.extend(ty.layout.at.filter(|at| at.axis == axis).map(|at| at.coordinate));
            if let Some(m) = ty.layout.moved_along(axis) {
                // Where parts go round, and where those that hold any begin and end.
                let (start, end) = m.only.unwrap_or((0, n));
                let edges = [start, start + n - 1, end, end + n - 1];
                coordinates.extend(edges.iter().flat_map(|&c| [c % n, (c + m.by) % n, (c + n - m.by) % n]));
            }
        }
        let with = |&rank: &Rank, &c: &u64| mesh.with_coordinate(rank, axis, c);
        let coordinates = &coordinates;
        ranks = ranks.iter().flat_map(|rank| coordinates.iter().map(move |c| with(rank, c))).collect();
    }
    // A sample, if there are too many, with the first and the last.
    let most = usize::try_from((BLOCKS / members).max(2)).unwrap_or(2);
    let step = ranks.len().div_ceil(most).max(1);
    let last = ranks.last().copied();
    ranks.into_iter().step_by(step).chain(last).filter(|&r| boxes::participates(space, from, to, r)).collect()
}

/// Whether `rank` sends the elements that its peers receive, and the other way round; of a large group a few peers are
/// asked.
fn ends_meet(
    space: &Space,
    parcel: &Parcel,
    rank: Rank,
    mine: &Exchange,
    exchange: &impl Fn(Rank) -> Exchange,
) -> Result<(), String> {
    let Parcel { from, to, .. } = parcel;
    if !mine.group.contains(&rank) {
        return Err(format!("rank {rank} is not of its own group"));
    }
    // Of peers that are looked at in full, one in each of so many equal runs, and those that are sent something first.
    let most =
        usize::try_from((BLOCKS / 16 / (mine.group.len() as u64).pow(2).max(1)).clamp(1, 64)).unwrap_or(1);
    let busy = (0..mine.group.len())
        .filter(|&i| !mine.send[i].is_empty() || !mine.recv[i].is_empty())
        .collect::<Vec<_>>();
    let step = busy.len().div_ceil(most).max(1);
    for &i in busy.iter().step_by(step).chain(busy.last()) {
        let peer = mine.group[i];
        let theirs = exchange(peer);
        let is_of_both = theirs.group.iter().position(|&r| r == rank).filter(|_| {
            // Parts that move have groups of their own on every rank.
            theirs.group == mine.group || parcel.op == Op::Permute
        });
        let Some(me) = is_of_both else {
            return Err(format!("ranks {rank} and {peer} see different groups"));
        };
        for (giver, taker, sent, received) in
            [(rank, peer, &mine.send[i], &theirs.recv[me]), (peer, rank, &theirs.send[me], &mine.recv[i])]
        {
            let n = [sent, received].map(|block| boxes::block_elements(block));
            if n[0] != n[1] {
                return Err(format!(
                    "rank {giver} sends {} elements to rank {taker}, which receives {}",
                    n[0], n[1]
                ));
            }
            let held = space.local_box(from, giver);
            let wanted = space.local_box(to, taker);
            let inside = |block: &[Region], whole: &Region| {
                block.iter().all(|part| boxes::intersect(part, whole) == *part)
            };
            if !inside(sent, &held) || !inside(received, &wanted) {
                return Err(format!("rank {giver} sends rank {taker} elements that the two do not hold"));
            }
            let renamed = renamed(parcel);
            let named = |block: &[Region], ty: &TensorType, at: Rank| -> Result<Vec<Region>, String> {
                block.iter().map(|part| origin(space, (ty, renamed), at, part)).collect()
            };
            if named(sent, from, giver)? != named(received, to, taker)? {
                return Err(format!("rank {taker} receives other elements than rank {giver} sends"));
            }
        }
    }
    Ok(())
}

/// The dimension that is fetched on one side of a collective, and a sequence on the other.
fn renamed(parcel: &Parcel) -> Option<DimId> {
    match parcel.op {
        Op::Fetch { to: dim } | Op::FetchSum { from: dim } => Some(dim),
        _ => None,
    }
}

/// The elements of the sequence that a region is, if its type has the dimension that is fetched; else itself.
fn origin(
    space: &Space,
    (ty, renamed): (&TensorType, Option<DimId>),
    rank: Rank,
    region: &Region,
) -> Result<Region, String> {
    let mut named = region.clone();
    let Some((dim, i)) = renamed.and_then(|dim| Some((dim, ty.position(dim)?))) else { return Ok(named) };
    let Some(fetched) = &space.dims[dim].fetched else { return Ok(named) };
    let c = usize::try_from(space.mesh.coordinate_along(rank, &ty.layout.split[i])).unwrap_or(usize::MAX);
    let parts = fetched.parts().get(c).ok_or_else(|| format!("rank {rank} fetches nothing"))?;
    let mut first = fetched.part(c).start;
    let mut found = None;
    for range in parts {
        let end = first + (range.end - range.start);
        if first <= region[i].start && region[i].end <= end {
            found = Some(range.start + (region[i].start - first)..range.start + (region[i].end - first));
        }
        first = end;
    }
    let place = || format!("elements {:?} of `{}` are not of one range", region[i], space.dims[dim].name);
    named[i] = found.ok_or_else(place)?;
    Ok(named)
}

/// The elements that arrive at a rank: for each contributor, the coordinates of the ranks whose parts it sums, its regions.
struct Arrivals {
    rank: Rank,
    /// The elements that must arrive from each contributor.
    wanted: BTreeMap<Vec<u64>, Vec<Region>>,
    found: BTreeMap<Vec<u64>, Vec<Region>>,
}

impl Arrivals {
    /// The elements that `rank` receives, and those that it should.
    fn of(space: &Space, parcel: &Parcel, rank: Rank, mine: &Exchange) -> Result<Self, String> {
        let Parcel { op, from, to } = parcel;
        let own = space.local_box(to, rank);
        let mut wanted: BTreeMap<Vec<u64>, Vec<Region>> = BTreeMap::new();
        let mut found: BTreeMap<Vec<u64>, Vec<Region>> = BTreeMap::new();
        let mut parts: Vec<AxisId> = from.layout.partial.to_vec();
        if let Op::FetchSum { from: dim } = *op {
            // The sum over all ranks that fetched the element: ranks are told apart by the fetching axes.
            let fetched = space.dims[dim].fetched.as_ref().ok_or("nothing is fetched")?;
            let at = to.position(fetched.of).ok_or("the sequence is missing")?;
            parts.extend(from.axes_of(dim));
            for rank in space.mesh.group_along(rank, from.axes_of(dim)) {
                let c = space.mesh.coordinate_along(rank, from.axes_of(dim));
                for range in
                    fetched.parts().get(usize::try_from(c).unwrap_or(usize::MAX)).into_iter().flatten()
                {
                    let mut region = own.clone();
                    region[at] = range.start.max(own[at].start)..range.end.min(own[at].end);
                    if region[at].start < region[at].end && boxes::elements(&region) > 0 {
                        wanted.entry(coordinates(space, rank, &parts)).or_default().push(region);
                    }
                }
            }
        } else if boxes::elements(&own) > 0 {
            let summed: Vec<AxisId> =
                parts.iter().copied().filter(|axis| !to.layout.partial.contains(axis)).collect();
            for giver in space.mesh.group_along(rank, &summed) {
                wanted.insert(coordinates(space, giver, &parts), vec![own.clone()]);
            }
        }
        for (&giver, block) in mine.group.iter().zip(&mine.recv) {
            let held = space.local_box(from, giver);
            for region in block {
                if boxes::intersect(region, &own) != *region {
                    return Err(format!("rank {rank} receives elements that it does not hold afterwards"));
                }
                // A rank must have the elements that it sends, under the same names.
                let named = origin(space, (to, renamed(parcel)), rank, region)?;
                let is_sum = matches!(op, Op::FetchSum { .. });
                if !is_sum && boxes::intersect(&named, &held) != named {
                    return Err(format!(
                        "rank {rank} receives elements from rank {giver}, which does not have them"
                    ));
                }
                found.entry(coordinates(space, giver, &parts)).or_default().push(region.clone());
            }
        }
        Ok(Self { rank, wanted, found })
    }

    /// Whether all that is wanted arrives once.
    fn check(mut self) -> Result<(), String> {
        let rank = self.rank;
        for (contributor, wanted) in self.wanted {
            let found = self.found.remove(&contributor).unwrap_or_default();
            let of = |regions: &[Region]| regions.iter().map(boxes::elements).sum::<u64>();
            let whose =
                if contributor.is_empty() { String::new() } else { format!(" of part {contributor:?}") };
            if of(&found) != of(&wanted) {
                let (found, wanted) = (of(&found), of(&wanted));
                return Err(format!("rank {rank} receives {found} elements{whose}, and needs {wanted}"));
            }
            if !apart(&mut found.iter().collect::<Vec<_>>()) {
                return Err(format!("rank {rank} receives an element{whose} twice, and another not at all"));
            }
        }
        match self.found.into_iter().next() {
            None => Ok(()),
            Some((part, _)) => {
                Err(format!("rank {rank} receives elements of part {part:?}, which is not summed"))
            }
        }
    }
}

fn coordinates(space: &Space, rank: Rank, axes: &[AxisId]) -> Vec<u64> {
    axes.iter().map(|&axis| space.mesh.coordinate(rank, axis)).collect()
}

/// Whether no two regions meet. Regions are cut along dimensions until each is alone, as layouts cut them.
fn apart(regions: &mut [&Region]) -> bool {
    let Some(first) = regions.first() else { return true };
    if regions.len() == 1 {
        return true;
    }
    for d in 0..first.len() {
        regions.sort_by_key(|region| (region[d].start, region[d].end));
        let mut end = regions[0][d].end;
        let cut = regions.iter().position(|region| {
            let cut = region[d].start >= end;
            end = end.max(region[d].end);
            cut
        });
        if cut.is_none() {
            continue;
        }
        // All cuts along this dimension at once, so that many slices take one sort.
        let mut begin = 0;
        let mut end = regions[0][d].end;
        for i in 1..=regions.len() {
            if i == regions.len() || regions[i][d].start >= end {
                if !apart(&mut regions[begin..i]) {
                    return false;
                }
                begin = i;
            }
            if i < regions.len() {
                end = end.max(regions[i][d].end);
            }
        }
        return true;
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cut_regions_are_apart() {
        let grid: Vec<Region> =
            (0..4).flat_map(|i| (0..3).map(move |j| vec![i * 2..i * 2 + 2, j * 5..j * 5 + 5])).collect();
        assert!(apart(&mut grid.iter().collect::<Vec<_>>()));
        let mut twice: Vec<&Region> = grid.iter().collect();
        twice.push(&grid[5]);
        assert!(!apart(&mut twice));
        let lapping = [vec![0..3, 0..4], vec![2..5, 3..6]];
        assert!(!apart(&mut lapping.iter().collect::<Vec<_>>()));
    }
}
