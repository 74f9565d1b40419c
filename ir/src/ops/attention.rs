//! Attention, and the replication of key/value heads.

use smallvec::smallvec;

use crate::dim::DimId;
use crate::mask::Mask;
use crate::ops::OpError;
use crate::ops::elementwise::need_float;
use crate::rule::{FactorKind, FactorRule, Factors};
use crate::space::Space;
use crate::types::TensorType;

/// Attributes of `attention`: the roles that dimensions of q, k and v play.
///
/// `q [… queries heads width]`, `k [… keys kv_heads width]`, `v [… keys kv_heads e]` give `[… queries heads e]`, where
/// the dimensions in front are shared. Query head `i` is served by key/value head `i / (heads / kv_heads)`.
#[derive(Clone, Debug, PartialEq)]
pub struct Attention {
    /// Query heads.
    pub heads: DimId,
    /// Key/value heads; may be `heads` itself.
    pub kv_heads: DimId,
    /// The query sequence.
    pub queries: DimId,
    /// The key sequence; may be `queries` itself.
    pub keys: DimId,
    /// The width of a head.
    pub width: DimId,
    /// Which keys a query sees, by position.
    pub mask: Mask,
    /// Factor of the scores.
    pub scale: f64,
    /// Bound of the scaled scores, which become `softcap · tanh(score / softcap)` before the mask; none when absent.
    pub softcap: Option<f64>,
}

impl Attention {
    /// Rule: heads are parallel (key/value heads being the same factor), queries are parallel, keys are the softmax.
    pub fn rule(&self, operands: &[&TensorType]) -> FactorRule {
        const HEADS: usize = 0;
        const QUERIES: usize = 1;
        const KEYS: usize = 2;
        const WIDTH: usize = 3;
        let mut factors =
            smallvec![FactorKind::Parallel, FactorKind::Parallel, FactorKind::Softmax, FactorKind::Whole];
        let mut shared: Vec<DimId> = Vec::new();
        let mut factors_of = |ty: &TensorType, sequence: usize| -> Factors {
            ty.dims
                .iter()
                .map(|&d| {
                    if d == self.heads || d == self.kv_heads {
                        HEADS
                    } else if d == self.queries || d == self.keys {
                        sequence
                    } else if d == self.width {
                        WIDTH
                    } else {
                        let i = shared.iter().position(|&s| s == d).unwrap_or_else(|| {
                            shared.push(d);
                            factors.push(FactorKind::Parallel);
                            shared.len() - 1
                        });
                        WIDTH + 1 + i
                    }
                })
                .collect()
        };
        let [q, k, v] = [operands[0], operands[1], operands[2]];
        let operands = smallvec![factors_of(q, QUERIES), factors_of(k, KEYS), factors_of(v, KEYS)];
        let results = smallvec![factors_of(&self.result(q, v), QUERIES)];
        FactorRule { factors, operands, results }
    }

    /// FLOPs on the busiest rank: two for each kept pair, head and element of width, for scores and for values.
    pub fn flops(&self, space: &Space, operands: &[&TensorType]) -> u128 {
        let [q, k, v] = [operands[0], operands[1], operands[2]];
        let (n_q, n_k) = (space.size(self.queries), space.size(self.keys));
        let q_axes = q.axes_of(self.queries);
        let key_parts = u128::from(space.mesh.degree(k.axes_of(self.keys)));
        let pairs = space
            .mesh
            .iter_ranks()
            .step_by(
                usize::try_from(q_axes.last().map_or(u64::MAX, |&a| space.mesh.stride(a)))
                    .unwrap_or(usize::MAX),
            )
            .map(|r| self.mask.pairs(space.range(self.queries, q_axes, r), 0..n_k))
            .max()
            .unwrap_or(u128::from(n_q) * u128::from(n_k));
        let others: u128 = q
            .dims
            .iter()
            .filter(|&&d| d != self.queries && d != self.width)
            .map(|&d| u128::from(space.max_extent(d, q.axes_of(d))))
            .product();
        let value_width = u128::from(space.size(self.value_width(v)));
        2 * pairs * others * (u128::from(space.size(self.width)) + value_width) / key_parts
    }

    /// The width of a value, the dimension of `v` that is no role of `k`; `width` itself when they are the same.
    pub fn value_width(&self, v: &TensorType) -> DimId {
        v.dims.last().copied().unwrap_or(self.width)
    }

    fn result(&self, q: &TensorType, v: &TensorType) -> TensorType {
        let e = self.value_width(v);
        TensorType::new(q.dtype, q.dims.iter().map(|&d| if d == self.width { e } else { d }))
    }
}

pub(super) fn infer(
    attention: &Attention,
    space: &Space,
    operands: &[&TensorType],
) -> Result<TensorType, OpError> {
    let [q, k, v] = [operands[0], operands[1], operands[2]];
    need_float("attention", q.dtype)?;
    if k.dtype != q.dtype || v.dtype != q.dtype {
        return Err(OpError::new("V04", format!("`attention` of {}, {} and {}", q.dtype, k.dtype, v.dtype)));
    }
    let Attention { heads, kv_heads, queries, keys, width, scale, softcap, .. } = *attention;
    let name = |d: DimId| space.dims[d].name.as_str();
    for (operand, ty, dims) in [
        ("q", q, &[queries, heads, width][..]),
        ("k", k, &[keys, kv_heads, width]),
        ("v", v, &[keys, kv_heads]),
    ] {
        let n = ty.dims.len();
        if n < 3 || !ty.dims[n - 3..].starts_with(dims) {
            let expected: Vec<&str> = dims.iter().map(|&d| name(d)).collect();
            return Err(OpError::new(
                "V05",
                format!("{operand} of `attention` must end in [{}]", expected.join(" ")),
            ));
        }
    }
    let front = |ty: &TensorType| ty.dims[..ty.dims.len() - 3].to_vec();
    if front(q) != front(k) || front(q) != front(v) {
        return Err(OpError::new("V05", "q, k and v of `attention` differ in the dimensions in front"));
    }
    let (hq, hkv) = (&space.dims[heads], &space.dims[kv_heads]);
    if hkv.size == 0 || hq.size % hkv.size != 0 {
        return Err(OpError::new(
            "V20",
            format!(
                "{} query heads `{}` are not a multiple of {} key/value heads `{}`",
                hq.size, hq.name, hkv.size, hkv.name
            ),
        ));
    }
    let group = hq.size / hkv.size;
    if hq.granule != group * hkv.granule {
        return Err(OpError::new(
            "V21",
            format!(
                "`{}` splits by {} heads, but {} of them share a key/value head: declare granule {}",
                hq.name,
                hq.granule,
                group,
                group * hkv.granule
            ),
        ));
    }
    if !scale.is_finite() {
        return Err(OpError::new("V05", format!("`attention` is scaled by {scale}")));
    }
    if let Some(cap) = softcap.filter(|&cap| !(cap.is_finite() && cap > 0.0)) {
        return Err(OpError::new("V05", format!("the scores of `attention` cannot be capped at {cap}")));
    }
    crate::mask::check(&attention.mask, &space.dims[queries], &space.dims[keys])?;
    Ok(attention.result(q, v))
}

pub(super) fn infer_repeat(
    space: &Space,
    from: DimId,
    to: DimId,
    x: &TensorType,
) -> Result<TensorType, OpError> {
    if !x.has(from) || x.has(to) {
        return Err(OpError::new("V05", format!("`repeat` needs `{}` in x", space.dims[from].name)));
    }
    // Directly, or both copy the same dimension, the result the more often.
    let (source, target) = (&space.dims[from], &space.dims[to]);
    let siblings =
        target.copies.is_some() && target.copies == source.copies && target.size % source.size == 0;
    if target.copies != Some(from) && !siblings {
        return Err(OpError::new(
            "V05",
            format!("`{}` is not declared to copy `{}`", space.dims[to].name, space.dims[from].name),
        ));
    }
    let dims = x.dims.iter().map(|&d| if d == from { to } else { d });
    Ok(TensorType::new(x.dtype, dims.collect::<Vec<_>>()))
}

/// Every dimension is parallel; the repeated one is the same factor on both sides.
pub(super) fn rule_repeat(operands: &[&TensorType]) -> FactorRule {
    let factors: Factors = (0..operands[0].dims.len()).collect();
    FactorRule {
        factors: factors.iter().map(|_| FactorKind::Parallel).collect(),
        operands: smallvec![factors.clone()],
        results: smallvec![factors],
    }
}
