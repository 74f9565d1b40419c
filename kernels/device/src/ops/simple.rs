//! Functions of elements, norms, rotary embeddings, look-ups: shapes and strides from types and the rank, then a kernel.

use ithaca_ir::ops::{Binary, Pairs, Rotary, Unary};
use ithaca_ir::{DType, DimId};

use super::view::{Cx, View, bits, float, place, signed, step, stride_of};
use crate::argument::arguments;
use crate::catalogue::c_type;
use crate::error::LowerError;
use crate::structs::{Sequence, Walk};

impl Cx<'_> {
    pub(crate) fn unary(&self, f: Unary, x: View<'_>, z: View<'_>) -> Result<(), LowerError> {
        let n = self.local(x.ty).size;
        self.launch(&format!("unary<{}>", float(x.ty)?), n, arguments![f as i32, x.at, z.at, n])
    }

    pub(crate) fn unary_backward(
        &self,
        f: Unary,
        x: View<'_>,
        d: View<'_>,
        z: View<'_>,
    ) -> Result<(), LowerError> {
        let n = self.local(x.ty).size;
        let kernel = format!("unary_backward<{}>", float(x.ty)?);
        self.launch(&kernel, n, arguments![f as i32, x.at, d.at, z.at, n])
    }

    pub(crate) fn scale(&self, factor: f64, x: View<'_>, z: View<'_>) -> Result<(), LowerError> {
        let n = self.local(x.ty).size;
        self.launch(&format!("scale<{}>", float(x.ty)?), n, arguments![factor, x.at, z.at, n])
    }

    pub(crate) fn cast(&self, x: View<'_>, z: View<'_>) -> Result<(), LowerError> {
        let n = self.local(x.ty).size;
        let [from, to] = [x.ty.dtype, z.ty.dtype];
        if from == DType::Bool || to == DType::Bool {
            return Err(LowerError::Unsupported(format!("a cast from {} to {}", from.name(), to.name())));
        }
        self.launch(&format!("cast<{}, {}>", c_type(from), c_type(to)), n, arguments![x.at, z.at, n])
    }

    pub(crate) fn binary(&self, f: Binary, x: View<'_>, y: View<'_>, z: View<'_>) -> Result<(), LowerError> {
        let (lx, ly) = (self.local(x.ty), self.local(y.ty));
        let mut walk = Walk::<1>::default();
        for (d, &dim) in x.ty.dims.iter().enumerate() {
            step(&mut walk, lx.extents[d], [stride_of(y.ty, &ly, dim)])?;
        }
        let kernel = format!("binary<{}>", float(x.ty)?);
        self.launch(&kernel, lx.size, arguments![f as i32, x.at, y.at, z.at, walk, lx.size])
    }

    pub(crate) fn rms_norm(
        &self,
        over: DimId,
        (eps, offset): (f64, f64),
        x: View<'_>,
        weight: View<'_>,
        z: View<'_>,
    ) -> Result<(), LowerError> {
        let rows = self.rows(x.ty, over, [x.ty, weight.ty])?;
        let n = rows.size();
        let width = self.extent_along(x.ty, over)?;
        let strides = [x.ty, weight.ty].map(|ty| self.stride_along(ty, over));
        self.launch(
            &format!("rms_norm<{}>", float(x.ty)?),
            n,
            arguments![x.at, weight.at, z.at, rows, n, width, strides[0], strides[1], eps, offset],
        )
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
        let (lx, ls, lw) = (self.local(x.ty), self.local(squares.ty), self.local(weight.ty));
        let mut walk = Walk::<3>::default();
        for (d, &dim) in x.ty.dims.iter().enumerate() {
            let strides = [lx.strides[d], stride_of(squares.ty, &ls, dim), stride_of(weight.ty, &lw, dim)];
            step(&mut walk, lx.extents[d], strides)?;
        }
        let n = walk.size();
        let kernel = format!("rms_scale<{}>", float(x.ty)?);
        self.launch(&kernel, n, arguments![x.at, squares.at, weight.at, z.at, walk, n, count, eps])
    }

    pub(crate) fn layer_norm(
        &self,
        over: DimId,
        eps: f64,
        [x, weight, bias]: [View<'_>; 3],
        z: View<'_>,
    ) -> Result<(), LowerError> {
        let rows = self.rows(x.ty, over, [x.ty, weight.ty, bias.ty])?;
        let n = rows.size();
        let width = self.extent_along(x.ty, over)?;
        let [sx, sw, sb] = [x, weight, bias].map(|v| self.stride_along(v.ty, over));
        self.launch(
            &format!("layer_norm<{}>", float(x.ty)?),
            n,
            arguments![x.at, weight.at, bias.at, z.at, rows, n, width, sx, sw, sb, eps],
        )
    }

    pub(crate) fn softmax(&self, over: DimId, x: View<'_>, z: View<'_>) -> Result<(), LowerError> {
        let lines = self.lines(x.ty, over)?;
        let (n, width) = (lines.size(), self.extent_along(x.ty, over)?);
        let stride = self.stride_along(x.ty, over);
        let kernel = format!("softmax<{}>", float(x.ty)?);
        self.launch(&kernel, n, arguments![x.at, z.at, lines, n, width, stride])
    }

    pub(crate) fn softmax_backward(
        &self,
        over: DimId,
        y: View<'_>,
        d: View<'_>,
        z: View<'_>,
    ) -> Result<(), LowerError> {
        let lines = self.lines(y.ty, over)?;
        let (n, width) = (lines.size(), self.extent_along(y.ty, over)?);
        let stride = self.stride_along(y.ty, over);
        let kernel = format!("softmax_backward<{}>", float(y.ty)?);
        self.launch(&kernel, n, arguments![y.at, d.at, z.at, lines, n, width, stride])
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
        let stride = self.stride_along(x.ty, rotary.over);
        self.launch(
            &format!("rotary<{}>", float(x.ty)?),
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
        self.launch(
            &format!("embed<{}>", float(table.ty)?),
            lz.size,
            arguments![table.at, ids.at, z.at, lz.size, width, first, rows],
        )
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
        let (li, ld, lz) = (self.local(ids.ty), self.local(d.ty), self.local(z.ty));
        let (mut tokens, mut columns) = (Walk::<1>::default(), Walk::<1>::default());
        for (i, &dim) in ids.ty.dims.iter().enumerate() {
            step(&mut tokens, li.extents[i], [stride_of(d.ty, &ld, dim)])?;
        }
        for (i, &dim) in z.ty.dims.iter().enumerate().skip(1) {
            step(&mut columns, lz.extents[i], [stride_of(d.ty, &ld, dim)])?;
        }
        let width = columns.size();
        let n = li.size * ((width + TILE - 1) / TILE);
        self.fill(0.0, z)?;
        let first = self.region(&lz).first().map_or(0, |r| signed(r.start));
        let rows = lz.extents.first().copied().unwrap_or(1);
        let padding = padding.map_or(-1, signed);
        self.launch(
            &format!("embed_backward<{}, {TILE}>", float(d.ty)?),
            n,
            arguments![ids.at, d.at, z.at, tokens, columns, li.size, width, first, rows, padding, n],
        )
    }

    pub(crate) fn positions(&self, z: View<'_>) -> Result<(), LowerError> {
        let n = self.local(z.ty).size;
        let Some(&dim) = z.ty.dims.first() else {
            return Err(LowerError::Unsupported("positions without a dimension".to_owned()));
        };
        let sequence: Sequence = self.sequence(z.ty, dim)?;
        let valid = signed(self.space.dims[self.space.sequence(dim)].valid);
        self.launch("positions<int32_t>", n, arguments![z.at, n, sequence, valid])
    }

    /// Repeats each element of dimension `from`; the result has dimension `to` in its place.
    pub(crate) fn repeat(&self, from: DimId, to: DimId, x: View<'_>, z: View<'_>) -> Result<(), LowerError> {
        let (lx, lz) = (self.local(x.ty), self.local(z.ty));
        let (d, e) = (place(x.ty, from)?, place(z.ty, to)?);
        let copies = signed(self.space.size(to) / self.space.size(from).max(1));
        self.launch(
            &format!("repeat<{}>", bits(x.ty)),
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

    /// The adjoint: sums the copies that this rank holds of each element of dimension `to`.
    pub(crate) fn sum_copies(
        &self,
        from: DimId,
        to: DimId,
        x: View<'_>,
        z: View<'_>,
    ) -> Result<(), LowerError> {
        let (lx, lz) = (self.local(x.ty), self.local(z.ty));
        let (d, e) = (place(x.ty, from)?, place(z.ty, to)?);
        let copies = signed(self.space.size(from) / self.space.size(to).max(1));
        self.launch(
            &format!("sum_copies<{}>", float(x.ty)?),
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
        let n = self.local(z.ty).size;
        self.launch(&format!("fill<{}>", float(z.ty)?), n, arguments![value, z.at, n])
    }

    /// Over the dimensions that z lacks.
    pub(crate) fn sum(&self, x: View<'_>, z: View<'_>) -> Result<(), LowerError> {
        let lx = self.local(x.ty);
        let (kept, summed) = self.kept_and_summed::<1>(x.ty, z.ty, |_, dim| stride_of(x.ty, &lx, dim))?;
        let (n, n_summed) = (kept.size(), summed.size());
        let kernel = format!("sum<{}>", float(x.ty)?);
        self.launch(&kernel, n, arguments![x.at, z.at, kept, summed, n, n_summed])
    }

    /// Along the dimensions that x lacks.
    pub(crate) fn expand(&self, x: View<'_>, z: View<'_>) -> Result<(), LowerError> {
        let (lx, lz) = (self.local(x.ty), self.local(z.ty));
        let mut walk = Walk::<2>::default();
        for (d, &dim) in z.ty.dims.iter().enumerate() {
            step(&mut walk, lz.extents[d], [lz.strides[d], stride_of(x.ty, &lx, dim)])?;
        }
        let kernel = format!("copy_box<{}>", bits(x.ty));
        self.launch(&kernel, lz.size, arguments![x.at, z.at, walk, lz.size])
    }
}
