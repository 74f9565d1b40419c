//! Families with full and sliding attention by type of layer: Qwen2, Qwen3, Gemma 2 and 3, SmolLM3, OLMo 3, EXAONE 4.
//!
//! `layer_types` states the types.

use ithaca_ir::{Diagnostic, Mask};
use serde_json::{Value, json};

use super::sizes::{Defaults, HeadDim, KvHeads, Padding, USUAL, read_activation, read_sizes};
use super::uniform::NORMS_AFTER;
use crate::fields::Fields;
use crate::rope::{Rope, RopeContext};
use crate::spec::{
    Biases, EmbeddingFactor, Kind, Layout, NormForm, Norms, QkNorm, RotarySpec, Sizes, Spec, Spelling, window,
};

/// Causal attention.
pub(super) const FULL: &str = "full_attention";
/// Causal attention within a window of tokens.
pub(super) const SLIDING: &str = "sliding_attention";

const QWEN: Defaults =
    Defaults { vocab: 151_936, ffn: 22_016, kv_heads: KvHeads::Fixed(32), max_positions: 32_768, ..USUAL };

/// Biased queries, keys and values.
pub(super) fn qwen2(fields: &mut Fields<'_>) -> Result<Spec, Diagnostic> {
    let sizes = read_sizes(fields, &QWEN)?;
    let spec = qwen(fields, sizes)?;
    Ok(Spec { bias: Biases { qkv: true, ..Biases::default() }, ..spec })
}

/// Normalised queries and keys.
pub(super) fn qwen3(fields: &mut Fields<'_>) -> Result<Spec, Diagnostic> {
    let sizes = read_sizes(fields, &Defaults { head_dim: HeadDim::Fixed(128), ..QWEN })?;
    let bias = Biases::of_attention(fields.flag("attention_bias", false)?);
    Ok(Spec { bias, qk_norm: QkNorm::Head, ..qwen(fields, sizes)? })
}

/// Without `layer_types`, layers from `max_window_layers` on slide if `use_sliding_window` is set and there is a window.
fn qwen(fields: &mut Fields<'_>, sizes: Sizes) -> Result<Spec, Diagnostic> {
    let width = used_window(fields)?;
    let first_sliding = fields.count("max_window_layers", 28)?;
    let types = match fields.words("layer_types")? {
        Some(types) => types,
        None => (0..sizes.layers)
            .map(|i| if width.is_some() && i >= first_sliding { SLIDING } else { FULL })
            .collect(),
    };
    let rope = Rope::read(fields, RopeContext::of(&sizes))?;
    let window = width.ok_or("`use_sliding_window` must be true and `sliding_window` a number of tokens");
    by_type(sizes, &types, window, |sizes, label, ty, mask| {
        Ok(Kind::new(label, mask, rope.of_layers(ty, &[FULL, SLIDING])?, sizes))
    })
}

/// The width of the window, if `use_sliding_window` is set.
pub(super) fn used_window(fields: &mut Fields<'_>) -> Result<Option<u64>, Diagnostic> {
    let used = fields.flag("use_sliding_window", false)?;
    Ok(fields.nullable_size("sliding_window", Some(4096))?.filter(|_| used))
}

/// As Llama, without rotary positions in every fourth layer unless lists state otherwise; layers without them slide if
/// `use_sliding_window` is set and there is a window.
pub(super) fn smollm3(fields: &mut Fields<'_>) -> Result<Spec, Diagnostic> {
    let defaults = Defaults {
        vocab: 128_256,
        hidden: 2048,
        layers: 36,
        heads: 16,
        kv_heads: KvHeads::Fixed(4),
        max_positions: 32_768,
        tied: true,
        padding: Padding::Token(128_004),
        ..USUAL
    };
    let sizes = read_sizes(fields, &defaults)?;
    let attention = fields.flag("attention_bias", false)?;
    let bias = Biases { mlp: fields.flag("mlp_bias", false)?, ..Biases::of_attention(attention) };
    let is_sliding = fields.flag("use_sliding_window", false)?;
    let width = fields.nullable_size("sliding_window", None)?.filter(|_| is_sliding);
    // Published descriptions state fields that the library does not read.
    fields.count("max_window_layers", 0)?;
    fields.skip(&["pretraining_tp"]);
    let rotated = rotated_layers(fields, &sizes)?;
    let types = match fields.words("layer_types")? {
        Some(types) => types,
        None => {
            let slides = |is_rotated: &bool| width.is_some() && !is_rotated;
            rotated.iter().map(|layer| if slides(layer) { SLIDING } else { FULL }).collect()
        }
    };
    let rotary = Rope::read(fields, RopeContext { theta: 2e6, ..RopeContext::of(&sizes) })?.of_model()?;
    let window = width.ok_or("`use_sliding_window` must be true and `sliding_window` a number of tokens");
    let of_rotated = by_type(sizes, &types, window, |sizes, label, _, mask| {
        Ok(Kind::new(label, mask, rotary.clone(), sizes))
    })?;
    Ok(Spec { bias, ..with_unrotated(of_rotated, &rotated) })
}

/// For each layer whether it has rotary positions: by `no_rope_layers`, of which 1 says so, else all but those that
/// `no_rope_layer_interval` counts.
pub(super) fn rotated_layers(fields: &mut Fields<'_>, sizes: &Sizes) -> Result<Vec<bool>, Diagnostic> {
    let interval = fields.size("no_rope_layer_interval", 4)?;
    let name = "no_rope_layers";
    match fields.counts(name)?.filter(|list| !list.is_empty()) {
        Some(list) if (list.len() as u64) < sizes.layers => {
            let message =
                format!("`{name}` has {} entries, but `num_hidden_layers` is {}", list.len(), sizes.layers);
            Err(Diagnostic::new("M07", message))
        }
        // The library reads as many as there are layers.
        Some(list) => Ok((0..sizes.layers).zip(list).map(|(_, flag)| flag != 0).collect()),
        None => Ok((1..=sizes.layers).map(|layer| !layer.is_multiple_of(interval)).collect()),
    }
}

/// The model without rotary positions in the layers that are not `rotated`.
fn with_unrotated(spec: Spec, rotated: &[bool]) -> Spec {
    let of_layers = spec.runs.iter().flat_map(|(kind, layers)| layers.clone().map(move |_| *kind));
    let mut kinds: Vec<Kind> = Vec::new();
    let mut layers = Vec::new();
    for (kind, &is_rotated) in of_layers.zip(rotated) {
        let known = &spec.kinds[kind];
        let kind = if is_rotated {
            known.clone()
        } else {
            Kind { label: format!("{}_unrotated", known.label), rotary: None, ..known.clone() }
        };
        layers.push(kinds.iter().position(|known| *known == kind).unwrap_or_else(|| {
            kinds.push(kind);
            kinds.len() - 1
        }));
    }
    Spec { spelling: Spelling::RotatedLayers, ..Spec::new(spec.sizes, kinds, layers) }
}

/// The base of OLMo 3's rotary positions where no parameters are nested by type of layer.
const OLMO_BASE: f64 = 5e5;

/// As OLMo 2, every fourth layer full and the others sliding unless `layer_types` states otherwise. The scaling of rotary positions,
/// where parameters are not nested by type of layer, is that of full layers.
pub(super) fn olmo3(fields: &mut Fields<'_>) -> Result<Spec, Diagnostic> {
    let defaults =
        Defaults { vocab: 50_304, eps: ("rms_norm_eps", 1e-5), padding: Padding::Token(1), ..USUAL };
    let sizes = read_sizes(fields, &defaults)?;
    let bias = Biases::of_attention(fields.flag("attention_bias", false)?);
    let width = fields.nullable_size("sliding_window", Some(4096))?;
    let types = match fields.words("layer_types")? {
        Some(types) => types,
        None => every(sizes.layers, 4),
    };
    let is_new = fields.raw("rope_parameters").is_some();
    let rope = Rope::read(fields, RopeContext { theta: OLMO_BASE, ..RopeContext::of(&sizes) })?;
    // The library applies neither of these to layers of both types.
    let unclear = if is_new && rope.is_flat() {
        Some("`rope_parameters` are not nested by type of layer".to_owned())
    } else {
        let base = rope.base().filter(|&base| base != OLMO_BASE);
        base.map(|base| format!("`rope_theta` is {base}, and is not that of layers that slide, {OLMO_BASE}"))
    };
    if let Some(message) = unclear {
        return Err(Diagnostic::new("M07", message)
            .help(format!("state `rope_parameters` of {FULL} and of {SLIDING}")));
    }
    let unscaled = rope.of_other_base(OLMO_BASE);
    let window = width.ok_or("`sliding_window` must be a number of tokens");
    let spec = by_type(sizes, &types, window, |sizes, label, ty, mask| {
        let rope = if ty == SLIDING { &unscaled } else { &rope };
        Ok(Kind::new(label, mask, rope.of_layers(ty, &[FULL, SLIDING])?, sizes))
    })?;
    Ok(Spec { layout: &NORMS_AFTER, bias, qk_norm: QkNorm::Projection, ..spec })
}

/// Norms after attention and MLP, queries and keys normalised in each head; without rotary positions in full layers if the model has
/// a window. By default every fourth layer is full, and `sliding_window_pattern` states another number.
pub(super) fn exaone4(fields: &mut Fields<'_>) -> Result<Spec, Diagnostic> {
    let defaults = Defaults {
        vocab: 102_400,
        ffn: 16_384,
        kv_heads: KvHeads::Fixed(32),
        eps: ("rms_norm_eps", 1e-5),
        ..USUAL
    };
    let sizes = read_sizes(fields, &defaults)?;
    let width = fields.nullable_size("sliding_window", Some(4096))?;
    let pattern = match fields.raw("sliding_window_pattern") {
        None => Some(4),
        // Letters for the layers of a period, of which the last is full.
        Some(Value::String(letters)) => match letters.strip_suffix('G') {
            Some(local) if local.chars().all(|letter| letter == 'L') => Some(letters.len() as u64),
            _ => {
                return Err(fields
                    .unsupported("sliding_window_pattern", &json!(letters))
                    .help("supported: a number, or letters as in LLLG; or state `layer_types`"));
            }
        },
        Some(_) => fields.nullable_size("sliding_window_pattern", None)?,
    };
    let types = match (fields.words("layer_types")?, width, pattern) {
        (Some(types), _, _) => types,
        (None, Some(_), Some(n)) => every(sizes.layers, n.max(1)),
        (None, _, _) => vec![FULL; usize::try_from(sizes.layers).unwrap_or(0)],
    };
    let rotary = Rope::read(fields, RopeContext::of(&sizes))?.of_model()?;
    let window = width.ok_or("`sliding_window` must be a number of tokens");
    let spec = by_type(sizes, &types, window, |sizes, label, ty, mask| {
        let rotary = (width.is_none() || ty == SLIDING).then(|| rotary.clone());
        Ok(Kind::new(label, mask, rotary, sizes))
    })?;
    Ok(Spec { layout: &NORMS_AFTER, qk_norm: QkNorm::Head, ..spec })
}

/// Types of layers of which every `n`-th is full.
fn every(layers: u64, n: u64) -> Vec<&'static str> {
    (1..=layers).map(|layer| if layer.is_multiple_of(n) { FULL } else { SLIDING }).collect()
}

/// Capped scores and logits, norms before and after attention and MLP with weight + 1, scaled embeddings.
///
/// Layers alternate, starting with a sliding one, unless `layer_types` states otherwise. The library computes the MLP
/// by `hidden_activation` and does not read `hidden_act` and `sliding_window_size`. Older descriptions have these
/// beside the fields in use; they must agree.
pub(super) fn gemma2(fields: &mut Fields<'_>) -> Result<Spec, Diagnostic> {
    let sizes = gemma_sizes(fields, 256_000, 8192)?;
    let width = fields.nullable_size("sliding_window", Some(4096))?;
    fields.neutral("sliding_window_size", &[json!(width)])?;
    let types = match fields.words("layer_types")? {
        Some(types) => types,
        None => (0..sizes.layers).map(|i| if i % 2 == 0 { SLIDING } else { FULL }).collect(),
    };
    let caps = [("attn_logit_softcapping", 50.0), ("final_logit_softcapping", 30.0)];
    let [softcap, logit_cap] = caps.map(|(name, default)| cap(fields, name, default));
    let rotary = Rope::read(fields, RopeContext::of(&sizes))?.of_model()?;
    gemma(fields, sizes, (&types, width), (softcap?, logit_cap?), |_| Ok(rotary.clone()))
}

/// As Gemma 2, with queries and keys normalised and other rotary positions in layers that slide; scores and logits are capped only
/// where a description says so.
///
/// Every sixth layer is full unless `layer_types` or `sliding_window_pattern` states otherwise.
pub(super) fn gemma3(fields: &mut Fields<'_>) -> Result<Spec, Diagnostic> {
    let sizes = gemma_sizes(fields, 262_208, 131_072)?;
    let width = fields.nullable_size("sliding_window", Some(4096))?;
    let pattern = fields.aliased_size(["sliding_window_pattern", "_sliding_window_pattern"], 6)?;
    let types = match fields.words("layer_types")? {
        Some(types) => types,
        None => (1..=sizes.layers).map(|i| if i % pattern == 0 { FULL } else { SLIDING }).collect(),
    };
    let caps = ["attn_logit_softcapping", "final_logit_softcapping"].map(|name| fields.positive(name));
    let [softcap, logit_cap] = caps;
    let local = fields.positive("rope_local_base_freq")?.unwrap_or(10_000.0);
    let cx = RopeContext { theta: 1_000_000.0, ..RopeContext::of(&sizes) };
    let rope = Rope::read(fields, cx)?;
    let of_window = rope.of_other_base(local);
    let rotary = |ty: &str| if ty == SLIDING { &of_window } else { &rope }.of_layers(ty, &[FULL, SLIDING]);
    let spec = gemma(fields, sizes, (&types, width), (softcap?, logit_cap?), rotary)?;
    Ok(Spec { qk_norm: QkNorm::Head, ..spec })
}

/// The sizes of Gemma 2 and 3.
fn gemma_sizes(fields: &mut Fields<'_>, vocab: u64, max_positions: u64) -> Result<Sizes, Diagnostic> {
    let defaults = Defaults {
        vocab,
        hidden: 2304,
        ffn: 9216,
        layers: 26,
        heads: 8,
        head_dim: HeadDim::Fixed(256),
        kv_heads: KvHeads::Fixed(4),
        max_positions,
        eps: ("rms_norm_eps", 1e-6),
        activation: ("hidden_activation", "gelu_pytorch_tanh"),
        tied: true,
        padding: Padding::Token(0),
    };
    let sizes = read_sizes(fields, &defaults)?;
    if read_activation(fields, "hidden_act", "gelu_pytorch_tanh")? != sizes.activation
        && fields.value("hidden_act").is_some()
    {
        return Err(Diagnostic::new("M07", "`hidden_act` and `hidden_activation` differ")
            .help("the library computes `hidden_activation`; remove the other"));
    }
    Ok(sizes)
}

/// What Gemma 2 and 3 have in common: types of layers with the width of the window, bounds of scores and of logits, and the rotary
/// positions of a type.
fn gemma(
    fields: &mut Fields<'_>,
    sizes: Sizes,
    (types, width): (&[&str], Option<u64>),
    (softcap, logit_cap): (Option<f64>, Option<f64>),
    rotary: impl Fn(&str) -> Result<RotarySpec, Diagnostic>,
) -> Result<Spec, Diagnostic> {
    const LAYOUT: Layout = Layout {
        norms: Norms {
            before_attention: Some("input_layernorm"),
            after_attention: Some("post_attention_layernorm"),
            before_mlp: Some("pre_feedforward_layernorm"),
            after_mlp: Some("post_feedforward_layernorm"),
        },
        ..Layout::USUAL
    };
    let bias = Biases::of_attention(fields.flag("attention_bias", false)?);
    // Selects the cache of keys and values for generation.
    fields.skip(&["cache_implementation"]);
    let scale = 1.0 / cap(fields, "query_pre_attn_scalar", 256.0)?.unwrap_or(256.0).sqrt();
    let window = width.ok_or("`sliding_window` must be a number of tokens");
    let spec = by_type(sizes, types, window, |sizes, label, ty, mask| {
        Ok(Kind { scale, softcap, ..Kind::new(label, mask, rotary(ty)?, sizes) })
    })?;
    let norm = NormForm::Rms { offset: 1.0 };
    Ok(Spec { layout: &LAYOUT, norm, bias, logit_cap, embedding: EmbeddingFactor::RootOfWidth, ..spec })
}

/// A positive number: `default` when absent, `None` when null.
fn cap(fields: &mut Fields<'_>, name: &str, default: f64) -> Result<Option<f64>, Diagnostic> {
    match fields.raw(name) {
        None => Ok(Some(default)),
        Some(_) => fields.positive(name),
    }
}

/// The model whose layers have these types.
///
/// `width` is the width of the window, or the condition for a window; `kind` makes a kind from its label, type and mask.
///
/// # Errors
/// `M07` when the list's length differs from the number of layers or a layer slides without a window, `M05` for an
/// unknown type, and the errors of `kind`.
pub(super) fn by_type(
    sizes: Sizes,
    types: &[&str],
    width: Result<u64, &str>,
    kind: impl Fn(&Sizes, &str, &str, Mask) -> Result<Kind, Diagnostic>,
) -> Result<Spec, Diagnostic> {
    if types.len() as u64 != sizes.layers {
        let message =
            format!("`layer_types` has {} entries, but `num_hidden_layers` is {}", types.len(), sizes.layers);
        return Err(Diagnostic::new("M07", message));
    }
    let mut present: Vec<&str> = Vec::new();
    let mut kinds = Vec::new();
    let mut of_layers = Vec::new();
    for &ty in types {
        if let Some(known) = present.iter().position(|&p| p == ty) {
            of_layers.push(known);
            continue;
        }
        let (label, mask) = match (ty, width) {
            (FULL, _) => ("full", Mask::Causal),
            (SLIDING, Ok(n)) => ("window", window(n)),
            (SLIDING, Err(missing)) => {
                let message =
                    format!("`layer_types` has sliding_attention, but the model has no window: {missing}");
                return Err(Diagnostic::new("M07", message));
            }
            (other, _) => {
                return Err(Diagnostic::new("M05", format!("type of layer \"{other}\" is not supported"))
                    .help(format!("`layer_types` may hold {FULL} and {SLIDING}")));
            }
        };
        of_layers.push(present.len());
        present.push(ty);
        kinds.push(kind(&sizes, label, ty, mask)?);
    }
    Ok(Spec { spelling: Spelling::LayerTypes, ..Spec::new(sizes, kinds, of_layers) })
}
