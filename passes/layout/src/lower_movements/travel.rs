//! Blocks that visit ranks, and sums that accumulate on the way and come home.

use ithaca_ir::layout::AxisList;
use ithaca_ir::mesh::AxisId;
use ithaca_ir::ops::{OpError, cast};
use ithaca_ir::{FunctionBuilder, Mesh, Op, ValueId};
use smallvec::SmallVec;

use super::plan::{home_of, is_full};
use crate::movement::{Partials, Seat, Step};

/// Values that travel together, with every seat of theirs so far.
pub(super) struct Travellers {
    /// The seat of the values in a step.
    seat: fn(&Step) -> &Seat,
    places: Vec<Place>,
}

/// A seat of values.
struct Place {
    at: Seat,
    /// The seat before it.
    from: Seat,
    values: Vec<ValueId>,
}

impl Travellers {
    /// Values at home.
    pub(super) fn new(values: &[ValueId], seat: fn(&Step) -> &Seat) -> Self {
        let home = Place { at: Seat::new(), from: Seat::new(), values: values.to_vec() };
        Self { seat, places: vec![home] }
    }

    /// The values in step `i`; the transfers of the next step are issued first.
    pub(super) fn visit(
        &mut self,
        b: &mut FunctionBuilder<'_>,
        steps: &[Step],
        i: usize,
    ) -> Result<Vec<ValueId>, OpError> {
        if let Some(next) = steps.get(i + 1) {
            self.bring(b, (self.seat)(next))?;
        }
        self.bring(b, (self.seat)(&steps[i]))
    }

    /// The values at `seat`, from the nearest earlier seat: along the fewest axes, then with the fewest hops. Among equal
    /// seats, values continue in their direction rather than turn, so that each block keeps to its way round; then the
    /// seat nearest to home along the axes of the hop wins, then the latest.
    fn bring(&mut self, b: &mut FunctionBuilder<'_>, seat: &Seat) -> Result<Vec<ValueId>, OpError> {
        if let Some(place) = self.places.iter().find(|place| place.at == *seat) {
            return Ok(place.values.clone());
        }
        let mesh = &b.space().mesh;
        let sources = || self.places.iter().rev().filter(|place| is_full(&place.at));
        // A ring has as many places as ranks, and few of them are nearest.
        let nearest = sources().map(|place| way(mesh, &place.at, seat)).min();
        let nearest = sources().filter(|place| Some(way(mesh, &place.at, seat)) == nearest);
        let preference = |place: &&Place| {
            let next = hops(mesh, &place.at, seat);
            let turns = hops(mesh, &place.from, &place.at) != next;
            let along: Seat =
                place.at.iter().copied().filter(|m| next.iter().any(|h| h.0 == m.axis)).collect();
            (turns, way(mesh, &Seat::new(), &along).1)
        };
        let source = nearest.min_by_key(preference).expect("the first place is home");
        let from = source.at.clone();
        let values = source.values.iter().map(|&v| go(b, v, seat)).collect::<Result<Vec<_>, _>>()?;
        self.places.push(Place { at: seat.clone(), from, values: values.clone() });
        Ok(values)
    }
}

/// The axes along which two seats differ, with the hops from the first to the second, up the coordinates.
fn hops(mesh: &Mesh, from: &Seat, to: &Seat) -> SmallVec<[(AxisId, u64); 2]> {
    let by = |seat: &Seat, axis| seat.iter().find(|m| m.axis == axis).map_or(0, |m| m.by);
    let mut axes: AxisList = from.iter().chain(to).map(|m| m.axis).collect();
    axes.sort_unstable();
    axes.dedup();
    let hops = axes.into_iter().map(|axis| {
        let n = mesh.size(axis);
        (axis, (by(to, axis) + n - by(from, axis)) % n)
    });
    hops.filter(|&(_, hops)| hops > 0).collect()
}

/// The distance of two seats: the number of axes along which they differ, and the most hops along one, either way round.
fn way(mesh: &Mesh, from: &Seat, to: &Seat) -> (usize, u64) {
    let hops = hops(mesh, from, to);
    let most = hops.iter().map(|&(axis, up)| up.min(mesh.size(axis) - up)).max();
    (hops.len(), most.unwrap_or(0))
}

/// Moves `value` to `seat`.
fn go(b: &mut FunctionBuilder<'_>, value: ValueId, seat: &Seat) -> Result<ValueId, OpError> {
    let mut ty = b.ty(value).clone();
    if ty.layout.moved == *seat {
        return Ok(value);
    }
    ty.layout.moved.clone_from(seat);
    b.push_as(Op::Permute, &[value], ty)
}

/// Moves partial results, `values[0]` and those as wide as it in the element type of partials; lse, of fewer dimensions,
/// stays as it is.
fn carry(
    b: &mut FunctionBuilder<'_>,
    values: &[ValueId],
    seat: &Seat,
    partials: Partials,
) -> Result<Vec<ValueId>, OpError> {
    let rank = values.iter().map(|&v| b.ty(v).dims.len()).max().unwrap_or(0);
    let mut carried = Vec::with_capacity(values.len());
    for &value in values {
        let ty = b.ty(value);
        let (computed, is_wide) = (ty.dtype, ty.dims.len() == rank);
        if ty.layout.moved == *seat || !is_wide {
            carried.push(go(b, value, seat)?);
            continue;
        }
        let narrow = cast(b, value, partials.wire(computed))?;
        let moved = go(b, narrow, seat)?;
        carried.push(cast(b, moved, computed)?);
    }
    Ok(carried)
}

/// The sum of two groups of values.
type Join = fn(&mut FunctionBuilder<'_>, &[ValueId], &[ValueId]) -> Result<Vec<ValueId>, OpError>;

/// Sums that travel to the ranks that make their summands.
///
/// Where all ranks make summands, the nearest sum travels there and takes them in; where some do, their summands go home.
/// A seat that is nearer to home than to any sum starts a sum of its own. Blocks that go round both ways thus accumulate
/// both ways, and none crosses the ring between two steps; the number of transfers is the same.
pub(super) struct Sums {
    join: Join,
    partials: Partials,
    sums: Vec<Sum>,
}

/// A sum so far, and its seat.
struct Sum {
    at: Seat,
    values: Vec<ValueId>,
}

impl Sums {
    /// No sum yet; the first summands are made at home.
    pub(super) fn new(join: Join, partials: Partials) -> Self {
        Self { join, partials, sums: Vec::new() }
    }

    /// Takes in `values` that were made at `seat`.
    pub(super) fn add(
        &mut self,
        b: &mut FunctionBuilder<'_>,
        seat: &Seat,
        values: &[ValueId],
    ) -> Result<(), OpError> {
        let made = Sum { at: seat.clone(), values: values.to_vec() };
        if is_full(seat) {
            return self.join_nearest(b, made, seat);
        }
        let Some(home) = home_of(&b.space().mesh, seat) else {
            return Err(OpError::new(
                "V28",
                "blocks of ranks that wrap around the end of a ring cannot go home together",
            ));
        };
        let values = carry(b, values, &home, self.partials)?;
        self.join_nearest(b, Sum { at: home, values }, &Seat::new())
    }

    /// Brings the nearest sum to `seat`, where `made` joins it, or starts a sum of its own.
    fn join_nearest(&mut self, b: &mut FunctionBuilder<'_>, made: Sum, seat: &Seat) -> Result<(), OpError> {
        let mesh = &b.space().mesh;
        let hops = |at: &Seat| way(mesh, at, seat).1;
        let nearest = self.sums.iter_mut().rev().min_by_key(|sum| hops(&sum.at));
        match nearest {
            Some(sum) if hops(&sum.at) <= hops(&Seat::new()) || *seat == Seat::new() => {
                sum.travel(b, seat, self.partials)?;
                sum.values = (self.join)(b, &sum.values, &made.values)?;
            }
            Some(_) | None => self.sums.push(made),
        }
        Ok(())
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
            sum.travel(b, &Seat::new(), self.partials)?;
            total = Some(match total {
                None => sum.values,
                Some(total) => (self.join)(b, &total, &sum.values)?,
            });
        }
        Ok(total.unwrap_or_default())
    }
}

impl Sum {
    fn travel(
        &mut self,
        b: &mut FunctionBuilder<'_>,
        seat: &Seat,
        partials: Partials,
    ) -> Result<(), OpError> {
        self.values = carry(b, &self.values, seat, partials)?;
        self.at.clone_from(seat);
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
