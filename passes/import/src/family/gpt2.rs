//! GPT-2: learned positions, layer norms with bias, matrices stored input-major, tied embeddings by default.
//!
//! `reorder_and_upcast_attn` is accepted and has no effect: it orders the same arithmetic differently to spare half
//! precision, and the softmax here is never narrower than f32. `scale_attn_by_inverse_layer_idx` gives every layer its
//! own scale, and so its own function.

use ithaca_ir::{DType, Diagnostic, Mask};

use super::sizes::{derived_head_dim, read_activation, usual_scale};
use crate::fields::Fields;
use crate::spec::Family;
use crate::spec::{Biases, Kind, Mlp, QkNorm, Residual, Spec, check_layers, runs};

pub(super) fn read(fields: &mut Fields<'_>, dtype: DType) -> Result<Spec, Diagnostic> {
    let hidden = fields.aliased_size(["n_embd", "hidden_size"], 768)?;
    let heads = fields.aliased_size(["n_head", "num_attention_heads"], 12)?;
    let layers = fields.aliased_size(["n_layer", "num_hidden_layers"], 12)?;
    let layers = check_layers("n_layer", layers)?;
    let positions = fields.aliased_size(["n_positions", "max_position_embeddings"], 1024)?;
    let head_dim = derived_head_dim(("n_embd", hidden), ("n_head", heads))?;
    let ffn = fields.nullable_size("n_inner", None)?.unwrap_or(hidden.saturating_mul(4));
    let _ = fields.flag("reorder_and_upcast_attn", false)?;
    let scale = match fields.flag("scale_attn_weights", true)? {
        true => usual_scale(head_dim),
        false => 1.0,
    };
    // Read by older versions for the mask's size, and by the heads of other tasks.
    let _ = fields.raw("n_ctx");
    for name in [
        "summary_activation",
        "summary_first_dropout",
        "summary_proj_to_labels",
        "summary_type",
        "summary_use_proj",
    ] {
        let _ = fields.raw(name);
    }
    let kind = |label: String, scale: f64| Kind {
        label,
        mask: Mask::Causal,
        scale,
        softcap: None,
        rotary: None,
        mlp: Mlp::Dense,
    };
    let by_layer = fields.flag("scale_attn_by_inverse_layer_idx", false)?;
    let (kinds, runs) = match by_layer {
        false => (vec![kind("full".to_owned(), scale)], runs((0..layers).map(|_| 0))),
        true => (
            (0..layers).map(|i| kind(i.to_string(), scale / (i + 1) as f64)).collect(),
            (0..).zip(0..layers).map(|(k, i)| (k, i..i + 1)).collect(),
        ),
    };
    Ok(Spec {
        family: Family::Gpt2,
        dtype,
        hidden,
        heads,
        kv_heads: heads,
        head_dim,
        ffn,
        vocab: fields.size("vocab_size", 50_257)?,
        eps: fields.epsilon("layer_norm_epsilon", 1e-5)?,
        activation: read_activation(fields, "activation_function", "gelu_new")?,
        kinds,
        runs,
        bias: Biases { qkv: true, out: true, mlp: true },
        qk_norm: QkNorm::None,
        residual: Residual::Serial,
        logit_cap: None,
        tied: fields.flag("tie_word_embeddings", true)?,
        padding: None,
        experts: None,
        latent: None,
        learned: Some(positions),
    })
}
