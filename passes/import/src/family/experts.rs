//! Families with experts: Mixtral, Qwen3-MoE and MiniMax-M2, and the fields and kinds of block that they share with DeepSeek.

use ithaca_ir::ops::experts::{Gates, Scoring};
use ithaca_ir::{Diagnostic, Mask};
use serde_json::json;

use super::by_layer::used_window;
use super::sizes::{Defaults, HeadDim, KvHeads, USUAL, read_sizes};
use super::uniform::no_biases;
use crate::fields::Fields;
use crate::rope::{Partial, Rope, RopeContext};
use crate::spec::{
    Biases, ExpertSpec, ExpertTensors, Kind, Layout, Mlp, QkNorm, RotarySpec, Sizes, Spec, Spelling, window,
};

/// Fields that Mixtral reads, and families without experts must leave neutral.
pub(super) const MIXTRAL_OWN: &[&str] = &["num_local_experts", "num_experts", "num_experts_per_tok"];

/// The names of Mixtral's experts.
const MIXTRAL: Layout =
    Layout { experts: "block_sparse_moe", expert: ExpertTensors::Each(["w1", "w3", "w2"]), ..Layout::USUAL };

/// As Mistral, with experts in every layer; gates are shares of softmax scores.
pub(super) fn mixtral(fields: &mut Fields<'_>) -> Result<Spec, Diagnostic> {
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
    Ok(Spec { layout: &MIXTRAL, experts: Some(experts), ..spec })
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

/// As Mixtral, with queries and keys normalised over all heads, a part of each head rotated, and scores by the sigmoid, of which a bias
/// takes part in the choice.
pub(super) fn minimax_m2(fields: &mut Fields<'_>) -> Result<Spec, Diagnostic> {
    const LAYOUT: Layout = Layout { bias_of_choice: "e_score_correction_bias", ..MIXTRAL };
    let defaults = Defaults {
        vocab: 200_064,
        hidden: 3072,
        ffn: 1536,
        layers: 62,
        heads: 48,
        head_dim: HeadDim::Fixed(128),
        kv_heads: KvHeads::Fixed(8),
        max_positions: 196_608,
        ..USUAL
    };
    let sizes = read_sizes(fields, &defaults)?;
    // Noise of the router, for training only.
    fields.neutral("router_jitter_noise", &[json!(0.0)])?;
    read_loss(fields)?;
    // Published descriptions state what the class does, and modules that predict further tokens, which it lacks.
    fields.neutral("scoring_func", &[json!("sigmoid")])?;
    fields.neutral("use_routing_bias", &[json!(true)])?;
    fields.neutral("use_qk_norm", &[json!(true)])?;
    fields.neutral("qk_norm_type", &[json!("per_layer")])?;
    fields.neutral("shared_intermediate_size", &[json!(0)])?;
    fields.skip(&["use_mtp", "num_mtp_modules", "mtp_transformer_layers", "attn_type_list"]);
    let count = fields.aliased_size(["num_local_experts", "num_experts"], 256)?;
    let top = fields.size("num_experts_per_tok", 8)?;
    let experts = ExpertSpec {
        scoring: Scoring::Sigmoid,
        gates: Gates::Shares,
        biased: true,
        ..by_softmax(count, top, sizes.ffn)
    };
    let partial = fields.nullable_size("rotary_dim", None)?.map_or(Partial::Factor, Partial::Elements);
    let cx = RopeContext { theta: 5e6, partial, ..RopeContext::of(&sizes) };
    let rotary = Rope::read(fields, cx)?.of_model()?;
    let spec = with_experts(sizes, None, &rotary, |_| true);
    Ok(Spec { layout: &LAYOUT, experts: Some(experts), qk_norm: QkNorm::Projection, ..spec })
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
        wide_router: false,
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
