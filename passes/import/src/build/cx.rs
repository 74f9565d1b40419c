//! What the functions of a decoder share, and the parts that they are made of.

use ithaca_ir::ops::{Attention, AttentionDims, Rotary, Turn, Unary};
use ithaca_ir::{DType, DimId, FunctionBuilder, Op, TensorType, ValueId};

use super::dims::Dims;
use super::drops::{Drops, Key};
use super::tensors::{Built, Tensors};
use crate::spec::{Family, Kind, Spec};

/// The names of a layer's tensors begin so, in most families.
pub(super) const LAYER: &str = "model.layers.{layer}";

/// What the functions of a model share.
pub(super) struct Cx<'a> {
    pub(super) spec: &'a Spec,
    pub(super) dims: Dims,
    pub(super) tensors: Tensors,
    pub(super) drops: Drops,
}

impl Cx<'_> {
    pub(super) fn rms_norm(
        &self,
        f: &mut FunctionBuilder<'_>,
        x: ValueId,
        name: &str,
        over: DimId,
    ) -> Built<ValueId> {
        let weight = self.tensors.weight(f, name, &[over])?;
        let offset = match self.spec.family {
            Family::Gemma2 => 1.0,
            Family::Llama
            | Family::Mistral
            | Family::Qwen2
            | Family::Qwen3
            | Family::Phi3
            | Family::Olmo2
            | Family::Starcoder2
            | Family::GptNeox
            | Family::Gpt2
            | Family::Mixtral
            | Family::Qwen3Moe
            | Family::DeepseekV3 => 0.0,
        };
        f.push(Op::RmsNorm { over, eps: self.spec.eps, offset }, &[x, weight])
    }

    pub(super) fn layer_norm(&self, f: &mut FunctionBuilder<'_>, x: ValueId, name: &str) -> Built<ValueId> {
        let over = self.dims.m;
        let weight = self.tensors.weight(f, &format!("{name}.weight"), &[over])?;
        let bias = self.tensors.weight(f, &format!("{name}.bias"), &[over])?;
        f.push(Op::LayerNorm { over, eps: self.spec.eps }, &[x, weight, bias])
    }

    /// Attention of a token to those that the kind's mask leaves, in a block with this key.
    pub(super) fn attention(
        &self,
        f: &mut FunctionBuilder<'_>,
        (kind, key): (&Kind, Key),
        qkv: [ValueId; 3],
    ) -> Built<ValueId> {
        let Dims { s, h, k: kv_heads, d, .. } = self.dims;
        let dims = AttentionDims { heads: h, kv_heads, queries: s, keys: s, width: d };
        let mut attention = Attention::new(dims, kind.mask.clone(), kind.scale);
        attention.softcap = kind.softcap;
        self.drops.attend(f, key, attention, &qkv)
    }

    /// Turns queries and keys by their positions, where the kind does, and names the three.
    pub(super) fn rotate(
        &self,
        f: &mut FunctionBuilder<'_>,
        kind: &Kind,
        [mut q, mut k, v]: [ValueId; 3],
    ) -> Built<[ValueId; 3]> {
        if let Some(rotary) = &kind.rotary {
            let positions = self.positions(f)?;
            let op = Op::Rotary(Rotary {
                over: self.dims.d,
                width: rotary.width,
                theta: rotary.theta,
                scaling: rotary.scaling.clone(),
                pairs: rotary.pairs,
                turn: Turn::Forth,
            });
            q = f.push(op.clone(), &[q, positions])?;
            k = f.push(op, &[k, positions])?;
        }
        for (value, name) in [(q, "q"), (k, "k"), (v, "v")] {
            f.name(value, Some(name));
        }
        Ok([q, k, v])
    }

    pub(super) fn positions(&self, f: &mut FunctionBuilder<'_>) -> Built<ValueId> {
        let positions = f.push_as(Op::Positions, &[], TensorType::new(DType::I32, [self.dims.s]))?;
        f.name(positions, Some("positions"));
        Ok(positions)
    }

    /// The name of the embedding's table.
    pub(super) fn embedding(&self) -> &'static str {
        match self.spec.family {
            Family::Llama
            | Family::Mistral
            | Family::Qwen2
            | Family::Qwen3
            | Family::Phi3
            | Family::Gemma2
            | Family::Olmo2
            | Family::Starcoder2
            | Family::Mixtral
            | Family::Qwen3Moe
            | Family::DeepseekV3 => "model.embed_tokens.weight",
            Family::GptNeox => "gpt_neox.embed_in.weight",
            Family::Gpt2 => "transformer.wte.weight",
        }
    }

    pub(super) fn activation(&self) -> Unary {
        self.spec.activation
    }
}
