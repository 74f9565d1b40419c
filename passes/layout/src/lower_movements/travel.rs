//! What travels: blocks that visit ranks, and sums that are added up on the way and come home.

use ithaca_ir::layout::AxisList;
use ithaca_ir::mesh::AxisId;
use ithaca_ir::ops::OpError;
use ithaca_ir::{FunctionBuilder, Mesh, Op, ValueId};
use smallvec::SmallVec;

use super::plan::{home_of, is_full};
use crate::movement::Seat;

/// Values that travel together, and every seat where they have been.
pub(super) struct Travellers {
    been: Vec<Place>,
}

/// Where values have been.
struct Place {
    at: Seat,
    /// Where they came from.
    from: Seat,
    values: Vec<ValueId>,
}

impl Travellers {
    /// Values that are at home.
    pub(super) fn new(values: &[ValueId]) -> Self {
        Self { been: vec![Place { at: Seat::new(), from: Seat::new(), values: values.to_vec() }] }
    }

    /// The values at `seat`: from where they have been along the fewest axes from there, of these the nearest place. Of
    /// those as near they come straight on rather than back, so that each block keeps to its way round; then from the
    /// nearest to home along the axes that they go, then from the latest.
    pub(super) fn bring(
        &mut self,
        b: &mut FunctionBuilder<'_>,
        seat: &Seat,
    ) -> Result<Vec<ValueId>, OpError> {
        if let Some(place) = self.been.iter().find(|place| place.at == *seat) {
            return Ok(place.values.clone());
        }
        let mesh = &b.space().mesh;
        let sources = || self.been.iter().rev().filter(|place| is_full(&place.at));
        // A ring has been at as many places as it has ranks, of which few are nearest.
        let nearest = sources().map(|place| way(mesh, &place.at, seat)).min();
        let nearest = sources().filter(|place| Some(way(mesh, &place.at, seat)) == nearest);
        let preference = |place: &&Place| {
            let next = hops(mesh, &place.at, seat);
            let turns = hops(mesh, &place.from, &place.at) != next;
            let along: Seat =
                place.at.iter().copied().filter(|m| next.iter().any(|h| h.0 == m.axis)).collect();
            (turns, way(mesh, &Seat::new(), &along).1)
        };
        let source = nearest.min_by_key(preference).expect("everything has been at home");
        let from = source.at.clone();
        let values =
            source.values.clone().into_iter().map(|v| go(b, v, seat)).collect::<Result<Vec<_>, _>>()?;
        self.been.push(Place { at: seat.clone(), from, values: values.clone() });
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

/// How far one seat is from another: along how many axes they differ, and the most hops along one, either way round.
fn way(mesh: &Mesh, from: &Seat, to: &Seat) -> (usize, u64) {
    let hops = hops(mesh, from, to);
    let most = hops.iter().map(|&(axis, up)| up.min(mesh.size(axis) - up)).max();
    (hops.len(), most.unwrap_or(0))
}

/// Moves `value` to `seat`.
pub(super) fn go(b: &mut FunctionBuilder<'_>, value: ValueId, seat: &Seat) -> Result<ValueId, OpError> {
    let mut ty = b.ty(value).clone();
    if ty.layout.moved == *seat {
        return Ok(value);
    }
    ty.layout.moved.clone_from(seat);
    b.push_as(Op::Permute, &[value], ty)
}

/// How two values become one.
pub(super) type Join = fn(&mut FunctionBuilder<'_>, &[ValueId], &[ValueId]) -> Result<Vec<ValueId>, OpError>;

/// Sums, of whatever kind, that go where their summands are made.
///
/// Where all ranks make summands, the nearest sum travels there and takes them in; where some do, their summands go home.
/// A place that is nearer to home than to any sum starts a sum of its own, so that blocks which go round both ways are
/// added up both ways, and none crosses the ring between two steps; the number of transfers is the same.
pub(super) struct Sums {
    join: Join,
    sums: Vec<Sum>,
}

/// Values that were added up, and where they are.
struct Sum {
    at: Seat,
    values: Vec<ValueId>,
}

impl Sums {
    /// Nothing yet; what comes first is made at home.
    pub(super) fn new(join: Join) -> Self {
        Self { join, sums: Vec::new() }
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
        let values = values.iter().map(|&v| go(b, v, &home)).collect::<Result<Vec<_>, _>>()?;
        self.join_nearest(b, Sum { at: home, values }, &Seat::new())
    }

    /// Brings the nearest sum to `seat`, where `made` joins it; or makes it a sum of its own.
    fn join_nearest(&mut self, b: &mut FunctionBuilder<'_>, made: Sum, seat: &Seat) -> Result<(), OpError> {
        let mesh = &b.space().mesh;
        let hops = |at: &Seat| way(mesh, at, seat).1;
        let nearest = self.sums.iter_mut().rev().min_by_key(|sum| hops(&sum.at));
        match nearest {
            Some(sum) if hops(&sum.at) <= hops(&Seat::new()) || *seat == Seat::new() => {
                sum.travel(b, seat)?;
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

    /// The sum of all, at home, of which the first `n_wanted` values are read.
    ///
    /// A sum that is whole where it stands comes home without the others; sums that are yet to be joined need all.
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
            sum.travel(b, &Seat::new())?;
            total = Some(match total {
                None => sum.values,
                Some(total) => (self.join)(b, &total, &sum.values)?,
            });
        }
        Ok(total.unwrap_or_default())
    }
}

impl Sum {
    fn travel(&mut self, b: &mut FunctionBuilder<'_>, seat: &Seat) -> Result<(), OpError> {
        for value in &mut self.values {
            *value = go(b, *value, seat)?;
        }
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
