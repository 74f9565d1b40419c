//! DeepSeek-V3, with latent attention, and GLM-4 with experts: the first layers are dense, the others have experts in groups and
//! shared experts.
//!
//! The library's models have no modules that predict further tokens; nor has the program.

use ithaca_ir::Diagnostic;
use ithaca_ir::ops::Pairs;
use ithaca_ir::ops::experts::{ExpertGroups, Scoring};
use serde_json::{Value, json};

use super::experts::{read_gates, read_loss, with_experts};
use super::sizes::{Defaults, HeadDim, KvHeads, USUAL, read_sizes};
use crate::fields::Fields;
use crate::rope::{Partial, Rope, RopeContext};
use crate::spec::{Biases, ExpertSpec, Latent, QkNorm, Sizes, Spec, Spelling};

/// Fields that families without experts must leave neutral.
pub(super) const OWN: &[&str] =
    &["num_local_experts", "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size"];

pub(super) fn read(fields: &mut Fields<'_>) -> Result<Spec, Diagnostic> {
    let latent = Latent {
        queries: fields.nullable_size("q_lora_rank", Some(1536))?,
        keys: fields.size("kv_lora_rank", 512)?,
        plain: fields.size("qk_nope_head_dim", 128)?,
        rotated: fields.size("qk_rope_head_dim", 64)?,
        value: fields.size("v_head_dim", 128)?,
    };
    let sizes = read_latent_sizes(fields, &latent)?;
    read_unused(fields)?;
    fields.neutral("moe_layer_freq", &[json!(1)])?;
    let bias = Biases::of_attention(fields.flag("attention_bias", false)?);
    let defaults = OfExperts { count: 256, ffn: 2048, groups: 8, kept: 4, scale: 2.5 };
    let experts = read_experts(fields, &defaults)?;
    let first = fields.count("first_k_dense_replace", 3)?;
    let pairs = match fields.raw("rope_interleave") {
        None | Some(Value::Bool(true)) => Pairs::Neighbours,
        Some(_) => fields.flag_or_null("rope_interleave").map(|_| Pairs::Halves)?,
    };
    // The rotated part of a head is a separate tensor.
    let cx = RopeContext { head_dim: latent.rotated, ..RopeContext::of(&sizes) };
    let rope = Rope::read(fields, cx)?;
    let mut rotary = rope.of_model()?;
    rotary.pairs = pairs;
    let sharpening = rope.sharpening(&rotary.scaling)?;
    let has_experts = sizes.layers > first;
    let mut spec = with_experts(sizes, None, &rotary, |layer| layer >= first);
    for kind in &mut spec.kinds {
        kind.scale *= sharpening;
    }
    let experts = has_experts.then_some(experts);
    Ok(Spec { spelling: Spelling::FirstDense, experts, latent: Some(latent), bias, ..spec })
}

/// As GLM-4 without norms after attention and MLP: half of each head is rotated, in halves; queries and keys are normalised by a
/// flag.
pub(super) fn glm4_moe(fields: &mut Fields<'_>) -> Result<Spec, Diagnostic> {
    let defaults = Defaults {
        vocab: 151_552,
        ffn: 10_944,
        layers: 46,
        heads: 96,
        kv_heads: KvHeads::Fixed(8),
        max_positions: 131_072,
        eps: ("rms_norm_eps", 1e-5),
        ..USUAL
    };
    let sizes = read_sizes(fields, &defaults)?;
    read_unused(fields)?;
    let qkv = fields.flag("attention_bias", false)?;
    let qk_norm = if fields.flag("use_qk_norm", false)? { QkNorm::Head } else { QkNorm::None };
    let defaults = OfExperts { count: 128, ffn: 1408, groups: 1, kept: 1, scale: 1.0 };
    let experts = read_experts(fields, &defaults)?;
    let first = fields.count("first_k_dense_replace", 1)?;
    let cx = RopeContext { partial: Partial::Half, ..RopeContext::of(&sizes) };
    let rotary = Rope::read(fields, cx)?.of_model()?;
    let experts = (sizes.layers > first).then_some(experts);
    let spec = with_experts(sizes, None, &rotary, |layer| layer >= first);
    let bias = Biases { qkv, ..Biases::default() };
    Ok(Spec { spelling: Spelling::FirstDense, experts, bias, qk_norm, ..spec })
}

/// The sizes that all families have; the width of a head is the sum of its two parts.
fn read_latent_sizes(fields: &mut Fields<'_>, latent: &Latent) -> Result<Sizes, Diagnostic> {
    let head_dim = latent.plain + latent.rotated;
    // The library derives both and ignores the description.
    for (name, derived) in [("head_dim", latent.rotated), ("qk_head_dim", head_dim)] {
        let stated = fields.nullable_size(name, None)?.unwrap_or(derived);
        if stated != derived {
            let message = format!("`{name}` is {stated}, but the parts of a head make it {derived}");
            return Err(Diagnostic::new("M07", message).help("leave it out"));
        }
    }
    let defaults = Defaults {
        vocab: 129_280,
        hidden: 7168,
        ffn: 18_432,
        layers: 61,
        heads: 128,
        head_dim: HeadDim::Sum(head_dim),
        kv_heads: KvHeads::NoField,
        max_positions: 4096,
        ..USUAL
    };
    let sizes = read_sizes(fields, &defaults)?;
    let heads = sizes.heads;
    match fields.nullable_size("num_key_value_heads", Some(128))? {
        Some(n) if n != heads => {
            let message = format!(
                "`num_key_value_heads` is {n}, but latent attention has a key for each of {heads} heads"
            );
            Err(Diagnostic::new("M07", message).help("leave it out"))
        }
        Some(_) | None => Ok(sizes),
    }
}

/// The values of absent fields of experts.
struct OfExperts {
    count: u64,
    ffn: u64,
    groups: u64,
    kept: u64,
    scale: f64,
}

fn read_experts(fields: &mut Fields<'_>, defaults: &OfExperts) -> Result<ExpertSpec, Diagnostic> {
    let count = fields.aliased_size(["n_routed_experts", "num_local_experts"], defaults.count)?;
    let top = fields.size("num_experts_per_tok", 8)?;
    let ffn = fields.size("moe_intermediate_size", defaults.ffn)?;
    let groups = read_groups(fields, count, top, defaults)?;
    let shared = fields.size("n_shared_experts", 1)?;
    Ok(ExpertSpec {
        count,
        top,
        ffn,
        shared: Some(ffn.saturating_mul(shared)),
        scoring: Scoring::Sigmoid,
        gates: read_gates(fields, true)?,
        scale: fields.positive("routed_scaling_factor")?.unwrap_or(defaults.scale),
        groups,
        biased: true,
        wide_router: true,
        rounded_gates: false,
        gated_inputs: false,
        biases: false,
        limit: None,
    })
}

/// Groups of experts, or `None` if the choice of groups excludes none.
///
/// # Errors
/// `M07` when the number of groups does not divide the number of experts, a group has fewer than two experts, or the
/// chosen groups have too few.
fn read_groups(
    fields: &mut Fields<'_>,
    count: u64,
    top: u64,
    defaults: &OfExperts,
) -> Result<Option<ExpertGroups>, Diagnostic> {
    let n = fields.size("n_group", defaults.groups)?;
    let kept = fields.size("topk_group", defaults.kept)?;
    let size = count / n;
    let problem = if !count.is_multiple_of(n) {
        format!("{count} experts do not divide into `n_group` {n}")
    } else if kept > n {
        format!("`topk_group` is {kept}, but `n_group` is {n}")
    } else if size < 2 {
        format!(
            "`n_group` of {n} leaves {size} of {count} experts in a group; a group is scored by its two best"
        )
    } else if top > size * kept {
        format!("{top} experts for a token, but {kept} groups of {size} to choose from")
    } else {
        return Ok((kept < n).then_some(ExpertGroups { count: n, kept }));
    };
    Err(Diagnostic::new("M07", problem))
}

/// Fields of published descriptions that the library's class does not read.
fn read_unused(fields: &mut Fields<'_>) -> Result<(), Diagnostic> {
    read_loss(fields)?;
    fields.neutral("scoring_func", &[json!("sigmoid")])?;
    fields.neutral("topk_method", &[json!("noaux_tc")])?;
    fields.neutral("ep_size", &[json!(1)])?;
    // Training only: the load-balancing loss, and prediction of further tokens.
    fields.number("aux_loss_alpha")?;
    fields.flag_or_null("seq_aux")?;
    fields.count("num_nextn_predict_layers", 1)?;
    fields.count("num_mtp_layers", 1)?;
    Ok(())
}
