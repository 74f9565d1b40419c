//! DeepSeek-V3: latent attention, the first layers dense, the others with experts in groups beside shared ones.
//!
//! Modules that predict further tokens are no part of the library's model, and none of the program.

use ithaca_ir::ops::Pairs;
use ithaca_ir::ops::experts::{Gates, Scoring};
use ithaca_ir::{DType, Diagnostic};
use serde_json::json;

use super::experts::{groups, kinds, read_loss};
use super::sizes::{Sizes, padding_row, read_activation, usual_scale};
use crate::fields::Fields;
use crate::rope::Rope;
use crate::rope::{COMMON, Partial};
use crate::spec::Family;
use crate::spec::{Biases, ExpertSpec, Latent, Spec, check_layers};

/// Fields that other families must leave neutral.
pub(super) const OWN: &[&str] =
    &["num_local_experts", "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size"];

pub(super) fn read<'a>(
    fields: &mut Fields<'a>,
    dtype: DType,
    ignore: &'a [String],
) -> Result<Spec, Diagnostic> {
    let latent = Latent {
        queries: fields.nullable_size("q_lora_rank", Some(1536))?,
        keys: fields.size("kv_lora_rank", 512)?,
        plain: fields.size("qk_nope_head_dim", 128)?,
        rotated: fields.size("qk_rope_head_dim", 64)?,
        value: fields.size("v_head_dim", 128)?,
    };
    let sizes = read_sizes(fields, &latent)?;
    read_unused(fields)?;
    let bias = fields.flag("attention_bias", false)?;
    let experts = read_experts(fields)?;
    let first = fields.count("first_k_dense_replace", 3)?;
    let pairs = match fields.flag_or_null("rope_interleave")?.unwrap_or(!is_null(fields, "rope_interleave")) {
        true => Pairs::Neighbours,
        false => Pairs::Halves,
    };
    // The rotated part of a head is a tensor of its own.
    let rotated = Sizes { head_dim: latent.rotated, ..sizes };
    let rope = Rope::read(fields, rotated.rope_context(COMMON, Partial::Whole), ignore)?;
    let (mut kinds, layers) = kinds(&sizes, None, &rope, |layer| layer >= first)?;
    for kind in &mut kinds {
        let Some(rotary) = &mut kind.rotary else { continue };
        rotary.pairs = pairs;
        kind.scale = usual_scale(sizes.head_dim) * rope.sharpening(&rotary.scaling)?;
    }
    let has_experts = layers.len() as u64 > first;
    Ok(Spec {
        experts: has_experts.then_some(experts),
        latent: Some(latent),
        bias: Biases { qkv: bias, out: bias, mlp: false },
        ..sizes.spec(Family::DeepseekV3, dtype, kinds, layers)
    })
}

fn is_null(fields: &mut Fields<'_>, name: &str) -> bool {
    fields.raw(name).is_some_and(serde_json::Value::is_null)
}

/// Sizes as the other families have them; a head is as wide as its two parts together.
fn read_sizes(fields: &mut Fields<'_>, latent: &Latent) -> Result<Sizes, Diagnostic> {
    let heads = fields.size("num_attention_heads", 128)?;
    let kv_heads = fields.nullable_size("num_key_value_heads", Some(128))?.unwrap_or(heads);
    if heads != kv_heads {
        return Err(Diagnostic::new(
            "M07",
            format!(
                "`num_key_value_heads` is {kv_heads}, but latent attention has a key for each of {heads} heads"
            ),
        )
        .help("leave it out"));
    }
    let head_dim = latent.plain + latent.rotated;
    // The library derives both, whatever the description says.
    for (name, derived) in [("head_dim", latent.rotated), ("qk_head_dim", head_dim)] {
        let stated = fields.nullable_size(name, None)?.unwrap_or(derived);
        if stated != derived {
            return Err(Diagnostic::new(
                "M07",
                format!("`{name}` is {stated}, but follows from the parts of a head as {derived}"),
            )
            .help("leave it out"));
        }
    }
    let layers = fields.count("num_hidden_layers", 61)?;
    let vocab = fields.size("vocab_size", 129_280)?;
    Ok(Sizes {
        hidden: fields.size("hidden_size", 7168)?,
        heads,
        kv_heads,
        head_dim,
        ffn: fields.size("intermediate_size", 18_432)?,
        vocab,
        padding: padding_row(fields, None, vocab)?,
        layers: check_layers("num_hidden_layers", layers)?,
        eps: fields.epsilon("rms_norm_eps", 1e-6)?,
        activation: read_activation(fields, "hidden_act", "silu")?,
        max_positions: fields.size("max_position_embeddings", 4096)?,
        tied: fields.flag("tie_word_embeddings", false)?,
    })
}

fn read_experts(fields: &mut Fields<'_>) -> Result<ExpertSpec, Diagnostic> {
    let count = fields.aliased_size(["n_routed_experts", "num_local_experts"], 256)?;
    let top = fields.size("num_experts_per_tok", 8)?;
    let ffn = fields.size("moe_intermediate_size", 2048)?;
    let n_groups = fields.size("n_group", 8)?;
    let kept = fields.size("topk_group", 4)?;
    let shared = fields.size("n_shared_experts", 1)?;
    let gates = match fields.flag("norm_topk_prob", true)? {
        true => Gates::Shares,
        false => Gates::Scores,
    };
    Ok(ExpertSpec {
        count,
        top,
        ffn,
        shared: Some(ffn.saturating_mul(shared)),
        scoring: Scoring::Sigmoid,
        gates,
        scale: fields.positive("routed_scaling_factor")?.unwrap_or(2.5),
        groups: groups((count, top), ("n_group", n_groups), ("topk_group", kept))?,
    })
}

/// Fields of published descriptions that the library's class does not read.
fn read_unused(fields: &mut Fields<'_>) -> Result<(), Diagnostic> {
    read_loss(fields)?;
    fields.neutral("scoring_func", &[json!("sigmoid")])?;
    fields.neutral("topk_method", &[json!("noaux_tc")])?;
    fields.neutral("moe_layer_freq", &[json!(1)])?;
    fields.neutral("ep_size", &[json!(1)])?;
    // Of training: the loss that keeps experts busy, and prediction of further tokens.
    fields.number("aux_loss_alpha")?;
    fields.flag_or_null("seq_aux")?;
    fields.count("num_nextn_predict_layers", 1)?;
    fields.count("num_mtp_layers", 1)?;
    Ok(())
}
