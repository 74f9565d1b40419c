//! Qwen2 (biased queries, keys and values) and Qwen3 (normalised queries and keys), with windows by type of layer.
//!
//! The types are `layer_types` where given; otherwise, where `use_sliding_window` is set and there is a window, layers
//! from `max_window_layers` on slide.

use ithaca_ir::{DType, Diagnostic};

use super::layer_types::{FULL, SLIDING, TYPES, by_type};
use super::sizes::{Defaults, HeadDim, Sizes, USUAL, read_sizes, usual_scale};
use crate::fields::Fields;
use crate::rope::Rope;
use crate::rope::{COMMON, Partial};
use crate::spec::Family;
use crate::spec::{Biases, Kind, Mlp, QkNorm, Spec};

const DEFAULTS: Defaults =
    Defaults { vocab: 151_936, ffn: 22_016, kv_heads: Some(32), max_positions: 32_768, ..USUAL };

pub(super) fn read_qwen2<'a>(
    fields: &mut Fields<'a>,
    dtype: DType,
    ignore: &'a [String],
) -> Result<Spec, Diagnostic> {
    let sizes = read_sizes(fields, &DEFAULTS)?;
    let spec = read_layers(fields, Family::Qwen2, sizes, dtype, ignore)?;
    Ok(Spec { bias: Biases { qkv: true, ..Biases::default() }, ..spec })
}

pub(super) fn read_qwen3<'a>(
    fields: &mut Fields<'a>,
    dtype: DType,
    ignore: &'a [String],
) -> Result<Spec, Diagnostic> {
    let sizes = read_sizes(fields, &Defaults { head_dim: HeadDim::Fixed(128), ..DEFAULTS })?;
    let bias = fields.flag("attention_bias", false)?;
    let spec = read_layers(fields, Family::Qwen3, sizes, dtype, ignore)?;
    Ok(Spec { bias: Biases { qkv: bias, out: bias, mlp: false }, qk_norm: QkNorm::Head, ..spec })
}

fn read_layers<'a>(
    fields: &mut Fields<'a>,
    family: Family,
    sizes: Sizes,
    dtype: DType,
    ignore: &'a [String],
) -> Result<Spec, Diagnostic> {
    let uses_window = fields.flag("use_sliding_window", false)?;
    let width = fields.nullable_size("sliding_window", Some(4096))?.filter(|_| uses_window);
    let first_sliding = fields.count("max_window_layers", 28)?;
    let types: Vec<&str> = match fields.words("layer_types")? {
        Some(types) => types,
        None => (0..sizes.layers)
            .map(|i| if width.is_some() && i >= first_sliding { SLIDING } else { FULL })
            .collect(),
    };
    let rope = Rope::read(fields, sizes.rope_context(COMMON, Partial::Whole), ignore)?;
    let scale = usual_scale(sizes.head_dim);
    let window = width.ok_or("`use_sliding_window` must be true and `sliding_window` a number of tokens");
    let (kinds, layers) = by_type(&types, sizes.layers, window, |label, ty, mask| {
        let rotary = rope.of_layers(ty, TYPES)?;
        Ok(Kind { label, mask, scale, softcap: None, rotary: Some(rotary), mlp: Mlp::Dense })
    })?;
    Ok(sizes.spec(family, dtype, kinds, layers))
}
