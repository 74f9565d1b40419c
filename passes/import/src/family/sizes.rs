//! Sizes of families, and the fields that they read alike.

use ithaca_ir::ops::Unary;
use ithaca_ir::{DType, Diagnostic};
use serde_json::{Value, json};

use crate::fields::Fields;
use crate::rope::{Partial, RopeContext};
use crate::spec::{Biases, Family, Kind, QkNorm, Residual, Spec, check_layers, runs};

/// The function of the MLP, by the library's name.
pub(super) fn read_activation(
    fields: &mut Fields<'_>,
    name: &str,
    default: &str,
) -> Result<Unary, Diagnostic> {
    let word = fields.word(name)?.unwrap_or(default);
    activation(word).ok_or_else(|| {
        fields
            .unsupported(name, &json!(word))
            .help("supported: silu, gelu, gelu_new, gelu_pytorch_tanh, gelu_fast, quick_gelu, relu, tanh")
    })
}

/// The function that the library calls `name`.
pub(super) fn activation(name: &str) -> Option<Unary> {
    Some(match name {
        "silu" | "swish" => Unary::Silu,
        "gelu" | "gelu_python" => Unary::Gelu,
        // All of these are the tanh approximation, written in different ways.
        "gelu_new" | "gelu_pytorch_tanh" | "gelu_python_tanh" | "gelu_fast" | "gelu_accurate" => {
            Unary::GeluTanh
        }
        "quick_gelu" => Unary::QuickGelu,
        "relu" => Unary::Relu,
        "tanh" => Unary::Tanh,
        _ => return None,
    })
}

/// Sizes of a family with rotary positions.
pub(super) struct Sizes {
    pub(super) hidden: u64,
    pub(super) heads: u64,
    pub(super) kv_heads: u64,
    pub(super) head_dim: u64,
    pub(super) ffn: u64,
    pub(super) vocab: u64,
    pub(super) layers: u64,
    pub(super) eps: f64,
    pub(super) activation: Unary,
    pub(super) max_positions: u64,
    pub(super) tied: bool,
    pub(super) padding: Option<u64>,
}

/// What absent fields mean, family by family.
pub(super) struct Defaults {
    pub(super) vocab: u64,
    pub(super) hidden: u64,
    pub(super) ffn: u64,
    pub(super) layers: u64,
    pub(super) heads: u64,
    /// `None` is as many as query heads.
    pub(super) kv_heads: Option<u64>,
    pub(super) head_dim: HeadDim,
    pub(super) max_positions: u64,
    /// The field of the norms' epsilon, and its value.
    pub(super) eps: (&'static str, f64),
    /// The field of the MLP's function, and its value.
    pub(super) activation: (&'static str, &'static str),
    pub(super) tied: bool,
    /// The token of padding.
    pub(super) padding: Option<i64>,
}

/// What most families have in common.
pub(super) const USUAL: Defaults = Defaults {
    vocab: 32_000,
    hidden: 4096,
    ffn: 11_008,
    layers: 32,
    heads: 32,
    kv_heads: None,
    head_dim: HeadDim::Derived,
    max_positions: 2048,
    eps: ("rms_norm_eps", 1e-6),
    activation: ("hidden_act", "silu"),
    tied: false,
    padding: None,
};

/// What an absent `head_dim` means.
pub(super) enum HeadDim {
    /// `hidden_size / num_attention_heads`; so does null.
    Derived,
    /// This many; null is refused.
    Fixed(u64),
}

pub(super) fn read_sizes(fields: &mut Fields<'_>, defaults: &Defaults) -> Result<Sizes, Diagnostic> {
    let hidden = fields.size("hidden_size", defaults.hidden)?;
    let heads = fields.size("num_attention_heads", defaults.heads)?;
    let kv_heads = fields.nullable_size("num_key_value_heads", defaults.kv_heads)?.unwrap_or(heads);
    let head_dim = match defaults.head_dim {
        HeadDim::Fixed(n) => fields.size("head_dim", n)?,
        HeadDim::Derived => match fields.nullable_size("head_dim", None)? {
            Some(n) => n,
            None => derived_head_dim(("hidden_size", hidden), ("num_attention_heads", heads))?,
        },
    };
    if !heads.is_multiple_of(kv_heads) {
        return Err(Diagnostic::new(
            "M07",
            format!(
                "`num_attention_heads` {heads} is not a multiple of `num_key_value_heads` {kv_heads}: each \
                 key/value head serves a whole group of query heads"
            ),
        ));
    }
    let layers = fields.count("num_hidden_layers", defaults.layers)?;
    let vocab = fields.size("vocab_size", defaults.vocab)?;
    Ok(Sizes {
        hidden,
        heads,
        kv_heads,
        head_dim,
        ffn: fields.size("intermediate_size", defaults.ffn)?,
        vocab,
        layers: check_layers("num_hidden_layers", layers)?,
        eps: fields.epsilon(defaults.eps.0, defaults.eps.1)?,
        activation: read_activation(fields, defaults.activation.0, defaults.activation.1)?,
        max_positions: fields.size("max_position_embeddings", defaults.max_positions)?,
        tied: fields.flag("tie_word_embeddings", defaults.tied)?,
        padding: padding_row(fields, defaults.padding, vocab)?,
    })
}

/// The row of the embedding through which no gradient flows: that of the token of padding, counted from the end where it is
/// negative. A token beyond the vocabulary has none.
pub(super) fn padding_row(
    fields: &mut Fields<'_>,
    absent: Option<i64>,
    vocab: u64,
) -> Result<Option<u64>, Diagnostic> {
    let token = match fields.raw("pad_token_id") {
        None => absent,
        Some(Value::Null) => None,
        Some(value) => Some(
            value.as_i64().ok_or_else(|| fields.wrong("pad_token_id", value, "a whole number or null"))?,
        ),
    };
    let row = token.map(|token| if token < 0 { i128::from(vocab) + i128::from(token) } else { token.into() });
    Ok(row.and_then(|row| u64::try_from(row).ok()).filter(|&row| row < vocab))
}

pub(super) fn derived_head_dim(hidden: (&str, u64), heads: (&str, u64)) -> Result<u64, Diagnostic> {
    if !hidden.1.is_multiple_of(heads.1) {
        return Err(Diagnostic::new(
            "M07",
            format!("`{}` {} is not a multiple of `{}` {}", hidden.0, hidden.1, heads.0, heads.1),
        )
        .help("the width of a head is their quotient, unless `head_dim` is given"));
    }
    Ok(hidden.1 / heads.1)
}

/// The scale of scores that all families but one have.
pub(super) fn usual_scale(head_dim: u64) -> f64 {
    1.0 / (head_dim as f64).sqrt()
}

impl Sizes {
    /// The model with kinds of block and the kind of each layer.
    pub(super) fn spec(
        self,
        family: Family,
        dtype: DType,
        kinds: Vec<Kind>,
        layers: impl IntoIterator<Item = usize>,
    ) -> Spec {
        Spec {
            family,
            dtype,
            hidden: self.hidden,
            heads: self.heads,
            kv_heads: self.kv_heads,
            head_dim: self.head_dim,
            ffn: self.ffn,
            vocab: self.vocab,
            eps: self.eps,
            activation: self.activation,
            kinds,
            runs: runs(layers),
            bias: Biases::default(),
            qk_norm: QkNorm::None,
            residual: Residual::Serial,
            logit_cap: None,
            tied: self.tied,
            padding: self.padding,
            learned: None,
            experts: None,
            latent: None,
        }
    }

    pub(super) fn rope_context<'t>(&self, types: &'t [&'static str], partial: Partial) -> RopeContext<'t> {
        let RopeContext { theta, .. } = RopeContext::USUAL;
        RopeContext { head_dim: self.head_dim, max_positions: self.max_positions, types, partial, theta }
    }
}
