//! Llama 4, the text part: experts that read gated tokens, causal attention within chunks in most layers, and queries that grow
//! with their positions in the layers without rotary positions.

use ithaca_ir::ops::Pairs;
use ithaca_ir::ops::experts::{Gates, Scoring};
use ithaca_ir::{Diagnostic, Mask};
use serde_json::{Value, json};

use super::by_layer::{FULL, rotated_layers};
use super::experts::{by_softmax, read_loss};
use super::sizes::{Defaults, HeadDim, KvHeads, USUAL, read_sizes};
use crate::fields::Fields;
use crate::rope::{Rope, RopeContext};
use crate::spec::{
    Biases, ExpertSpec, ExpertTensors, Growth, Kind, Layout, Mlp, QkNorm, Sizes, Spec, Spelling, chunks,
};

/// Fields that families without experts must leave neutral.
pub(super) const OWN: &[&str] = &["num_local_experts", "num_experts_per_tok"];

/// Causal attention within chunks of tokens.
const CHUNKED: &str = "chunked_attention";

/// Every fourth layer has no rotary positions and sees all tokens, and every layer has experts, unless lists state otherwise.
pub(super) fn read(fields: &mut Fields<'_>) -> Result<Spec, Diagnostic> {
    const LAYOUT: Layout = Layout {
        gated: "feed_forward",
        experts: "feed_forward",
        expert: ExpertTensors::Halves,
        shared: "feed_forward.shared_expert",
        ..Layout::USUAL
    };
    let defaults = Defaults {
        vocab: 202_048,
        hidden: 5120,
        ffn: 8192,
        layers: 48,
        heads: 40,
        head_dim: HeadDim::Fixed(128),
        kv_heads: KvHeads::Fixed(8),
        max_positions: 131_072,
        eps: ("rms_norm_eps", 1e-5),
        ..USUAL
    };
    let of_experts = read_sizes(fields, &defaults)?;
    let sizes = Sizes { ffn: fields.size("intermediate_size_mlp", 16_384)?, ..of_experts };
    let experts = read_experts(fields, of_experts.ffn)?;
    let bias = Biases::of_attention(fields.flag("attention_bias", false)?);
    let qk_norm = if fields.flag("use_qk_norm", true)? { QkNorm::Rotated } else { QkNorm::None };
    let growth = read_growth(fields)?;
    let chunk = fields.nullable_size("attention_chunk_size", Some(8192))?;
    // Of another library.
    fields.skip(&["for_llm_compressor"]);

    let rotated = rotated_layers(fields, &sizes)?;
    let is_rotated = |layer: u64| rotated[layer as usize];
    let types = fields.words("layer_types")?;
    if let Some(types) = types.as_ref().filter(|types| types.len() as u64 != sizes.layers) {
        let message =
            format!("`layer_types` has {} entries, but `num_hidden_layers` is {}", types.len(), sizes.layers);
        return Err(Diagnostic::new("M07", message));
    }
    let step = fields.size("interleave_moe_layer_step", 1)?;
    let with_experts = fields.counts("moe_layers")?;
    let has_experts = |layer: u64| match &with_experts {
        Some(layers) => layers.contains(&layer),
        None => (layer + 1).is_multiple_of(step),
    };
    let cx = RopeContext { theta: 500_000.0, ..RopeContext::of(&sizes) };
    let mut rotary = Rope::read(fields, cx)?.of_model()?;
    rotary.pairs = Pairs::Neighbours;

    let (mut kinds, mut layers): (Vec<Kind>, Vec<usize>) = (Vec::new(), Vec::new());
    for layer in 0..sizes.layers {
        let is_chunked = match &types {
            Some(types) => match types[layer as usize] {
                FULL => false,
                CHUNKED => true,
                other => {
                    let refusal =
                        Diagnostic::new("M05", format!("type of layer \"{other}\" is not supported"));
                    return Err(refusal.help(format!("`layer_types` may hold {FULL} and {CHUNKED}")));
                }
            },
            None => is_rotated(layer) && chunk.is_some(),
        };
        let mask = match chunk {
            Some(size) if is_chunked => chunks(size),
            None if is_chunked => {
                let message = "`layer_types` has chunked_attention, but `attention_chunk_size` is null";
                return Err(Diagnostic::new("M07", message));
            }
            Some(_) | None => Mask::Causal,
        };
        let (mlp, of_mlp) =
            if has_experts(layer) { (Mlp::Experts, "experts") } else { (Mlp::Dense, "dense") };
        let rotary = is_rotated(layer).then(|| rotary.clone());
        let growth = if rotary.is_none() { growth } else { None };
        let of_attention = match (is_chunked, rotary.is_some()) {
            (true, true) => "chunks",
            (true, false) => "chunks_unrotated",
            (false, true) => "full_rotated",
            (false, false) => "full",
        };
        let label = format!("{of_attention}_{of_mlp}");
        let kind = Kind { growth, mlp, ..Kind::new(label, mask, rotary, &sizes) };
        layers.push(kinds.iter().position(|known| *known == kind).unwrap_or_else(|| {
            kinds.push(kind);
            kinds.len() - 1
        }));
    }
    let experts = kinds.iter().any(|kind| kind.mlp == Mlp::Experts).then_some(experts);
    let spec = Spec::new(sizes, kinds, layers);
    Ok(Spec { layout: &LAYOUT, spelling: Spelling::Llama4, bias, qk_norm, experts, ..spec })
}

/// One expert for each token, beside a network that all tokens share and that is as wide.
fn read_experts(fields: &mut Fields<'_>, ffn: u64) -> Result<ExpertSpec, Diagnostic> {
    read_loss(fields)?;
    // Noise of the router, for training only.
    fields.neutral("router_jitter_noise", &[json!(0.0)])?;
    let count = fields.size("num_local_experts", 16)?;
    let top = fields.size("num_experts_per_tok", 1)?;
    if top != 1 {
        let message = format!("`num_experts_per_tok` is {top}: experts that read gated tokens have one each");
        return Err(Diagnostic::new("M05", message).help("set it to 1"));
    }
    Ok(ExpertSpec {
        shared: Some(ffn),
        scoring: Scoring::Sigmoid,
        gates: Gates::Scores,
        rounded_gates: true,
        gated_inputs: true,
        ..by_softmax(count, top, ffn)
    })
}

/// How queries without rotary positions grow; published descriptions state a number where the class has a flag.
fn read_growth(fields: &mut Fields<'_>) -> Result<Option<Growth>, Diagnostic> {
    let scale = fields.positive("attn_scale")?.unwrap_or(0.1);
    let step = fields.size("floor_scale", 8192)?;
    let name = "attn_temperature_tuning";
    let is_on = match fields.raw(name) {
        None => true,
        Some(Value::Bool(is_on)) => *is_on,
        Some(value) => {
            value.as_f64().ok_or_else(|| fields.wrong(name, value, "true, false or a number"))? != 0.0
        }
    };
    Ok(is_on.then_some(Growth { scale, step }))
}
