//! GPT-2: learned positions, layer norms with bias, matrices stored input-major, tied embeddings by default.
//!
//! `reorder_and_upcast_attn` is accepted and has no effect: it reorders the arithmetic to protect half precision, and
//! the softmax here is computed in f32 or wider. `scale_attn_by_inverse_layer_idx` gives every layer its own scale, and
//! so its own function.

use ithaca_ir::{Diagnostic, Mask};

use super::sizes::{derived_head_dim, read_activation};
use crate::fields::Fields;
use crate::spec::{
    Biases, Kind, Layout, MlpLayout, NormForm, Norms, Projections, Sizes, Spec, Spelling, check_layers,
    usual_scale,
};

const LAYOUT: Layout = Layout {
    embedding: "transformer.wte.weight",
    layer: "transformer.h.{layer}",
    norms: Norms { before_attention: Some("ln_1"), before_mlp: Some("ln_2"), ..Norms::BEFORE },
    projections: Projections::Columns("attn.c_attn"),
    attention_out: "attn.c_proj",
    mlp: MlpLayout::Plain(["mlp.c_fc", "mlp.c_proj"]),
    last_norm: "transformer.ln_f",
    input_major: true,
    ..Layout::USUAL
};

pub(super) fn read(fields: &mut Fields<'_>) -> Result<Spec, Diagnostic> {
    let hidden = fields.aliased_size(["n_embd", "hidden_size"], 768)?;
    let heads = fields.aliased_size(["n_head", "num_attention_heads"], 12)?;
    let layers = fields.aliased_size(["n_layer", "num_hidden_layers"], 12)?;
    let positions = fields.aliased_size(["n_positions", "max_position_embeddings"], 1024)?;
    let head_dim = derived_head_dim(("n_embd", hidden), ("n_head", heads))?;
    let sizes = Sizes {
        hidden,
        heads,
        kv_heads: heads,
        head_dim,
        ffn: fields.nullable_size("n_inner", None)?.unwrap_or(hidden.saturating_mul(4)),
        vocab: fields.size("vocab_size", 50_257)?,
        layers: check_layers("n_layer", layers)?,
        eps: fields.epsilon("layer_norm_epsilon", 1e-5)?,
        activation: read_activation(fields, "activation_function", "gelu_new")?,
        max_positions: positions,
        tied: fields.flag("tie_word_embeddings", true)?,
        padding: None,
    };
    fields.flag("reorder_and_upcast_attn", false)?;
    // The mask's size in older versions, and fields of other heads.
    fields.skip(&[
        "n_ctx",
        "summary_activation",
        "summary_first_dropout",
        "summary_proj_to_labels",
        "summary_type",
        "summary_use_proj",
    ]);
    let scale = if fields.flag("scale_attn_weights", true)? { usual_scale(head_dim) } else { 1.0 };
    let kind = Kind { scale, ..Kind::new("block", Mask::Causal, None, &sizes) };
    let spec = if fields.flag("scale_attn_by_inverse_layer_idx", false)? {
        let own = |i: u64| Kind { label: i.to_string(), scale: scale / (i + 1) as f64, ..kind.clone() };
        Spec::new(sizes, (0..layers).map(own).collect(), 0..layers as usize)
    } else {
        Spec::new(sizes, vec![kind], (0..layers).map(|_| 0))
    };
    Ok(Spec {
        layout: &LAYOUT,
        spelling: Spelling::Gpt2,
        norm: NormForm::Layer,
        bias: Biases { qkv: true, out: true, mlp: true },
        learned: Some(positions),
        ..spec
    })
}
