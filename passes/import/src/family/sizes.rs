//! The sizes of a family, and readers of common fields.

use ithaca_ir::Diagnostic;
use ithaca_ir::ops::Unary;
use serde_json::{Value, json};

use crate::fields::Fields;
use crate::spec::{Sizes, check_layers};

/// The activation of the MLP, by the library's name.
pub(super) fn read_activation(
    fields: &mut Fields<'_>,
    name: &str,
    default: &str,
) -> Result<Unary, Diagnostic> {
    let word = fields.word(name)?.unwrap_or(default);
    activation(word).ok_or_else(|| {
        fields.unsupported(name, &json!(word)).help(
            "supported: silu, gelu, gelu_new, gelu_pytorch_tanh, gelu_fast, quick_gelu, relu, relu2, tanh",
        )
    })
}

/// The activation that the library calls `name`.
pub(super) fn activation(name: &str) -> Option<Unary> {
    Some(match name {
        "silu" | "swish" => Unary::Silu,
        "gelu" | "gelu_python" => Unary::Gelu,
        // All of them are the tanh approximation, in different formulations.
        "gelu_new" | "gelu_pytorch_tanh" | "gelu_python_tanh" | "gelu_fast" | "gelu_accurate" => {
            Unary::GeluTanh
        }
        "quick_gelu" => Unary::QuickGelu,
        "relu" => Unary::Relu,
        "relu2" => Unary::Relu2,
        "tanh" => Unary::Tanh,
        _ => return None,
    })
}

/// The values of absent fields, family by family.
pub(super) struct Defaults {
    pub(super) vocab: u64,
    pub(super) hidden: u64,
    pub(super) ffn: u64,
    pub(super) layers: u64,
    pub(super) heads: u64,
    pub(super) head_dim: HeadDim,
    pub(super) kv_heads: KvHeads,
    pub(super) max_positions: u64,
    /// The field of the norms' epsilon, and its value.
    pub(super) eps: (&'static str, f64),
    /// The field of the MLP's activation, and its value.
    pub(super) activation: (&'static str, &'static str),
    pub(super) tied: bool,
    /// The padding token.
    pub(super) padding: Padding,
}

/// The defaults of most families.
pub(super) const USUAL: Defaults = Defaults {
    vocab: 32_000,
    hidden: 4096,
    ffn: 11_008,
    layers: 32,
    heads: 32,
    head_dim: HeadDim::Derived,
    kv_heads: KvHeads::AsQueries,
    max_positions: 2048,
    eps: ("rms_norm_eps", 1e-6),
    activation: ("hidden_act", "silu"),
    tied: false,
    padding: Padding::None,
};

/// The meaning of an absent `head_dim`.
pub(super) enum HeadDim {
    /// `hidden_size / num_attention_heads`; null means the same.
    Derived,
    /// A constant; null is refused.
    Fixed(u64),
    /// `hidden_size / num_attention_heads`; no field states another.
    Quotient,
    /// The sum of fields that the family reads itself.
    Sum(u64),
}

/// The meaning of an absent `num_key_value_heads`; null means as many as query heads.
pub(super) enum KvHeads {
    AsQueries,
    Fixed(u64),
    /// As many as query heads; no field states another number.
    NoField,
}

/// The meaning of an absent `pad_token_id`; null means no padding token.
pub(super) enum Padding {
    None,
    Token(i64),
    /// No padding token; the field has no influence.
    NoField,
}

pub(super) fn read_sizes(fields: &mut Fields<'_>, defaults: &Defaults) -> Result<Sizes, Diagnostic> {
    let hidden = fields.size("hidden_size", defaults.hidden)?;
    let heads = fields.size("num_attention_heads", defaults.heads)?;
    let kv_heads = match defaults.kv_heads {
        KvHeads::AsQueries => fields.nullable_size("num_key_value_heads", None)?,
        KvHeads::Fixed(n) => fields.nullable_size("num_key_value_heads", Some(n))?,
        KvHeads::NoField => None,
    }
    .unwrap_or(heads);
    let derived = || derived_head_dim(("hidden_size", hidden), ("num_attention_heads", heads));
    let head_dim = match defaults.head_dim {
        HeadDim::Fixed(n) => fields.size("head_dim", n)?,
        HeadDim::Derived => fields.nullable_size("head_dim", None)?.map_or_else(derived, Ok)?,
        HeadDim::Quotient => derived()?,
        HeadDim::Sum(n) => n,
    };
    if !heads.is_multiple_of(kv_heads) {
        let message = format!(
            "`num_attention_heads` {heads} is not a multiple of `num_key_value_heads` {kv_heads}: each \
                 key/value head serves a whole group of query heads"
        );
        return Err(Diagnostic::new("M07", message));
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
        padding: match defaults.padding {
            Padding::None => padding_row(fields, None, vocab)?,
            Padding::Token(token) => padding_row(fields, Some(token), vocab)?,
            Padding::NoField => None,
        },
    })
}

/// The row of the embedding that receives no gradient: the padding token's, counted from the end if negative. A token
/// beyond the vocabulary has no row.
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
        let message = format!("`{}` {} is not a multiple of `{}` {}", hidden.0, hidden.1, heads.0, heads.1);
        return Err(Diagnostic::new("M07", message)
            .help("set `head_dim`, or choose sizes of which the quotient is the width of a head"));
    }
    Ok(hidden.1 / heads.1)
}
