//! The forward pass of an attention, by its plan.

use ithaca_ir::layout::Layout;
use ithaca_ir::ops::{Attention, Binary, OpError, Returns};
use ithaca_ir::{DimId, FunctionBuilder, Op, TensorType, ValueId};

use super::attend::{arrived, attend, gathered, split_by};
use super::groups::{self, Groups};
use super::plan::Plan;
use super::relays::{Blocks, relays};
use super::travel::{MovingBlocks, Sums, merge};
use crate::movement::{Partials, Step};

/// Output and lse, or the output alone, as the attention returns them; the caller converts element types and layouts.
pub(super) fn forward(
    b: &mut FunctionBuilder<'_>,
    attention: &Attention,
    (plan, partials): (&Plan, Partials),
    operands: &[ValueId],
) -> Result<Vec<ValueId>, OpError> {
    let mut a = attention.clone();
    a.movement = None;
    let [q, k, v] = [operands[0], operands[1], operands[2]];
    // Scales of keys and values, which are last, go where they go.
    let (bias, scales) =
        operands[3..].split_at(attention.scale_operands().map_or(operands.len(), |[i, _]| i) - 3);
    match plan {
        Plan::Gather | Plan::Fetch(_) => {
            let [k, v] = arrived(b, &mut a, plan, [k, v])?;
            let scales = scales.iter().map(|&x| gathered(b, a.keys, x)).collect::<Result<Vec<_>, _>>()?;
            attend(b, &a, [q, k, v], &[bias, &scales].concat())
        }
        Plan::Groups { heads, kv_heads } => {
            groups::forward(b, &a, Groups { heads, kv_heads }, [q, k, v], bias)
        }
        Plan::Steps(steps) => {
            let n_wanted = match attention.returns {
                Returns::Output => 1,
                Returns::WithLse | Returns::Part => 2,
            };
            a.returns = Returns::Part;
            steps_forward(b, &a, (steps, partials), [&[q, k, v], scales], bias, n_wanted)
        }
        Plan::TwoPass { steps, columns } => two_pass(b, &a, steps, *columns, [q, k, v]),
        Plan::Reduce { parts, axes } => {
            let [k, v] = arrived(b, &mut a, plan, [k, v])?;
            let scales =
                scales.iter().map(|&x| split_by(b, a.keys, axes, x)).collect::<Result<Vec<_>, _>>()?;
            a.returns = Returns::Part;
            a.parts = Some(*parts);
            let partial = attend(b, &a, [q, k, v], &[bias, &scales].concat())?;
            let (o, lse) = (by_rows(b, &a, *parts, partial[0])?, by_rows(b, &a, *parts, partial[1])?);
            Ok(b.node(Op::MergeParts { over: *parts }, &[o, lse], &[])?.to_vec())
        }
    }
}

fn steps_forward(
    b: &mut FunctionBuilder<'_>,
    a: &Attention,
    (steps, partials): (&[Step], Partials),
    [qkv, scales]: [&[ValueId]; 2],
    bias: &[ValueId],
    n_wanted: usize,
) -> Result<Vec<ValueId>, OpError> {
    let mut queries = MovingBlocks::new(&qkv[..1], |step| &step.queries);
    // Latents are keys and values, and travel once.
    let n_keys = if a.latent { 1 } else { 2 };
    let kv = [&qkv[1..=n_keys], scales].concat();
    let blocks = Blocks::new(b, [&kv, &qkv[..1]], [&[], &qkv[..1]], partials);
    let mut keys = MovingBlocks::relayed(&kv, |step| &step.keys, relays(&b.space().mesh, steps, blocks));
    let mut sums = Sums::new(merge, partials);
    for (i, step) in steps.iter().enumerate() {
        let (q, kv) = (queries.visit(b, steps, i)?[0], keys.visit(b, steps, i)?);
        sums.send_ahead(b, &step.queries)?;
        let part = attend(b, a, [q, kv[0], kv[n_keys - 1]], &[bias, &kv[n_keys..]].concat())?;
        sums.add(b, &step.queries, &part)?;
    }
    sums.finish_first(b, n_wanted)
}

/// Rows of scores are completed before values are weighed.
fn two_pass(
    b: &mut FunctionBuilder<'_>,
    a: &Attention,
    steps: &[Step],
    columns: DimId,
    [q, k, v]: [ValueId; 3],
) -> Result<Vec<ValueId>, OpError> {
    let mut a = a.clone();
    a.returns = Returns::Output;
    let mut keys = MovingBlocks::new(&[k], |step| &step.keys);
    let mut rows = Vec::with_capacity(steps.len());
    let mut total: Option<ValueId> = None;
    for i in 0..steps.len() {
        let k = keys.visit(b, steps, i)?[0];
        let scores = b.push(Op::Scores { attention: a.clone(), columns }, &[q, k])?;
        let lse = b.push(Op::RowLse { over: columns, parts: None }, &[scores])?;
        rows.push(scores);
        total = Some(match total {
            None => lse,
            Some(sum) => b.push(Op::Binary(Binary::LogAddExp), &[sum, lse])?,
        });
    }
    let lse = total.expect("there is a step at home");
    let mut values = MovingBlocks::new(&[v], |step| &step.keys);
    let mut sum: Option<ValueId> = None;
    for (i, &scores) in rows.iter().enumerate() {
        let v = values.visit(b, steps, i)?[0];
        let o = b.push(Op::Weigh { attention: a.clone(), columns }, &[scores, lse, v])?;
        sum = Some(match sum {
            None => o,
            Some(sum) => b.push(Op::Accumulate, &[sum, o])?,
        });
    }
    Ok(vec![sum.expect("there is a step at home"), lse])
}

/// Partial results with `parts` whole. The axes that split the parts split heads, or else sequences of the batch, so that
/// ranks share the merge.
fn by_rows(
    b: &mut FunctionBuilder<'_>,
    a: &Attention,
    parts: DimId,
    value: ValueId,
) -> Result<ValueId, OpError> {
    let ty: TensorType = b.ty(value).clone();
    let axes = ty.axes_of(parts).to_vec();
    let mut layout: Layout = ty.layout.clone();
    layout.split[0].clear();
    let shared = |dim: DimId| -> Option<Layout> {
        let i = ty.position(dim)?;
        let mut layout = layout.clone();
        layout.split[i].extend(axes.iter().copied());
        b.space().can_split(dim, &layout.split[i]).then_some(layout)
    };
    let front = ty.dims[1..].iter().copied().take_while(|&d| d != a.queries);
    let chosen = std::iter::once(a.heads).chain(front).find_map(shared).unwrap_or(layout);
    let ty = ty.with_layout(chosen);
    b.push_as(Op::Reshard, &[value], ty)
}
