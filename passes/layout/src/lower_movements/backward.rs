//! The backward pass of an attention: the movement of its forward pass, with gradients on the way.

use ithaca_ir::ops::{Attention, OpError, Returns};
use ithaca_ir::{FunctionBuilder, Op, ValueId};

use super::attend::{gathered, gradients, split_by};
use super::groups::{self, Groups};
use super::plan::Plan;
use super::travel::{Sums, Travellers, accumulate};
use crate::movement::{Seat, Step};

/// Gradients for q, k, v and the bias from `q, k, v, d_o, lse, delta` and the bias, that of the bias being a sum still to
/// be taken over the ranks; element types and layouts are put right later.
pub(super) fn backward(
    b: &mut FunctionBuilder<'_>,
    attention: &Attention,
    plan: &Plan,
    operands: &[ValueId],
) -> Result<Vec<ValueId>, OpError> {
    let mut a = attention.clone();
    a.movement = None;
    let [k, v] = [operands[1], operands[2]];
    // What goes with the queries.
    let rows = [operands[0], operands[3], operands[4], operands[5]];
    let bias = &operands[6..];
    match plan {
        Plan::Gather => {
            let kv = [gathered(b, a.keys, k)?, gathered(b, a.keys, v)?];
            // A rank's gradients are complete for its queries; what the reduce-scatter adds is in the model's type.
            gradients(b, &a, &rows, &kv, bias)
        }
        Plan::Groups { heads, kv_heads } => {
            groups::backward(b, &a, Groups { heads, kv_heads }, &rows, [k, v], bias)
        }
        Plan::Fetch(to) => {
            let kv = [b.push(Op::Fetch { to: *to }, &[k])?, b.push(Op::Fetch { to: *to }, &[v])?];
            a.keys = *to;
            a.returns = Returns::Part;
            let mut gradients = gradients(b, &a, &rows, &kv, bias)?;
            for gradient in &mut gradients[1..3] {
                *gradient = b.push(Op::FetchSum { from: *to }, &[*gradient])?;
            }
            Ok(gradients)
        }
        Plan::Steps(steps) | Plan::TwoPass { steps, .. } => {
            a.returns = Returns::Part;
            steps_backward(b, &a, steps, &rows, &[k, v], bias)
        }
        Plan::Reduce { axes, .. } => {
            a.returns = Returns::Part;
            let kv = [split_by(b, a.keys, axes, k)?, split_by(b, a.keys, axes, v)?];
            gradients(b, &a, &rows, &kv, bias)
        }
    }
}

fn steps_backward(
    b: &mut FunctionBuilder<'_>,
    a: &Attention,
    steps: &[Step],
    rows: &[ValueId],
    kv: &[ValueId],
    bias: &[ValueId],
) -> Result<Vec<ValueId>, OpError> {
    let (mut queries, mut keys) = (Travellers::new(rows), Travellers::new(kv));
    let (mut d_queries, mut d_keys) = (Sums::new(accumulate), Sums::new(accumulate));
    // What a rank adds to the gradient of the bias stays with it, whoever's queries and keys it was made of.
    let mut d_bias = Sums::new(accumulate);
    for (i, step) in steps.iter().enumerate() {
        if let Some(next) = steps.get(i + 1) {
            queries.bring(b, &next.queries)?;
            keys.bring(b, &next.keys)?;
        }
        let (rows, kv) = (queries.bring(b, &step.queries)?, keys.bring(b, &step.keys)?);
        let part = gradients(b, a, &rows, &kv, bias)?;
        d_queries.add(b, &step.queries, &part[..1])?;
        d_keys.add(b, &step.keys, &part[1..3])?;
        d_bias.add(b, &Seat::new(), &part[3..])?;
    }
    let mut gradients = d_queries.finish(b)?;
    gradients.extend(d_keys.finish(b)?);
    gradients.extend(d_bias.finish(b)?);
    Ok(gradients)
}
