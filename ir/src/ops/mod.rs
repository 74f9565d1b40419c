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
mod dims;
pub mod elementwise;
pub mod experts;
pub mod gradient;
pub mod linear;
pub mod loss;
pub mod norm;
pub mod optimizer;
mod partial;
mod parts;
pub mod random;
mod reference;
mod repeat;
pub mod rotary;
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
use crate::rule::{FactorKind, FactorRule, Misfit};
use crate::space::Space;
use crate::types::TensorType;

pub use adjoint::Gradients;
pub use attention::{Attention, AttentionDims, Dropout, Keyed, Movement, RelativeBias, Returns, Sides};
pub use attr::{Attr, Attrs};
pub use coalesced::MAX_COALESCED;
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

/// What an operation costs on one rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cost {
    /// Floating-point operations.
    pub flops: u128,
    /// Bytes read and written.
    pub bytes: u128,
}

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

    /// The types of the results.
    ///
    /// `declared` are the types that the text or the builder states. Operations whose results do not follow from their
    /// operands (sources, `einsum`, `reshard`, `permute`) take them from there and check them; the others ignore them.
    ///
    /// # Errors
    /// The invariant that operands or attributes break.
    pub fn infer(
        &self,
        cx: Context<'_>,
        operands: &[&TensorType],
        declared: &[TensorType],
    ) -> Result<Types, OpError> {
        self.check_operand_count(operands.len())?;
        match self {
            Op::Call { callee, layers, stride: _, scan, stage } => {
                return structure::infer_call(cx, *callee, layers, (scan.as_ref(), *stage), operands);
            }
            Op::Permute => return collective::infer(self, cx.space, operands[0], declared),
            Op::Coalesced(members) => return coalesced::infer(members, cx, operands, declared),
            _ => {}
        }
        // Where values are is no matter of any other operation: all are in one place.
        let mut places = operands.iter().filter_map(|ty| ty.layout.at);
        let Some(at) = places.next() else { return self.infer_here(cx, operands, declared) };
        if places.any(|other| other != at) {
            let message =
                format!("operands of `{}` are on different ranks; a permute is missing", self.name());
            return Err(OpError::new("V33", message));
        }
        let here: Types = operands.iter().map(|ty| ty.located(None)).collect();
        let here: SmallVec<[&TensorType; 4]> = here.iter().collect();
        let declared: Types = declared.iter().map(|ty| ty.located(None)).collect();
        let mut results = self.infer_here(cx, &here, &declared)?;
        results.iter_mut().for_each(|ty| ty.layout.at = Some(at));
        Ok(results)
    }

    /// The types of the results where all operands are on all ranks.
    fn infer_here(
        &self,
        cx: Context<'_>,
        operands: &[&TensorType],
        declared: &[TensorType],
    ) -> Result<Types, OpError> {
        match self {
            Op::State(binding) => return state::infer_state(binding, cx.space, declared),
            Op::Assign { target, binding } => {
                return state::infer_assign(binding, *target, cx.space, operands[0]);
            }
            Op::Fill { .. } => return state::infer_fill(declared),
            Op::Random(
                random
                @ (Random::Key { .. } | Random::FoldIn | Random::LayerKey | Random::DropoutMask { .. }),
            ) => return random.infer(operands, declared),
            Op::Gradient(_)
            | Op::Loss(_)
            | Op::Optimizer(_)
            | Op::Experts(_)
            | Op::Random(Random::Dropout { .. }) => {
                return self.infer_by_rule(cx, operands, declared);
            }
            Op::Param(binding) | Op::Input(binding) => {
                return source::infer(self, binding, cx.space, declared);
            }
            Op::Positions => return source::infer_positions(cx.space, declared),
            Op::Reshard => return structure::infer_reshard(cx.space, operands[0], declared),
            Op::Attention(attention) => return attention::infer(attention, cx.space, operands),
            Op::AttentionBackward(attention) => {
                return attention::infer_backward(attention, cx.space, operands);
            }
            Op::Take { .. } | Op::Join { .. } => {
                return parts::infer(self, cx.space, operands).map(|ty| smallvec::smallvec![ty]);
            }
            Op::SumCopies { from, to } => {
                return repeat::infer_sum(cx.space, *from, *to, operands[0])
                    .map(|ty| smallvec::smallvec![ty]);
            }
            Op::Merge
            | Op::MergeParts { .. }
            | Op::Accumulate
            | Op::Sink
            | Op::Scores { .. }
            | Op::RowLse { .. }
            | Op::Weigh { .. } => return partial::infer(self, cx.space, operands),
            Op::AllToAll { .. }
            | Op::AllGather { .. }
            | Op::Slice { .. }
            | Op::ReduceScatter { .. }
            | Op::AllReduce { .. }
            | Op::Permute
            | Op::Fetch { .. }
            | Op::FetchSum { .. } => return collective::infer(self, cx.space, operands[0], declared),
            _ => {}
        }
        let mut result = match self {
            Op::Einsum => linear::infer_einsum(cx.space, operands, declared)?,
            Op::Sum => linear::infer_sum(cx.space, operands[0], declared)?,
            Op::Expand => linear::infer_expand(cx.space, operands[0], declared)?,
            Op::Embed { over, .. } => linear::infer_embed(cx.space, *over, operands)?,
            Op::Unary(_) | Op::Scale { .. } | Op::Cast { .. } => elementwise::infer_unary(self, operands[0])?,
            Op::Binary(f) => elementwise::infer_binary(*f, operands)?,
            Op::RmsNorm { over, .. } | Op::LayerNorm { over, .. } | Op::Softmax { over } => {
                norm::infer(self.name(), cx.space, *over, operands)?
            }
            Op::RmsScale { over, .. } => norm::infer_scale(cx.space, over, operands)?,
            Op::Rotary(rotary) => rotary::infer(rotary, cx.space, operands)?,
            Op::Repeat { from, to } => repeat::infer(cx.space, *from, *to, operands[0])?,
            Op::Window(window) => window.infer(cx.space, operands)?,
            _ => unreachable!("the other operations returned above"),
        };
        let rule = self.rule(operands, &[&result]).expect("an operation on values has a rule");
        let (taken, pending) = match self {
            // In a wider type a sum is still to be taken as it was before.
            Op::Cast { to } if to.is_float() && to.bytes() >= operands[0].dtype.bytes() => {
                parts::without_pending(operands)
            }
            _ => (SmallVec::new(), None),
        };
        let taken: SmallVec<[&TensorType; 4]> = taken.iter().collect();
        let operands = if pending.is_some() { &taken } else { operands };
        let mut layouts = rule.results(operands).map_err(|misfit| self.misfit(cx.space, misfit))?;
        result.layout = layouts.pop().expect("one result has one layout");
        if let Some(pending) = pending {
            result.layout.partial = pending;
        }
        Ok(smallvec::smallvec![result])
    }

    /// Results whose layouts all follow from the factor rule.
    fn infer_by_rule(
        &self,
        cx: Context<'_>,
        operands: &[&TensorType],
        declared: &[TensorType],
    ) -> Result<Types, OpError> {
        let mut results = match self {
            Op::Gradient(gradient) => gradient.infer(cx.space, operands, declared)?,
            Op::Loss(loss) => loss.infer(cx.space, operands)?,
            Op::Optimizer(optimizer) => optimizer.infer(operands)?,
            Op::Experts(experts) => experts.infer(cx.space, operands)?,
            Op::Random(random) => random.infer(operands, declared)?,
            _ => unreachable!("only families of several results come here"),
        };
        let layouts = {
            let types: SmallVec<[&TensorType; 4]> = results.iter().collect();
            let rule = self.rule(operands, &types).expect("an operation on values has a rule");
            rule.results(operands).map_err(|misfit| self.misfit(cx.space, misfit))?
        };
        for (result, layout) in results.iter_mut().zip(layouts) {
            result.layout = layout;
        }
        if let Op::Experts(experts) = self
            && let Some((dim, axes)) = experts.declared_experts(declared)
        {
            if results[0].layout.axes().any(|a| axes.contains(&a)) {
                return Err(self.misfit(cx.space, Misfit::AxisTwice(dim)));
            }
            results[0].layout.split[0] = axes;
        }
        Ok(results)
    }

    /// The factor rule; `None` for operations that have no loop of their own: calls, sources, changes of layout.
    pub fn rule(&self, operands: &[&TensorType], results: &[&TensorType]) -> Option<FactorRule> {
        match self {
            Op::Einsum | Op::Sum => Some(linear::rule_einsum(operands, results[0])),
            Op::Gradient(gradient) => Some(gradient.rule(operands, results)),
            Op::Loss(loss) => Some(loss.rule(operands, results)),
            Op::Optimizer(_) => Some(Optimizer::rule(operands, results)),
            Op::Experts(experts) => Some(experts.rule(operands, results)),
            Op::Window(_) => Some(Window::rule(operands, results[0])),
            Op::Embed { over, .. } => Some(linear::rule_embed(*over, operands, results[0])),
            Op::Unary(_)
            | Op::Binary(_)
            | Op::Scale { .. }
            | Op::Cast { .. }
            | Op::RmsScale { .. }
            | Op::Expand => Some(elementwise::rule(operands, results[0])),
            Op::RmsNorm { over, .. } | Op::LayerNorm { over, .. } => {
                Some(norm::rule(*over, operands, results[0]))
            }
            Op::Softmax { over } => Some(norm::rule(*over, operands, results[0])),
            Op::Random(random) => random.rule(operands, results),
            Op::Rotary(rotary) => Some(norm::rule(rotary.over, operands, results[0])),
            Op::Attention(attention) => Some(attention.rule(operands)),
            Op::Repeat { .. } => Some(repeat::rule(operands)),
            Op::Take { .. } | Op::Join { .. } => Some(parts::rule(operands)),
            Op::Sink | Op::Merge => {
                let dims: Vec<&[DimId]> = results.iter().map(|ty| ty.dims.as_slice()).collect();
                Some(FactorRule::by_name(operands, &dims, |_| FactorKind::Parallel))
            }
            Op::Accumulate => Some(elementwise::rule(operands, results[0])),
            Op::Param(_)
            | Op::Input(_)
            | Op::State(_)
            | Op::Assign { .. }
            | Op::Fill { .. }
            | Op::Positions
            | Op::AttentionBackward(_)
            | Op::MergeParts { .. }
            | Op::Scores { .. }
            | Op::RowLse { .. }
            | Op::Weigh { .. }
            | Op::SumCopies { .. }
            | Op::Call { .. }
            | Op::Reshard
            | Op::AllToAll { .. }
            | Op::AllGather { .. }
            | Op::Slice { .. }
            | Op::ReduceScatter { .. }
            | Op::AllReduce { .. }
            | Op::Permute
            | Op::Fetch { .. }
            | Op::FetchSum { .. }
            | Op::Coalesced(_) => None,
        }
    }

    /// Work and traffic of the operation on the busiest rank, the bytes of collectives on the wire left out.
    pub fn cost(&self, space: &Space, operands: &[&TensorType], results: &[&TensorType]) -> Cost {
        let elements = |ty: &TensorType| u128::from(space.max_local_elements(ty));
        let per_element = |n: u128| results.iter().map(|ty| elements(ty) * n).sum();
        let flops = match self {
            Op::Einsum => linear::flops_einsum(space, operands, results[0]),
            Op::Attention(attention) => attention.flops(space, operands),
            Op::AttentionBackward(attention) => attention.flops_backward(space, operands),
            Op::SumCopies { .. } | Op::Sum => operands.iter().map(|ty| elements(ty)).sum(),
            Op::Gradient(g) => elements(operands[0]) * g.flops(),
            Op::Loss(Loss::CrossEntropy { .. }) => elements(operands[0]) * 5,
            Op::Loss(Loss::Pick { .. } | Loss::Valid { .. })
            | Op::Assign { .. }
            | Op::Fill { .. }
            | Op::State(_) => 0,
            Op::Optimizer(_) => elements(operands[0]) * 15,
            Op::Experts(e) => {
                operands.iter().chain(results).map(|ty| elements(ty)).max().unwrap_or(0) * e.flops()
            }
            Op::Coalesced(members) => match members.first() {
                Some(Op::ReduceScatter { .. } | Op::AllReduce { .. }) => per_element(1),
                Some(_) | None => 0,
            },
            Op::Merge => per_element(4),
            Op::MergeParts { .. } | Op::RowLse { .. } => operands.iter().map(|ty| elements(ty) * 4).sum(),
            Op::Sink => per_element(2),
            Op::Scores { attention, .. } => {
                // Explicit rows are computed whether the mask keeps them or not.
                per_element(2) * u128::from(space.size(attention.width))
            }
            Op::Weigh { attention, .. } => {
                elements(operands[0]) * (4 + 2 * u128::from(space.size(attention.value_width(operands[2]))))
            }
            Op::Unary(f) => per_element(f.flops()),
            Op::Binary(_)
            | Op::Scale { .. }
            | Op::Accumulate
            | Op::ReduceScatter { .. }
            | Op::AllReduce { .. }
            | Op::FetchSum { .. } => per_element(1),
            Op::RmsNorm { .. } => per_element(4),
            Op::RmsScale { .. } => per_element(2),
            Op::LayerNorm { .. } => per_element(6),
            Op::Softmax { .. } => per_element(5),
            Op::Random(Random::Dropout { .. }) => per_element(2),
            Op::Random(
                Random::Key { .. } | Random::FoldIn | Random::LayerKey | Random::DropoutMask { .. },
            ) => 0,
            Op::Rotary(_) => per_element(3),
            Op::Param(_)
            | Op::Input(_)
            | Op::Positions
            | Op::Embed { .. }
            | Op::Cast { .. }
            | Op::Expand
            | Op::Repeat { .. }
            | Op::Take { .. }
            | Op::Join { .. }
            | Op::Window(_)
            | Op::Call { .. }
            | Op::Reshard
            | Op::AllToAll { .. }
            | Op::AllGather { .. }
            | Op::Slice { .. }
            | Op::Permute
            | Op::Fetch { .. } => 0,
        };
        let bytes = match self {
            Op::Param(_) | Op::Input(_) | Op::State(_) | Op::Call { .. } => 0,
            // A table is read only where it is asked.
            Op::Embed { .. } => linear::bytes_embed(space, operands, results[0]),
            // Of the operand only the part is read.
            Op::Take { .. } => {
                2 * results.iter().map(|ty| u128::from(space.max_local_bytes(ty))).sum::<u128>()
            }
            _ => operands.iter().chain(results).map(|ty| u128::from(space.max_local_bytes(ty))).sum(),
        };
        Cost { flops, bytes }
    }

    fn check_operand_count(&self, n: usize) -> Result<(), OpError> {
        let expected = &self.info().operands;
        match expected.contains(&n) {
            true => Ok(()),
            false if expected.start() == expected.end() => Err(OpError::new(
                "V01",
                format!("`{}` takes {} operands, not {n}", self.name(), expected.start()),
            )),
            false => Err(OpError::new(
                "V01",
                format!(
                    "`{}` takes {} to {} operands, not {n}",
                    self.name(),
                    expected.start(),
                    expected.end()
                ),
            )),
        }
    }

    fn misfit(&self, space: &Space, misfit: Misfit) -> OpError {
        let name = self.name();
        let dim = |d: DimId| space.dims[d].name.as_str();
        match misfit {
            Misfit::NotWhole(d) => {
                OpError::new("V08", format!("`{name}` needs dimension `{}` whole, but it is split", dim(d)))
            }
            Misfit::Conflict(d) => OpError::new(
                "V07",
                format!(
                    "`{name}` sees dimension `{}` split in two different ways; a reshard is missing",
                    dim(d)
                ),
            ),
            Misfit::Moved => OpError::new(
                "V07",
                format!(
                    "`{name}` takes parts that have moved along an axis in different ways; a permute is missing"
                ),
            ),
            Misfit::AxisTwice(d) => OpError::new(
                "V07",
                format!("`{name}` sees one mesh axis split `{}` and another dimension", dim(d)),
            ),
            Misfit::Pending(i) => OpError::new(
                "V11",
                format!(
                    "operand {i} of `{name}` is a partial sum; an all-reduce or reduce-scatter is missing"
                ),
            ),
        }
    }
}

/// The layout in which nothing is split, for inference to replace.
fn unplaced(ty: &TensorType) -> TensorType {
    ty.with_layout(Layout::whole(ty.dims.len()))
}
