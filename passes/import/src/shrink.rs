//! Small models of the same structure, to run on one machine what was planned for many.
//!
//! Kept: family, flags, activation, rotary parameters, numbers of heads, kinds of layers, what divides what. Made
//! small: widths, vocabulary, layers, and windows in proportion to the sequence.

use ithaca_ir::{Diagnostic, Mask};
use num_integer::gcd;
use serde_json::{Map, Value, json};

use super::family;
use super::spec::Family;
use super::spec::{Bert, Mlp, Spec, Structure, T5};

/// How small.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shrink {
    /// Tokens that the model was asked for.
    pub sequence: u64,
    /// Tokens of the small run.
    pub small_sequence: u64,
    /// A number whose divisors divide the small MLP and vocabulary exactly where they divide the large ones; the number
    /// of ranks, for example.
    pub multiple: u64,
    /// Layers that remain at least, where the model has as many; the chunks of a pipeline, for example.
    pub layers: u64,
}

/// A description of a small model of the structure that `config` describes.
///
/// Head counts stay. A head becomes 8 wide (16 where it is partly rotated), the MLP and the vocabulary become the
/// smallest sizes from 48 and 96 on with the same common divisor with `multiple`. Two layers remain, of each of two
/// stacks, or one of each kind, or as many as are asked for; windows shrink with the sequence, and learned positions cover the small one. Buckets of
/// relative positions and types of token stay. `ignore` is as in [`Workload`](super::Workload).
///
/// # Errors
/// Those of [`import`](super::import) on the description; `M10` for a sequence or `multiple` of zero.
pub fn shrink(config: &Value, ignore: &[String], shrink: &Shrink) -> Result<Value, Diagnostic> {
    let Shrink { sequence, small_sequence, multiple, layers: _ } = *shrink;
    if sequence == 0 || small_sequence == 0 || multiple == 0 {
        return Err(Diagnostic::new(
            "M10",
            format!("cannot shrink {sequence} tokens to {small_sequence} on {multiple} ranks"),
        ));
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
    let head_dim = small_head_dim(spec);
    let sizes = Small {
        hidden: spec.heads.saturating_mul(head_dim),
        head_dim,
        ffn: alike(spec.ffn, multiple, 48),
        vocab: alike(spec.vocab, multiple, 96),
        kinds: small_layers(spec, layers),
        window: window_of(spec).map(|w| scaled(w, small_sequence, sequence)),
        positions: spec.learned.map(|n| scaled(n, small_sequence, sequence).max(small_sequence)),
    };
    match spec.family {
        Family::Gpt2 => sizes.write_gpt2(small),
        Family::GptNeox => {
            sizes.write_common(small);
            // The width of a head is a quotient, and there is no other way to state it.
            small.remove("head_dim");
        }
        Family::Llama | Family::Mistral | Family::Phi3 | Family::Olmo2 | Family::Starcoder2 => {
            sizes.write_common(small);
        }
        Family::Mixtral => sizes.write_common(small),
        Family::Qwen3Moe => {
            sizes.write_common(small);
            sizes.write_experts(spec, multiple, small);
            // Of the layers that remain, those are dense that are of a dense kind.
            let dense = (0..).zip(&sizes.kinds).filter(|(_, kind)| spec.kinds[**kind].mlp == Mlp::Dense);
            let dense: Vec<u64> = dense.map(|(layer, _)| layer).collect();
            small.insert("mlp_only_layers".to_owned(), json!(dense));
            small.insert("decoder_sparse_step".to_owned(), json!(1));
        }
        Family::DeepseekV3 => {
            sizes.write_common(small);
            sizes.write_experts(spec, multiple, small);
            sizes.write_latent(spec, small);
            let dense = sizes.kinds.iter().filter(|&&kind| spec.kinds[kind].mlp == Mlp::Dense).count();
            small.insert("first_k_dense_replace".to_owned(), json!(dense));
        }
        Family::Qwen2 | Family::Qwen3 | Family::Gemma2 => {
            sizes.write_common(small);
            sizes.write_layer_types(spec, small);
        }
    }
}

fn shrink_t5(t5: &T5, shrink: &Shrink, small: &mut Map<String, Value>) {
    let Shrink { multiple, layers, .. } = *shrink;
    for alias in ["hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim"] {
        small.remove(alias);
    }
    let head_dim = t5.head_dim.min(8);
    let mut set = |name: &str, value: u64| small.insert(name.to_owned(), json!(value));
    // Heads together may be wider than the stream, and stay so.
    set("d_model", scaled(t5.hidden, head_dim, t5.head_dim));
    set("d_kv", head_dim);
    set("num_heads", t5.heads);
    set("d_ff", alike(t5.ffn, multiple, 48));
    set("vocab_size", alike(t5.vocab, multiple, 96));
    set("num_layers", t5.encoder_layers.min(layers.max(2)));
    set("num_decoder_layers", t5.decoder_layers.min(layers.max(2)));
}

fn shrink_bert(bert: &Bert, shrink: &Shrink, small: &mut Map<String, Value>) {
    let Shrink { sequence, small_sequence, multiple, layers } = *shrink;
    let mut set = |name: &str, value: u64| small.insert(name.to_owned(), json!(value));
    set("hidden_size", bert.heads.saturating_mul(bert.head_dim().min(8)));
    set("intermediate_size", alike(bert.ffn, multiple, 48));
    set("vocab_size", alike(bert.vocab, multiple, 96));
    set("num_hidden_layers", bert.layers.min(layers.max(2)));
    set("max_position_embeddings", scaled(bert.positions, small_sequence, sequence).max(small_sequence));
}

struct Small {
    hidden: u64,
    head_dim: u64,
    ffn: u64,
    vocab: u64,
    /// The kind of each layer.
    kinds: Vec<usize>,
    window: Option<u64>,
    positions: Option<u64>,
}

impl Small {
    fn write_common(&self, config: &mut Map<String, Value>) {
        // An older name of the window, which would keep the large one.
        config.remove("sliding_window_size");
        let mut set = |name: &str, value: u64| config.insert(name.to_owned(), json!(value));
        set("hidden_size", self.hidden);
        set("intermediate_size", self.ffn);
        set("vocab_size", self.vocab);
        set("num_hidden_layers", self.kinds.len() as u64);
        set("head_dim", self.head_dim);
        if let Some(window) = self.window {
            set("sliding_window", window);
        }
    }

    /// The number of experts stays, and how they are chosen; their width becomes as small as that of the MLP.
    fn write_experts(&self, spec: &Spec, multiple: u64, config: &mut Map<String, Value>) {
        if let Some(experts) = &spec.experts {
            config.insert("moe_intermediate_size".to_owned(), json!(alike(experts.ffn, multiple, 16)));
        }
    }

    /// The parts of a head and the latents become small.
    fn write_latent(&self, spec: &Spec, config: &mut Map<String, Value>) {
        let Some(latent) = spec.latent else { return };
        config.remove("head_dim");
        config.remove("qk_head_dim");
        let mut set = |name: &str, value: u64| config.insert(name.to_owned(), json!(value));
        if let Some(n) = latent.queries {
            set("q_lora_rank", n.min(16));
        }
        set("kv_lora_rank", latent.keys.min(16));
        set("qk_nope_head_dim", latent.plain.min(8));
        set("qk_rope_head_dim", latent.rotated.min(8));
        set("v_head_dim", latent.value.min(8));
    }

    /// States the type of each layer, which large models may derive from `max_window_layers`.
    fn write_layer_types(&self, spec: &Spec, config: &mut Map<String, Value>) {
        let name = |&kind: &usize| match window_width(&spec.kinds[kind].mask) {
            None => "full_attention",
            Some(_) => "sliding_attention",
        };
        let types: Vec<&str> = self.kinds.iter().map(name).collect();
        config.insert("layer_types".to_owned(), json!(types));
    }

    fn write_gpt2(&self, config: &mut Map<String, Value>) {
        for alias in ["hidden_size", "num_hidden_layers", "max_position_embeddings", "n_ctx"] {
            config.remove(alias);
        }
        let mut set = |name: &str, value: u64| config.insert(name.to_owned(), json!(value));
        set("n_embd", self.hidden);
        set("n_inner", self.ffn);
        set("vocab_size", self.vocab);
        set("n_layer", self.kinds.len() as u64);
        if let Some(positions) = self.positions {
            set("n_positions", positions);
        }
    }
}

fn small_head_dim(spec: &Spec) -> u64 {
    let partly = spec.kinds.iter().flat_map(|k| &k.rotary).find(|r| r.width != spec.head_dim);
    let Some(rotary) = partly else { return spec.head_dim.min(8) };
    // The factor is in the description; the first width at which it leaves whole pairs serves.
    let factor = rotary.width as f64 / spec.head_dim as f64;
    (4..=32)
        .map(|n| 2 * n)
        .find(|&n| ((n as f64 * factor) as u64).is_multiple_of(2) && (n as f64 * factor) as u64 > 0)
        .unwrap_or(spec.head_dim)
}

/// Two layers, or the first of each kind, in order; more of the last kind where `least` are wanted.
fn small_layers(spec: &Spec, least: u64) -> Vec<usize> {
    let mut kinds: Vec<usize> = Vec::new();
    for (kind, _) in &spec.runs {
        if !kinds.contains(kind) {
            kinds.push(*kind);
        }
    }
    // Kinds that differ by layer only (scores scaled by depth) need no more than two.
    if spec.family == Family::Gpt2 {
        kinds.truncate(2);
    }
    if kinds.len() == 1 && spec.n_layers() > 1 {
        kinds.push(kinds[0]);
    }
    let least = least.min(spec.n_layers());
    while let Some(&last) = kinds.last().filter(|_| (kinds.len() as u64) < least) {
        kinds.push(last);
    }
    kinds
}

fn window_of(spec: &Spec) -> Option<u64> {
    spec.kinds.iter().find_map(|kind| window_width(&kind.mask))
}

/// Tokens that a query of a sliding window sees; a config has no way to state other masks.
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

/// The smallest size from `least` on whose common divisor with `multiple` is that of `n`; at most `n`.
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
