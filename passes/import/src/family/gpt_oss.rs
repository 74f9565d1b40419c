//! gpt-oss: experts in every layer, learned sinks of attention, sliding windows by layer.

use ithaca_ir::Diagnostic;
use ithaca_ir::ops::Unary;
use ithaca_ir::ops::experts::Gates;
use serde_json::json;

use super::by_layer::{FULL, SLIDING, by_type};
use super::experts::{by_softmax, read_loss};
use super::sizes::{Defaults, HeadDim, KvHeads, USUAL, read_sizes};
use crate::fields::Fields;
use crate::rope::{Rope, RopeContext};
use crate::spec::{Biases, ExpertSpec, ExpertTensors, Kind, Layout, Mlp, Spec};

/// Fields that families without experts must leave neutral.
pub(super) const OWN: &[&str] = &["num_local_experts", "num_experts", "num_experts_per_tok"];

/// Layers alternate, starting with a sliding one, unless `layer_types` states otherwise.
///
/// The class reads neither `hidden_act` nor `initial_context_length` and `experts_per_token`, which published descriptions repeat.
pub(super) fn read(fields: &mut Fields<'_>) -> Result<Spec, Diagnostic> {
    const LAYOUT: Layout = Layout { expert: ExpertTensors::Alternating, ..Layout::USUAL };
    let defaults = Defaults {
        vocab: 201_088,
        hidden: 2880,
        ffn: 2880,
        layers: 36,
        heads: 64,
        head_dim: HeadDim::Fixed(64),
        kv_heads: KvHeads::Fixed(8),
        max_positions: 131_072,
        eps: ("rms_norm_eps", 1e-5),
        ..USUAL
    };
    let mut sizes = read_sizes(fields, &defaults)?;
    sizes.activation = Unary::QuickGelu;
    fields.neutral("swiglu_alpha", &[json!(1.702)])?;
    let limit = fields.positive("swiglu_limit")?.unwrap_or(7.0);
    let bias = Biases::of_attention(fields.flag("attention_bias", true)?);
    let width = fields.nullable_size("sliding_window", Some(128))?;
    let types = match fields.words("layer_types")? {
        Some(types) => types,
        None => (0..sizes.layers).map(|i| if i % 2 == 0 { SLIDING } else { FULL }).collect(),
    };
    read_loss(fields)?;
    let count = fields.aliased_size(["num_local_experts", "num_experts"], 128)?;
    let top = fields.size("num_experts_per_tok", 4)?;
    fields.neutral("experts_per_token", &[json!(top)])?;
    fields.skip(&["initial_context_length"]);
    let experts = ExpertSpec {
        gates: Gates::Shares,
        rounded_gates: true,
        biases: true,
        limit: Some(limit),
        ..by_softmax(count, top, sizes.ffn)
    };
    let rope = Rope::read(fields, RopeContext { theta: 150_000.0, ..RopeContext::of(&sizes) })?;
    let yarn = json!({
        "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": false,
        "original_max_position_embeddings": 4096,
    });
    let rope = rope.or_by_default(yarn.as_object());
    let window = width.ok_or("`sliding_window` must be a number of tokens");
    let spec = by_type(sizes, &types, window, |sizes, label, ty, mask| {
        let rotary = rope.of_layers(ty, &[FULL, SLIDING])?;
        Ok(Kind { mlp: Mlp::Experts, ..Kind::new(label, mask, rotary, sizes) })
    })?;
    Ok(Spec { layout: &LAYOUT, bias, experts: Some(experts), sinks: true, ..spec })
}
