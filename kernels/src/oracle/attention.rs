//! Scaled dot-product attention.

use std::ops::Range;

use ithaca_ir::Space;
use ithaca_ir::boxes::Region;
use ithaca_ir::ops::Attention;

use super::Operand;
use crate::error::RunError;
use crate::real::Real;
use crate::tensor::{extents, index, length};

/// What one rank computes of an attention, in indices: shared by the oracle and the runtime.
#[derive(Clone, Debug)]
pub struct Extent {
    /// Combinations of the shared dimensions in front.
    pub front: usize,
    /// Queries held.
    pub queries: usize,
    /// Query heads held.
    pub heads: usize,
    /// Keys held.
    pub keys: usize,
    /// Key/value heads held.
    pub kv_heads: usize,
    /// Width of queries and keys.
    pub width: usize,
    /// Width of values.
    pub value_width: usize,
    /// The position of the first query held.
    pub first_query: u64,
    /// Positions of the keys held; those of padding, at the end, are left out.
    pub key_positions: Range<u64>,
    /// For each query head held, the key/value head held that serves it.
    pub served_by: Vec<usize>,
}

impl Extent {
    /// The extent of `attention` on operands that hold these parts of q, k and v.
    ///
    /// # Errors
    /// [`RunError::Invalid`] when a query head is held without its key/value head, or shapes do not fit.
    pub fn new(
        space: &Space,
        attention: &Attention,
        q: &Region,
        k: &Region,
        v: &Region,
    ) -> Result<Self, RunError> {
        let fits = [q, k, v].iter().all(|r| r.len() >= 3 && r.len() == q.len());
        let n = q.len();
        if !fits || k[..n - 1] != v[..n - 1] || q[..n - 3] != k[..n - 3] || q[n - 1] != k[n - 1] {
            return Err(RunError::invalid("q, k and v of `attention` are held in parts that do not fit"));
        }
        // Global heads decide, so that parts of any size are served rightly.
        let group = (space.size(attention.heads) / space.size(attention.kv_heads).max(1)).max(1);
        let held = &k[n - 2];
        let served_by = q[n - 2]
            .clone()
            .map(|head| match held.contains(&(head / group)) {
                true => Ok(index(head / group - held.start)),
                false => Err(RunError::invalid(format!(
                    "query head {head} is held without its key/value head {}",
                    head / group
                ))),
            })
            .collect::<Result<_, _>>()?;
        let valid = space.dims[attention.keys].valid;
        let key_start = k[n - 3].start;
        Ok(Self {
            front: extents(&q[..n - 3].to_vec()).iter().product(),
            queries: length(&q[n - 3]),
            heads: length(&q[n - 2]),
            keys: length(&k[n - 3]),
            kv_heads: length(held),
            width: length(&q[n - 1]),
            value_width: length(&v[n - 1]),
            first_query: q[n - 3].start,
            key_positions: key_start..k[n - 3].end.min(valid).max(key_start),
            served_by,
        })
    }

    /// Intervals of key positions that are held, as indices of the keys held.
    pub fn held(&self, positions: &[Range<u64>]) -> Vec<Range<usize>> {
        let first = self.key_positions.start;
        positions.iter().map(|r| index(r.start - first)..index(r.end - first)).collect()
    }
}

/// `o = Σ_k softmax_k(cap(scale · q·k)) v` over the keys that the mask leaves; a query that sees no key gives zero.
pub(super) fn attention<T: Real>(
    space: &Space,
    attention: &Attention,
    operands: &[Operand<'_, T>],
    region: &Region,
) -> Result<Vec<T>, RunError> {
    let [q, k, v] = [&operands[0], &operands[1], &operands[2]];
    let x = Extent::new(space, attention, &q.region, &k.region, &v.region)?;
    let (q, k, v) = (q.real()?, k.real()?, v.real()?);
    let scale = T::from_f64(attention.scale);
    let mut out = vec![T::ZERO; extents(region).iter().product()];
    for front in 0..x.front {
        for query in 0..x.queries {
            let seen = attention.mask.runs(x.first_query + query as u64, x.key_positions.clone());
            let seen: Vec<usize> = x.held(&seen).into_iter().flatten().collect();
            for head in 0..x.heads {
                let kv_head = x.served_by[head];
                let at = (front * x.queries + query) * x.heads + head;
                let q = &q[at * x.width..][..x.width];
                let key = |j: usize| (front * x.keys + j) * x.kv_heads + kv_head;
                let score = |&j: &usize| capped(attention, scale * dot(q, &k[key(j) * x.width..][..x.width]));
                let scores: Vec<T> = seen.iter().map(score).collect();
                let Some(weights) = softmax(&scores) else { continue };
                let o = &mut out[at * x.value_width..][..x.value_width];
                for (&j, weight) in seen.iter().zip(weights) {
                    let v = &v[key(j) * x.value_width..][..x.value_width];
                    for (o, &v) in o.iter_mut().zip(v) {
                        *o += weight * v;
                    }
                }
            }
        }
    }
    Ok(out)
}

/// A scaled score within the bound that the attention sets.
fn capped<T: Real>(attention: &Attention, score: T) -> T {
    match attention.softcap.map(T::from_f64) {
        Some(cap) => cap * (score / cap).through(f64::tanh),
        None => score,
    }
}

fn dot<T: Real>(x: &[T], y: &[T]) -> T {
    let mut sum = T::ZERO;
    for (&x, &y) in x.iter().zip(y) {
        sum += x * y;
    }
    sum
}

/// `exp(x − max) / Σ exp(x − max)`; `None` of nothing.
fn softmax<T: Real>(scores: &[T]) -> Option<Vec<T>> {
    let mut max = *scores.first()?;
    for &x in scores {
        if x > max {
            max = x;
        }
    }
    let weights: Vec<T> = scores.iter().map(|&x| (x - max).through(f64::exp)).collect();
    let mut sum = T::ZERO;
    for &w in &weights {
        sum += w;
    }
    Some(weights.into_iter().map(|w| w / sum).collect())
}
