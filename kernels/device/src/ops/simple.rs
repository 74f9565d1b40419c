//! Functions of elements, norms, rotary embeddings, look-ups: shapes and strides from types and the rank, then a kernel.

use ithaca_ir::ops::{Binary, Pairs, Rotary};
use ithaca_ir::{DType, DimId};

use super::view::{Cx, RowsAlong, View, bits, float, place, signed, step, stride_of};
use crate::argument::{Arg, arguments};
use crate::catalogue::c_type;
use crate::error::LowerError;
use crate::structs::{Sequence, Walk};

impl Cx<'_> {
    pub(crate) fn scale(&self, factor: f64, x: View<'_>, z: View<'_>) -> Result<(), LowerError> {
        self.elementwise("scale", x, arguments![factor, x.at, z.at])
    }

    pub(crate) fn cast(&self, x: View<'_>, z: View<'_>) -> Result<(), LowerError> {
        let n = self.local(x.ty).size;
        let [from, to] = [x.ty.dtype, z.ty.dtype];
        if from == DType::Bool || to == DType::Bool {
            return LowerError::unsupported(format!("a cast from {from} to {to}"));
        }
        self.launch(&format!("cast<{}, {}>", c_type(from), c_type(to)), n, arguments![x.at, z.at, n])
    }

    pub(crate) fn binary(&self, f: Binary, x: View<'_>, y: View<'_>, z: View<'_>) -> Result<(), LowerError> {
        let walk = self.walk(x.ty, |_| true, [y.ty])?;
        self.elementwise("binary", x, arguments![f as i32, x.at, y.at, z.at, walk])
    }

    pub(crate) fn rms_norm(
        &self,
        over: DimId,
        (eps, offset): (f64, f64),
        x: View<'_>,
        weight: View<'_>,
        z: View<'_>,
    ) -> Result<(), LowerError> {
        let RowsAlong { walk, n, width, strides: [sx, sw] } = self.rows(over, [x.ty, weight.ty])?;
        let arguments = arguments![x.at, weight.at, z.at, walk, n, width, sx, sw, eps, offset];
        self.launch_of("rms_norm", x.ty, n, arguments)
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

    pub(crate) fn layer_norm(
        &self,
        over: DimId,
        eps: f64,
        &[x, weight, bias]: &[View<'_>; 3],
        z: View<'_>,
    ) -> Result<(), LowerError> {
        let rows = self.rows(over, [x.ty, weight.ty, bias.ty])?;
        let RowsAlong { walk, n, width, strides: [sx, sw, sb] } = rows;
        let arguments = arguments![x.at, weight.at, bias.at, z.at, walk, n, width, sx, sw, sb, eps];
        self.launch_of("layer_norm", x.ty, n, arguments)
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
        self.launch_of(name, x[0].ty, n, arguments)
    }

    pub(crate) fn rotary(
        &self,
        rotary: &Rotary,
        x: View<'_>,
        positions: View<'_>,
        z: View<'_>,
    ) -> Result<(), LowerError> {
        let frequencies: Vec<f64> =
            rotary.frequencies().into_iter().map(|f| rotary.turn.sign() * f).collect();
        let frequencies = self.reals(frequencies);
        let mut rows = Walk::<3>::default();
        let local = self.local(x.ty);
        for (d, &dim) in x.ty.dims.iter().enumerate().filter(|(_, dim)| **dim != rotary.over) {
            for (steps, strides) in self.legs(dim, local.extents[d], [x, positions, z])? {
                step(&mut rows, steps, strides)?;
            }
        }
        let (n, extent) = (rows.size(), self.extent_along(x.ty, rotary.over)?);
        let width = signed(rotary.width);
        let (spread, apart): (i64, i64) = match rotary.pairs {
            Pairs::Halves => (1, width / 2),
            Pairs::Neighbours => (2, 1),
        };
        let stride = stride_of(x.ty, &local, rotary.over);
        self.launch_of(
            "rotary",
            x.ty,
            n * (extent - width / 2),
            arguments![
                x.at,
                positions.at,
                frequencies,
                z.at,
                rows,
                n,
                extent,
                stride,
                width,
                spread,
                apart,
                rotary.amplitude(),
            ],
        )
    }

    /// The table's first dimension is looked up.
    pub(crate) fn embed(&self, table: View<'_>, ids: View<'_>, z: View<'_>) -> Result<(), LowerError> {
        let (lt, lz) = (self.local(table.ty), self.local(z.ty));
        let first = self.region(&lt).first().map_or(0, |r| signed(r.start));
        let (rows, width) =
            (lt.extents.first().copied().unwrap_or(1), lt.strides.first().copied().unwrap_or(1));
        let arguments = arguments![table.at, ids.at, z.at, lz.size, width, first, rows];
        self.launch_of("embed", table.ty, lz.size, arguments)
    }

    /// The row `padding` has no gradient.
    pub(crate) fn embed_backward(
        &self,
        padding: Option<u64>,
        ids: View<'_>,
        d: View<'_>,
        z: View<'_>,
    ) -> Result<(), LowerError> {
        const TILE: i64 = 32;
        let lz = self.local(z.ty);
        let tokens = self.walk(ids.ty, |_| true, [d.ty])?;
        let columns = self.walk(z.ty, |dim| z.ty.dims.first() != Some(&dim), [d.ty])?;
        let (n_tokens, width) = (tokens.size(), columns.size());
        let n = n_tokens * ((width + TILE - 1) / TILE);
        self.fill(0.0, z)?;
        let first = self.region(&lz).first().map_or(0, |r| signed(r.start));
        let rows = lz.extents.first().copied().unwrap_or(1);
        let padding = padding.map_or(-1, signed);
        self.launch(
            &format!("embed_backward<{}, {TILE}>", float(d.ty)?),
            n,
            arguments![ids.at, d.at, z.at, tokens, columns, n_tokens, width, first, rows, padding, n],
        )
    }

    pub(crate) fn positions(&self, z: View<'_>) -> Result<(), LowerError> {
        let n = self.local(z.ty).size;
        let Some(&dim) = z.ty.dims.first() else {
            return LowerError::unsupported("positions without a dimension");
        };
        let sequence: Sequence = self.sequence(z.ty, dim)?;
        let valid = signed(self.space.dims[self.space.sequence(dim)].valid);
        self.launch("positions<int32_t>", n, arguments![z.at, n, sequence, valid])
    }

    /// Repeats each element of dimension `from`, or sums the copies that this rank holds of each element of `to`; the result
    /// has dimension `to` in the place of `from`.
    pub(crate) fn copies(
        &self,
        kernel: &str,
        (x, from): (View<'_>, DimId),
        (z, to): (View<'_>, DimId),
    ) -> Result<(), LowerError> {
        let (lx, lz) = (self.local(x.ty), self.local(z.ty));
        let (d, e) = (place(x.ty, from)?, place(z.ty, to)?);
        let (n_from, n_to) = (self.space.size(from), self.space.size(to));
        let copies = signed(n_from.max(n_to) / n_from.min(n_to).max(1));
        self.launch(
            kernel,
            lz.size,
            arguments![
                x.at,
                z.at,
                lz.size,
                lx.extents[d],
                lz.extents[e],
                lz.strides[e],
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
        let (n, n_summed) = (kept.size(), summed.size());
        self.launch_of("sum", x.ty, n, arguments![x.at, z.at, kept, summed, n, n_summed])
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
        let n = self.local(z.ty).size;
        self.launch(&format!("copy_box<{}>", bits(x.ty)), n, arguments![x.at.offset(start), z.at, walk, n])
    }

    /// Along the dimensions that x lacks.
    pub(crate) fn expand(&self, x: View<'_>, z: View<'_>) -> Result<(), LowerError> {
        let walk = self.walk(z.ty, |_| true, [z.ty, x.ty])?;
        let n = self.local(z.ty).size;
        self.launch(&format!("copy_box<{}>", bits(x.ty)), n, arguments![x.at, z.at, walk, n])
    }
}
