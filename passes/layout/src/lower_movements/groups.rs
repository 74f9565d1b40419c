//! Keys gathered in groups of heads: at any time a rank holds the gathered keys and values of one group.
//!
//! ```text
//! %o = attention %q, %k, %v {…, movement=gather(groups=2)} : bf16[b s@cp h d]
//! ```
//! becomes
//! ```text
//! %q0 = take %q {to=h_0} : bf16[b s@cp h_0 d]
//! %k0 = take %k {to=k_0} : bf16[b s@cp k_0 d]
//! %k1 = reshard %k0 : bf16[b s k_0 d]
//! …
//! %o0 = attention %q0, %k1, %v1 {heads=h_0, kv_heads=k_0, …} : bf16[b s@cp h_0 d]
//! … the same of h_1 and k_1 …
//! %o = join %o0, %o1 {to=h} : bf16[b s@cp h d]
//! ```
//! A group's keys are gathered after the previous group is done, so that a rank never holds two groups.

use ithaca_ir::ops::{Attention, OpError};
use ithaca_ir::{DimId, FunctionBuilder, Op, ValueId};

use super::attend::{attend, both, gathered, gradients};

/// The parts of heads, one of each for each group.
#[derive(Clone, Copy)]
pub(super) struct Groups<'a> {
    pub(super) heads: &'a [DimId],
    pub(super) kv_heads: &'a [DimId],
}

impl Groups<'_> {
    /// The attention of each group.
    fn attentions(self, a: &Attention) -> impl Iterator<Item = Attention> {
        let groups = self.heads.iter().zip(self.kv_heads);
        groups.map(|(&heads, &kv_heads)| Attention { heads, kv_heads, ..a.clone() })
    }
}

/// Output and lse, or the output alone.
pub(super) fn forward(
    b: &mut FunctionBuilder<'_>,
    a: &Attention,
    groups: Groups<'_>,
    [q, k, v]: [ValueId; 3],
    bias: &[ValueId],
) -> Result<Vec<ValueId>, OpError> {
    let mut parts = Vec::with_capacity(groups.heads.len());
    for own in groups.attentions(a) {
        let q = b.push(Op::Take { to: own.heads }, &[q])?;
        let bias = bias_of(b, &own, bias)?;
        let [k, v] = both(&own, [k, v], |value| {
            let taken = b.push(Op::Take { to: own.kv_heads }, &[value])?;
            gathered(b, own.keys, taken)
        })?;
        parts.push(attend(b, &own, [q, k, v], &bias)?);
    }
    joined(b, a.heads, &parts)
}

/// Gradients for q, k, v and the bias; `rows` are q, d_o, lse and delta.
pub(super) fn backward(
    b: &mut FunctionBuilder<'_>,
    a: &Attention,
    groups: Groups<'_>,
    rows: &[ValueId],
    [k, v]: [ValueId; 2],
    bias: &[ValueId],
) -> Result<Vec<ValueId>, OpError> {
    let mut d_heads = Vec::with_capacity(groups.heads.len());
    let mut d_kv = Vec::with_capacity(groups.heads.len());
    for own in groups.attentions(a) {
        let rows = taken(b, own.heads, rows)?;
        let bias = bias_of(b, &own, bias)?;
        let home = taken(b, own.kv_heads, &[k, v])?;
        let kv = [gathered(b, own.keys, home[0])?, gathered(b, own.keys, home[1])?];
        let mut part = gradients(b, &own, &rows, &kv, &bias)?;
        for (gradient, &home) in part[1..3].iter_mut().zip(&home) {
            // Each group is summed at once, so a rank holds the gradients of whole keys of one group only.
            let mut ty = b.ty(*gradient).clone();
            ty.layout.clone_from(&b.ty(home).layout);
            if *b.ty(*gradient) != ty {
                *gradient = b.push_as(Op::Reshard, &[*gradient], ty)?;
            }
        }
        d_kv.push(part.drain(1..3).collect());
        d_heads.push(part);
    }
    // The gradients of the bias and of the queries have query heads.
    let mut gradients = joined(b, a.heads, &d_heads)?;
    let kv = joined(b, a.kv_heads, &d_kv)?;
    gradients.splice(1..1, kv);
    Ok(gradients)
}

/// A group's part of the bias; all groups share the key of dropout.
fn bias_of(b: &mut FunctionBuilder<'_>, own: &Attention, more: &[ValueId]) -> Result<Vec<ValueId>, OpError> {
    let (bias, key) = more.split_at(usize::from(own.bias.is_some()).min(more.len()));
    let mut own_bias = taken(b, own.heads, bias)?;
    own_bias.extend(key);
    Ok(own_bias)
}

fn taken(b: &mut FunctionBuilder<'_>, to: DimId, values: &[ValueId]) -> Result<Vec<ValueId>, OpError> {
    values.iter().map(|&value| b.push(Op::Take { to }, &[value])).collect()
}

/// For each result its parts, one from each group, joined.
fn joined(b: &mut FunctionBuilder<'_>, to: DimId, parts: &[Vec<ValueId>]) -> Result<Vec<ValueId>, OpError> {
    let n = parts.first().map_or(0, Vec::len);
    (0..n)
        .map(|i| {
            let of_each: Vec<ValueId> = parts.iter().map(|part| part[i]).collect();
            b.push(Op::Join { to }, &of_each)
        })
        .collect()
}
