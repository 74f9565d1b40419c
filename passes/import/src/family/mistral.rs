//! Mistral: as Llama without biases, with one sliding window for all layers.

use ithaca_ir::{DType, Diagnostic, Mask};
use serde_json::json;

use super::sizes::{Defaults, USUAL, read_sizes, usual_scale};
use crate::fields::Fields;
use crate::rope::Rope;
use crate::rope::{COMMON, Partial};
use crate::spec::Family;
use crate::spec::{Kind, Mlp, Spec, window};

pub(super) fn read<'a>(
    fields: &mut Fields<'a>,
    dtype: DType,
    ignore: &'a [String],
) -> Result<Spec, Diagnostic> {
    let sizes =
        read_sizes(fields, &Defaults { ffn: 14_336, kv_heads: Some(8), max_positions: 4096 * 32, ..USUAL })?;
    // The library's class has no biases; descriptions made for others say so.
    fields.neutral("attention_bias", &[json!(false)])?;
    fields.neutral("mlp_bias", &[json!(false)])?;
    let (label, mask) = match fields.nullable_size("sliding_window", Some(4096))? {
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
    Ok(sizes.spec(Family::Mistral, dtype, vec![kind], layers))
}
