//! The parts that all blocks of a decoder share.

use ithaca_ir::ops::{Attention, AttentionDims, Returns};
use ithaca_ir::{DimId, Op, ValueId};

use super::body::{Body, Built};
use super::dims::Dims;
use crate::documents::Documents;
use crate::spec::{Kind, Spec};
use crate::workload::Logits;

/// A decoder and its dimensions.
#[derive(Clone, Copy)]
pub(super) struct Decoder<'a> {
    pub(super) spec: &'a Spec,
    pub(super) dims: Dims,
    pub(super) logits: Logits,
    pub(super) documents: Option<&'a Documents>,
}

impl Decoder<'_> {
    /// The name of a part of a layer.
    pub(super) fn name(&self, part: &str) -> String {
        format!("{}.{part}", self.spec.layout.layer)
    }

    /// A norm of the model's form.
    pub(super) fn norm(&self, f: &mut Body<'_>, x: ValueId, name: &str, over: DimId) -> Built<ValueId> {
        f.norm((self.spec.norm, self.spec.sizes.eps), x, name, over)
    }

    /// Attention under the kind's mask, inside documents. Positions go on from one to the next: rotary ones only count
    /// differences.
    pub(super) fn mix(&self, kind: &Kind, f: &mut Body<'_>, qkv: [ValueId; 3]) -> Built<ValueId> {
        let Dims { s, h, k: kv_heads, d, .. } = self.dims;
        for (value, name) in qkv.into_iter().zip(["q", "k", "v"]) {
            f.name(value, Some(name));
        }
        let mut attention =
            self.attention(kind, AttentionDims { heads: h, kv_heads, queries: s, keys: s, width: d });
        let sinks = self.spec.sinks.then(|| self.name("self_attn.sinks"));
        if sinks.is_some() {
            attention.returns = Returns::WithLse;
        }
        let results = match (f.continued, self.dims.c) {
            (Some(continued), Some(capacity)) => {
                let [q, k, v] = qkv;
                let cache = self.dims.cache_of(&kind.mask, capacity);
                f.attend_cached(attention, (continued, cache), &[q], &[("key", k), ("value", v)])?
            }
            _ => f.attend("mixed", attention, &qkv)?,
        };
        let (Some(name), &[mixed, lse]) = (sinks, &results[..]) else { return Ok(results[0]) };
        let logits = f.weight(&name, &[h])?;
        Ok(f.node(Op::Sink, &[mixed, lse, logits], &[])?[0])
    }

    /// Attention of the kind.
    pub(super) fn attention(&self, kind: &Kind, dims: AttentionDims) -> Attention {
        let mask = self.documents.map_or(kind.mask.clone(), |documents| documents.inside(kind.mask.clone()));
        let mut attention = Attention::new(dims, mask, kind.scale);
        attention.softcap = kind.softcap;
        attention
    }
}
