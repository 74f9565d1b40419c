//! Phi-3: as Llama, with queries, keys and values in one matrix, gate and up in another, and partly rotated heads.
//!
//! A `sliding_window` applies to all layers. The library reads `yarn` as `longrope` here, so neither is accepted.

use ithaca_ir::{DType, Diagnostic, Mask};
use serde_json::json;

use super::sizes::{Defaults, USUAL, read_sizes, usual_scale};
use crate::fields::Fields;
use crate::rope::Partial;
use crate::rope::Rope;
use crate::spec::Family;
use crate::spec::{Kind, Mlp, Spec, window};

pub(super) fn read<'a>(
    fields: &mut Fields<'a>,
    dtype: DType,
    ignore: &'a [String],
) -> Result<Spec, Diagnostic> {
    let sizes = read_sizes(
        fields,
        &Defaults {
            vocab: 32_064,
            hidden: 3072,
            ffn: 8192,
            max_positions: 4096,
            eps: ("rms_norm_eps", 1e-5),
            padding: Some(32_000),
            ..USUAL
        },
    )?;
    fields.neutral("attention_bias", &[json!(false)])?;
    fields.neutral("mlp_bias", &[json!(false)])?;
    fields.neutral("lm_head_bias", &[json!(false)])?;
    let (label, mask) = match fields.nullable_size("sliding_window", None)? {
        Some(n) => ("window", window(n)),
        None => ("full", Mask::Causal),
    };
    let rope = Rope::read(fields, sizes.rope_context(&["default"], Partial::Factor), ignore)?;
    let kind = Kind {
        label: label.to_owned(),
        mask,
        scale: usual_scale(sizes.head_dim),
        softcap: None,
        rotary: Some(rope.of_model()?),
        mlp: Mlp::Dense,
    };
    let layers = (0..sizes.layers).map(|_| 0);
    Ok(sizes.spec(Family::Phi3, dtype, vec![kind], layers))
}
