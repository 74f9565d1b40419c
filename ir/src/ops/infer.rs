//! Result types: this file calls the function of the operation's family.

use smallvec::SmallVec;

use crate::dim::DimId;
use crate::ops::context::{Context, Types};
use crate::ops::error::{OpError, ensure};
use crate::ops::table::op::Op;
use crate::ops::table::random::Random;
use crate::ops::{
    attention, coalesced, collective, elementwise, linear, norm, partial, parts, repeat, rotary, source,
    state, structure,
};
use crate::rule::Misfit;
use crate::space::Space;
use crate::types::TensorType;

impl Op {
    /// The types of the results.
    ///
    /// `declared` are the types that the text or the builder states. Operations whose results do not follow from their
    /// operands (sources, `einsum`, `reshard`, `permute`) check and return these; the others ignore them.
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
        // For any other operation all operands are in one place.
        let mut places = operands.iter().filter_map(|ty| ty.layout.at);
        let Some(at) = places.next() else { return self.infer_here(cx, operands, declared) };
        ensure!(
            !places.any(|other| other != at),
            "V33",
            "operands of `{}` are on different ranks; a permute is missing",
            self.name()
        );
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

    fn check_operand_count(&self, n: usize) -> Result<(), OpError> {
        let info = self.info();
        if info.operands.contains(&n) {
            return Ok(());
        }
        Err(OpError::new("V01", format!("`{}` takes {}, not {n}", info.name, info.operand_count())))
    }

    pub(super) fn misfit(&self, space: &Space, misfit: Misfit) -> OpError {
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
