//! The dimensions that attributes of operations name.

use crate::dim::DimId;
use crate::ops::Op;

impl Op {
    /// Calls `new` on every dimension that an attribute names.
    pub fn each_dim_mut(&mut self, new: &mut dyn FnMut(&mut DimId)) {
        match self {
            Op::Attention(a) | Op::AttentionBackward(a) => a.dims_mut().for_each(new),
            Op::Scores { attention, columns } | Op::Weigh { attention, columns } => {
                attention.dims_mut().chain([columns]).for_each(new);
            }
            Op::MergeParts { over } => new(over),
            Op::RowLse { over, parts } => std::iter::once(over).chain(parts).for_each(new),
            Op::Gradient(g) => g.dims_mut().for_each(new),
            Op::Loss(l) => l.dims_mut().for_each(new),
            Op::Experts(e) => e.dims_mut().for_each(new),
            Op::Window(w) => new(w.dim_mut()),
            Op::Call { scan: Some(scan), .. } => new(&mut scan.over),
            Op::Fetch { to: dim } | Op::FetchSum { from: dim } => new(dim),
            Op::Take { to } | Op::Join { to } => new(to),
            Op::Embed { over, .. }
            | Op::RmsNorm { over, .. }
            | Op::LayerNorm { over, .. }
            | Op::Softmax { over } => new(over),
            Op::Coalesced(members) => members.iter_mut().for_each(|member| member.each_dim_mut(new)),
            Op::RmsScale { over, .. } => over.iter_mut().for_each(new),
            Op::Rotary(rotary) => new(&mut rotary.over),
            Op::Repeat { from, to } | Op::SumCopies { from, to } => [from, to].into_iter().for_each(new),
            Op::AllToAll { split, concat, .. } => [split, concat].into_iter().for_each(new),
            Op::AllGather { dim, .. } | Op::Slice { dim, .. } | Op::ReduceScatter { dim, .. } => new(dim),
            Op::Param(_)
            | Op::Input(_)
            | Op::State(_)
            | Op::Assign { .. }
            | Op::Fill { .. }
            | Op::Sum
            | Op::Expand
            | Op::Optimizer(_)
            | Op::Random(_)
            | Op::Positions
            | Op::Einsum
            | Op::Unary(_)
            | Op::Binary(_)
            | Op::Scale { .. }
            | Op::Cast { .. }
            | Op::Call { scan: None, .. }
            | Op::Reshard
            | Op::Merge
            | Op::Accumulate
            | Op::Sink
            | Op::AllReduce { .. }
            | Op::Permute => {}
        }
    }
}
