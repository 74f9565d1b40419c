//! Result types: this file calls the function of the operation's family.

use smallvec::{SmallVec, smallvec};

use crate::ops::check::refuse;
use crate::ops::context::{Context, Types};
use crate::ops::error::{OpError, ensure};
use crate::ops::table::cache::Cache;
use crate::ops::table::op::Op;
use crate::ops::table::random::Random;
use crate::ops::table::training::Gradient;
use crate::ops::{
    attention, coalesced, collective, elementwise, linear, norm, partial, parts, repeat, rotary, source,
    state, structure,
};
use crate::rule::RuleViolation;
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
        let space = cx.space;
        let mut results: Types = match self {
            // Their layouts are inferred with their types.
            Op::State(binding) => return state::infer_state(binding, space, declared),
            Op::Assign { target, binding } => {
                return state::infer_assign(binding, *target, space, operands[0]);
            }
            Op::Fill { .. } => return state::infer_fill(declared),
            Op::AccumulateProduct => return Ok(smallvec![linear::infer_accumulate(space, operands)?]),
            Op::Random(
                random
                @ (Random::Key { .. } | Random::FoldIn | Random::LayerKey | Random::DropoutMask { .. }),
            ) => return random.infer(operands, declared),
            Op::Param(binding) | Op::Input(binding) => {
                return source::infer(self, binding, space, declared);
            }
            Op::Positions { padding } => return source::infer_positions(*padding, space, declared),
            Op::Reshard => return structure::infer_reshard(space, operands[0], declared),
            Op::Attention(attention) => return attention::infer(attention, space, operands),
            Op::AttendPages { attention, pages, slots } => {
                return attention.infer_pages([*pages, *slots], space, operands);
            }
            Op::RotateAppend(rotated) => return rotated.infer(space, operands),
            Op::AttentionBackward(attention) => {
                return attention::infer_backward(attention, space, operands);
            }
            Op::SumCopies { from, to } => {
                return Ok(smallvec![repeat::infer_sum(space, *from, *to, operands[0])?]);
            }
            Op::Cache(Cache::Argmax { over, parts }) => {
                return Cache::infer_argmax((*over, *parts), space, operands);
            }
            Op::Merge
            | Op::MergeParts { .. }
            | Op::Accumulate
            | Op::Sink
            | Op::Scores { .. }
            | Op::RowLse { .. }
            | Op::Weigh { .. } => return partial::infer(self, space, operands),
            Op::AllToAll { .. }
            | Op::AllGather { .. }
            | Op::Slice { .. }
            | Op::ReduceScatter { .. }
            | Op::AllReduce { .. }
            | Op::Permute
            | Op::Fetch { .. }
            | Op::FetchSum { .. } => return collective::infer(self, space, operands[0], declared),
            // The factor rule gives their layouts.
            Op::Gradient(gradient) => gradient.infer(space, operands, declared)?,
            Op::Fused(fused) => fused.infer(space, operands, declared)?,
            Op::Loss(loss) => loss.infer(space, operands)?,
            Op::Optimizer(optimizer) => optimizer.infer(operands)?,
            Op::Experts(experts) => experts.infer(space, operands)?,
            Op::Cache(cache) => cache.infer(space, operands)?,
            Op::Random(random @ Random::Dropout { .. }) => random.infer(operands, declared)?,
            Op::Take { to } => smallvec![parts::infer_take(space, *to, operands[0])?],
            Op::Join { to } => smallvec![parts::infer_join(space, *to, operands)?],
            Op::Einsum => smallvec![linear::infer_einsum(space, operands, declared)?],
            Op::Sum => smallvec![linear::infer_sum(space, operands[0], declared)?],
            Op::Select { over, position } => {
                smallvec![linear::infer_select(space, *over, *position, operands[0])?]
            }
            Op::Expand => smallvec![linear::infer_expand(space, operands[0], declared)?],
            Op::Embed { over, .. } => smallvec![linear::infer_embed(space, *over, operands)?],
            Op::Unary(_) | Op::Scale { .. } | Op::Clamp { .. } | Op::Cast { .. } => {
                smallvec![elementwise::infer_unary(self, operands[0])?]
            }
            Op::Binary(f) => smallvec![elementwise::infer_binary(*f, operands)?],
            Op::RmsNorm { over, .. } | Op::LayerNorm { over, .. } | Op::Softmax { over } => {
                smallvec![norm::infer(self.name(), space, *over, operands)?]
            }
            Op::RmsScale { over, .. } => smallvec![norm::infer_scale(space, over, operands)?],
            Op::Rotary(rotary) => smallvec![rotary::infer(rotary, space, operands)?],
            Op::Repeat { from, to } => smallvec![repeat::infer(space, *from, *to, operands[0])?],
            Op::Window(window) => smallvec![window.infer(space, operands)?],
            Op::Call { .. } | Op::Coalesced(_) => unreachable!("they have no place of their own"),
        };
        let rule = {
            let types: SmallVec<[&TensorType; 4]> = results.iter().collect();
            self.rule(operands, &types).expect("an operation on values has a rule")
        };
        let (taken, pending) = match self {
            // In another type a sum is still to be taken as it was before.
            Op::Cast { to } if to.is_float() => parts::without_pending(operands),
            // They only move elements.
            Op::Take { .. } | Op::Join { .. } => parts::without_pending(operands),
            // It is linear in the gradient, and integers are never pending.
            Op::Gradient(Gradient::Embed { .. }) => parts::without_pending_of(operands, 1),
            _ => (SmallVec::new(), None),
        };
        let taken: SmallVec<[&TensorType; 4]> = taken.iter().collect();
        let operands = if pending.is_some() { &taken } else { operands };
        let layouts = rule.results(operands).map_err(|violation| refuse(self.name(), space, violation))?;
        for (result, layout) in results.iter_mut().zip(layouts) {
            result.layout = layout;
            if let Some(pending) = &pending {
                result.layout.partial.extend(pending.iter().copied());
                result.layout.partial.sort_unstable();
            }
        }
        // The first dimension of some results is in no operand: every rank may compute the part of its own.
        let declared = match self {
            Op::Experts(experts) => experts.declared_experts(declared),
            Op::Gradient(gradient) => gradient.declared_rows(declared),
            _ => None,
        };
        if let Some((dim, axes)) = declared {
            if results[0].layout.axes().any(|a| axes.contains(&a)) {
                return Err(refuse(self.name(), space, RuleViolation::AxisTwice(dim)));
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
}
