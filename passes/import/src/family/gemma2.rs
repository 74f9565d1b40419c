//! Gemma 2: windows and full attention by type of layer, capped scores and logits, norms on both sides of attention and
//! MLP whose weight has one added, scaled embeddings.
//!
//! Layers alternate, the first sliding, unless `layer_types` says otherwise. The library computes the MLP by
//! `hidden_activation` and reads neither `hidden_act` nor `sliding_window_size`, which older descriptions hold beside the
//! fields in use; they must agree with those.

use ithaca_ir::{DType, Diagnostic};
use serde_json::json;

use super::layer_types::{FULL, SLIDING, by_type};
use super::sizes::{Defaults, HeadDim, read_activation, read_sizes};
use crate::fields::Fields;
use crate::rope::Rope;
use crate::rope::{COMMON, Partial};
use crate::spec::Family;
use crate::spec::{Biases, Kind, Mlp, Spec};

/// Fields that other families must leave neutral.
pub(super) const OWN: &[&str] =
    &["final_logit_softcapping", "attn_logit_softcapping", "query_pre_attn_scalar"];

pub(super) fn read<'a>(
    fields: &mut Fields<'a>,
    dtype: DType,
    ignore: &'a [String],
) -> Result<Spec, Diagnostic> {
    let sizes = read_sizes(
        fields,
        &Defaults {
            vocab: 256_000,
            hidden: 2304,
            ffn: 9216,
            layers: 26,
            heads: 8,
            kv_heads: Some(4),
            head_dim: HeadDim::Fixed(256),
            max_positions: 8192,
            eps: ("rms_norm_eps", 1e-6),
            activation: ("hidden_activation", "gelu_pytorch_tanh"),
            tied: true,
            padding: Some(0),
        },
    )?;
    if read_activation(fields, "hidden_act", "gelu_pytorch_tanh")? != sizes.activation
        && fields.value("hidden_act").is_some()
    {
        return Err(Diagnostic::new("M07", "`hidden_act` and `hidden_activation` differ")
            .help("the library computes `hidden_activation`; remove the other"));
    }
    let bias = fields.flag("attention_bias", false)?;
    let width = fields.nullable_size("sliding_window", Some(4096))?;
    fields.neutral("sliding_window_size", &[json!(width)])?;
    // A way to keep keys and values while generating.
    let _ = fields.raw("cache_implementation");
    let types = match fields.words("layer_types")? {
        Some(types) => types,
        None => (0..sizes.layers).map(|i| if i % 2 == 0 { SLIDING } else { FULL }).collect(),
    };
    let scale = 1.0 / cap(fields, "query_pre_attn_scalar", 256.0)?.unwrap_or(256.0).sqrt();
    let softcap = cap(fields, "attn_logit_softcapping", 50.0)?;
    let logit_cap = cap(fields, "final_logit_softcapping", 30.0)?;
    let rope = Rope::read(fields, sizes.rope_context(COMMON, Partial::Whole), ignore)?;
    let rotary = rope.of_model()?;
    let window = width.ok_or("`sliding_window` must be a number of tokens");
    let (kinds, layers) = by_type(&types, sizes.layers, window, |label, _, mask| {
        Ok(Kind { label, mask, scale, softcap, rotary: Some(rotary.clone()), mlp: Mlp::Dense })
    })?;
    let spec = sizes.spec(Family::Gemma2, dtype, kinds, layers);
    Ok(Spec { bias: Biases { qkv: bias, out: bias, mlp: false }, logit_cap, ..spec })
}

/// A number above zero: `default` when absent, `None` when null.
fn cap(fields: &mut Fields<'_>, name: &str, default: f64) -> Result<Option<f64>, Diagnostic> {
    match fields.raw(name) {
        None => Ok(Some(default)),
        Some(_) => fields.positive(name),
    }
}
