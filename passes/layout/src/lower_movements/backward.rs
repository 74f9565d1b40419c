//! The backward pass of an attention: the movement of its forward pass, with gradients on the way.

use ithaca_ir::ops::{Attention, OpError, Returns};
use ithaca_ir::{FunctionBuilder, Op, ValueId};

use super::attend::{arrived, gradients};
use super::groups::{self, Groups};
use super::plan::Plan;
use super::relays::{Blocks, relays};
use super::travel::{MovingBlocks, Sums, accumulate};
use crate::movement::{Partials, RankOffset, Step};

/// Gradients for q, k, v and the bias from `q, k, v, d_o, lse, delta` and the bias. The gradient of the bias is a pending sum
/// over the ranks; the caller converts element types and layouts.
pub(super) fn backward(
    b: &mut FunctionBuilder<'_>,
    attention: &Attention,
    (plan, partials): (&Plan, Partials),
    operands: &[ValueId],
) -> Result<Vec<ValueId>, OpError> {
    let mut a = attention.clone();
    a.movement = None;
    let [k, v] = [operands[1], operands[2]];
    // The values that travel with the queries.
    let rows = [operands[0], operands[3], operands[4], operands[5]];
    let bias = &operands[6..];
    if !matches!(plan, Plan::Gather | Plan::Groups { .. }) {
        a.returns = Returns::Part;
    }
    match plan {
        Plan::Groups { heads, kv_heads } => {
            groups::backward(b, &a, Groups { heads, kv_heads }, &rows, [k, v], bias)
        }
        Plan::Steps(steps) | Plan::TwoPass { steps, .. } => {
            steps_backward(b, &a, (steps, partials), &rows, &[k, v], bias)
        }
        // A rank's gradients are complete for its queries; a later reduce-scatter sums those of keys in the model's type.
        Plan::Gather | Plan::Fetch(_) | Plan::Reduce { .. } => {
            let kv = arrived(b, &mut a, plan, [k, v])?;
            let mut gradients = gradients(b, &a, &rows, &kv, bias)?;
            if let Plan::Fetch(from) = *plan {
                for gradient in &mut gradients[1..3] {
                    *gradient = b.push(Op::FetchSum { from }, &[*gradient])?;
                }
            }
            Ok(gradients)
        }
    }
}

fn steps_backward(
    b: &mut FunctionBuilder<'_>,
    a: &Attention,
    (steps, partials): (&[Step], Partials),
    rows: &[ValueId],
    kv: &[ValueId],
    bias: &[ValueId],
) -> Result<Vec<ValueId>, OpError> {
    let mut queries = MovingBlocks::new(rows, |step| &step.queries);
    let blocks = Blocks::new(b, [kv, rows], [kv, &rows[..1]], partials);
    let mut keys = MovingBlocks::relayed(kv, |step| &step.keys, relays(&b.space().mesh, steps, blocks));
    // A rank's part of the gradient of the bias stays with it.
    let [mut d_queries, mut d_keys, mut d_bias] = [(); 3].map(|()| Sums::new(accumulate, partials));
    for (i, step) in steps.iter().enumerate() {
        let (rows, kv) = (queries.visit(b, steps, i)?, keys.visit(b, steps, i)?);
        d_queries.send_ahead(b, &step.queries)?;
        d_keys.send_ahead(b, &step.keys)?;
        let part = gradients(b, a, &rows, &kv, bias)?;
        d_queries.add(b, &step.queries, &part[..1])?;
        d_keys.add(b, &step.keys, &part[1..3])?;
        d_bias.add(b, &RankOffset::new(), &part[3..])?;
    }
    let mut gradients = d_queries.finish(b)?;
    gradients.extend(d_keys.finish(b)?);
    gradients.extend(d_bias.finish(b)?);
    Ok(gradients)
}
