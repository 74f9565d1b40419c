//! Blocks that visit ranks, and sums that accumulate on the way and come home.

use std::collections::BTreeMap;

use ithaca_ir::layout::{AxisList, Move};
use ithaca_ir::mesh::AxisId;
use ithaca_ir::ops::{OpError, cast};
use ithaca_ir::{DType, FunctionBuilder, Mesh, Op, ValueId};
use smallvec::SmallVec;

use super::plan::{home_of, is_full};
use crate::movement::{Partials, RankOffset, Step};

/// Values that travel together, with every offset of theirs so far.
pub(super) struct MovingBlocks {
    /// The offset of the values in a step.
    offset: fn(&Step) -> &RankOffset,
    places: Vec<Place>,
    /// The number of each place.
    numbers: BTreeMap<RankOffset, usize>,
    /// The axes along which places differ.
    axes: AxisList,
    /// Whether each place is on all ranks, and its offset is spelt in one way only.
    is_plain: bool,
    /// The earlier offsets that some offsets come from.
    relays: BTreeMap<RankOffset, RankOffset>,
}

/// An offset of values.
struct Place {
    at: RankOffset,
    /// The offset before it.
    from: RankOffset,
    values: Vec<ValueId>,
}

impl MovingBlocks {
    /// Values at home.
    pub(super) fn new(values: &[ValueId], offset: fn(&Step) -> &RankOffset) -> Self {
        Self::relayed(values, offset, BTreeMap::new())
    }

    /// Values at home; those of some offsets come from the offsets given.
    pub(super) fn relayed(
        values: &[ValueId],
        offset: fn(&Step) -> &RankOffset,
        relays: BTreeMap<RankOffset, RankOffset>,
    ) -> Self {
        let home = Place { at: RankOffset::new(), from: RankOffset::new(), values: values.to_vec() };
        Self {
            offset,
            places: vec![home],
            numbers: BTreeMap::from([(RankOffset::new(), 0)]),
            axes: AxisList::new(),
            is_plain: true,
            relays,
        }
    }

    /// The values in step `i`; the transfers of the next step are issued first.
    pub(super) fn visit(
        &mut self,
        b: &mut FunctionBuilder<'_>,
        steps: &[Step],
        i: usize,
    ) -> Result<Vec<ValueId>, OpError> {
        if let Some(next) = steps.get(i + 1) {
            self.bring(b, (self.offset)(next))?;
        }
        self.bring(b, (self.offset)(&steps[i]))
    }

    /// The values at `offset`, from the offset that relays say, or else from the nearest earlier offset: along the fewest axes, then
    /// with the fewest hops. Among equal offsets, values continue in their direction rather than turn, so that each block keeps
    /// to its way round; then the offset nearest to home along the axes of the hop wins, then the latest.
    fn bring(&mut self, b: &mut FunctionBuilder<'_>, offset: &RankOffset) -> Result<Vec<ValueId>, OpError> {
        if let Some(&number) = self.numbers.get(offset) {
            return Ok(self.places[number].values.clone());
        }
        let mesh = &b.space().mesh;
        self.is_plain &= is_plain(mesh, offset);
        let nearest = self.nearest(mesh, offset);
        let preference = |place: &&Place| {
            let next = hops(mesh, &place.at, offset);
            let turns = hops(mesh, &place.from, &place.at) != next;
            let along: RankOffset =
                place.at.iter().copied().filter(|m| next.iter().any(|h| h.0 == m.axis)).collect();
            (turns, way(mesh, &RankOffset::new(), &along).1)
        };
        let relay = self.relays.get(offset).and_then(|from| self.numbers.get(from));
        let source = match relay {
            Some(&number) => &self.places[number],
            None => nearest.into_iter().min_by_key(preference).expect("the first place is home"),
        };
        let from = source.at.clone();
        let values = source.values.iter().map(|&v| go(b, v, offset)).collect::<Result<Vec<_>, _>>()?;
        self.add(Place { at: offset.clone(), from, values: values.clone() });
        Ok(values)
    }

    fn add(&mut self, place: Place) {
        self.numbers.insert(place.at.clone(), self.places.len());
        for m in &place.at {
            if !self.axes.contains(&m.axis) {
                self.axes.push(m.axis);
            }
        }
        self.places.push(place);
    }

    /// The places from which a new offset is nearest, the latest first.
    fn nearest(&self, mesh: &Mesh, offset: &RankOffset) -> Vec<&Place> {
        // A ring has as many places as ranks, and nearly always one that is a hop away, than which none is nearer.
        let mut numbers: Vec<usize> =
            neighbours(mesh, offset, &self.axes).filter_map(|at| self.numbers.get(&at).copied()).collect();
        numbers.sort_unstable_by(|a, b| b.cmp(a));
        numbers.dedup();
        let next: Vec<&Place> = numbers.into_iter().map(|number| &self.places[number]).collect();
        if self.is_plain && !next.is_empty() {
            return next;
        }
        let sources = || self.places.iter().rev().filter(|place| is_full(&place.at));
        let nearest = sources().map(|place| way(mesh, &place.at, offset)).min();
        sources().filter(|place| Some(way(mesh, &place.at, offset)) == nearest).collect()
    }
}

/// Whether an offset is on all ranks, with a move along each of some axes, in their order.
fn is_plain(mesh: &Mesh, offset: &RankOffset) -> bool {
    let moves = |m: &Move| m.only.is_none() && (1..mesh.size(m.axis)).contains(&m.by);
    offset.iter().all(moves) && offset.windows(2).all(|pair| pair[0].axis < pair[1].axis)
}

/// The offsets that are one hop from a plain one along one of its axes or of `others`.
fn neighbours<'a>(
    mesh: &'a Mesh,
    offset: &'a RankOffset,
    others: &'a AxisList,
) -> impl Iterator<Item = RankOffset> + 'a {
    let own = offset.iter().map(|m| m.axis);
    let others = others.iter().copied().filter(move |axis| offset.iter().all(|m| m.axis != *axis));
    own.chain(others).flat_map(move |axis| {
        let n = mesh.size(axis);
        let here = offset.iter().find(|m| m.axis == axis).map_or(0, |m| m.by);
        [1, n - 1].map(|hop| {
            let mut at: RankOffset = offset.iter().copied().filter(|m| m.axis != axis).collect();
            let by = (here + hop) % n;
            if by > 0 {
                let place = at.iter().position(|m| m.axis > axis).unwrap_or(at.len());
                at.insert(place, Move { axis, by, only: None });
            }
            at
        })
    })
}

/// The axes along which two offsets differ, with the hops from the first to the second, up the coordinates.
fn hops(mesh: &Mesh, from: &RankOffset, to: &RankOffset) -> SmallVec<[(AxisId, u64); 2]> {
    let by = |offset: &RankOffset, axis| offset.iter().find(|m| m.axis == axis).map_or(0, |m| m.by);
    let mut axes: AxisList = from.iter().chain(to).map(|m| m.axis).collect();
    axes.sort_unstable();
    axes.dedup();
    let hops = axes.into_iter().map(|axis| {
        let n = mesh.size(axis);
        (axis, (by(to, axis) + n - by(from, axis)) % n)
    });
    hops.filter(|&(_, hops)| hops > 0).collect()
}

/// The distance of two offsets: the number of axes along which they differ, and the most hops along one, either way round.
fn way(mesh: &Mesh, from: &RankOffset, to: &RankOffset) -> (usize, u64) {
    let hops = hops(mesh, from, to);
    let most = hops.iter().map(|&(axis, up)| up.min(mesh.size(axis) - up)).max();
    (hops.len(), most.unwrap_or(0))
}

/// Moves `value` to `offset`.
fn go(b: &mut FunctionBuilder<'_>, value: ValueId, offset: &RankOffset) -> Result<ValueId, OpError> {
    let mut ty = b.ty(value).clone();
    if ty.layout.moved == *offset {
        return Ok(value);
    }
    ty.layout.moved.clone_from(offset);
    b.push_as(Op::Permute, &[value], ty)
}

/// Moves partial results, `values[0]` and those as wide as it in the element type of partials; lse, of fewer dimensions,
/// stays as it is.
fn carry(
    b: &mut FunctionBuilder<'_>,
    values: &[ValueId],
    offset: &RankOffset,
    partials: Partials,
) -> Result<Vec<ValueId>, OpError> {
    let rank = values.iter().map(|&v| b.ty(v).dims.len()).max().unwrap_or(0);
    let mut carried = Vec::with_capacity(values.len());
    for &value in values {
        let ty = b.ty(value);
        let goes_narrow = ty.layout.moved != *offset && ty.dims.len() == rank;
        let wire = if goes_narrow { partials.wire(ty.dtype) } else { ty.dtype };
        let narrow = cast(b, value, wire)?;
        carried.push(go(b, narrow, offset)?);
    }
    Ok(carried)
}

/// The sum of two groups of values.
type Join = fn(&mut FunctionBuilder<'_>, &[ValueId], &[ValueId]) -> Result<Vec<ValueId>, OpError>;

/// Sums that travel to the ranks that make their summands.
///
/// Where all ranks make summands, the nearest sum travels there and takes them in; where some do, their summands go home.
/// An offset that is nearer to home than to any sum starts a sum of its own. Blocks that go round both ways thus accumulate
/// both ways, and none crosses the ring between two steps; the number of transfers is the same.
pub(super) struct Sums {
    join: Join,
    partials: Partials,
    sums: Vec<Sum>,
}

/// A sum so far, and its offset.
struct Sum {
    at: RankOffset,
    /// In the element type of partials once they have travelled.
    values: Vec<ValueId>,
    /// The types in which they are computed.
    types: Vec<DType>,
}

impl Sums {
    /// No sum yet; the first summands are made at home.
    pub(super) fn new(join: Join, partials: Partials) -> Self {
        Self { join, partials, sums: Vec::new() }
    }

    /// Takes in `values` that were made at `offset`.
    pub(super) fn add(
        &mut self,
        b: &mut FunctionBuilder<'_>,
        offset: &RankOffset,
        values: &[ValueId],
    ) -> Result<(), OpError> {
        let made = Sum::new(b, values);
        if is_full(offset) {
            return self.join_nearest(b, Sum { at: offset.clone(), ..made }, offset);
        }
        let Some(home) = home_of(&b.space().mesh, offset) else {
            return Err(OpError::new(
                "V28",
                "blocks of ranks that wrap around the end of a ring cannot go home together",
            ));
        };
        let values = carry(b, values, &home, self.partials)?;
        self.join_nearest(b, Sum { at: home, values, ..made }, &RankOffset::new())
    }

    /// Sends the nearest sum to `offset` while the values that it will take in there are made.
    pub(super) fn send_ahead(
        &mut self,
        b: &mut FunctionBuilder<'_>,
        offset: &RankOffset,
    ) -> Result<(), OpError> {
        let partials = self.partials;
        match self.nearest(&b.space().mesh, offset) {
            Some(sum) if is_full(offset) => sum.travel(b, offset, partials),
            Some(_) | None => Ok(()),
        }
    }

    /// Brings the nearest sum to `offset`, where `made` joins it, or starts a sum of its own.
    fn join_nearest(
        &mut self,
        b: &mut FunctionBuilder<'_>,
        made: Sum,
        offset: &RankOffset,
    ) -> Result<(), OpError> {
        let (partials, join) = (self.partials, self.join);
        match self.nearest(&b.space().mesh, offset) {
            Some(sum) => {
                sum.travel(b, offset, partials)?;
                let (before, made) = (sum.computed(b)?, made.computed(b)?);
                sum.values = join(b, &before, &made)?;
            }
            None => self.sums.push(made),
        }
        Ok(())
    }

    /// The nearest sum to `offset`, unless home is nearer.
    fn nearest(&mut self, mesh: &Mesh, offset: &RankOffset) -> Option<&mut Sum> {
        let hops = |at: &RankOffset| way(mesh, at, offset).1;
        let nearest = self.sums.iter_mut().rev().min_by_key(|sum| hops(&sum.at));
        nearest.filter(|sum| hops(&sum.at) <= hops(&RankOffset::new()) || *offset == RankOffset::new())
    }

    /// The sum of all, at home.
    pub(super) fn finish(self, b: &mut FunctionBuilder<'_>) -> Result<Vec<ValueId>, OpError> {
        self.finish_first(b, usize::MAX)
    }

    /// The first `n_wanted` values of the sum of all, at home.
    ///
    /// A complete sum comes home without its other values; several sums need all values to be joined.
    pub(super) fn finish_first(
        mut self,
        b: &mut FunctionBuilder<'_>,
        n_wanted: usize,
    ) -> Result<Vec<ValueId>, OpError> {
        if let [whole] = self.sums.as_mut_slice() {
            whole.values.truncate(n_wanted);
        }
        let mut total: Option<Vec<ValueId>> = None;
        for mut sum in self.sums {
            sum.travel(b, &RankOffset::new(), self.partials)?;
            let values = sum.computed(b)?;
            total = Some(match total {
                None => values,
                Some(total) => (self.join)(b, &total, &values)?,
            });
        }
        Ok(total.unwrap_or_default())
    }
}

impl Sum {
    /// A sum at home.
    fn new(b: &FunctionBuilder<'_>, values: &[ValueId]) -> Self {
        let types = values.iter().map(|&v| b.ty(v).dtype).collect();
        Self { at: RankOffset::new(), values: values.to_vec(), types }
    }

    /// The values in the types in which they are computed. A kernel that makes them from what arrives waits for it, so they
    /// are not made before they are read.
    fn computed(&self, b: &mut FunctionBuilder<'_>) -> Result<Vec<ValueId>, OpError> {
        self.values.iter().zip(&self.types).map(|(&value, &dtype)| cast(b, value, dtype)).collect()
    }

    fn travel(
        &mut self,
        b: &mut FunctionBuilder<'_>,
        offset: &RankOffset,
        partials: Partials,
    ) -> Result<(), OpError> {
        self.values = carry(b, &self.values, offset, partials)?;
        self.at.clone_from(offset);
        Ok(())
    }
}

/// Merges `o, lse` pairs by online softmax.
pub(super) fn merge(
    b: &mut FunctionBuilder<'_>,
    sum: &[ValueId],
    more: &[ValueId],
) -> Result<Vec<ValueId>, OpError> {
    let operands: Vec<ValueId> = sum.iter().chain(more).copied().collect();
    Ok(b.node(Op::Merge, &operands, &[])?.to_vec())
}

/// Adds value by value.
pub(super) fn accumulate(
    b: &mut FunctionBuilder<'_>,
    sum: &[ValueId],
    more: &[ValueId],
) -> Result<Vec<ValueId>, OpError> {
    sum.iter().zip(more).map(|(&x, &y)| b.push(Op::Accumulate, &[x, y])).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The places that a new offset is nearest to, found among its neighbours, are those found among all.
    #[test]
    fn neighbours_are_the_nearest_places() {
        let mesh = Mesh::new([("outer", 3), ("ring", 5), ("pair", 2)]);
        let axes: Vec<AxisId> = mesh.axes.ids().collect();
        for first in 0..4u64 {
            let mut blocks = MovingBlocks::new(&[], |step| &step.keys);
            for i in 1..30 {
                // In an order that goes through all offsets, and leaps.
                let at = i * [1, 7, 11, 13][first as usize] % 30;
                let by = [at / 10, at / 2 % 5, at % 2];
                let moves = axes.iter().zip(by).filter(|(_, by)| *by > 0);
                let offset: RankOffset = moves.map(|(&axis, by)| Move { axis, by, only: None }).collect();
                assert!(is_plain(&mesh, &offset));
                let found: Vec<RankOffset> =
                    blocks.nearest(&mesh, &offset).iter().map(|p| p.at.clone()).collect();
                let all = || blocks.places.iter().rev();
                let least = all().map(|place| way(&mesh, &place.at, &offset)).min();
                let expected: Vec<RankOffset> = all()
                    .filter(|place| Some(way(&mesh, &place.at, &offset)) == least)
                    .map(|place| place.at.clone())
                    .collect();
                assert_eq!(found, expected, "{offset:?}");
                blocks.add(Place { at: offset, from: RankOffset::new(), values: Vec::new() });
            }
        }
    }
}
