//! StarCoder2: layer norms, a plain MLP, biases everywhere or nowhere, tied embeddings by default.
//!
//! A `sliding_window` applies to all layers. Published descriptions still hold fields of the class that the library's
//! was made from; it reads none of them, and those that would change the computation must say what it does.

use ithaca_ir::{DType, Diagnostic, Mask};
use serde_json::json;

use super::sizes::{Defaults, USUAL, read_sizes, usual_scale};
use crate::fields::Fields;
use crate::rope::Rope;
use crate::rope::{COMMON, Partial};
use crate::spec::Family;
use crate::spec::{Biases, Kind, Mlp, Spec, window};

pub(super) fn read<'a>(
    fields: &mut Fields<'a>,
    dtype: DType,
    ignore: &'a [String],
) -> Result<Spec, Diagnostic> {
    let sizes = read_sizes(
        fields,
        &Defaults {
            vocab: 49_152,
            hidden: 3072,
            ffn: 12_288,
            layers: 30,
            heads: 24,
            kv_heads: Some(2),
            max_positions: 4096,
            eps: ("norm_epsilon", 1e-5),
            activation: ("hidden_act", "gelu_pytorch_tanh"),
            tied: true,
            ..USUAL
        },
    )?;
    let bias = fields.flag("use_bias", true)?;
    fields.neutral("mlp_type", &[json!("default")])?;
    fields.neutral("norm_type", &[json!("layer_norm")])?;
    fields.neutral("scale_attn_weights", &[json!(true)])?;
    fields.neutral("layer_norm_epsilon", &[json!(sizes.eps)])?;
    // The MLP's function is `hidden_act`; the softmax is never narrower than f32.
    for name in ["activation_function", "attention_softmax_in_fp32", "scale_attention_softmax_in_fp32"] {
        let _ = fields.raw(name);
    }
    let (label, mask) = match fields.nullable_size("sliding_window", None)? {
        Some(n) => ("window", window(n)),
        None => ("full", Mask::Causal),
    };
    let rope = Rope::read(fields, sizes.rope_context(COMMON, Partial::Whole), ignore)?;
    let kind = Kind {
        label: label.to_owned(),
        mask,
        scale: usual_scale(sizes.head_dim),
        softcap: None,
        rotary: Some(rope.of_model()?),
        mlp: Mlp::Dense,
    };
    let layers = (0..sizes.layers).map(|_| 0);
    let spec = sizes.spec(Family::Starcoder2, dtype, vec![kind], layers);
    Ok(Spec { bias: Biases { qkv: bias, out: bias, mlp: bias }, ..spec })
}
