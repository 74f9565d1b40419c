//! Operations: one closed enum, one table, one file per family.
//!
//! Everything that a pass may want to know of an operation is asked here: its [`info`](Op::info), its attributes, its
//! result types ([`infer`](Op::infer)), its factor rule ([`rule`](Op::rule)) and its work ([`cost`](Op::cost)).
//! A new operation is a variant, a row of [`TABLE`], and an arm in its family's file.

pub mod adjoint;
pub mod attention;
pub mod attr;
pub mod coalesced;
pub mod collective;
mod cost;
mod dims;
pub mod elementwise;
pub mod experts;
pub mod gradient;
mod infer;
pub mod linear;
pub mod loss;
pub mod norm;
pub mod optimizer;
mod partial;
mod parts;
pub mod random;
mod reference;
mod repeat;
mod results;
pub mod rotary;
mod rule;
mod sink;
pub mod source;
pub mod state;
pub mod structure;
mod table;
pub mod window;

use smallvec::SmallVec;

use crate::dim::DimId;
use crate::dtype::DType;
use crate::entity::Arena;
use crate::layout::Layout;
use crate::mesh::AxisId;
use crate::module::{FuncId, Function, Layers};
use crate::rule::Misfit;
use crate::space::Space;
use crate::types::TensorType;

pub use adjoint::Gradients;
pub use attention::{Attention, AttentionDims, Dropout, Keyed, Movement, RelativeBias, Returns, Sides};
pub use attr::{Attr, Attrs};
pub use coalesced::MAX_COALESCED;
pub use cost::Cost;
pub use elementwise::{Binary, Unary};
pub use experts::Experts;
pub use gradient::Gradient;
pub use loss::Loss;
pub use optimizer::{AdamW, Optimizer};
pub use parts::MAX_PARTS;
pub use random::Random;
pub use reference::reference;
pub use rotary::{Pairs, Rotary, Scaling, Turn};
pub use source::Binding;
pub use state::Target;
pub use structure::{Scan, ScanOrder, Stage};
pub use table::{Family, OpInfo, TABLE};
pub use window::Window;

/// An operation with its attributes. Operands and results stand in the node.
#[derive(Clone, Debug, PartialEq)]
pub enum Op {
    /// A weight, read from the file of parameters.
    Param(Binding),
    /// A model input, read from the file of inputs.
    Input(Binding),
    /// What a step left for the next one: zero before the first.
    State(Binding),
    /// Writes a weight or a state; there is no result, and later reads see it.
    Assign {
        /// What is written.
        target: Target,
        /// Where it is kept.
        binding: Binding,
    },
    /// A tensor of one number.
    Fill {
        /// The number.
        value: f64,
    },
    /// The position of each token.
    Positions,
    /// Sum of products over the dimensions that the result lacks.
    Einsum,
    /// Sum over the dimensions that the result lacks.
    Sum,
    /// The same elements along dimensions that x lacks.
    Expand,
    /// Rows of a table `[over, …]`, chosen by integers.
    Embed {
        /// The dimension of the table that the integers index.
        over: DimId,
        /// The row of padding tokens, through which no gradient flows; PyTorch's `padding_idx`.
        padding: Option<u64>,
    },
    /// A function of each element.
    Unary(Unary),
    /// A function of two elements; dimensions that one operand lacks are broadcast by name.
    Binary(Binary),
    /// Each element times a constant.
    Scale {
        /// The constant.
        factor: f64,
    },
    /// Conversion to the element type of the result.
    Cast {
        /// The element type.
        to: DType,
    },
    /// `x / sqrt(mean(x²) + eps) · (offset + weight)`.
    RmsNorm {
        /// The dimension that is normalised.
        over: DimId,
        /// Added to the mean square.
        eps: f64,
        /// Added to the weight.
        offset: f64,
    },
    /// `x / sqrt(squares / n + eps) · weight`, `n` being the number of elements of `over` together: the end of a norm
    /// whose sum of squares was taken apart, so that ranks may hold parts of every dimension.
    RmsScale {
        /// The dimensions over which the squares were summed.
        over: Vec<DimId>,
        /// Added to the mean square.
        eps: f64,
    },
    /// `(x − mean) / sqrt(variance + eps) · weight + bias`.
    LayerNorm {
        /// The dimension that is normalised.
        over: DimId,
        /// Added to the variance.
        eps: f64,
    },
    /// `exp(x) / Σ exp(x)` over a dimension.
    Softmax {
        /// The dimension that is summed over.
        over: DimId,
    },
    /// Numbers drawn at random, and dropout.
    Random(Random),
    /// Rotary position embedding.
    Rotary(Rotary),
    /// Scaled dot-product attention.
    Attention(Attention),
    /// Gradients of attention for q, k and v, from `q, k, v, d_o, lse, delta`: `delta` is the sum over the width of
    /// `d_o · o`, and `lse` that of all keys.
    AttentionBackward(Attention),
    /// Two parts of an attention over different keys become one: `o, lse, o, lse → o, lse`.
    Merge,
    /// The parts along a dimension become one: `o, lse → o, lse`.
    MergeParts {
        /// The dimension of parts, the first of both operands.
        over: DimId,
    },
    /// `x + y`, where a rank that holds nothing of y adds nothing.
    Accumulate,
    /// A learned logit for each head enters the denominator of the softmax: `o, lse, logits → o, lse`.
    Sink,
    /// Scaled, capped and masked scores of the keys that a rank holds; masked ones are −∞.
    Scores {
        /// Roles and mask.
        attention: Attention,
        /// The dimension of the keys that a rank holds, as columns.
        columns: DimId,
    },
    /// The logarithm of the sum of exponentials over a dimension.
    RowLse {
        /// The dimension.
        over: DimId,
        /// Where ranks hold parts of the dimension: what tells apart their results, the first dimension of the result.
        parts: Option<DimId>,
    },
    /// `Σ exp(scores − lse) · v` over the keys that a rank holds.
    Weigh {
        /// Roles and mask.
        attention: Attention,
        /// The dimension of columns.
        columns: DimId,
    },
    /// Repeats each element of a dimension, so that every rank has a key/value head.
    Repeat {
        /// The dimension of the operand.
        from: DimId,
        /// The dimension of the result, declared to copy `from`.
        to: DimId,
    },
    /// The adjoint of [`Repeat`](Op::Repeat): sums the copies of each element.
    SumCopies {
        /// The dimension of the operand, one that copies.
        from: DimId,
        /// The dimension of the result.
        to: DimId,
    },
    /// The part `to` of a dimension, of what each rank holds.
    Take {
        /// The dimension of the result, declared to be a part of one of the operand's.
        to: DimId,
    },
    /// The parts of a dimension, in order, become the dimension again.
    Join {
        /// The dimension of the result.
        to: DimId,
    },
    /// A mixture of experts: routing, dispatch, combination.
    Experts(Experts),
    /// Parts of a dimension.
    Window(Window),
    /// Runs a function for each layer, its results becoming its first arguments.
    Call {
        /// The function.
        callee: FuncId,
        /// The layers.
        layers: Layers,
        /// How much further the layers are for each layer of the caller.
        stride: u64,
        /// What layers keep of their own, beside what they hand on.
        scan: Option<Scan>,
        /// The stage of a pipeline that runs it; all ranks when absent.
        stage: Option<Stage>,
    },
    /// The gradient of an operation.
    Gradient(Gradient),
    /// The loss and its pieces.
    Loss(Loss),
    /// A step of an optimizer.
    Optimizer(Optimizer),
    /// A change of layout that is yet to become collectives; the layout is that of the result.
    Reshard,
    /// Along `axis`: splits dimension `split`, joins dimension `concat`.
    AllToAll {
        /// The axis of communication.
        axis: AxisId,
        /// The dimension that becomes split.
        split: DimId,
        /// The dimension that becomes whole along the axis.
        concat: DimId,
    },
    /// Joins dimension `dim` along `axis`.
    AllGather {
        /// The axis of communication.
        axis: AxisId,
        /// The dimension that becomes whole along the axis.
        dim: DimId,
    },
    /// Keeps this rank's part of `dim`; nothing is sent.
    Slice {
        /// The axis that becomes the splitting one.
        axis: AxisId,
        /// The dimension that becomes split.
        dim: DimId,
    },
    /// Sums over `axis` and keeps this rank's part of `dim`.
    ReduceScatter {
        /// The axis of communication.
        axis: AxisId,
        /// The dimension that becomes split.
        dim: DimId,
    },
    /// Sums over `axis`.
    AllReduce {
        /// The axis of communication.
        axis: AxisId,
    },
    /// Moves whole blocks between ranks, to the layout of the result.
    Permute,
    /// Brings every rank the tokens that it needs: the dimension that `to` is fetched from becomes `to`.
    Fetch {
        /// The dimension of the result.
        to: DimId,
    },
    /// The adjoint of a fetch: what ranks computed for fetched tokens goes to where the tokens belong and is summed.
    FetchSum {
        /// The dimension of the operand, one that is fetched.
        from: DimId,
    },
    /// Several collectives as one message: member i acts on operand i and gives result i.
    Coalesced(Vec<Op>),
}

/// What inference may look at beside operands.
#[derive(Clone, Copy)]
pub struct Context<'a> {
    /// Dimensions and mesh.
    pub space: &'a Space,
    /// The functions that a call may name.
    pub functions: &'a Arena<FuncId, Function>,
}

/// A broken invariant of one operation, for the verifier to place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpError {
    /// The invariant, `V..`.
    pub code: &'static str,
    /// What is wrong, with names and numbers.
    pub message: String,
}

impl OpError {
    /// The violation of `code` that `message` describes.
    pub fn new(code: &'static str, message: impl Into<String>) -> Self {
        Self { code, message: message.into() }
    }
}

/// Result types of one node.
pub type Types = SmallVec<[TensorType; 1]>;

impl Op {
    /// The row of the table.
    pub fn info(&self) -> &'static OpInfo {
        let name = self.name();
        TABLE.iter().find(|row| row.name == name).expect("every operation has a row in the table")
    }

    /// The name in the text form.
    pub fn name(&self) -> &'static str {
        match self {
            Op::Param(_) => "param",
            Op::Input(_) => "input",
            Op::State(_) => "state",
            Op::Assign { .. } => "assign",
            Op::Fill { .. } => "fill",
            Op::Positions => "positions",
            Op::Einsum => "einsum",
            Op::Sum => "sum",
            Op::Expand => "expand",
            Op::Embed { .. } => "embed",
            Op::Unary(f) => f.name(),
            Op::Binary(f) => f.name(),
            Op::Scale { .. } => "scale",
            Op::Cast { .. } => "cast",
            Op::RmsNorm { .. } => "rms_norm",
            Op::RmsScale { .. } => "rms_scale",
            Op::LayerNorm { .. } => "layer_norm",
            Op::Softmax { .. } => "softmax",
            Op::Random(r) => r.name(),
            Op::Rotary(_) => "rotary",
            Op::Attention(_) => "attention",
            Op::AttentionBackward(_) => "attention_backward",
            Op::Merge => "merge",
            Op::MergeParts { .. } => "merge_parts",
            Op::Accumulate => "accumulate",
            Op::Sink => "sink",
            Op::Scores { .. } => "scores",
            Op::RowLse { .. } => "row_lse",
            Op::Weigh { .. } => "weigh",
            Op::Repeat { .. } => "repeat",
            Op::SumCopies { .. } => "sum_copies",
            Op::Take { .. } => "take",
            Op::Join { .. } => "join",
            Op::Experts(e) => e.name(),
            Op::Window(w) => w.name(),
            Op::Call { .. } => "call",
            Op::Gradient(g) => g.name(),
            Op::Loss(l) => l.name(),
            Op::Optimizer(o) => o.name(),
            Op::Reshard => "reshard",
            Op::AllToAll { .. } => "all_to_all",
            Op::AllGather { .. } => "all_gather",
            Op::Slice { .. } => "slice",
            Op::ReduceScatter { .. } => "reduce_scatter",
            Op::AllReduce { .. } => "all_reduce",
            Op::Permute => "permute",
            Op::Fetch { .. } => "fetch",
            Op::FetchSum { .. } => "fetch_sum",
            Op::Coalesced(_) => "coalesced",
        }
    }

    /// Whether the operation changes layouts and nothing else.
    pub fn is_layout_change(&self) -> bool {
        self.info().family == Family::Layout
    }

    /// Whether ranks communicate.
    pub fn is_communication(&self) -> bool {
        match self {
            Op::AllToAll { .. }
            | Op::AllGather { .. }
            | Op::ReduceScatter { .. }
            | Op::AllReduce { .. }
            | Op::Permute
            | Op::Fetch { .. }
            | Op::FetchSum { .. }
            | Op::Coalesced(_) => true,
            Op::Param(_)
            | Op::Input(_)
            | Op::State(_)
            | Op::Assign { .. }
            | Op::Fill { .. }
            | Op::Positions
            | Op::Einsum
            | Op::Sum
            | Op::Expand
            | Op::Gradient(_)
            | Op::Loss(_)
            | Op::Optimizer(_)
            | Op::Embed { .. }
            | Op::Unary(_)
            | Op::Binary(_)
            | Op::Scale { .. }
            | Op::Cast { .. }
            | Op::RmsNorm { .. }
            | Op::RmsScale { .. }
            | Op::LayerNorm { .. }
            | Op::Softmax { .. }
            | Op::Random(_)
            | Op::Rotary(_)
            | Op::Attention(_)
            | Op::AttentionBackward(_)
            | Op::Merge
            | Op::MergeParts { .. }
            | Op::Accumulate
            | Op::Sink
            | Op::Scores { .. }
            | Op::RowLse { .. }
            | Op::Weigh { .. }
            | Op::Repeat { .. }
            | Op::SumCopies { .. }
            | Op::Take { .. }
            | Op::Join { .. }
            | Op::Experts(_)
            | Op::Window(_)
            | Op::Call { .. }
            | Op::Reshard
            | Op::Slice { .. } => false,
        }
    }
}

/// The layout in which nothing is split, for inference to replace.
fn unplaced(ty: &TensorType) -> TensorType {
    ty.with_layout(Layout::whole(ty.dims.len()))
}
