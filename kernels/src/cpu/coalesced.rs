//! Coalesced tensors: packed into a wire, exchanged from wire to wire, unpacked.

use ithaca_ir::boxes::Side;
use ithaca_ir::message::{self, Parcel, Wire};
use ithaca_ir::{Op, Rank, Space};

use super::communicator::Communicator;
use super::transfer::{all_reduce, sum};
use crate::error::RunError;
use crate::tensor::{extents, index, read_part, write_part};

/// Coalesced transfers as seen from one rank.
pub(super) struct CoalescedTransfer<'a> {
    pub(super) space: &'a Space,
    pub(super) parcels: &'a [Parcel],
    pub(super) rank: Rank,
}

impl CoalescedTransfer<'_> {
    /// The wire, of the tensors that the rank holds.
    pub(super) fn pack<T: AsRef<[f32]>>(&self, tensors: &[T]) -> Result<Vec<f32>, RunError> {
        if tensors.len() != self.parcels.len() {
            let (n, m) = (self.parcels.len(), tensors.len());
            return Err(RunError::invalid(format!("{n} coalesced tensors are packed from {m} buffers")));
        }
        let mut wire = Vec::new();
        for piece in self.wire(Side::Sent).blocks.iter().flatten() {
            let held = self.space.local_box(&self.parcels[piece.parcel].from, self.rank);
            wire.extend(read_part(&held, tensors[piece.parcel].as_ref(), &piece.region));
        }
        Ok(wire)
    }

    /// The tensors of a received wire. Elements that no rank sends are NaN.
    pub(super) fn unpack(&self, data: &[f32]) -> Result<Vec<Vec<f32>>, RunError> {
        let boxes: Vec<_> =
            self.parcels.iter().map(|parcel| self.space.local_box(&parcel.to, self.rank)).collect();
        let mut tensors: Vec<Vec<f32>> =
            boxes.iter().map(|region| vec![f32::NAN; extents(region).iter().product()]).collect();
        let mut rest = data;
        for piece in self.wire(Side::Received).blocks.iter().flatten() {
            let (here, after) = self.cut(rest, extents(&piece.region).iter().product())?;
            write_part(&boxes[piece.parcel], &mut tensors[piece.parcel], &piece.region, here);
            rest = after;
        }
        Ok(tensors)
    }

    /// The wire that is received, and how many elements were sent to others.
    pub(super) fn exchange(
        &self,
        data: &[f32],
        communicator: &dyn Communicator,
    ) -> Result<(Vec<f32>, u64), RunError> {
        let Parcel { op, from, .. } = self
            .parcels
            .first()
            .ok_or_else(|| RunError::invalid("a coalesced collective without tensors"))?;
        let (sent, received) = (self.wire(Side::Sent), self.wire(Side::Received));
        if let Op::AllReduce { .. } = op {
            let n = self.length(&sent);
            let (data, _) = self.cut(data, n)?;
            return all_reduce(from.dtype, self.rank, data, &sent.group, communicator);
        }
        let mut blocks = Vec::with_capacity(sent.group.len());
        if message::is_shared(op, Side::Sent) {
            let (whole, _) = self.cut(data, self.length(&sent))?;
            blocks.extend(sent.elements.iter().map(|&n| if n == 0 { Vec::new() } else { whole.to_vec() }));
        } else {
            let mut rest = data;
            for &n in &sent.elements {
                let (block, after) = self.cut(rest, index(n))?;
                blocks.push(block.to_vec());
                rest = after;
            }
        }
        let expected: Vec<usize> = received.elements.iter().map(|&n| index(n)).collect();
        let arrived = communicator.exchange(self.rank, &sent.group, blocks, &expected)?;
        let wire = match op {
            Op::ReduceScatter { .. } => sum(from.dtype, arrived.blocks),
            _ => arrived.blocks.concat(),
        };
        Ok((wire, arrived.elements_sent))
    }

    fn wire(&self, side: Side) -> Wire {
        message::wire(self.space, self.parcels, side, self.rank)
    }

    /// Elements on the wire.
    fn length(&self, wire: &Wire) -> usize {
        let pieces = wire.blocks.iter().flatten();
        pieces.map(|piece| extents(&piece.region).iter().product::<usize>()).sum()
    }

    fn cut<'d>(&self, data: &'d [f32], n: usize) -> Result<(&'d [f32], &'d [f32]), RunError> {
        data.split_at_checked(n).ok_or_else(|| {
            let (tensors, found) = (self.parcels.len(), data.len());
            RunError::invalid(format!("the blocks of {tensors} tensors do not fit in {found} elements"))
        })
    }
}
