//! Families with experts: Mixtral and Qwen3-MoE, and the fields and kinds of block that they share with DeepSeek.

use ithaca_ir::ops::experts::{Gates, Scoring};
use ithaca_ir::{Diagnostic, Mask};
use serde_json::json;

use super::by_layer::used_window;
use super::sizes::{Defaults, KvHeads, USUAL, read_sizes};
use super::uniform::no_biases;
use crate::fields::Fields;
use crate::rope::{Rope, RopeContext};
use crate::spec::{
    Biases, ExpertSpec, ExpertTensors, Kind, Layout, Mlp, QkNorm, RotarySpec, Sizes, Spec, Spelling, window,
};

/// Fields that Mixtral reads, and families without experts must leave neutral.
pub(super) const MIXTRAL_OWN: &[&str] = &["num_local_experts", "num_experts", "num_experts_per_tok"];

/// As Mistral, with experts in every layer; gates are shares of softmax scores.
pub(super) fn mixtral(fields: &mut Fields<'_>) -> Result<Spec, Diagnostic> {
    const LAYOUT: Layout = Layout {
        experts: "block_sparse_moe",
        expert: ExpertTensors::Each(["w1", "w3", "w2"]),
        ..Layout::USUAL
    };
    let defaults = Defaults {
        ffn: 14_336,
        kv_heads: KvHeads::Fixed(8),
        max_positions: 4096 * 32,
        eps: ("rms_norm_eps", 1e-5),
        ..USUAL
    };
    let sizes = read_sizes(fields, &defaults)?;
    no_biases(fields)?;
    // Noise of the router, for training only.
    fields.neutral("router_jitter_noise", &[json!(0.0)])?;
    read_loss(fields)?;
    let count = fields.aliased_size(["num_local_experts", "num_experts"], 8)?;
    let top = fields.size("num_experts_per_tok", 2)?;
    let width = fields.nullable_size("sliding_window", None)?;
    let rope = Rope::read(fields, RopeContext { theta: 1e6, ..RopeContext::of(&sizes) })?;
    let experts = ExpertSpec { gates: Gates::Shares, ..by_softmax(count, top, sizes.ffn) };
    let spec = with_experts(sizes, width, &rope.of_model()?, |_| true);
    Ok(Spec { layout: &LAYOUT, experts: Some(experts), ..spec })
}

/// Fields that Qwen3-MoE reads, and families without experts must leave neutral.
pub(super) const QWEN3_MOE_OWN: &[&str] = &[
    "num_local_experts",
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "decoder_sparse_step",
    "mlp_only_layers",
];

/// As Qwen3, with experts in every `decoder_sparse_step`-th layer except those of `mlp_only_layers`.
pub(super) fn qwen3_moe(fields: &mut Fields<'_>) -> Result<Spec, Diagnostic> {
    let defaults = Defaults {
        vocab: 151_936,
        hidden: 2048,
        ffn: 6144,
        layers: 24,
        kv_heads: KvHeads::Fixed(4),
        max_positions: 32_768,
        ..USUAL
    };
    let sizes = read_sizes(fields, &defaults)?;
    let bias = Biases::of_attention(fields.flag("attention_bias", false)?);
    let width = used_window(fields)?;
    // The library's class slides in all layers or in none; this field is Qwen3's.
    fields.count("max_window_layers", 0)?;
    read_loss(fields)?;
    let count = fields.aliased_size(["num_experts", "num_local_experts"], 128)?;
    let top = fields.size("num_experts_per_tok", 8)?;
    let ffn = fields.size("moe_intermediate_size", 768)?;
    let experts =
        ExpertSpec { gates: read_gates(fields, false)?, rounded_gates: true, ..by_softmax(count, top, ffn) };
    let step = fields.size("decoder_sparse_step", 1)?;
    let dense = fields.counts("mlp_only_layers")?.unwrap_or_default();
    let rope = Rope::read(fields, RopeContext::of(&sizes))?;
    let has_experts = |layer: u64| !dense.contains(&layer) && (layer + 1).is_multiple_of(step);
    let spec = with_experts(sizes, width, &rope.of_model()?, has_experts);
    let spelling = Spelling::DenseLayers;
    Ok(Spec { spelling, experts: Some(experts), bias, qk_norm: QkNorm::Head, ..spec })
}

/// The model in which layer `i` has experts if `has_experts(i)`. All layers have the same window, if any.
pub(super) fn with_experts(
    sizes: Sizes,
    width: Option<u64>,
    rotary: &RotarySpec,
    has_experts: impl Fn(u64) -> bool,
) -> Spec {
    let mask = width.map_or(Mask::Causal, window);
    let mut kinds: Vec<Kind> = Vec::new();
    let mut layers = Vec::new();
    for layer in 0..sizes.layers {
        let (mlp, label) = if has_experts(layer) { (Mlp::Experts, "experts") } else { (Mlp::Dense, "dense") };
        layers.push(kinds.iter().position(|kind| kind.mlp == mlp).unwrap_or_else(|| {
            kinds.push(Kind { mlp, ..Kind::new(label, mask.clone(), rotary.clone(), &sizes) });
            kinds.len() - 1
        }));
    }
    Spec::new(sizes, kinds, layers)
}

/// Experts whose gates are softmax scores.
pub(super) fn by_softmax(count: u64, top: u64, ffn: u64) -> ExpertSpec {
    ExpertSpec {
        count,
        top,
        ffn,
        shared: None,
        scoring: Scoring::Softmax,
        gates: Gates::Scores,
        scale: 1.0,
        groups: None,
        biased: false,
        rounded_gates: false,
        gated_inputs: false,
        biases: false,
        limit: None,
    }
}

/// Whether gates are scores, or shares of the chosen experts' scores.
pub(super) fn read_gates(fields: &mut Fields<'_>, default: bool) -> Result<Gates, Diagnostic> {
    Ok(if fields.flag("norm_topk_prob", default)? { Gates::Shares } else { Gates::Scores })
}

/// Fields of the load-balancing loss, which has no influence on the logits.
pub(super) fn read_loss(fields: &mut Fields<'_>) -> Result<(), Diagnostic> {
    fields.neutral("output_router_logits", &[json!(false)])?;
    fields.number("router_aux_loss_coef").map(|_| ())
}
