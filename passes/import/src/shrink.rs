//! Small models of the same structure, to run a plan for many machines on one.
//!
//! Unchanged: family, flags, activation, rotary parameters, numbers of heads, kinds of layers, divisibility, and how many
//! blocks of the sequence a window reaches. Reduced: widths, vocabulary, layers, windows and experts.

mod layers;
mod tokens;

use std::collections::{BTreeMap, BTreeSet};

use ithaca_ir::{Diagnostic, Mask};
use num_integer::{gcd, lcm};
use serde_json::{Map, Value, json};

use self::layers::{Keep, by_chunk, is_scaled_by_layer, small_layers};
pub use self::tokens::SmallTokens;
use self::tokens::scaled;
use super::family::{self, text_part};
use super::spec::{Bert, ExpertSpec, Kind, Mlp, Sizes, Spec, Spelling, Structure, T5};

/// The target sizes of a small model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shrink {
    /// The sequences of both models.
    pub tokens: SmallTokens,
    /// The degrees by which sizes divide alike.
    pub degrees: Degrees,
    /// The cuts of a rank's experts, and of its heads, which are as possible as before.
    pub experts: Cuts,
    /// The layers of each chunk of a pipeline, which keeps some of them; empty without a pipeline.
    pub chunks: Vec<u64>,
    /// The layers that are recomputed together.
    pub every: u64,
    /// How much of the model is kept.
    pub detail: Detail,
}

/// The degrees by which a large layout splits dimensions, each with that of the small layout.
///
/// A degree of the small layout divides a size of the small model if and only if the large one divides the large size.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Degrees {
    /// The ranks of the small layout.
    pub ranks: u64,
    /// The degrees in the large layout and in the small one, for all sizes.
    pub all: Vec<[u64; 2]>,
    /// Those for sizes of the large model.
    pub of_size: BTreeMap<u64, OfSize>,
}

/// The degrees of a size, in the large layout and in the small one.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OfSize {
    /// They split a dimension of this size.
    pub must: BTreeSet<[u64; 2]>,
    /// They would split one if they divided it; a small size may divide by some of them otherwise.
    pub may: BTreeSet<[u64; 2]>,
}

/// A divisor of `cuts` divides a rank's small experts if and only if it divides a rank's large ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cuts {
    /// The degrees by which the large layout splits experts, and the small one.
    pub degrees: [u64; 2],
    /// A multiple of the chunks that a rank's experts, or heads, are cut into.
    pub cuts: u64,
}

impl Degrees {
    /// All divisors of `ranks`, for a small layout of as many ranks as the large one has.
    pub fn same(ranks: u64) -> Self {
        let mut divisors = Vec::from_iter((1..=ranks.isqrt()).filter(|d| ranks.is_multiple_of(*d)));
        let others = Vec::from_iter(divisors.iter().rev().map(|d| ranks / d));
        divisors.extend(others);
        divisors.dedup();
        Self { ranks, all: divisors.into_iter().map(|d| [d, d]).collect(), of_size: BTreeMap::new() }
    }

    /// Whether the small layout has as many ranks as the large one.
    pub fn are_same(&self) -> bool {
        self.all.iter().all(|[large, small]| large == small) && self.of_size.is_empty()
    }

    /// The degrees that a small size must divide by as the size `large` does.
    fn must(&self, large: u64) -> impl Iterator<Item = &[u64; 2]> {
        self.all.iter().chain(self.of_size.get(&large).into_iter().flat_map(|of_size| &of_size.must))
    }

    fn are_alike(&self, large: u64, small: u64) -> bool {
        self.must(large).all(|degrees| divides_alike(degrees, large, small))
    }

    /// Whether each rank of a degree has a part of the small size if it has one of the large size.
    fn are_enough(&self, large: u64, small: u64) -> bool {
        self.must(large).all(|degrees| (large < degrees[0]) == (small < degrees[1]))
    }

    /// How many degrees might split the size, and divide `small` otherwise.
    pub fn n_unlike(&self, large: u64, small: u64) -> usize {
        let may = self.of_size.get(&large).into_iter().flat_map(|of_size| &of_size.may);
        may.filter(|degrees| !divides_alike(degrees, large, small)).count()
    }
}

/// Whether a pair of degrees divides a pair of sizes alike.
fn divides_alike(degrees: &[u64; 2], large: u64, small: u64) -> bool {
    large.is_multiple_of(degrees[0]) == small.is_multiple_of(degrees[1])
}

/// How much of a model a small one keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Detail {
    /// The width of a head.
    pub head_dim: u64,
    /// Groups of layers that are recomputed together, in every chunk.
    pub groups: u64,
}

impl Default for Detail {
    /// The least.
    fn default() -> Self {
        Self { head_dim: 8, groups: 1 }
    }
}

/// A description of a small model with the structure that `config` describes.
///
/// Head counts stay. A head becomes 8 wide (16 if it is partly rotated), or as wide as `detail` says. The stream (unless its width is
/// that of all heads), the MLP and the vocabulary become the smallest sizes from 64, 48 and 96 that divide alike. Two layers of each stack remain, or one of each
/// kind, and more where groups of layers or `detail` need them, or kinds are to have the same neighbours. Windows reach as many blocks of the sequence as before, and
/// learned positions cover the small sequence. Buckets of relative positions and token types stay. `ignore` is as in [`Workload`](super::Workload).
///
/// # Errors
/// Those of [`import`](super::import) on the description; `M10` for a sequence of zero and for no ranks.
pub fn shrink(config: &Value, ignore: &[String], shrink: &Shrink) -> Result<Value, Diagnostic> {
    let SmallTokens { sequence, small_sequence, block, .. } = shrink.tokens;
    let ranks = shrink.degrees.ranks;
    if sequence == 0 || small_sequence == 0 || ranks == 0 || block == 0 {
        let message = format!("cannot shrink {sequence} tokens to {small_sequence} on {ranks} ranks");
        return Err(Diagnostic::new("M10", message));
    }
    let config = &*text_part(config);
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
    let Shrink { tokens, degrees, .. } = shrink;
    let SmallTokens { sequence, small_sequence, .. } = *tokens;
    let Sizes { hidden, ffn, vocab, .. } = spec.sizes;
    let head_dim = small_head_dim(spec, shrink.detail.head_dim);
    let layers = small_layers(spec, &shrink.keep());
    let kinds = || layers.iter().map(|&kind| &spec.kinds[kind]);
    let is_dense = |kind: &Kind| kind.mlp == Mlp::Dense;
    let usual = ["hidden_size", "intermediate_size", "vocab_size", "num_hidden_layers"];
    let (names, aliases): (_, &[&str]) = match spec.spelling {
        Spelling::FirstDense if spec.latent.is_some() => {
            (usual, &["sliding_window_size", "head_dim", "qk_head_dim"])
        }
        Spelling::Gpt2 => (
            ["n_embd", "n_inner", "vocab_size", "n_layer"],
            &["hidden_size", "num_hidden_layers", "max_position_embeddings", "n_ctx"],
        ),
        Spelling::Llama4 => {
            (["hidden_size", "intermediate_size_mlp", "vocab_size", "num_hidden_layers"], &[])
        }
        _ => (usual, &["sliding_window_size"]),
    };
    // They would keep the large values.
    for alias in aliases {
        small.remove(*alias);
    }
    let has_kv_heads = small.contains_key("num_key_value_heads")
        || spec.sizes.kv_heads != spec.sizes.heads
        || spec.latent.is_some();
    let rotary_dim = small.remove("rotary_dim").and_then(|n| n.as_u64());
    let mut set = |name: &str, value: Value| small.insert(name.to_owned(), value);
    if let Some(n) = rotary_dim {
        set("partial_rotary_factor", json!(n as f64 / spec.sizes.head_dim as f64));
    }
    let is_tied = matches!(spec.spelling, Spelling::Quotient | Spelling::Gpt2);
    let [heads, kv_heads] = fewer_heads(&spec.sizes, shrink, is_tied.then_some(head_dim));
    if heads != spec.sizes.heads {
        set(if spec.spelling == Spelling::Gpt2 { "n_head" } else { "num_attention_heads" }, json!(heads));
        if has_kv_heads {
            set("num_key_value_heads", json!(kv_heads));
        }
    }
    let hidden = match spec.spelling {
        Spelling::Quotient | Spelling::Gpt2 => heads.saturating_mul(head_dim),
        _ => alike(hidden, degrees, 64),
    };
    let sizes = [hidden, alike(ffn, degrees, 48), alike(vocab, degrees, 96), layers.len() as u64];
    for (name, size) in names.into_iter().zip(sizes) {
        set(name, json!(size));
    }
    if !is_tied && spec.latent.is_none() {
        set("head_dim", json!(head_dim));
    }
    if let Some(positions) = spec.learned {
        set(
            "n_positions",
            json!(alike(positions, degrees, scaled(positions, small_sequence, sequence).max(small_sequence))),
        );
    }
    if let Some(width) = spec.kinds.iter().find_map(|kind| window_width(&kind.mask)) {
        set("sliding_window", json!(tokens.window(width)));
    }
    if let (Spelling::DenseLayers | Spelling::FirstDense, Some(experts)) = (spec.spelling, &spec.experts) {
        set("moe_intermediate_size", json!(alike(experts.ffn, degrees, 16)));
    }
    if let Some(experts) = &spec.experts {
        let (count, top) = fewer(experts, shrink);
        let name = match spec.spelling {
            Spelling::FirstDense => "n_routed_experts",
            Spelling::DenseLayers => "num_experts",
            Spelling::Usual
            | Spelling::LayerTypes
            | Spelling::RotatedLayers
            | Spelling::Gpt2
            | Spelling::Quotient
            | Spelling::Llama4 => "num_local_experts",
        };
        set(name, json!(count));
        set("num_experts_per_tok", json!(top));
    }
    match spec.spelling {
        Spelling::Usual | Spelling::Gpt2 | Spelling::Quotient => {}
        Spelling::LayerTypes | Spelling::RotatedLayers => {
            // Large models may derive the types from `max_window_layers`.
            let types = kinds().map(|kind| match window_width(&kind.mask) {
                None => "full_attention",
                Some(_) => "sliding_attention",
            });
            set("layer_types", json!(types.collect::<Vec<_>>()));
            if spec.spelling == Spelling::RotatedLayers {
                set("no_rope_layers", rotated(&mut kinds()));
            }
        }
        Spelling::DenseLayers => {
            let dense = (0u64..).zip(kinds()).filter(|(_, kind)| is_dense(kind));
            set("mlp_only_layers", json!(dense.map(|(layer, _)| layer).collect::<Vec<_>>()));
            set("decoder_sparse_step", json!(1));
        }
        Spelling::Llama4 => {
            let experts = (0u64..).zip(kinds()).filter(|(_, kind)| !is_dense(kind));
            set("moe_layers", json!(experts.map(|(layer, _)| layer).collect::<Vec<_>>()));
            set("no_rope_layers", rotated(&mut kinds()));
            let types = kinds().map(|kind| match chunk_size(&kind.mask) {
                None => "full_attention",
                Some(_) => "chunked_attention",
            });
            set("layer_types", json!(types.collect::<Vec<_>>()));
            if let Some(size) = spec.kinds.iter().find_map(|kind| chunk_size(&kind.mask)) {
                set("attention_chunk_size", json!(tokens.chunk(size)));
            }
            if let Some(growth) = spec.kinds.iter().find_map(|kind| kind.growth) {
                set("floor_scale", json!(tokens.window(growth.step)));
            }
            if let Some(experts) = &spec.experts {
                set("intermediate_size", json!(alike(experts.ffn, degrees, 16)));
            }
        }
        Spelling::FirstDense => {
            set("first_k_dense_replace", json!(kinds().filter(|kind| is_dense(kind)).count()));
            if let Some(latent) = spec.latent {
                if let Some(n) = latent.queries {
                    set("q_lora_rank", json!(alike(n, degrees, 16)));
                }
                set("kv_lora_rank", json!(alike(latent.keys, degrees, 16)));
                set("qk_nope_head_dim", json!(latent.plain.min(shrink.detail.head_dim)));
                set("qk_rope_head_dim", json!(latent.rotated.min(shrink.detail.head_dim)));
                set("v_head_dim", json!(latent.value.min(shrink.detail.head_dim)));
            }
        }
    }
}

/// For each kind of layer 1 where it has rotary positions, and 0 where it has none.
fn rotated(kinds: &mut dyn Iterator<Item = &Kind>) -> Value {
    json!(kinds.map(|kind| u64::from(kind.rotary.is_some())).collect::<Vec<_>>())
}

/// Experts, and those of a token: enough for a choice, in as many groups as before.
fn fewer(experts: &ExpertSpec, shrink: &Shrink) -> (u64, u64) {
    let top = experts.top.min(8);
    let (groups, kept) = experts.groups.as_ref().map_or((1, 1), |groups| (groups.count, groups.kept));
    // Few experts that many ranks split may be more on fewer ranks.
    let [enough, most] = if shrink.degrees.are_same() { [16, experts.count] } else { [4, 2 * experts.count] };
    let least = (2 * top).max(enough).div_ceil(groups).max(top.div_ceil(kept)).max(2);
    let Cuts { degrees, cuts } = shrink.experts;
    let of_rank = |count: u64, degree: u64| gcd(count / degree.max(1), cuts);
    let of_large = of_rank(experts.count, degrees[0]);
    let counts = (least..most / groups).map(|of_group| of_group * groups);
    let counts = counts.filter(|&count| of_rank(count, degrees[1]) == of_large);
    // Their order on a rank shows with two.
    let several = (experts.count / degrees[0].max(1)).min(2);
    let counts = counts.filter(|&count| count / degrees[1].max(1) >= several);
    let is_alike = |&count: &u64| {
        shrink.degrees.are_alike(experts.count, count) && shrink.degrees.are_enough(experts.count, count)
    };
    let counts = counts.filter(is_alike);
    let found = counts.min_by_key(|&count| shrink.degrees.n_unlike(experts.count, count));
    (found.unwrap_or(experts.count), top)
}

/// Query heads and key/value heads: those that there are, or on fewer ranks so few that ranks have as many parts of them, whole or
/// copied. `tied` is the width of a head where all heads are as wide as the stream.
fn fewer_heads(sizes: &Sizes, shrink: &Shrink, tied: Option<u64>) -> [u64; 2] {
    let Sizes { heads, kv_heads, .. } = *sizes;
    let degrees = &shrink.degrees;
    if degrees.are_same() || kv_heads == 0 {
        return [heads, kv_heads];
    }
    let group = heads / kv_heads;
    let counts = (1..=kv_heads).flat_map(|kv| (group.min(2)..=group).map(move |group| [kv * group, kv]));
    let is_alike =
        |large: u64, small: u64| degrees.are_alike(large, small) && degrees.are_enough(large, small);
    // Those of a rank are cut into chunks too.
    let of_rank = |large: u64| degrees.must(large).filter(move |pair| large.is_multiple_of(pair[0])).max();
    let [of_large, of_small] = of_rank(heads).copied().unwrap_or([1, 1]);
    let cuts = |count: u64, degree: u64| gcd((count / degree).max(1), shrink.experts.cuts);
    let counts = counts.filter(|counts| cuts(counts[1], of_small) == cuts(kv_heads, of_large));
    // Their order on a rank shows with two.
    let has_several = |large: u64, small: u64| small / of_small >= (large / of_large).min(2);
    let counts = counts.filter(|counts| has_several(heads, counts[0]) && has_several(kv_heads, counts[1]));
    let counts = counts.filter(|counts| is_alike(heads, counts[0]) && is_alike(kv_heads, counts[1]));
    let hidden = |counts: &[u64; 2]| tied.map(|head_dim| counts[0] * head_dim);
    let counts =
        counts.filter(|counts| hidden(counts).is_none_or(|small| degrees.are_alike(sizes.hidden, small)));
    let n_unlike = |counts: &[u64; 2]| {
        let of_hidden = hidden(counts).map_or(0, |small| degrees.n_unlike(sizes.hidden, small));
        degrees.n_unlike(heads, counts[0]) + degrees.n_unlike(kv_heads, counts[1]) + of_hidden
    };
    counts.min_by_key(n_unlike).unwrap_or([heads, kv_heads])
}

fn shrink_t5(t5: &T5, shrink: &Shrink, small: &mut Map<String, Value>) {
    let degrees = &shrink.degrees;
    for alias in ["hidden_size", "num_hidden_layers", "num_attention_heads", "head_dim"] {
        small.remove(alias);
    }
    let head_dim = t5.sizes.head_dim.min(shrink.detail.head_dim);
    let mut set = |name: &str, value: u64| small.insert(name.to_owned(), json!(value));
    // Heads together may be wider than the stream; the ratio stays.
    let [heads, _] = fewer_heads(&t5.sizes, shrink, None);
    let hidden = scaled(t5.sizes.hidden, head_dim, t5.sizes.head_dim);
    set("d_model", if degrees.are_same() { hidden } else { alike(t5.sizes.hidden, degrees, 64) });
    set("d_kv", head_dim);
    set("num_heads", heads);
    if !degrees.are_same() {
        // Half of them are for tokens behind.
        let counts = (8..t5.buckets).step_by(2).filter(|&count| degrees.are_alike(t5.buckets, count));
        let found = counts.min_by_key(|&count| degrees.n_unlike(t5.buckets, count));
        set("relative_attention_num_buckets", found.unwrap_or(t5.buckets));
    }
    set("d_ff", alike(t5.sizes.ffn, degrees, 48));
    set("vocab_size", alike(t5.sizes.vocab, degrees, 96));
    set("num_layers", shrink.keep().layers(t5.sizes.layers));
    set("num_decoder_layers", shrink.keep().layers(t5.decoder_layers));
}

fn shrink_bert(bert: &Bert, shrink: &Shrink, small: &mut Map<String, Value>) {
    let degrees = &shrink.degrees;
    let SmallTokens { sequence, small_sequence, .. } = shrink.tokens;
    let mut set = |name: &str, value: u64| small.insert(name.to_owned(), json!(value));
    let Sizes { head_dim, ffn, vocab, max_positions, .. } = bert.sizes;
    let [heads, _] = fewer_heads(&bert.sizes, shrink, Some(bert.sizes.head_dim.min(shrink.detail.head_dim)));
    set("num_attention_heads", heads);
    set("hidden_size", heads.saturating_mul(head_dim.min(shrink.detail.head_dim)));
    set("intermediate_size", alike(ffn, degrees, 48));
    set("vocab_size", alike(vocab, degrees, 96));
    set("num_hidden_layers", shrink.keep().layers(bert.sizes.layers));
    let positions = scaled(max_positions, small_sequence, sequence).max(small_sequence);
    set("max_position_embeddings", alike(max_positions, degrees, positions));
}

impl Shrink {
    /// The least sizes for a sequence of `small_sequence` tokens on so many ranks, in one chunk, of layers that are recomputed
    /// alone.
    pub fn to(sequence: u64, small_sequence: u64, ranks: u64) -> Self {
        let tokens = SmallTokens::halves(sequence, small_sequence, ranks);
        let experts = Cuts { degrees: [1, 1], cuts: 1 };
        let degrees = Degrees::same(ranks);
        Self { tokens, degrees, experts, chunks: Vec::new(), every: 1, detail: Detail::default() }
    }

    /// How many layers are kept.
    fn keep(&self) -> Keep<'_> {
        Keep { chunks: &self.chunks, every: self.every, groups: self.detail.groups }
    }

    /// The layers of each chunk of the small model in place of `chunks`; empty where its layers are too few to be those of each
    /// chunk.
    ///
    /// # Errors
    /// Those of [`shrink`] on the description.
    pub fn small_chunks(&self, config: &Value, ignore: &[String]) -> Result<Vec<u64>, Diagnostic> {
        let model = family::read(&text_part(config), ignore)?;
        let chunks = match &model.structure {
            Structure::Decoder(spec) if !is_scaled_by_layer(spec) => by_chunk(&spec.runs, &self.keep()),
            Structure::Bert(bert) => by_chunk(&[(0, 0..bert.sizes.layers)], &self.keep()),
            Structure::Decoder(_) | Structure::T5(_) => None,
        };
        let lengths = chunks.unwrap_or_default().into_iter().map(|kinds| kinds.len() as u64);
        Ok(if self.chunks.is_empty() { Vec::new() } else { lengths.collect() })
    }
}

fn small_head_dim(spec: &Spec, least: u64) -> u64 {
    let head_dim = spec.sizes.head_dim;
    let partly = spec.kinds.iter().flat_map(|k| &k.rotary).find(|r| r.width != head_dim);
    let Some(rotary) = partly else { return head_dim.min(least) };
    // The description fixes the factor; use the first width of which it selects whole pairs.
    let factor = rotary.width as f64 / head_dim as f64;
    (least / 2..=32)
        .map(|n| 2 * n)
        .find(|&n| ((n as f64 * factor) as u64).is_multiple_of(2) && (n as f64 * factor) as u64 > 0)
        .unwrap_or(head_dim)
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
        | Mask::Chunks(_)
        | Mask::Documents(_)
        | Mask::DocumentPairs { .. }
        | Mask::Blocks { .. }
        | Mask::All(_)
        | Mask::Any(_) => None,
    }
}

/// Tokens that a query sees at most, its own the last of them.
pub(crate) fn seen(mask: &Mask) -> Option<u64> {
    window_width(mask).or_else(|| chunk_size(mask))
}

/// Tokens of a chunk within which a query sees keys.
fn chunk_size(mask: &Mask) -> Option<u64> {
    match mask {
        Mask::Chunks(size) => Some(*size),
        Mask::All(masks) => masks.iter().find_map(chunk_size),
        _ => None,
    }
}

/// The smallest size of at least `least` that degrees divide as they divide `n`; at most `n`. One that does not divide by all of them
/// has a row for each rank.
fn alike(n: u64, degrees: &Degrees, least: u64) -> u64 {
    let dividing = degrees.must(n).filter(|[large, _]| n.is_multiple_of(*large));
    let step = dividing.fold(1, |step, [_, small]| lcm(step, *small));
    let all_divide = degrees.must(n).all(|[large, _]| n.is_multiple_of(*large));
    let least = if all_divide { least } else { least.max(degrees.ranks) };
    let sizes = (least.next_multiple_of(step)..n).step_by(usize::try_from(step).unwrap_or(usize::MAX));
    let sizes = sizes.filter(|&small| degrees.are_alike(n, small)).take(MOST_SIZES);
    let first = sizes.clone().find(|&small| degrees.n_unlike(n, small) == 0);
    first.or_else(|| sizes.min_by_key(|&small| degrees.n_unlike(n, small))).unwrap_or(n)
}

/// Sizes among which the one is chosen that divides most alike.
const MOST_SIZES: usize = 1000;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_divide_as_before() {
        for (n, multiple) in [(14_336, 8), (50_257, 8), (151_936, 64), (18_944, 6), (32_064, 12), (7, 7)] {
            let small = alike(n, &Degrees::same(multiple), 48);
            for degree in (1..=multiple).filter(|d| multiple % d == 0) {
                assert_eq!(
                    small.is_multiple_of(degree),
                    n.is_multiple_of(degree),
                    "{n} as {small} on {degree} of {multiple}"
                );
            }
        }
        assert_eq!(alike(14_336, &Degrees::same(8), 48), 48);
        assert_eq!(alike(50_257, &Degrees::same(8), 96), 97);
    }
}
