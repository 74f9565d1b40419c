//! Qwen2 (biased queries, keys and values) and Qwen3 (normalised queries and keys), with windows by type of layer.
//!
//! The types are `layer_types` where given; otherwise, where `use_sliding_window` is set and there is a window, layers
//! from `max_window_layers` on slide.

use ithaca_ir::{DType, Diagnostic, Mask};

use super::{Defaults, Family, HeadDim, Rope, Sizes, read_sizes, usual_scale};
use crate::import::fields::Fields;
use crate::import::rope::{COMMON, Partial};
use crate::import::spec::{Biases, Kind, Spec, window};

const FULL: &str = "full_attention";
const SLIDING: &str = "sliding_attention";

const DEFAULTS: Defaults = Defaults {
    vocab: 151_936,
    hidden: 4096,
    ffn: 22_016,
    layers: 32,
    heads: 32,
    kv_heads: Some(32),
    head_dim: HeadDim::Derived,
    max_positions: 32_768,
    eps: 1e-6,
};

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
    Ok(Spec { bias: Biases { qkv: bias, out: bias, mlp: false }, ..spec })
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
    if types.len() as u64 != sizes.layers {
        return Err(Diagnostic::new(
            "M07",
            format!("`layer_types` has {} entries, but `num_hidden_layers` is {}", types.len(), sizes.layers),
        ));
    }
    let mut present: Vec<&str> = Vec::new();
    for ty in &types {
        if !present.contains(ty) {
            present.push(ty);
        }
    }
    let rope = Rope::read(fields, sizes.rope_context(COMMON, Partial::Whole), ignore)?;
    let scale = usual_scale(sizes.head_dim);
    let kind = |ty: &&str| -> Result<Kind, Diagnostic> {
        let (label, mask) = match (*ty, width) {
            (FULL, _) => ("full", Mask::Causal),
            (SLIDING, Some(n)) => ("window", window(n)),
            (SLIDING, None) => {
                return Err(Diagnostic::new(
                    "M07",
                    "`layer_types` has sliding_attention, but there is no window: `use_sliding_window` must be \
                     true and `sliding_window` a number of tokens",
                ));
            }
            (other, _) => {
                return Err(Diagnostic::new("M05", format!("type of layer \"{other}\" is not supported"))
                    .help(format!("`layer_types` may hold {FULL} and {SLIDING}")));
            }
        };
        // Parameters may be given for types that no layer has.
        let rotary = rope.of_layers(ty, &[FULL, SLIDING])?;
        Ok(Kind { label: label.to_owned(), mask, scale, rotary: Some(rotary) })
    };
    let kinds = present.iter().map(kind).collect::<Result<Vec<_>, _>>()?;
    let index = |ty: &&str| present.iter().position(|p| p == ty).expect("every type was entered above");
    let layers: Vec<usize> = types.iter().map(index).collect();
    Ok(sizes.spec(family, dtype, kinds, layers))
}
