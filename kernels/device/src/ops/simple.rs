//! Functions of elements, norms, rotary embeddings, look-ups: shapes and strides from types and the rank, then a kernel.

use ithaca_ir::ops::{Binary, Pairs, Rotary};
use ithaca_ir::{DType, DimId, TensorType};

use super::training::Norm;
use super::view::{Cx, RowsAlong, View, bits_of, float, place, signed, step, stride_of};
use crate::argument::{Arg, Pointer, arguments};
use crate::catalogue::c_type;
use crate::error::LowerError;
use crate::flash::Block;
use crate::structs::{Lookup, Rotation, Sequence, Walk};
use crate::threads::{Chunks, Columns, MOST_LANES, packs};

/// Rows for which a thread computes an angle once.
const ROWS_OF_AN_ANGLE: i64 = 8;

/// The most tokens of which a list is sorted.
const MOST_LISTED: i64 = 1023;

/// What a norm reads.
#[derive(Clone, Copy)]
pub(crate) struct NormOperands<'v> {
    pub(crate) x: View<'v>,
    /// What is added to x, and the sum.
    pub(crate) added: Option<[View<'v>; 2]>,
    pub(crate) weight: View<'v>,
    pub(crate) bias: Option<View<'v>>,
}

impl Cx<'_> {
    pub(crate) fn scale(&self, factor: f64, x: View<'_>, z: View<'_>) -> Result<(), LowerError> {
        self.elementwise("scale", x, arguments![factor, x.at, z.at])
    }

    /// `clamp`, or its gradient from x and the gradient of the result.
    pub(crate) fn clamp(
        &self,
        kernel: &str,
        (min, max): (Option<f64>, Option<f64>),
        x: &[View<'_>],
        z: View<'_>,
    ) -> Result<(), LowerError> {
        let (min, max) = (min.unwrap_or(f64::NEG_INFINITY), max.unwrap_or(f64::INFINITY));
        match x {
            [x] => self.elementwise(kernel, *x, arguments![min, max, x.at, z.at]),
            _ => self.elementwise(kernel, x[0], arguments![min, max, x[0].at, x[1].at, z.at]),
        }
    }

    pub(crate) fn cast(&self, x: View<'_>, z: View<'_>) -> Result<(), LowerError> {
        let n = self.local(x.ty).size;
        let [from, to] = [x.ty.dtype, z.ty.dtype];
        if from == DType::Bool || to == DType::Bool {
            return LowerError::unsupported(format!("a cast from {from} to {to}"));
        }
        let kernel = format!("cast<{}, {}>", c_type(from), c_type(to));
        self.launch(&kernel, packs(n, to), arguments![x.at, z.at, n])
    }

    pub(crate) fn binary(&self, f: Binary, x: View<'_>, y: View<'_>, z: View<'_>) -> Result<(), LowerError> {
        let walk = self.walk(x.ty, |_| true, [y.ty])?;
        self.elementwise("binary", x, arguments![f as i32, x.at, y.at, z.at, walk])
    }

    /// A norm of x, or of x + y, whose sum is then a result of its own.
    pub(crate) fn norm(&self, norm: Norm, x: NormOperands<'_>, z: View<'_>) -> Result<(), LowerError> {
        let Norm { centre, over, eps, offset } = norm;
        let NormOperands { x, added, weight, bias } = x;
        let rows = self.rows(over, [x.ty, weight.ty, bias.unwrap_or(weight).ty])?;
        let [y, sum] = added.map_or([Pointer::NONE; 2], |added| added.map(|view| view.at));
        let (bias, [sx, sw, sb]) = (bias.map_or(Pointer::NONE, |bias| bias.at), rows.strides);
        let RowsAlong { walk, n, width, .. } = rows;
        let arguments = arguments![
            centre as i32,
            x.at,
            y,
            weight.at,
            bias,
            sum,
            z.at,
            walk,
            n,
            width,
            sx,
            sw,
            sb,
            eps,
            offset
        ];
        self.launch_rows(&format!("norm<{}>", float(x.ty)?), (n, width, x.ty.dtype), arguments)
    }

    /// `squares` are sums over the `count` elements of x, on all ranks together, that share an index of `squares`.
    pub(crate) fn rms_scale(
        &self,
        (count, eps): (f64, f64),
        x: View<'_>,
        squares: View<'_>,
        weight: View<'_>,
        z: View<'_>,
    ) -> Result<(), LowerError> {
        let walk = self.walk(x.ty, |_| true, [x.ty, squares.ty, weight.ty])?;
        let n = walk.size();
        let arguments = arguments![x.at, squares.at, weight.at, z.at, walk, n, count, eps];
        self.launch_of("rms_scale", x.ty, n, arguments)
    }

    /// A kernel on tensors of one type, row by row along `over`.
    pub(crate) fn along(
        &self,
        name: &str,
        over: DimId,
        x: &[View<'_>],
        z: View<'_>,
    ) -> Result<(), LowerError> {
        let RowsAlong { walk, n, width, strides: [stride] } = self.rows(over, [x[0].ty])?;
        let mut arguments: Vec<Arg> = x.iter().chain([&z]).map(|view| Arg::of(view.at)).collect();
        arguments.extend(arguments![walk, n, width, stride]);
        self.launch_rows(&format!("{name}<{}>", float(x[0].ty)?), (n, width, x[0].ty.dtype), arguments)
    }

    /// How the elements of a head of x turn.
    pub(super) fn rotation(&self, rotary: &Rotary, x: &TensorType) -> Result<Rotation, LowerError> {
        let frequencies = rotary.frequencies().into_iter().map(|f| rotary.turn.sign() * f).collect();
        let (frequencies, width) = (self.reals(frequencies), signed(rotary.width));
        let apart = match rotary.pairs {
            Pairs::Halves => width / 2,
            Pairs::Neighbours => 1,
        };
        let (extent, amplitude) = (self.extent_along(x, rotary.over)?, rotary.amplitude());
        Ok(Rotation {
            frequencies,
            extent,
            width,
            apart,
            amplitude,
            each: ROWS_OF_AN_ANGLE,
            ..Rotation::default()
        })
    }

    pub(crate) fn rotary(
        &self,
        rotary: &Rotary,
        x: View<'_>,
        positions: View<'_>,
        z: View<'_>,
    ) -> Result<(), LowerError> {
        let Rotation { frequencies, extent, width, apart, amplitude, .. } = self.rotation(rotary, x.ty)?;
        let (mut turned, mut alike) = (Walk::<3>::default(), Walk::<3>::default());
        let local = self.local(x.ty);
        for (d, &dim) in x.ty.dims.iter().enumerate().filter(|(_, dim)| **dim != rotary.over) {
            let rows = if positions.ty.has(dim) { &mut turned } else { &mut alike };
            for (steps, strides) in self.legs(dim, local.extents[d], [x, positions, z])? {
                step(rows, steps, strides)?;
            }
        }
        let (n, n_alike) = (turned.size(), alike.size());
        let stride = stride_of(x.ty, &local, rotary.over);
        let chunks = (n_alike + ROWS_OF_AN_ANGLE - 1) / ROWS_OF_AN_ANGLE;
        self.launch_of(
            "rotary",
            x.ty,
            n * chunks * packs(extent - width / 2, x.ty.dtype),
            arguments![
                x.at,
                positions.at,
                frequencies,
                z.at,
                turned,
                alike,
                n,
                n_alike,
                ROWS_OF_AN_ANGLE,
                extent,
                stride,
                width,
                apart,
                amplitude,
            ],
        )
    }

    /// The table's first dimension is looked up.
    pub(crate) fn embed(&self, table: View<'_>, ids: View<'_>, z: View<'_>) -> Result<(), LowerError> {
        let (lt, lz, dtype) = (self.local(table.ty), self.local(z.ty), table.ty.dtype);
        let first = self.region(&lt).first().map_or(0, |r| signed(r.start));
        let (rows, width) =
            (lt.extents.first().copied().unwrap_or(1), lt.strides.first().copied().unwrap_or(1));
        let each = self.neighbours(dtype, &[table.at, z.at], &[width]);
        let (n, width) = (lz.size / each, width / each);
        let arguments = arguments![table.at, ids.at, z.at, n, width, first, rows];
        self.launch(&format!("embed<{}>", bits_of(dtype, each)), n, arguments)
    }

    /// The row `padding` has no gradient. Before a row is computed its own memory lists the tokens that ask for it.
    pub(crate) fn embed_backward(
        &self,
        padding: Option<u64>,
        ids: View<'_>,
        d: View<'_>,
        z: View<'_>,
    ) -> Result<(), LowerError> {
        const WORD: i64 = 4;
        let lz = self.local(z.ty);
        let tokens = self.walk(ids.ty, |_| true, [d.ty])?;
        let columns = self.walk(z.ty, |dim| z.ty.dims.first() != Some(&dim), [d.ty])?;
        let (n_tokens, width) = (tokens.size(), columns.size());
        let n_rows = lz.extents.first().copied().unwrap_or(1);
        let lookup = Lookup {
            ids: ids.at,
            n_tokens,
            first_row: self.region(&lz).first().map_or(0, |r| signed(r.start)),
            n_rows,
            padding: padding.map_or(-1, signed),
        };
        let bytes = width * signed(d.ty.dtype.bytes());
        let has_lists = bytes >= 2 * WORD && bytes % WORD == 0 && self.is_aligned(z.at) && lz.size > 0;
        let room = if has_lists { (bytes / WORD - 1).min(MOST_LISTED) } else { 0 };
        if has_lists {
            self.launch("no_tokens", n_rows, arguments![z.at, bytes, n_rows])?;
            self.launch("list_tokens", n_tokens, arguments![lookup, z.at, bytes, room, n_tokens])?;
        }
        let threads = packs(width, d.ty.dtype).cast_unsigned().next_power_of_two();
        let block = Block {
            rows: 1,
            threads: u32::try_from(threads).unwrap_or(u32::MAX).clamp(32, MOST_LANES.unsigned_abs()),
            // The list as it is, and sorted.
            shared_bytes: u32::try_from(2 * WORD * room.max(2)).unwrap_or(0),
        };
        let arguments = arguments![lookup, d.at, z.at, tokens, columns, width, room];
        self.launch_blocks(&format!("embed_backward<{}>", float(d.ty)?), n_rows, block, arguments)
    }

    pub(crate) fn positions(&self, padding: i64, z: View<'_>) -> Result<(), LowerError> {
        let n = self.local(z.ty).size;
        let Some(&dim) = z.ty.dims.first() else {
            return LowerError::unsupported("positions without a dimension");
        };
        let sequence: Sequence = self.sequence(z.ty, dim)?;
        let valid = signed(self.space.dims[self.space.sequence(dim)].valid);
        self.launch("positions<int32_t>", n, arguments![z.at, n, sequence, valid, padding])
    }

    /// Repeats each element of dimension `from`.
    pub(crate) fn repeat(
        &self,
        (x, from): (View<'_>, DimId),
        (z, to): (View<'_>, DimId),
    ) -> Result<(), LowerError> {
        let inner = self.local(z.ty).strides[place(z.ty, to)?];
        let each = self.neighbours(x.ty.dtype, &[x.at, z.at], &[inner]);
        self.copies(&format!("repeat<{}>", bits_of(x.ty.dtype, each)), (x, from), (z, to), each)
    }

    /// Sums the copies that this rank holds of each element of `to`.
    pub(crate) fn sum_copies(
        &self,
        (x, from): (View<'_>, DimId),
        (z, to): (View<'_>, DimId),
    ) -> Result<(), LowerError> {
        let kernel = format!("sum_copies<{}>", float(x.ty)?);
        self.copies(&kernel, (x, from), (z, to), 1)
    }

    /// A kernel on `each` neighbours at once; the result has dimension `to` in the place of `from`.
    fn copies(
        &self,
        kernel: &str,
        (x, from): (View<'_>, DimId),
        (z, to): (View<'_>, DimId),
        each: i64,
    ) -> Result<(), LowerError> {
        let (lx, lz) = (self.local(x.ty), self.local(z.ty));
        let (d, e) = (place(x.ty, from)?, place(z.ty, to)?);
        let (n_from, n_to) = (self.space.size(from), self.space.size(to));
        let copies = signed(n_from.max(n_to) / n_from.min(n_to).max(1));
        self.launch(
            kernel,
            packs(lz.size, z.ty.dtype),
            arguments![
                x.at,
                z.at,
                lz.size / each,
                lx.extents[d],
                lz.extents[e],
                lz.strides[e] / each,
                copies,
                signed(self.region(&lx)[d].start),
                signed(self.region(&lz)[e].start),
            ],
        )
    }

    pub(crate) fn fill(&self, value: f64, z: View<'_>) -> Result<(), LowerError> {
        self.elementwise("fill", z, arguments![value, z.at])
    }

    /// Over the dimensions that z lacks.
    pub(crate) fn sum(&self, x: View<'_>, z: View<'_>) -> Result<(), LowerError> {
        let (kept, summed) = self.kept_and_summed(x.ty, z.ty, [x.ty])?;
        let (n, n_summed, t) = (kept.size(), summed.size(), float(x.ty)?);
        let columns = Columns::of(&kept, &summed, x.ty.dtype, Chunks::One);
        self.launch_columns(
            &format!("sum<{t}, {t}>"),
            columns,
            arguments![x.at, z.at, kept, summed, n, n_summed],
        )
    }

    /// The elements at a position of a dimension; zeros where the rank does not hold it.
    pub(crate) fn select(
        &self,
        (over, position): (DimId, u64),
        x: View<'_>,
        z: View<'_>,
    ) -> Result<(), LowerError> {
        let (lx, at) = (self.local(x.ty), place(x.ty, over)?);
        let held = self.region(&lx)[at].clone();
        let Some(found) = self.space.index_at(over, held.clone(), position) else {
            return self.fill(0.0, z);
        };
        let start = (found - held.start) * lx.strides[at].unsigned_abs() * x.ty.dtype.bytes();
        let walk = self.walk(z.ty, |_| true, [z.ty, x.ty])?;
        self.copy_box(x.ty.dtype, [x.at.offset(start), z.at], walk)
    }

    /// Along the dimensions that x lacks.
    pub(crate) fn expand(&self, x: View<'_>, z: View<'_>) -> Result<(), LowerError> {
        let walk = self.walk(z.ty, |_| true, [z.ty, x.ty])?;
        self.copy_box(x.ty.dtype, [x.at, z.at], walk)
    }
}
