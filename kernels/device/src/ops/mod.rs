//! Operations as records: an operation and the types of its tensors become the arguments of kernels, for one rank.
//!
//! Addresses are symbolic. The records of different ranks are merged afterwards.

mod attention;
mod blocks;
mod cache;
mod einsum;
mod expert_products;
mod experts;
mod fused;
mod nan;
mod parts;
mod random;
mod simple;
pub(crate) mod trace;
mod training;
pub(crate) mod view;

use ithaca_ir::ops::{Fused, Gradient, Loss, Optimizer, Window};
use ithaca_ir::{DType, Op};

use crate::argument::arguments;
use crate::error::LowerError;
use einsum::Epilogue;
use simple::NormOperands;
use training::{Centre, Norm};
use view::{Cx, View};

/// As many tensors as an operation has.
fn exactly<'x, 'v, const N: usize>(op: &Op, x: &'x [View<'v>]) -> Result<&'x [View<'v>; N], LowerError> {
    let wrong = |_| LowerError::Unsupported(format!("`{}` of {} tensors", op.name(), x.len()));
    x.try_into().map_err(wrong)
}

/// Whether there are kernels for elements of this type.
fn has_kernels(dtype: DType) -> bool {
    dtype.is_arithmetic() || !dtype.is_float()
}

impl Cx<'_> {
    /// Adds the records that compute `z` from `x`.
    ///
    /// # Errors
    /// [`LowerError::Unsupported`] where there is no kernel.
    pub(crate) fn compute(&self, op: &Op, x: &[View<'_>], z: &[View<'_>]) -> Result<(), LowerError> {
        if let Some(narrow) = x.iter().chain(z).find(|view| !has_kernels(view.ty.dtype)) {
            return LowerError::unsupported(format!("`{}` of a cache of {}", op.name(), narrow.ty.dtype));
        }
        if !op.info().operands.contains(&x.len()) || z.len() != op.n_results() {
            let what = format!("`{}` that reads {} tensors and writes {}", op.name(), x.len(), z.len());
            return LowerError::unsupported(what);
        }
        let is_cut = x.iter().chain(z).any(|view| view.cut().is_some());
        let knows = matches!(
            op,
            Op::Attention(_)
                | Op::AttentionBackward(_)
                | Op::Rotary(_)
                | Op::Einsum
                | Op::Fused(Fused::BiasProduct { .. })
                | Op::Take { .. }
                | Op::Join { .. }
        );
        if is_cut && !knows {
            return LowerError::unsupported(format!("`{}` of a tensor that is cut into blocks", op.name()));
        }
        let count =
            |over: &[ithaca_ir::DimId]| -> f64 { over.iter().map(|&d| self.space.size(d) as f64).product() };
        match op {
            Op::Positions { padding } => self.positions(*padding, z[0]),
            Op::Einsum => self.einsum(*exactly(op, x)?, Epilogue::default(), z[0]),
            Op::AccumulateProduct => {
                let [a, b, before] = *exactly(op, x)?;
                self.einsum([a, b], Epilogue { before: Some(before), ..Epilogue::default() }, z[0])
            }
            Op::Embed { .. } => self.embed(x[0], x[1], z[0]),
            Op::Unary(f) => self.elementwise("unary", x[0], arguments![*f as i32, x[0].at, z[0].at]),
            Op::Binary(f) => self.binary(*f, x[0], x[1], z[0]),
            Op::Scale { factor } => self.scale(*factor, x[0], z[0]),
            Op::Clamp { min, max } => self.clamp("clamp", (*min, *max), x, z[0]),
            Op::Gradient(Gradient::Clamp { min, max }) => self.clamp("clamp_backward", (*min, *max), x, z[0]),
            Op::Cast { .. } => self.cast(x[0], z[0]),
            Op::Fused(fused) => self.fused(fused, x, z),
            Op::RmsNorm { over, eps, offset } => {
                let norm = Norm { centre: Centre::None, over: *over, eps: *eps, offset: *offset };
                let operands = NormOperands { x: x[0], added: None, weight: x[1], bias: None };
                self.norm(norm, operands, z[0])
            }
            Op::RmsScale { over, eps } => self.rms_scale((count(over), *eps), x[0], x[1], x[2], z[0]),
            Op::LayerNorm { over, eps } => {
                let norm = Norm { centre: Centre::Mean, over: *over, eps: *eps, offset: 0.0 };
                let operands = NormOperands { x: x[0], added: None, weight: x[1], bias: Some(x[2]) };
                self.norm(norm, operands, z[0])
            }
            Op::Softmax { over } => self.along("softmax", *over, x, z[0]),
            Op::Gradient(Gradient::Softmax { over }) => self.along("softmax_backward", *over, x, z[0]),
            Op::Random(random) => self.random(random, x, z[0]),
            Op::RotateAppend(rotated) => self.rotate_append(rotated, x, z),
            Op::Rotary(rotary) => self.rotary(rotary, x[0], x[1], z[0]),
            Op::Attention(a) => self.attention(a, x, z),
            Op::AttendPages { attention, pages, slots } => {
                self.attend_pages((attention, [*pages, *slots]), x, z)
            }
            Op::AttentionBackward(a) => self.attention_backward(a, x, z),
            Op::Scores { attention, .. } => self.scores(attention, x[0], x[1], z[0]),
            Op::Weigh { attention, .. } => self.weigh(attention, *exactly(op, x)?, z[0]),
            Op::Merge => self.merge(exactly(op, x)?, exactly(op, z)?),
            Op::MergeParts { .. } => self.merge_parts(exactly(op, x)?, exactly(op, z)?),
            Op::Accumulate => self.accumulate(x[0], x[1], z[0]),
            Op::Sink => self.sink(exactly(op, x)?, exactly(op, z)?),
            Op::RowLse { over, parts: _ } => self.row_lse(*over, x[0], z[0]),
            Op::Fill { value } => self.fill(*value, z[0]),
            Op::Sum => self.sum(x[0], z[0]),
            Op::Select { over, position } => self.select((*over, *position), x[0], z[0]),
            Op::Expand => self.expand(x[0], z[0]),
            Op::Gradient(Gradient::Unary(f)) => {
                let arguments = arguments![*f as i32, x[0].at, x[1].at, z[0].at];
                self.elementwise("unary_backward", x[0], arguments)
            }
            Op::Gradient(Gradient::Embed { over: _, padding }) => {
                self.embed_backward(*padding, x[0], x[1], z[0])
            }
            Op::Gradient(Gradient::Sink) => self.sink_backward(exactly(op, x)?, exactly(op, z)?),
            Op::Gradient(Gradient::RmsNorm { over, eps, offset }) => {
                let norm = Norm { centre: Centre::None, over: *over, eps: *eps, offset: *offset };
                self.norm_backward(norm, *exactly(op, x)?, z)
            }
            Op::Gradient(Gradient::LayerNorm { over, eps }) => {
                let norm = Norm { centre: Centre::Mean, over: *over, eps: *eps, offset: 0.0 };
                self.norm_backward(norm, *exactly(op, x)?, z)
            }
            Op::Gradient(Gradient::RmsScale { over, eps }) => {
                self.rms_scale_backward((count(over), *eps), *exactly(op, x)?, exactly(op, z)?)
            }
            Op::Gradient(Gradient::CrossEntropy { over, ignore }) => {
                self.on_labels("cross_entropy_backward", (*over, *ignore), x, z)
            }
            Op::Loss(Loss::CrossEntropy { over, ignore }) => {
                self.on_labels("cross_entropy", (*over, *ignore), x, z)
            }
            Op::Loss(Loss::Pick { over, ignore }) => self.on_labels("pick", (*over, *ignore), x, z),
            Op::Loss(Loss::Valid { ignore }) => self.valid(*ignore, x[0], z[0]),
            Op::Optimizer(Optimizer::AdamW(adamw)) => self.adamw(adamw, exactly(op, x)?, exactly(op, z)?),
            Op::Optimizer(Optimizer::ClipFactor { max_norm }) => {
                self.elementwise("clip_factor", x[0], arguments![*max_norm, x[0].at, z[0].at])
            }
            Op::Repeat { from, to } => self.repeat((x[0], *from), (z[0], *to)),
            Op::SumCopies { from, to } => self.sum_copies((x[0], *from), (z[0], *to)),
            Op::Take { to } => self.take(*to, x[0], z[0]),
            Op::Join { to } => self.join(*to, x, z[0]),
            Op::Slice { .. } => self.slice(x[0], z[0]),
            Op::Experts(experts) => self.experts(experts, x, z),
            Op::Cache(cache) => self.cache(cache, x, z),
            Op::Window(Window::Concat { .. }) => self.concat(x[0], x[1], z[0]),
            Op::Window(Window::Cut { start, .. }) => self.cut(*start, x[0], z[0]),
            Op::Param(_)
            | Op::Input(_)
            | Op::State(_)
            | Op::Assign { .. }
            | Op::Call { .. }
            | Op::Reshard
            | Op::AllToAll { .. }
            | Op::AllGather { .. }
            | Op::ReduceScatter { .. }
            | Op::AllReduce { .. }
            | Op::Permute
            | Op::Fetch { .. }
            | Op::FetchSum { .. }
            | Op::Coalesced(_) => LowerError::unsupported(format!("`{}` as a computation", op.name())),
        }
    }
}
