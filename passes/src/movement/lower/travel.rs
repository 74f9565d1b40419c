//! What travels: blocks that visit ranks, and sums that are added up on the way and come home.

use ithaca_ir::ops::OpError;
use ithaca_ir::{FunctionBuilder, Op, ValueId};

use super::plan::{home_of, is_full};
use crate::movement::Seat;

/// Values that travel together, and every seat where they have been.
pub(super) struct Travellers {
    been: Vec<(Seat, Vec<ValueId>)>,
}

impl Travellers {
    /// Values that are at home.
    pub(super) fn new(values: &[ValueId]) -> Self {
        Self { been: vec![(Seat::new(), values.to_vec())] }
    }

    /// The values at `seat`: from where they have been along the fewest axes from there, the latest such place.
    pub(super) fn bring(
        &mut self,
        b: &mut FunctionBuilder<'_>,
        seat: &Seat,
    ) -> Result<Vec<ValueId>, OpError> {
        if let Some((_, values)) = self.been.iter().find(|(at, _)| at == seat) {
            return Ok(values.clone());
        }
        let sources = self.been.iter().rev().filter(|(at, _)| is_full(at));
        let source = sources.min_by_key(|(at, _)| distance(at, seat)).expect("everything has been at home");
        let values = source.1.clone().into_iter().map(|v| go(b, v, seat)).collect::<Result<Vec<_>, _>>()?;
        self.been.push((seat.clone(), values.clone()));
        Ok(values)
    }
}

/// Number of axes along which two seats differ.
fn distance(a: &Seat, b: &Seat) -> usize {
    let differs = |axis| a.iter().find(|m| m.axis == axis) != b.iter().find(|m| m.axis == axis);
    let mut axes: Vec<_> = a.iter().chain(b).map(|m| m.axis).collect();
    axes.sort_unstable();
    axes.dedup();
    axes.into_iter().filter(|&axis| differs(axis)).count()
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
/// Where all ranks make summands, the sum travels there and takes them in; where some do, their summands go home.
pub(super) struct Sums {
    join: Join,
    at: Seat,
    values: Vec<ValueId>,
}

impl Sums {
    /// Nothing yet; what comes first is made at home.
    pub(super) fn new(join: Join) -> Self {
        Self { join, at: Seat::new(), values: Vec::new() }
    }

    /// Takes in `values` that were made at `seat`.
    pub(super) fn add(
        &mut self,
        b: &mut FunctionBuilder<'_>,
        seat: &Seat,
        values: &[ValueId],
    ) -> Result<(), OpError> {
        if self.values.is_empty() {
            self.at.clone_from(seat);
            self.values = values.to_vec();
            return Ok(());
        }
        if is_full(seat) {
            self.travel(b, seat)?;
            self.values = (self.join)(b, &self.values, values)?;
            return Ok(());
        }
        self.travel(b, &Seat::new())?;
        let Some(home) = home_of(&b.space().mesh, seat) else {
            return Err(OpError::new(
                "V28",
                "blocks of ranks that wrap around the end of a ring cannot go home together",
            ));
        };
        let homed = values.iter().map(|&v| go(b, v, &home)).collect::<Result<Vec<_>, _>>()?;
        self.values = (self.join)(b, &self.values, &homed)?;
        Ok(())
    }

    /// The sums, at home.
    pub(super) fn finish(mut self, b: &mut FunctionBuilder<'_>) -> Result<Vec<ValueId>, OpError> {
        self.travel(b, &Seat::new())?;
        Ok(self.values)
    }

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
