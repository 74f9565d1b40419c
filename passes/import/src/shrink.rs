//! Small models of the same structure, to run a plan for many machines on one.
//!
//! Unchanged: family, flags, activation, rotary parameters, numbers of heads, kinds of layers, divisibility. Reduced:
//! widths, vocabulary, layers, and windows in proportion to the sequence.

use ithaca_ir::{Diagnostic, Mask};
use num_integer::gcd;
use serde_json::{Map, Value, json};

use super::family;
use super::spec::{Bert, Kind, Mlp, Sizes, Spec, Spelling, Structure, T5};

/// The target sizes of a small model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shrink {
    /// Tokens of a sequence of the large model.
    pub sequence: u64,
    /// Tokens of a sequence of the small model.
    pub small_sequence: u64,
    /// A divisor of `multiple` divides the small MLP and vocabulary if and only if it divides the large ones; pass the
    /// number of ranks, for example.
    pub multiple: u64,
    /// The minimum number of layers, up to that of the model; the chunks of a pipeline, for example.
    pub layers: u64,
}

/// A description of a small model with the structure that `config` describes.
///
/// Head counts stay. A head becomes 8 wide (16 if it is partly rotated). The MLP and the vocabulary become the smallest
/// sizes from 48 and 96 with the same common divisor with `multiple`. Two layers of each stack remain, or one of each
/// kind, or `layers` if that is more. Windows shrink with the sequence, and learned positions cover the small sequence.
/// Buckets of relative positions and token types stay. `ignore` is as in [`Workload`](super::Workload).
///
/// # Errors
/// Those of [`import`](super::import) on the description; `M10` for a sequence or `multiple` of zero.
pub fn shrink(config: &Value, ignore: &[String], shrink: &Shrink) -> Result<Value, Diagnostic> {
    let Shrink { sequence, small_sequence, multiple, layers: _ } = *shrink;
    if sequence == 0 || small_sequence == 0 || multiple == 0 {
        let message = format!("cannot shrink {sequence} tokens to {small_sequence} on {multiple} ranks");
        return Err(Diagnostic::new("M10", message));
    }
    let model = family::read(config, ignore)?;
    let mut small = config.as_object().cloned().unwrap_or_default();
    match &model.structure {
        Structure::Decoder(spec) => shrink_decoder(spec, shrink, &mut small),
        Structure::T5(t5) => shrink_t5(t5, shrink, &mut small),
        Structure::Bert(bert) => shrink_bert(bert, shrink, &mut small),
    }
    let small = Value::Object(small);
    family::read(&small, ignore)?;
    Ok(small)
}

fn shrink_decoder(spec: &Spec, shrink: &Shrink, small: &mut Map<String, Value>) {
    let Shrink { sequence, small_sequence, multiple, layers } = *shrink;
    let Sizes { heads, ffn, vocab, .. } = spec.sizes;
    let head_dim = small_head_dim(spec);
    let layers = small_layers(spec, layers);
    let kinds = || layers.iter().map(|&kind| &spec.kinds[kind]);
    let is_dense = |kind: &Kind| kind.mlp == Mlp::Dense;
    let usual = ["hidden_size", "intermediate_size", "vocab_size", "num_hidden_layers"];
    let (names, aliases): (_, &[&str]) = match spec.spelling {
        Spelling::Usual | Spelling::LayerTypes | Spelling::DenseLayers | Spelling::Quotient => {
            (usual, &["sliding_window_size"])
        }
        Spelling::Latent => (usual, &["sliding_window_size", "head_dim", "qk_head_dim"]),
        Spelling::Gpt2 => (
            ["n_embd", "n_inner", "vocab_size", "n_layer"],
            &["hidden_size", "num_hidden_layers", "max_position_embeddings", "n_ctx"],
        ),
    };
    // They would keep the large values.
    for alias in aliases {
        small.remove(*alias);
    }
    let mut set = |name: &str, value: Value| small.insert(name.to_owned(), value);
    let sizes = [
        heads.saturating_mul(head_dim),
        alike(ffn, multiple, 48),
        alike(vocab, multiple, 96),
        layers.len() as u64,
    ];
    for (name, size) in names.into_iter().zip(sizes) {
        set(name, json!(size));
    }
    if matches!(spec.spelling, Spelling::Usual | Spelling::LayerTypes | Spelling::DenseLayers) {
        set("head_dim", json!(head_dim));
    }
    if let Some(positions) = spec.learned {
        set("n_positions", json!(scaled(positions, small_sequence, sequence).max(small_sequence)));
    }
    if let Some(width) = spec.kinds.iter().find_map(|kind| window_width(&kind.mask)) {
        set("sliding_window", json!(scaled(width, small_sequence, sequence)));
    }
    if let (Spelling::DenseLayers | Spelling::Latent, Some(experts)) = (spec.spelling, &spec.experts) {
        // The number of experts and their routing stay; their width shrinks like the MLP's.
        set("moe_intermediate_size", json!(alike(experts.ffn, multiple, 16)));
    }
    match spec.spelling {
        Spelling::Usual | Spelling::Gpt2 | Spelling::Quotient => {}
        Spelling::LayerTypes => {
            // Large models may derive the types from `max_window_layers`.
            let types = kinds().map(|kind| match window_width(&kind.mask) {
                None => "full_attention",
                Some(_) => "sliding_attention",
            });
            set("layer_types", json!(types.collect::<Vec<_>>()));
        }
        Spelling::DenseLayers => {
            let dense = (0u64..).zip(kinds()).filter(|(_, kind)| is_dense(kind));
            set("mlp_only_layers", json!(dense.map(|(layer, _)| layer).collect::<Vec<_>>()));
            set("decoder_sparse_step", json!(1));
        }
        Spelling::Latent => {
            set("first_k_dense_replace", json!(kinds().filter(|kind| is_dense(kind)).count()));
            if let Some(latent) = spec.latent {
                if let Some(n) = latent.queries {
                    set("q_lora_rank", json!(n.min(16)));
                }
                set("kv_lora_rank", json!(latent.keys.min(16)));
                set("qk_nope_head_dim", json!(latent.plain.min(8)));
                set("qk_rope_head_dim", json!(latent.rotated.min(8)));
                set("v_head_dim", json!(latent.value.min(8)));
            }
        }
    }
}

fn shrink_t5(t5: &T5, shrink: &Shrink, small: &mut Map<String, Value>) {
    let Shrink { multiple, layers, .. } = *shrink;
    for alias in ["hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim"] {
        small.remove(alias);
    }
    let head_dim = t5.sizes.head_dim.min(8);
    let mut set = |name: &str, value: u64| small.insert(name.to_owned(), json!(value));
    // Heads together may be wider than the stream; the ratio stays.
    set("d_model", scaled(t5.sizes.hidden, head_dim, t5.sizes.head_dim));
    set("d_kv", head_dim);
    set("num_heads", t5.sizes.heads);
    set("d_ff", alike(t5.sizes.ffn, multiple, 48));
    set("vocab_size", alike(t5.sizes.vocab, multiple, 96));
    set("num_layers", t5.sizes.layers.min(layers.max(2)));
    set("num_decoder_layers", t5.decoder_layers.min(layers.max(2)));
}

fn shrink_bert(bert: &Bert, shrink: &Shrink, small: &mut Map<String, Value>) {
    let Shrink { sequence, small_sequence, multiple, layers } = *shrink;
    let mut set = |name: &str, value: u64| small.insert(name.to_owned(), json!(value));
    let Sizes { heads, head_dim, ffn, vocab, max_positions, .. } = bert.sizes;
    set("hidden_size", heads.saturating_mul(head_dim.min(8)));
    set("intermediate_size", alike(ffn, multiple, 48));
    set("vocab_size", alike(vocab, multiple, 96));
    set("num_hidden_layers", bert.sizes.layers.min(layers.max(2)));
    set("max_position_embeddings", scaled(max_positions, small_sequence, sequence).max(small_sequence));
}

fn small_head_dim(spec: &Spec) -> u64 {
    let head_dim = spec.sizes.head_dim;
    let partly = spec.kinds.iter().flat_map(|k| &k.rotary).find(|r| r.width != head_dim);
    let Some(rotary) = partly else { return head_dim.min(8) };
    // The description fixes the factor; use the first width of which it selects whole pairs.
    let factor = rotary.width as f64 / head_dim as f64;
    (4..=32)
        .map(|n| 2 * n)
        .find(|&n| ((n as f64 * factor) as u64).is_multiple_of(2) && (n as f64 * factor) as u64 > 0)
        .unwrap_or(head_dim)
}

/// Two layers, or the first of each kind, in order; the last kind repeats until there are `least`.
fn small_layers(spec: &Spec, least: u64) -> Vec<usize> {
    let mut kinds: Vec<usize> = Vec::new();
    for (kind, _) in &spec.runs {
        if !kinds.contains(kind) {
            kinds.push(*kind);
        }
    }
    // Kinds that differ by layer only (scores scaled by depth) need two at most.
    if spec.spelling == Spelling::Gpt2 {
        kinds.truncate(2);
    }
    if kinds.len() == 1 && spec.sizes.layers > 1 {
        kinds.push(kinds[0]);
    }
    let least = least.min(spec.sizes.layers);
    while let Some(&last) = kinds.last().filter(|_| (kinds.len() as u64) < least) {
        kinds.push(last);
    }
    kinds
}

/// Tokens that a query of a sliding window sees; a config cannot state other masks.
fn window_width(mask: &Mask) -> Option<u64> {
    match mask {
        Mask::Window { left, .. } => left.map(|l| l + 1),
        Mask::Full
        | Mask::Causal
        | Mask::CausalAtEnd { .. }
        | Mask::Prefix(_)
        | Mask::Sinks(_)
        | Mask::Global(_)
        | Mask::GlobalAt(_)
        | Mask::Documents(_)
        | Mask::DocumentPairs { .. }
        | Mask::Blocks { .. }
        | Mask::All(_)
        | Mask::Any(_) => None,
    }
}

/// `n · small / large`, rounded up.
fn scaled(n: u64, small: u64, large: u64) -> u64 {
    let scaled = (u128::from(n) * u128::from(small)).div_ceil(u128::from(large));
    u64::try_from(scaled).unwrap_or(u64::MAX).max(1)
}

/// The smallest size of at least `least` with the same common divisor with `multiple` as `n`; at most `n`.
fn alike(n: u64, multiple: u64, least: u64) -> u64 {
    let common = gcd(n, multiple);
    let mut size = least.next_multiple_of(common);
    while size < n && gcd(size, multiple) != common {
        size += common;
    }
    size.min(n)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_divide_as_before() {
        for (n, multiple) in [(14_336, 8), (50_257, 8), (151_936, 64), (18_944, 6), (32_064, 12), (7, 7)] {
            let small = alike(n, multiple, 48);
            for degree in (1..=multiple).filter(|d| multiple % d == 0) {
                assert_eq!(
                    small.is_multiple_of(degree),
                    n.is_multiple_of(degree),
                    "{n} as {small} on {degree} of {multiple}"
                );
            }
        }
        assert_eq!(alike(14_336, 8, 48), 48);
        assert_eq!(alike(50_257, 8, 96), 97);
    }
}
