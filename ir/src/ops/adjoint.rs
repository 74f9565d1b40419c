//! Adjoints: the gradients of operands from those of results.
//!
//! The adjoint of an operation is in its family's file; this file chooses it. A gradient has the type of the value
//! that it is the gradient of, so that a gradient of `bf16` is `bf16`; a sum in `f32` is rounded once.

use crate::builder::FunctionBuilder;
use crate::handles::ValueId;
use crate::ops::error::OpError;
use crate::ops::gradients::{Gradients, cast};
use crate::ops::table::op::Op;
use crate::ops::table::training::{Gradient, Loss};
use crate::ops::{attention, elementwise, linear, loss, norm, parts, sink};

impl Op {
    /// Adds the nodes that compute the gradients of `operands` from those of `results`, all of them values of `b`; the
    /// operation itself, with these operands and results, is in `b` as well. An operand that occurs twice has two
    /// gradients, to be added up.
    ///
    /// Where no result has a gradient no operand has one. `attention` must have returned its lse.
    ///
    /// # Errors
    /// `V32` where a gradient reaches an operation, or a result of it, that has no adjoint.
    pub fn adjoint(
        &self,
        b: &mut FunctionBuilder<'_>,
        operands: &[ValueId],
        results: &[ValueId],
        gradients: &[Option<ValueId>],
    ) -> Result<Gradients, OpError> {
        let Some(d) = gradients.iter().copied().flatten().next() else {
            return Ok(vec![None; operands.len()]);
        };
        match self {
            Op::Param(_)
            | Op::Input(_)
            | Op::State(_)
            | Op::Fill { .. }
            | Op::Positions { .. }
            | Op::Loss(Loss::Valid { .. }) => Ok(vec![None; operands.len()]),
            Op::Einsum => linear::adjoint_einsum(b, operands, d),
            Op::Sum => linear::adjoint_sum(b, operands[0], d),
            Op::Expand => linear::adjoint_expand(b, operands[0], d),
            Op::Embed { over, padding } => linear::adjoint_embed(b, (*over, *padding), operands, d),
            Op::Unary(f) => Ok(vec![Some(b.push(Op::Gradient(Gradient::Unary(*f)), &[operands[0], d])?)]),
            Op::Binary(f) => elementwise::adjoint_binary(*f, b, operands, results[0], d),
            Op::Scale { factor } => Ok(vec![Some(b.push(Op::Scale { factor: *factor }, &[d])?)]),
            Op::Clamp { min, max } => {
                let op = Op::Gradient(Gradient::Clamp { min: *min, max: *max });
                Ok(vec![Some(b.push(op, &[operands[0], d])?)])
            }
            Op::Cast { .. } => {
                let to = b.ty(operands[0]).dtype;
                Ok(vec![if to.is_float() { Some(cast(b, d, to)?) } else { None }])
            }
            Op::RmsNorm { over, eps, offset } => norm::adjoint_rms(
                b,
                Gradient::RmsNorm { over: *over, eps: *eps, offset: *offset },
                operands,
                d,
            ),
            Op::RmsScale { over, eps } => {
                norm::adjoint_rms(b, Gradient::RmsScale { over: over.clone(), eps: *eps }, operands, d)
            }
            Op::LayerNorm { over, eps } => norm::adjoint_layer(b, *over, *eps, operands, d),
            Op::Softmax { over } => norm::adjoint_softmax(b, *over, results[0], d),
            Op::Random(random) => random.adjoint(b, operands, d),
            Op::Rotary(rotary) => {
                let mut back = rotary.clone();
                back.turn = rotary.turn.inverse();
                Ok(vec![Some(b.push(Op::Rotary(back), &[d, operands[1]])?), None])
            }
            Op::Attention(a) => attention::adjoint(a, b, operands, results, gradients),
            Op::Sink => sink::adjoint(b, operands, results, gradients),
            Op::Accumulate => Ok(vec![Some(d), Some(d)]),
            Op::Repeat { from, to } => Ok(vec![Some(b.push(Op::SumCopies { from: *to, to: *from }, &[d])?)]),
            Op::SumCopies { from, to } => Ok(vec![Some(b.push(Op::Repeat { from: *to, to: *from }, &[d])?)]),
            Op::Loss(Loss::CrossEntropy { over, ignore }) => {
                loss::adjoint_cross_entropy(b, (*over, *ignore), operands, results, gradients)
            }
            Op::Loss(Loss::Pick { over, ignore }) => loss::adjoint_pick(b, (*over, *ignore), operands, d),
            Op::Join { to } => parts::adjoint_join(b, *to, operands, d),
            Op::Experts(experts) => experts.adjoint(b, operands, results, gradients),
            Op::Window(window) => window.adjoint(b, operands, d),
            _ => Err(OpError::new(
                "V32",
                format!("a gradient reaches `{}`, which has no adjoint", self.name()),
            )),
        }
    }
}
