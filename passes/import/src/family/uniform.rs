//! Families whose layers are all alike: Llama, Seed-OSS, Mistral, Phi-3, GLM-4, OLMo 2, Gemma, Granite, Arcee, ERNIE 4.5, StarCoder2 and
//! GPT-NeoX.
//!
//! A `sliding_window` applies to all layers.

use ithaca_ir::ops::{Pairs, Unary};
use ithaca_ir::{Diagnostic, Mask};
use serde_json::json;

use super::sizes::{Defaults, HeadDim, KvHeads, Padding, USUAL, read_sizes};
use crate::fields::Fields;
use crate::rope::{Partial, Rope, RopeContext};
use crate::spec::{
    Biases, EmbeddingFactor, Kind, Layout, MlpLayout, NormForm, Norms, Projections, QkNorm, Residual, Sizes,
    Spec, Spelling, window,
};

/// Biases by flags, no windows.
pub(super) fn llama(fields: &mut Fields<'_>) -> Result<Spec, Diagnostic> {
    let sizes = read_sizes(fields, &USUAL)?;
    let attention = fields.flag("attention_bias", false)?;
    let mlp = fields.flag("mlp_bias", false)?;
    let spec = alike(fields, RopeContext::of(&sizes), sizes, None)?;
    Ok(Spec { bias: Biases { mlp, ..Biases::of_attention(attention) }, ..spec })
}

/// As Llama, with biased queries, keys and values by default, and a flag of its own for the bias of attention's output.
pub(super) fn seed_oss(fields: &mut Fields<'_>) -> Result<Spec, Diagnostic> {
    let defaults = Defaults {
        vocab: 155_136,
        ffn: 27_648,
        layers: 64,
        heads: 80,
        head_dim: HeadDim::Fixed(128),
        kv_heads: KvHeads::Fixed(8),
        max_positions: 524_288,
        padding: Padding::Token(1),
        ..USUAL
    };
    let sizes = read_sizes(fields, &defaults)?;
    let bias = Biases {
        qkv: fields.flag("attention_bias", true)?,
        out: fields.flag("attention_out_bias", false)?,
        mlp: fields.flag("mlp_bias", false)?,
    };
    Ok(Spec { bias, ..alike(fields, RopeContext::of(&sizes), sizes, None)? })
}

/// As Llama without biases, with one sliding window.
pub(super) fn mistral(fields: &mut Fields<'_>) -> Result<Spec, Diagnostic> {
    let defaults = Defaults { ffn: 14_336, kv_heads: KvHeads::Fixed(8), max_positions: 4096 * 32, ..USUAL };
    let sizes = read_sizes(fields, &defaults)?;
    no_biases(fields)?;
    let window = fields.nullable_size("sliding_window", Some(4096))?;
    alike(fields, RopeContext::of(&sizes), sizes, window)
}

/// The library's class has no biases; descriptions made for other classes state it.
pub(super) fn no_biases(fields: &mut Fields<'_>) -> Result<(), Diagnostic> {
    fields.neutral("attention_bias", &[json!(false)])?;
    fields.neutral("mlp_bias", &[json!(false)])
}

/// As Llama, with queries, keys and values in one matrix, gate and up in another, and partly rotated heads.
///
/// The library reads `yarn` as `longrope` here, so both are refused.
pub(super) fn phi3(fields: &mut Fields<'_>) -> Result<Spec, Diagnostic> {
    const LAYOUT: Layout = Layout {
        projections: Projections::Rows("self_attn.qkv_proj"),
        mlp: MlpLayout::GatedRows,
        ..Layout::USUAL
    };
    let defaults = Defaults {
        vocab: 32_064,
        hidden: 3072,
        ffn: 8192,
        max_positions: 4096,
        eps: ("rms_norm_eps", 1e-5),
        padding: Padding::Token(32_000),
        ..USUAL
    };
    let sizes = read_sizes(fields, &defaults)?;
    no_biases(fields)?;
    fields.neutral("lm_head_bias", &[json!(false)])?;
    let window = fields.nullable_size("sliding_window", None)?;
    let cx = RopeContext { types: &["default"], partial: Partial::Factor, ..RopeContext::of(&sizes) };
    Ok(Spec { layout: &LAYOUT, ..alike(fields, cx, sizes, window)? })
}

/// As Llama with biased queries, keys and values, norms after attention and MLP too, gate and up in one matrix, and a part of each
/// head rotated whose pairs are neighbours.
pub(super) fn glm4(fields: &mut Fields<'_>) -> Result<Spec, Diagnostic> {
    const LAYOUT: Layout = Layout {
        norms: Norms {
            before_attention: Some("input_layernorm"),
            after_attention: Some("post_self_attn_layernorm"),
            before_mlp: Some("post_attention_layernorm"),
            after_mlp: Some("post_mlp_layernorm"),
        },
        mlp: MlpLayout::GatedRows,
        ..Layout::USUAL
    };
    let defaults = Defaults {
        vocab: 151_552,
        ffn: 13_696,
        layers: 40,
        head_dim: HeadDim::Fixed(128),
        kv_heads: KvHeads::Fixed(2),
        max_positions: 131_072,
        eps: ("rms_norm_eps", 1.5625e-7),
        padding: Padding::Token(151_329),
        ..USUAL
    };
    let sizes = read_sizes(fields, &defaults)?;
    let qkv = fields.flag("attention_bias", true)?;
    let cx = RopeContext { partial: Partial::Half, ..RopeContext::of(&sizes) };
    let mut spec = alike(fields, cx, sizes, None)?;
    for rotary in spec.kinds.iter_mut().filter_map(|kind| kind.rotary.as_mut()) {
        rotary.pairs = Pairs::Neighbours;
    }
    Ok(Spec { layout: &LAYOUT, bias: Biases { qkv, ..Biases::default() }, ..spec })
}

/// Norms after attention and MLP instead of before.
pub(super) const NORMS_AFTER: Layout = Layout {
    norms: Norms {
        before_attention: None,
        after_attention: Some("post_attention_layernorm"),
        before_mlp: None,
        after_mlp: Some("post_feedforward_layernorm"),
    },
    ..Layout::USUAL
};

/// As Llama, with queries and keys normalised over all heads of a token, and norms after attention and MLP instead of
/// before.
pub(super) fn olmo2(fields: &mut Fields<'_>) -> Result<Spec, Diagnostic> {
    let defaults =
        Defaults { vocab: 50_304, eps: ("rms_norm_eps", 1e-5), padding: Padding::Token(1), ..USUAL };
    let sizes = read_sizes(fields, &defaults)?;
    let bias = Biases::of_attention(fields.flag("attention_bias", false)?);
    let spec = alike(fields, RopeContext::of(&sizes), sizes, None)?;
    Ok(Spec { layout: &NORMS_AFTER, bias, qk_norm: QkNorm::Projection, ..spec })
}

/// As Llama, with norms by weight + 1, a scaled embedding, and the tanh approximation of GELU, also where a description says `gelu`.
pub(super) fn gemma(fields: &mut Fields<'_>) -> Result<Spec, Diagnostic> {
    let defaults = Defaults {
        vocab: 256_000,
        hidden: 3072,
        ffn: 24_576,
        layers: 28,
        heads: 16,
        head_dim: HeadDim::Fixed(256),
        kv_heads: KvHeads::Fixed(16),
        max_positions: 8192,
        activation: ("hidden_act", "gelu_pytorch_tanh"),
        tied: true,
        padding: Padding::Token(0),
        ..USUAL
    };
    let mut sizes = read_sizes(fields, &defaults)?;
    if sizes.activation == Unary::Gelu {
        sizes.activation = Unary::GeluTanh;
    }
    // The library computes `hidden_act` alone.
    fields.skip(&["hidden_activation"]);
    let bias = Biases::of_attention(fields.flag("attention_bias", false)?);
    let spec = alike(fields, RopeContext::of(&sizes), sizes, None)?;
    let embedding = EmbeddingFactor::RootOfWidth;
    Ok(Spec { norm: NormForm::Rms { offset: 1.0 }, bias, embedding, ..spec })
}

/// As Llama, with factors of the embedding, of scores and of the outputs of attention and MLP, and a divisor of logits.
pub(super) fn granite(fields: &mut Fields<'_>) -> Result<Spec, Diagnostic> {
    let sizes = read_sizes(fields, &USUAL)?;
    let attention = fields.flag("attention_bias", false)?;
    let mlp = fields.flag("mlp_bias", false)?;
    let mut factor = |name: &str| Ok::<_, Diagnostic>(fields.positive(name)?.unwrap_or(1.0));
    let (embedding, branch_factor) = (factor("embedding_multiplier")?, factor("residual_multiplier")?);
    let (scale, divisor) = (factor("attention_multiplier")?, factor("logits_scaling")?);
    let mut spec = alike(fields, RopeContext::of(&sizes), sizes, None)?;
    spec.kinds.iter_mut().for_each(|kind| kind.scale = scale);
    Ok(Spec {
        bias: Biases { mlp, ..Biases::of_attention(attention) },
        embedding: EmbeddingFactor::Number(embedding),
        branch_factor,
        logit_factor: 1.0 / divisor,
        ..spec
    })
}

/// As Llama, with a plain MLP of the square of ReLU.
pub(super) fn arcee(fields: &mut Fields<'_>) -> Result<Spec, Diagnostic> {
    const LAYOUT: Layout =
        Layout { mlp: MlpLayout::Plain(["mlp.up_proj", "mlp.down_proj"]), ..Layout::USUAL };
    let defaults = Defaults {
        hidden: 2560,
        ffn: 18_432,
        max_positions: 4096,
        eps: ("rms_norm_eps", 1e-5),
        activation: ("hidden_act", "relu2"),
        ..USUAL
    };
    let sizes = read_sizes(fields, &defaults)?;
    let attention = fields.flag("attention_bias", false)?;
    let bias = Biases { mlp: fields.flag("mlp_bias", false)?, ..Biases::of_attention(attention) };
    Ok(Spec { layout: &LAYOUT, bias, ..alike(fields, RopeContext::of(&sizes), sizes, None)? })
}

/// As Llama, with biases everywhere by a flag, and heads whose pairs are neighbours.
pub(super) fn ernie4_5(fields: &mut Fields<'_>) -> Result<Spec, Diagnostic> {
    let defaults = Defaults {
        vocab: 103_424,
        hidden: 1024,
        ffn: 3072,
        layers: 18,
        heads: 16,
        head_dim: HeadDim::Fixed(128),
        kv_heads: KvHeads::Fixed(2),
        max_positions: 131_072,
        eps: ("rms_norm_eps", 1e-5),
        tied: true,
        padding: Padding::Token(0),
        ..USUAL
    };
    let sizes = read_sizes(fields, &defaults)?;
    let is_biased = fields.flag("use_bias", false)?;
    let bias = Biases { mlp: is_biased, ..Biases::of_attention(is_biased) };
    let cx = RopeContext { theta: 5e5, ..RopeContext::of(&sizes) };
    let mut spec = alike(fields, cx, sizes, None)?;
    for rotary in spec.kinds.iter_mut().filter_map(|kind| kind.rotary.as_mut()) {
        rotary.pairs = Pairs::Neighbours;
    }
    Ok(Spec { bias, ..spec })
}

/// Layer norms, a plain MLP, biases everywhere or nowhere, tied embeddings by default.
///
/// Published descriptions contain fields of the class that the library's was derived from. The library reads none of
/// them; those that would change the computation must be neutral.
pub(super) fn starcoder2(fields: &mut Fields<'_>) -> Result<Spec, Diagnostic> {
    const LAYOUT: Layout = Layout { mlp: MlpLayout::Plain(["mlp.c_fc", "mlp.c_proj"]), ..Layout::USUAL };
    let defaults = Defaults {
        vocab: 49_152,
        hidden: 3072,
        ffn: 12_288,
        layers: 30,
        heads: 24,
        kv_heads: KvHeads::Fixed(2),
        max_positions: 4096,
        eps: ("norm_epsilon", 1e-5),
        activation: ("hidden_act", "gelu_pytorch_tanh"),
        tied: true,
        ..USUAL
    };
    let sizes = read_sizes(fields, &defaults)?;
    let bias = fields.flag("use_bias", true)?;
    fields.neutral("mlp_type", &[json!("default")])?;
    fields.neutral("norm_type", &[json!("layer_norm")])?;
    fields.neutral("scale_attn_weights", &[json!(true)])?;
    fields.neutral("layer_norm_epsilon", &[json!(sizes.eps)])?;
    // The MLP's activation is `hidden_act`; the softmax is computed in f32 or wider.
    fields.skip(&["activation_function", "attention_softmax_in_fp32", "scale_attention_softmax_in_fp32"]);
    let window = fields.nullable_size("sliding_window", None)?;
    let spec = alike(fields, RopeContext::of(&sizes), sizes, window)?;
    let bias = Biases { mlp: bias, ..Biases::of_attention(bias) };
    Ok(Spec { layout: &LAYOUT, norm: NormForm::Layer, bias, ..spec })
}

/// GPT-NeoX and Pythia: queries, keys and values of a head are adjacent in one matrix, heads are partly rotated, norms
/// are layer norms; attention and MLP read the same stream unless `use_parallel_residual` is off.
pub(super) fn gpt_neox(fields: &mut Fields<'_>) -> Result<Spec, Diagnostic> {
    const LAYOUT: Layout = Layout {
        embedding: "gpt_neox.embed_in.weight",
        layer: "gpt_neox.layers.{layer}",
        projections: Projections::HeadRows("attention.query_key_value"),
        attention_out: "attention.dense",
        mlp: MlpLayout::Plain(["mlp.dense_h_to_4h", "mlp.dense_4h_to_h"]),
        last_norm: "gpt_neox.final_layer_norm",
        head: "embed_out.weight",
        ..Layout::USUAL
    };
    let defaults = Defaults {
        vocab: 50_432,
        hidden: 6144,
        ffn: 24_576,
        layers: 44,
        heads: 64,
        head_dim: HeadDim::Quotient,
        kv_heads: KvHeads::NoField,
        eps: ("layer_norm_eps", 1e-5),
        activation: ("hidden_act", "gelu"),
        padding: Padding::NoField,
        ..USUAL
    };
    let sizes = read_sizes(fields, &defaults)?;
    let attention = fields.flag("attention_bias", true)?;
    let parallel = fields.flag("use_parallel_residual", true)?;
    let cx =
        RopeContext { types: &["default", "linear"], partial: Partial::Percent, ..RopeContext::of(&sizes) };
    Ok(Spec {
        layout: &LAYOUT,
        spelling: Spelling::Quotient,
        norm: NormForm::Layer,
        bias: Biases { mlp: true, ..Biases::of_attention(attention) },
        residual: if parallel { Residual::Parallel } else { Residual::Serial },
        ..alike(fields, cx, sizes, None)?
    })
}

/// A model whose layers have causal attention within a window of `width` tokens, if any, and the same rotary positions.
fn alike(
    fields: &mut Fields<'_>,
    cx: RopeContext,
    sizes: Sizes,
    width: Option<u64>,
) -> Result<Spec, Diagnostic> {
    let rotary = Rope::read(fields, cx)?.of_model()?;
    let kind = Kind::new("block", width.map_or(Mask::Causal, window), rotary, &sizes);
    let layers = (0..sizes.layers).map(|_| 0);
    Ok(Spec::new(sizes, vec![kind], layers))
}
