//! Operations of training: gradients of norms, the loss and the optimizer.

use ithaca_ir::ops::{AdamW, sums_in};
use ithaca_ir::strided::row_major;
use ithaca_ir::{DType, DimId, TensorType};

use super::view::{Cx, RowsAlong, View, float, place, reals, signed, step};
use crate::argument::{Arg, Pointer, arguments};
use crate::catalogue::{accumulator, c_type};
use crate::error::LowerError;
use crate::structs::{self, Labels, Padding, Vocabulary, Walk};
use crate::threads::{Chunks, Columns, packs};

/// The most dimensions of labels that have padding.
const MOST_PADDED: usize = 2;

/// The number that a norm subtracts: the kernels' `enum class Centre`.
#[derive(Clone, Copy)]
#[repr(i32)]
pub(crate) enum Centre {
    /// Nothing.
    None = 0,
    /// The mean.
    Mean = 1,
}

/// The attributes of a norm.
#[derive(Clone, Copy)]
pub(crate) struct Norm {
    pub(crate) centre: Centre,
    pub(crate) over: DimId,
    pub(crate) eps: f64,
    pub(crate) offset: f64,
}

impl Cx<'_> {
    /// Gradients of a norm over one dimension: dx, d_weight and maybe d_bias. The memory of dx holds the moments of the
    /// rows, and sums of parts of the rows, until dx is written.
    pub(crate) fn norm_backward(
        &self,
        norm: Norm,
        [x, weight, d]: [View<'_>; 3],
        z: &[View<'_>],
    ) -> Result<(), LowerError> {
        let Norm { centre, over, eps, offset } = norm;
        let (lx, t, dtype) = (self.local(x.ty), float(x.ty)?, x.ty.dtype);
        let RowsAlong { walk, n, width, strides: [stride, w_stride] } = self.rows(over, [x.ty, weight.ty])?;
        let starts = self.lines(x.ty, over)?;
        let before = place(x.ty, over)?;
        let others: Vec<i64> = (0..x.ty.dims.len()).filter(|&d| d != before).map(|d| lx.extents[d]).collect();
        let numbers = row_major(&others);
        let strides = |dim: DimId| {
            let at = x.ty.position(dim).unwrap_or(before);
            if dim == over {
                [lx.strides[at], 0]
            } else {
                [lx.strides[at], numbers[at - usize::from(at > before)]]
            }
        };
        let kept = self.walk_by(z[1].ty, |_| true, strides)?;
        let summed = self.walk_by(x.ty, |dim| !z[1].ty.has(dim), strides)?;
        let wide = signed(sums_in(dtype).bytes());
        let (room, moment) = (lx.size * signed(dtype.bytes()), 2 * wide);
        // Where dx is not aligned the moments start at the first multiple of 16 bytes in it.
        let is_aligned = self.is_aligned(z[0].at);
        if n * moment + if is_aligned { 0 } else { 16 } > room && n > 0 {
            let what = format!("the gradient of a norm over {width} elements of {dtype}");
            return LowerError::unsupported(what);
        }
        let centre = centre as i32;
        self.launch_rows(
            &format!("norm_moments<{t}>"),
            (n, width, dtype),
            arguments![x.at, z[0].at, starts, n, width, stride, eps, centre],
        )?;
        let (n_kept, n_summed) = (kept.size(), summed.size());
        let weights = signed(z.len() as u64 - 1);
        let sums = (n * moment + 15) / 16 * 16;
        let most = if is_aligned { (room - sums) / (n_kept * wide * weights).max(1) } else { 1 };
        let columns = Columns::of(&kept, &summed, dtype, Chunks::UpTo(most));
        let Columns { chunks, .. } = columns;
        let partial = |i: usize| match chunks {
            1 => z.get(i).map_or(Pointer::NONE, |z| z.at),
            _ if i < z.len() => {
                z[0].at.offset((sums + (signed(i as u64) - 1) * chunks * n_kept * wide).cast_unsigned())
            }
            _ => Pointer::NONE,
        };
        let into = if chunks == 1 { t } else { accumulator(dtype) };
        self.launch_columns(
            &format!("norm_backward_weight<{t}, {into}>"),
            columns,
            arguments![x.at, d.at, z[0].at, partial(1), partial(2), kept, summed, n_kept, n_summed, chunks],
        )?;
        for (i, z) in z.iter().enumerate().skip(1).filter(|_| chunks > 1) {
            let (mut over, mut along) = (Walk::<1>::default(), Walk::<1>::default());
            step(&mut over, n_kept, [1])?;
            step(&mut along, chunks, [n_kept])?;
            let columns = Columns::of(&over, &along, sums_in(dtype), Chunks::One);
            self.launch_columns(
                &format!("sum<{}, {t}>", accumulator(dtype)),
                columns,
                arguments![partial(i), z.at, over, along, n_kept, chunks],
            )?;
        }
        self.launch_rows(
            &format!("norm_backward<{t}>"),
            (n, width, dtype),
            arguments![x.at, weight.at, d.at, z[0].at, walk, n, width, stride, w_stride, eps, offset, centre],
        )
    }

    pub(crate) fn rms_scale_backward(
        &self,
        (count, eps): (f64, f64),
        [x, squares, weight, d]: [View<'_>; 4],
        z: &[View<'_>; 3],
    ) -> Result<(), LowerError> {
        let t = float(x.ty)?;
        // The order of the kernels' `enum class ScaleResult`; sums of squares are as wide as the arithmetic.
        let results = [(0_i32, t), (1, accumulator(x.ty.dtype)), (2, t)];
        for ((which, to), z) in results.into_iter().zip(z) {
            let (kept, summed) = self.kept_and_summed(x.ty, z.ty, [x.ty, squares.ty, weight.ty])?;
            let (n, n_summed) = (kept.size(), summed.size());
            self.launch_columns(
                &format!("rms_scale_backward<{t}, {to}>"),
                Columns::of(&kept, &summed, x.ty.dtype, Chunks::One).single(),
                arguments![
                    which, x.at, squares.at, weight.at, d.at, z.at, kept, summed, n, n_summed, count, eps
                ],
            )?;
        }
        Ok(())
    }

    fn labels(&self, labels: View<'_>, ignore: i64) -> Result<Labels, LowerError> {
        let local = self.local(labels.ty);
        let mut padding = Padding::default();
        let mut n = 0;
        for (at, &dim) in labels.ty.dims.iter().enumerate() {
            let sequence = &self.space.dims[self.space.sequence(dim)];
            if sequence.valid >= sequence.size {
                continue;
            }
            if n == MOST_PADDED {
                let what = format!("labels with padding in more than {MOST_PADDED} dimensions");
                return LowerError::unsupported(what);
            }
            padding.positions[n] = self.sequence(labels.ty, dim)?;
            padding.valid[n] = signed(sequence.valid);
            padding.step[n] = local.strides[at];
            padding.extent[n] = local.extents[at];
            n += 1;
        }
        padding.n = i32::try_from(n).unwrap_or(0);
        Ok(Labels { data: labels.at, ignore, padding })
    }

    fn vocabulary(&self, logits: &TensorType, over: DimId) -> Result<Vocabulary, LowerError> {
        let (local, at) = (self.local(logits), place(logits, over)?);
        Ok(Vocabulary {
            first: signed(self.region(&local)[at].start),
            extent: local.extents[at],
            columns: self.vocabulary_extent(&local, at, over)?,
            stride: local.strides[at],
        })
    }

    /// A kernel on logits, their labels and other tensors.
    pub(crate) fn on_labels(
        &self,
        name: &str,
        (over, ignore): (DimId, i64),
        x: &[View<'_>],
        z: &[View<'_>],
    ) -> Result<(), LowerError> {
        let (logits, n) = (x[0], self.local(x[1].ty).size);
        let mut arguments = arguments![logits.at, self.labels(x[1], ignore)?];
        arguments.extend(x[2..].iter().chain(z).map(|view| Arg::of(view.at)));
        let (rows, vocabulary) = (self.lines(logits.ty, over)?, self.vocabulary(logits.ty, over)?);
        arguments.extend(arguments![rows, vocabulary, n]);
        let kernel = format!("{name}<{}>", float(logits.ty)?);
        match name {
            "pick" => self.launch(&kernel, n, arguments),
            _ => self.launch_rows(&kernel, (n, vocabulary.extent, logits.ty.dtype), arguments),
        }
    }

    pub(crate) fn valid(&self, ignore: i64, labels: View<'_>, z: View<'_>) -> Result<(), LowerError> {
        if z.ty.dtype != DType::F32 {
            return LowerError::unsupported(format!("`valid` in {}", c_type(z.ty.dtype)));
        }
        let n = self.local(labels.ty).size;
        self.launch("valid<float>", n, arguments![self.labels(labels, ignore)?, z.at, n])
    }

    pub(crate) fn row_lse(&self, over: DimId, x: View<'_>, z: View<'_>) -> Result<(), LowerError> {
        let lines = self.lines(x.ty, over)?;
        let (local, at) = (self.local(x.ty), place(x.ty, over)?);
        let columns = self.vocabulary_extent(&local, at, over)?;
        let n = lines.size();
        let arguments = arguments![x.at, z.at, lines, columns, local.strides[at], n];
        self.launch_rows(&format!("row_lse<{}>", float(x.ty)?), (n, columns, x.ty.dtype), arguments)
    }

    /// From w, g, m, v, step and clip to the new w, m and v.
    pub(crate) fn adamw(&self, c: &AdamW, x: &[View<'_>; 6], z: &[View<'_>; 3]) -> Result<(), LowerError> {
        let AdamW { lr, beta1, beta2, eps, weight_decay } = *c;
        let constants = structs::AdamW { lr, beta1, beta2, eps, weight_decay };
        let [w, g, m, v] = [x[0], x[1], x[2], x[3]];
        let [steps, clip] = [x[4], x[5]].map(reals);
        let [to_w, to_m, to_v] = z.map(|z| z.at);
        let n = self.local(w.ty).size;
        let arguments = arguments![constants, w.at, g.at, m.at, v.at, steps, clip, to_w, to_m, to_v, n];
        let kernel = format!("adamw<{}, {}>", float(w.ty)?, float(g.ty)?);
        self.launch(&kernel, packs(n, w.ty.dtype), arguments)
    }
}
