//! Blocks between tensors and wires: packing, unpacking, slicing.

use ithaca_ir::boxes::{self, Region, Side};
use ithaca_ir::message::{self, Parcel, Piece};
use ithaca_ir::strided::{self, row_major};
use ithaca_ir::{DType, DimId, Op};

use super::view::{Cx, Local, View, bits_of, place, signed, step};
use crate::argument::{Pointer, arguments};
use crate::catalogue::c_type;
use crate::error::LowerError;
use crate::structs::{Pieces, PiecesShape, Walk};
use crate::threads::packs;

/// Blocks of a tensor, each with its first element on the wire.
type Placed = Vec<(Region, u64)>;

impl Cx<'_> {
    /// Copies blocks of a tensor to a wire that is sent, or from one that was received. Blocks of one shape at even
    /// distances, as those of an even split are, take one kernel.
    fn move_placed(
        &self,
        dtype: DType,
        whole: &Local,
        blocks: &Placed,
        side: Side,
        [tensor, wire]: [Pointer; 2],
    ) -> Result<(), LowerError> {
        let offset_of = |block: &Region| -> i64 {
            let distances = whole.distances(block);
            distances.iter().zip(&whole.strides).map(|(distance, stride)| distance * stride).sum()
        };
        let shape_of = |block: &Region| -> Vec<i64> { Local::new(block.clone()).extents };
        let order = |wire: i64, tensor: i64| match side {
            Side::Sent => [wire, tensor],
            Side::Received => [tensor, wire],
        };
        let mut rest: &[(Region, u64)] = blocks;
        while let [(block, at), ..] = rest {
            let shape = shape_of(block);
            let n: i64 = shape.iter().product();
            let first = offset_of(block);
            let (mut run, mut apart, mut wire_apart) = (1, 0, n);
            while let Some((next, next_at)) = rest.get(run) {
                let (before, before_at) = &rest[run - 1];
                if shape_of(next) != shape || next_at < before_at {
                    break;
                }
                let distances = (offset_of(next) - offset_of(before), signed(next_at - before_at));
                if run > 1 && distances != (apart, wire_apart) {
                    break;
                }
                (apart, wire_apart) = distances;
                run += 1;
            }
            let mut walk = Walk::<2>::default();
            step(&mut walk, signed(run as u64), order(wire_apart, apart))?;
            for ((&extent, dense), &stride) in shape.iter().zip(row_major(&shape)).zip(&whole.strides) {
                step(&mut walk, extent, order(dense, stride))?;
            }
            let here = tensor.offset(u64::try_from(first).unwrap_or(0) * dtype.bytes());
            let there = wire.offset(at * dtype.bytes());
            let [from, to] = match side {
                Side::Sent => [here, there],
                Side::Received => [there, here],
            };
            self.copy_box(dtype, [from, to], walk)?;
            rest = &rest[run..];
        }
        Ok(())
    }

    /// Copies this rank's part without communication.
    pub(crate) fn slice(&self, x: View<'_>, z: View<'_>) -> Result<(), LowerError> {
        let (whole, part) = (self.local(x.ty), self.local(z.ty));
        let blocks = if part.size > 0 { vec![(self.region(&part).clone(), 0)] } else { Vec::new() };
        self.move_placed(x.ty.dtype, &whole, &blocks, Side::Sent, [x.at, z.at])
    }

    /// Packs the blocks of a message into its wire, or unpacks them from it.
    pub(crate) fn move_message(
        &self,
        parcels: &[Parcel],
        side: Side,
        tensors: &[Pointer],
        wire: Pointer,
    ) -> Result<(), LowerError> {
        if let [parcel @ Parcel { op: Op::Fetch { to: dim } | Op::FetchSum { from: dim }, .. }] = parcels {
            return self.move_pieces(parcel, *dim, side, [tensors[0], wire]);
        }
        if side == Side::Received && parcels.iter().any(|p| matches!(p.op, Op::FetchSum { .. })) {
            return LowerError::unsupported("several sums of fetched tokens in one message");
        }
        let laid = message::wire(self.space, parcels, side, self.rank);
        let mut placed: Vec<Placed> = vec![Vec::new(); parcels.len()];
        let mut end = 0;
        for Piece { parcel, region } in laid.blocks.into_iter().flatten() {
            let n = boxes::elements(&region);
            placed[parcel].push((region, end));
            end += n;
        }
        // Tensors in the wire are not copied.
        let moved = parcels.iter().zip(&placed).zip(tensors).filter(|(_, at)| **at != Pointer::NONE);
        for ((parcel, blocks), &tensor) in moved {
            let ty = strided::end(parcel, side);
            self.move_placed(ty.dtype, &self.local(ty), blocks, side, [tensor, wire])?;
        }
        Ok(())
    }

    /// Moves the pieces of a fetch, or of its adjoint, in one kernel. `dim` is the fetched dimension.
    fn move_pieces(
        &self,
        parcel: &Parcel,
        dim: DimId,
        side: Side,
        [tensor, wire]: [Pointer; 2],
    ) -> Result<(), LowerError> {
        let sums = matches!(parcel.op, Op::FetchSum { .. });
        // The fetched dimension has the place that its sequence has in the other type.
        let at = place(if sums { &parcel.from } else { &parcel.to }, dim)?;
        let ty = strided::end(parcel, side);
        let whole = self.local(ty);
        let laid = message::wire(self.space, std::slice::from_ref(parcel), side, self.rank);
        let inner: i64 = whole.extents[at + 1..].iter().product();
        let each = if sums && side == Side::Received {
            1
        } else {
            self.neighbours(ty.dtype, &[tensor, wire], &[inner])
        };
        let (mut table, mut end) = (Vec::new(), 0);
        for Piece { region, .. } in laid.blocks.iter().flatten() {
            let held = &region[at];
            let first = whole.distances(region)[at];
            table.extend([end, first, signed(held.end - held.start)]);
            end += signed(boxes::elements(region)) / each;
        }
        let n_pieces = signed(table.len() as u64 / 3);
        let runs = if table.is_empty() { Pointer::NONE } else { self.integers(table) };
        let pieces = Pieces { table: runs, n: n_pieces };
        let shape = PiecesShape {
            outer: whole.extents[..at].iter().product(),
            tokens: whole.extents[at],
            inner: inner / each,
        };
        match side {
            Side::Sent => {
                let kernel = format!("gather_pieces<{}>", bits_of(ty.dtype, each));
                self.launch(&kernel, end, arguments![tensor, wire, pieces, shape, end])
            }
            Side::Received if sums => {
                let (kernel, n) = (format!("sum_pieces<{}>", c_type(ty.dtype)), whole.size);
                self.launch(&kernel, packs(n, ty.dtype), arguments![wire, tensor, pieces, shape, n])
            }
            Side::Received => {
                let kernel = format!("scatter_pieces<{}>", bits_of(ty.dtype, each));
                self.launch(&kernel, end, arguments![wire, tensor, pieces, shape, end])
            }
        }
    }
}
