//! Operations of training: gradients of norms, the loss and the optimizer.

use ithaca_ir::ops::AdamW;
use ithaca_ir::{DType, DimId, TensorType};

use super::view::{Cx, View, float, place, reals, row_major, signed, stride_of};
use crate::argument::{Pointer, arguments};
use crate::catalogue::{accumulator, c_type};
use crate::error::LowerError;
use crate::structs::{self, Labels, Padding, Vocabulary};

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
    /// rows until dx is written, if they fit.
    pub(crate) fn norm_backward(
        &self,
        norm: Norm,
        [x, weight, d]: [View<'_>; 3],
        z: &[View<'_>],
    ) -> Result<(), LowerError> {
        let Norm { centre, over, eps, offset } = norm;
        let (lx, t) = (self.local(x.ty), float(x.ty)?);
        let rows = self.rows(x.ty, over, [x.ty, weight.ty])?;
        let starts = self.lines(x.ty, over)?;
        let before = place(x.ty, over)?;
        let others: Vec<i64> = (0..x.ty.dims.len()).filter(|&d| d != before).map(|d| lx.extents[d]).collect();
        let numbers = row_major(&others);
        let (kept, summed) = self.kept_and_summed::<3>(x.ty, z[1].ty, |k, dim| {
            let at = x.ty.position(dim).unwrap_or(before);
            match k {
                0 => lx.strides[at],
                _ if dim == over => 0,
                1 => numbers[at - usize::from(at > before)],
                _ => lx.strides[at],
            }
        })?;
        let (n, width) = (rows.size(), self.extent_along(x.ty, over)?);
        let [stride, w_stride] = [x.ty, weight.ty].map(|ty| self.stride_along(ty, over));
        let moment = 2 * if x.ty.dtype == DType::F64 { 8 } else { 4 };
        let room = lx.size * signed(x.ty.dtype.bytes()) >= n * moment;
        let moments = if room { z[0].at } else { Pointer::NONE };
        let centre = centre as i32;
        if room {
            let kernel = format!("norm_moments<{t}>");
            self.launch(&kernel, n, arguments![x.at, moments, starts, n, width, stride, eps, centre])?;
        }
        let d_bias = z.get(2).map_or(Pointer::NONE, |z| z.at);
        let (n_kept, n_summed) = (kept.size(), summed.size());
        self.launch(
            &format!("norm_backward_weight<{t}>"),
            n_kept,
            arguments![
                x.at, d.at, moments, z[1].at, d_bias, kept, summed, n_kept, n_summed, width, stride, eps,
                centre
            ],
        )?;
        self.launch(
            &format!("norm_backward<{t}>"),
            n,
            arguments![x.at, weight.at, d.at, z[0].at, rows, n, width, stride, w_stride, eps, offset, centre],
        )
    }

    pub(crate) fn rms_scale_backward(
        &self,
        (count, eps): (f64, f64),
        [x, squares, weight, d]: [View<'_>; 4],
        z: &[View<'_>; 3],
    ) -> Result<(), LowerError> {
        let [lx, ls, lw] = [x, squares, weight].map(|v| self.local(v.ty));
        let t = float(x.ty)?;
        // The order of the kernels' `enum class ScaleResult`; sums of squares are as wide as the arithmetic.
        let results = [(0_i32, t), (1, accumulator(x.ty.dtype)), (2, t)];
        for ((which, to), z) in results.into_iter().zip(z) {
            let (kept, summed) = self.kept_and_summed::<3>(x.ty, z.ty, |k, dim| match k {
                0 => stride_of(x.ty, &lx, dim),
                1 => stride_of(squares.ty, &ls, dim),
                _ => stride_of(weight.ty, &lw, dim),
            })?;
            let (n, n_summed) = (kept.size(), summed.size());
            self.launch(
                &format!("rms_scale_backward<{t}, {to}>"),
                n,
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
                let message = format!("labels with padding in more than {MOST_PADDED} dimensions");
                return Err(LowerError::Unsupported(message));
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

    /// From logits and labels to nll and lse, of each row.
    pub(crate) fn cross_entropy(
        &self,
        (over, ignore): (DimId, i64),
        [x, labels]: [View<'_>; 2],
        [nll, lse]: [View<'_>; 2],
    ) -> Result<(), LowerError> {
        let rows = self.lines(x.ty, over)?;
        let (l, v, n) = (self.labels(labels, ignore)?, self.vocabulary(x.ty, over)?, rows.size());
        let kernel = format!("cross_entropy<{}>", float(x.ty)?);
        self.launch(&kernel, n, arguments![x.at, l, nll.at, lse.at, rows, v, n])
    }

    pub(crate) fn cross_entropy_backward(
        &self,
        (over, ignore): (DimId, i64),
        [x, labels, lse, d]: [View<'_>; 4],
        z: View<'_>,
    ) -> Result<(), LowerError> {
        let rows = self.lines(x.ty, over)?;
        let (l, v, n) = (self.labels(labels, ignore)?, self.vocabulary(x.ty, over)?, self.local(x.ty).size);
        let kernel = format!("cross_entropy_backward<{}>", float(x.ty)?);
        self.launch(&kernel, n, arguments![x.at, l, lse.at, d.at, z.at, rows, v, n])
    }

    pub(crate) fn pick(
        &self,
        (over, ignore): (DimId, i64),
        [x, labels]: [View<'_>; 2],
        z: View<'_>,
    ) -> Result<(), LowerError> {
        let rows = self.lines(x.ty, over)?;
        let (l, v, n) = (self.labels(labels, ignore)?, self.vocabulary(x.ty, over)?, rows.size());
        let kernel = format!("pick<{}>", float(x.ty)?);
        self.launch(&kernel, n, arguments![x.at, l, z.at, rows, v, n])
    }

    pub(crate) fn valid(&self, ignore: i64, labels: View<'_>, z: View<'_>) -> Result<(), LowerError> {
        if z.ty.dtype != DType::F32 {
            return Err(LowerError::Unsupported(format!("`valid` in {}", c_type(z.ty.dtype))));
        }
        let n = self.local(labels.ty).size;
        self.launch("valid<float>", n, arguments![self.labels(labels, ignore)?, z.at, n])
    }

    pub(crate) fn row_lse(&self, over: DimId, x: View<'_>, z: View<'_>) -> Result<(), LowerError> {
        let lines = self.lines(x.ty, over)?;
        let (local, at) = (self.local(x.ty), place(x.ty, over)?);
        let columns = self.vocabulary_extent(&local, at, over)?;
        let n = lines.size();
        let kernel = format!("row_lse<{}>", float(x.ty)?);
        self.launch(&kernel, n, arguments![x.at, z.at, lines, columns, local.strides[at], n])
    }

    /// From w, g, m, v, step and clip to the new w, m and v.
    pub(crate) fn adamw(&self, c: &AdamW, x: &[View<'_>; 6], z: &[View<'_>; 3]) -> Result<(), LowerError> {
        let AdamW { lr, beta1, beta2, eps, weight_decay } = *c;
        let constants = structs::AdamW { lr, beta1, beta2, eps, weight_decay };
        let [w, g, m, v, steps, clip] = *x;
        let n = self.local(w.ty).size;
        self.launch(
            &format!("adamw<{}>", float(w.ty)?),
            n,
            arguments![
                constants,
                w.at,
                reals(g),
                m.at,
                v.at,
                reals(steps),
                reals(clip),
                z[0].at,
                z[1].at,
                z[2].at,
                n
            ],
        )
    }

    pub(crate) fn clip_factor(
        &self,
        max_norm: f64,
        squares: View<'_>,
        z: View<'_>,
    ) -> Result<(), LowerError> {
        let n = self.local(squares.ty).size;
        let kernel = format!("clip_factor<{}>", float(squares.ty)?);
        self.launch(&kernel, n, arguments![max_norm, squares.at, z.at, n])
    }
}
