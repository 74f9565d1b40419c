//! The enum of all operations.

use crate::dim::DimId;
use crate::dtype::DType;
use crate::handles::{FuncId, Layers};
use crate::mesh::{Axes, AxisId};
use crate::ops::attr::{Attr, AttrError, Attrs, Names};
use crate::ops::attribute::{Refused, Value};
use crate::ops::declare::ops;
use crate::ops::info::{Class, OpInfo};
use crate::ops::table::attention::Attention;
use crate::ops::table::cache::{Cache, RotateAppend};
use crate::ops::table::elementwise::{Binary, Unary};
use crate::ops::table::experts::{Experts, Rows};
use crate::ops::table::fused::Fused;
use crate::ops::table::random::Random;
use crate::ops::table::rotary::Rotary;
use crate::ops::table::source::{Binding, Target};
use crate::ops::table::structure::{Scan, Stage};
use crate::ops::table::training::{Gradient, Loss, Optimizer};
use crate::ops::table::window::Window;

/// The largest number of parts that are joined at once.
pub const MAX_PARTS: usize = 256;

/// The largest number of collectives that are coalesced into one message.
pub const MAX_COALESCED: usize = 64;

ops! {
    /// An operation with its attributes. Operands and results are fields of the node.
    #[derive(Clone, Debug, PartialEq)]
    pub enum Op {
        family Source {
            /// A weight, read from the file of parameters.
            Param(binding: Binding) = "param", "-> any", Effect, NoKernel, Zero;
            /// A model input, read from the file of inputs.
            Input(binding: Binding) = "input", "-> any", Effect, NoKernel, Zero;
            /// A tensor that a step leaves under a name for the next step; zero before the first.
            State(binding: Binding) = "state", "-> any", Effect, NoKernel, Zero;
            /// Writes a weight or a state; later reads see it.
            Assign {
                /// The kind of tensor that is written: a weight or a state.
                target: Target,
                /// The place of the tensor.
                binding: Binding,
            } = "assign", "any ->", Effect, Vector, Zero;
            /// A tensor of one number.
            Fill {
                /// The number.
                value: f64,
            } = "fill", "-> any", Compute, Vector, Zero;
            /// The position of each token.
            Positions {
                /// The number of padding.
                padding: i64 = 0,
            } = "positions", "-> s", Compute, Vector, Zero;
        }
        family Linear {
            /// Sum of products over the dimensions that the result lacks; the result has the type of the operands, or the one in
            /// which products are summed.
            Einsum = "einsum", "x, y -> z", Compute, Matmul, Own;
            /// `z + Σ x · y` over the dimensions that z lacks, rounded once; z has the type of x and y, or the one in which
            /// products are summed.
            AccumulateProduct = "accumulate_product", "x, y, z -> z", Compute, Matmul, Own;
            /// Sum over the dimensions that the result lacks.
            Sum = "sum", "x -> y", Compute, Vector, Operands(1);
            /// The same elements along dimensions that the operand lacks.
            Expand = "expand", "y -> x", Compute, Vector, Zero;
            /// The elements at one position of a dimension; a rank that lacks the position contributes zero.
            Select {
                /// The dimension of x that the result lacks.
                over: DimId,
                /// The position along it.
                position: u64,
            } = "select", "x a s -> x a", Compute, Vector, Zero;
            /// Rows of a table, chosen by integers; a rank that lacks the row contributes zero.
            Embed {
                /// The dimension of the table that the integers index.
                over: DimId,
                /// The row of padding tokens, which has no gradient (PyTorch's `padding_idx`).
                padding: Option<u64> = None,
            } = "embed", "v m, b s -> b s m", Compute, Vector, Zero;
        }
        family Elementwise {
            /// Each element times a constant.
            Scale {
                /// The constant.
                factor: f64,
            } = "scale", "x -> x", Compute, Vector, Results(1);
            /// Each element, but at least `min` and at most `max`.
            Clamp {
                /// The least result; none when absent.
                min: Option<f64> = None,
                /// The largest result; none when absent.
                max: Option<f64> = None,
            } = "clamp", "x -> x", Compute, Vector, Results(2);
            /// Conversion to the element type of the result. Of a pending sum each rank converts its part, so a narrower type
            /// rounds the parts, not the sum.
            Cast {
                /// The element type.
                to: DType,
            } = "cast", "x -> x", Compute, Vector, Zero;
        }
        family Norm {
            /// `x / sqrt(mean(x²) + eps) · (offset + weight)`.
            RmsNorm {
                /// The dimension that is normalised.
                over: DimId,
                /// Added to the mean square.
                eps: f64,
                /// Added to the weight.
                offset: f64 = 0.0,
            } = "rms_norm", "x, m -> x", Compute, Vector, Results(4);
            /// `x / sqrt(squares / n + eps) · weight`, n being the number of elements of `over` together: the end of a norm
            /// whose sum of squares is computed separately, so that ranks may hold parts of every dimension.
            RmsScale {
                /// The dimensions over which the squares were summed.
                over: Vec<DimId>,
                /// Added to the mean square.
                eps: f64,
            } = "rms_scale", "b s h d, b s, h d -> b s h d", Compute, Vector, Results(2);
            /// `(x − mean) / sqrt(variance + eps) · weight + bias`.
            LayerNorm {
                /// The dimension that is normalised.
                over: DimId,
                /// Added to the variance.
                eps: f64,
            } = "layer_norm", "x, m, m -> x", Compute, Vector, Results(6);
            /// `exp(x) / Σ exp(x)` over a dimension.
            Softmax {
                /// The dimension that is summed over.
                over: DimId,
            } = "softmax", "x -> x", Compute, Vector, Results(5);
        }
        family Attention {
            /// Rotary position embedding.
            Rotary(rotary: Rotary) = "rotary", "b s h d, s -> b s h d", Compute, Vector, Results(3);
            /// Scaled dot-product attention with grouped key/value heads. After q, k and v come the bias, and the key that
            /// dropout draws from.
            Attention(attention: Attention)
                = "attention", "b s h d, b t k d, b t k e, (r h), (key), (b t k), (b t k) -> b s h e, (b s h)", Compute, Attention, Own;
            /// Gradients for q, k, v and the bias (in f32) from q, k, v, d_o, lse, delta = Σ d_o · o, the bias and the key;
            /// lse is that of all keys.
            AttentionBackward(attention: Attention)
                = "attention_backward",
                "b s h d, b t k d, b t k e, b s h e, b s h, b s h, (r h), (key) -> b s h d, b t k d, b t k e, (r h)",
                Compute, Attention, Own;
            /// o and lse of two sets of keys become those of their union (online softmax).
            Merge = "merge", "b s h e, b s h, b s h e, b s h -> b s h e, b s h", Compute, Vector, Results(4);
            /// o and lse of many sets of keys become those of their union.
            MergeParts {
                /// The dimension of parts, the first of both operands.
                over: DimId,
            } = "merge_parts", "p b s h e, p b s h -> b s h e, b s h", Compute, Vector, Operands(4);
            /// `x + y`; a rank that holds nothing of y adds nothing.
            Accumulate = "accumulate", "x, x -> x", Compute, Vector, Results(1);
            /// A learned logit for each head enters the denominator of the softmax, once.
            Sink = "sink", "b s h e, b s h, h -> b s h e, b s h", Compute, Vector, Results(2);
            /// Scaled, capped and masked scores of the keys that a rank holds; masked ones are −∞.
            Scores {
                /// Roles and mask.
                attention: Attention,
                /// The dimension of the keys that a rank holds, as columns.
                columns: DimId,
            } = "scores", "b s h d, b t k d -> b s h c", Compute, Attention, Own;
            /// Logarithm of the sum of exponentials over a dimension.
            RowLse {
                /// The dimension of columns.
                over: DimId,
                /// The dimension that distinguishes the results of ranks that hold parts of `over`; the first of the result.
                parts: Option<DimId> = None,
            } = "row_lse", "b s h c -> (p) b s h", Compute, Vector, Operands(4);
            /// `Σ exp(scores − lse) · v` over the keys that a rank holds.
            Weigh {
                /// Roles and mask.
                attention: Attention,
                /// The dimension of columns.
                columns: DimId,
            } = "weigh", "b s h c, b s h, b t k e -> b s h e", Compute, Attention, Own;
            /// Repeats each element of a dimension, as key/value heads are replicated.
            Repeat {
                /// The dimension of the operand.
                from: DimId,
                /// The dimension of the result, declared to copy `from`.
                to: DimId,
            } = "repeat", "k -> kr", Compute, Vector, Zero;
            /// The adjoint of `repeat`: sums the copies of each element.
            SumCopies {
                /// The dimension of the operand, one that copies.
                from: DimId,
                /// The dimension of the result.
                to: DimId,
            } = "sum_copies", "kr -> k", Compute, Vector, Operands(1);
            /// One of several equal parts of a dimension, of the elements that each rank holds.
            Take {
                /// The dimension of the result, declared to be a part of a dimension of x.
                to: DimId,
            } = "take", "h -> hp", Compute, Vector, Zero;
            /// The parts of a dimension, in order, become the dimension again.
            Join {
                /// The dimension of the result, whose parts are dimensions of the operands.
                to: DimId,
            } = "join", "hp, … -> h" at most MAX_PARTS, Compute, Vector, Zero;
        }
        family Cache {
            /// `attention` over a cache in pages, without a copy of its tokens. The result is that of `attention` after
            /// `gather_pages` of keys, values and their scales. After q, k and v come the positions of first queries and the table.
            AttendPages {
                /// Roles and mask.
                attention: Attention,
                /// The pages of all sequences.
                pages: DimId,
                /// The slots of a page.
                slots: DimId,
            } = "attend_pages", "b s h d, p t k d, p t k e, b, b n, (p t k), (p t k) -> b s h e, (b s h)", Compute, Attention, Own;
            /// The caches of keys and values with the new rows of both, by `append` or `append_pages`, of keys rotated by their
            /// positions, as `token_positions` gives them; and queries, rotated by theirs. After the caches come keys, values,
            /// `start`, `end`, a table where caches are in pages, and queries.
            RotateAppend(rotated: RotateAppend) = "rotate_append", "p c k d, p c k d, b t k d, b t k d, b, b, (b n), (b t h d) -> p c k d, p c k d, (b t h d)", Compute, Vector, Own;
        }
        family Structure {
            /// Runs a function for each layer; its results become the first arguments of the next layer.
            Call {
                /// The function.
                callee: FuncId,
                /// The function runs once for each layer.
                layers: Layers = 0..1,
                /// The shift of the layers for each layer of the caller.
                stride: u64 = 0,
                /// The results that each layer returns by itself.
                scan: Option<Scan> = None,
                /// The stage of a pipeline that runs it; all ranks when absent.
                stage: Option<Stage> = None,
            } = "call", "… -> …" at most 64, Effect, NoKernel, Zero;
        }
        family Layout {
            /// A change of layout that is not lowered to collectives yet; the layout is that of the result.
            Reshard = "reshard", "x -> x", Layout, NoKernel, Zero;
            /// Splits one dimension and joins another.
            AllToAll {
                /// The axis of communication.
                axis: AxisId,
                /// The dimension that becomes split.
                split: DimId,
                /// The dimension that becomes whole along the axis.
                concat: DimId,
                /// The rows of a ragged dimension that are sent.
                rows: Rows = Rows::Filled,
            } = "all_to_all", "x -> x", Collective, NoKernel, Zero;
            /// Joins a dimension.
            AllGather {
                /// The axis of communication, or the axes along which one message is gathered, as in `[u, dp]`.
                axis: Axes,
                /// The dimension that becomes whole along the axis.
                dim: DimId,
            } = "all_gather", "x -> x", Collective, NoKernel, Zero;
            /// Keeps this rank's part of a dimension; nothing is sent.
            Slice {
                /// The axis that becomes the splitting one.
                axis: AxisId,
                /// The dimension that becomes split.
                dim: DimId,
            } = "slice", "x -> x", Layout, Vector, Zero;
            /// Sums, and keeps this rank's part of a dimension.
            ReduceScatter {
                /// The axis of communication, or several.
                axis: Axes,
                /// The dimension that becomes split.
                dim: DimId,
            } = "reduce_scatter", "x -> x", Collective, NoKernel, Results(1);
            /// Sums; every rank has the result.
            AllReduce {
                /// The axis of communication, or several.
                axis: Axes,
            } = "all_reduce", "x -> x", Collective, NoKernel, Results(1);
            /// Moves whole blocks between ranks, to the layout of the result.
            Permute = "permute", "x -> x", Collective, NoKernel, Zero;
            /// Brings every rank the tokens that it needs.
            Fetch {
                /// The dimension of the result, fetched from a dimension of x.
                to: DimId,
            } = "fetch", "x -> x", Collective, NoKernel, Zero;
            /// The adjoint of `fetch`: gradients of fetched tokens return to the owners of the tokens and are summed.
            FetchSum {
                /// The dimension of x, one that is fetched.
                from: DimId,
            } = "fetch_sum", "x -> x", Collective, NoKernel, Results(1);
            /// Several collectives of one kind, between the same ranks and of one element type, as one message. Member i acts
            /// on operand i and gives result i.
            Coalesced(
                /// The collectives, as `[all_to_all(axis=u, split=h, concat=s), …]`.
                ops: Vec<Op>
            ) = "coalesced", "x, y, … -> x, y, …" at most MAX_COALESCED, Collective, NoKernel, Own;
        }
        groups {
            /// A function of each element.
            Unary(f: Unary);
            /// A function of two elements; dimensions that one operand lacks are broadcast by name.
            Binary(f: Binary);
            /// Several operations as one kernel.
            Fused(fused: Fused);
            /// Two tensors side by side, or a window of one.
            Window(window: Window);
            /// Random numbers and dropout.
            Random(random: Random);
            /// A mixture of experts: routing, dispatch, combination.
            Experts(experts: Experts);
            /// Caches of keys and values, and generated tokens.
            Cache(cache: Cache);
            /// The loss and its parts.
            Loss(loss: Loss);
            /// The gradient of an operation.
            Gradient(gradient: Gradient);
            /// A step of an optimizer.
            Optimizer(optimizer: Optimizer);
        }
    }
}

const GROUPS: [&[OpInfo]; 11] = [
    Op::DECLARED,
    Unary::DECLARED,
    Binary::DECLARED,
    Fused::DECLARED,
    Window::DECLARED,
    Random::DECLARED,
    Experts::DECLARED,
    Cache::DECLARED,
    Loss::DECLARED,
    Gradient::DECLARED,
    Optimizer::DECLARED,
];

const N_OPS: usize = {
    let (mut n, mut group) = (0, 0);
    while group < GROUPS.len() {
        n += GROUPS[group].len();
        group += 1;
    }
    n
};

/// The declarations of all operations.
pub static TABLE: [&OpInfo; N_OPS] = {
    let mut table = [&GROUPS[0][0]; N_OPS];
    let (mut n, mut group) = (0, 0);
    while group < GROUPS.len() {
        let mut i = 0;
        while i < GROUPS[group].len() {
            table[n] = &GROUPS[group][i];
            n += 1;
            i += 1;
        }
        group += 1;
    }
    table
};

impl Op {
    /// The class.
    pub fn class(&self) -> Class {
        self.info().class
    }

    /// Whether the operation changes layouts and nothing else.
    pub fn is_layout_change(&self) -> bool {
        matches!(self.class(), Class::Layout | Class::Collective)
    }

    /// Whether ranks communicate.
    pub fn is_communication(&self) -> bool {
        self.class() == Class::Collective
    }

    /// Whether each rank computes the results from its own operands, with a kernel.
    pub fn is_computation(&self) -> bool {
        self.class() == Class::Compute || matches!(self, Op::Slice { .. })
    }

    /// The attributes, in the order of the text form.
    pub fn attrs(&self, names: Names<'_>) -> Vec<(&'static str, Attr)> {
        let mut attrs = Vec::new();
        self.write_attrs(names, &mut attrs);
        attrs
    }

    /// The operation called `name` with these attributes: the inverse of [`attrs`](Self::attrs).
    ///
    /// # Errors
    /// The attribute that is missing, unknown or of the wrong kind; `None` when no operation has the name.
    pub fn from_attrs(name: &str, mut attrs: Attrs, names: Names<'_>) -> Option<Result<Op, AttrError>> {
        let op = Self::read_attrs(name, &mut attrs, names).transpose()?;
        Some(op.and_then(|op| attrs.finish().map(|()| op)))
    }

    /// Whether a collective may be coalesced with others into one message.
    ///
    /// A fetch may not: its blocks are lists of tokens, gathered by a kernel of their own.
    pub fn may_coalesce(&self) -> bool {
        self.is_communication() && !matches!(self, Op::Fetch { .. } | Op::FetchSum { .. } | Op::Coalesced(_))
    }
}

/// A member of a coalesced collective: `permute`, `all_to_all(axis=u, split=h, concat=s)`.
impl Value for Op {
    const KIND: &'static str = "a collective";
    const LIST: &'static str = "a list of collectives";

    fn to_attr(&self, names: Names<'_>) -> Attr {
        let attrs: Vec<_> = self.attrs(names).into_iter().map(|(key, attr)| (key.to_owned(), attr)).collect();
        if attrs.is_empty() {
            Attr::Word(self.name().to_owned())
        } else {
            Attr::Call(self.name().to_owned(), attrs)
        }
    }

    fn from_attr(attr: Attr, names: Names<'_>) -> Result<Self, Refused> {
        let (name, attrs) = match &attr {
            Attr::Word(name) => (name, Vec::new()),
            Attr::Call(name, attrs) => (name, attrs.clone()),
            _ => return Err(Refused::Kind(attr)),
        };
        let refused = || Refused::Message(format!("`{name}` cannot be coalesced with other collectives"));
        // Refused by name, before attributes are read: a list in a list is not followed.
        if !Op::DECLARED.iter().any(|info| info.name == *name && info.class == Class::Collective)
            || name == "coalesced"
        {
            return Err(refused());
        }
        let op = Op::from_attrs(name, Attrs::new(name.as_str(), attrs), names).ok_or_else(refused)?;
        op.map_err(Refused::Message).and_then(|op| if op.may_coalesce() { Ok(op) } else { Err(refused()) })
    }

    fn each_dim_mut(&mut self, new: &mut dyn FnMut(&mut DimId)) {
        Op::each_dim_mut(self, new);
    }
}
