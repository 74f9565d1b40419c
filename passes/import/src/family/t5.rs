//! T5 (Raffel et al., arXiv 1910.10683), and version 1.1 with a gated MLP and an untied head.
//!
//! The library saves the fields that it derives: `dense_act_fn` and `is_gated_act` from `feed_forward_proj`, and
//! `scale_decoder_outputs` from `tie_word_embeddings`. A stated field takes precedence, as in the library. Version 5
//! saves `tie_word_embeddings` as true for every model; a model without scaling has an untied head. A checkpoint
//! without `lm_head.weight` is then refused when weights are loaded.

use ithaca_ir::Diagnostic;
use serde_json::{Value, json};

use super::sizes::{activation, padding_row, read_activation};
use crate::fields::Fields;
use crate::spec::{Sizes, T5, check_layers};

/// Fields that other families must leave neutral.
pub(super) const OWN: &[&str] = &["is_encoder_decoder"];

pub(super) fn read(fields: &mut Fields<'_>) -> Result<T5, Diagnostic> {
    fields.neutral("is_encoder_decoder", &[json!(true)])?;
    fields.neutral("tie_encoder_decoder", &[json!(false)])?;
    let layers = fields.aliased_size(["num_layers", "num_hidden_layers"], 6)?;
    let decoder_layers = fields.nullable_size("num_decoder_layers", None)?.unwrap_or(layers);
    let proj = fields.word("feed_forward_proj")?.unwrap_or("relu");
    let (gated, function) = match proj.split('-').collect::<Vec<_>>().as_slice() {
        ["gated", "gelu"] => (true, Some("gelu_new")),
        ["gated", function] => (true, Some(*function)),
        ["gated"] | [] => (true, None),
        [function] => (false, Some(*function)),
        _ => (false, None),
    };
    let Some(function) = function.filter(|f| activation(f).is_some()) else {
        return Err(fields
            .unsupported("feed_forward_proj", &json!(proj))
            .help("write it as in relu, gated-gelu or gated-silu"));
    };
    let gated = fields.flag("is_gated_act", gated)?;
    let activation = read_activation(fields, "dense_act_fn", function)?;
    let own_head = fields.flag_or_null("tie_word_embeddings")? == Some(false);
    let scaled = fields.flag("scale_decoder_outputs", !own_head)?;
    let buckets = fields.size("relative_attention_num_buckets", 32)?;
    let max_distance = fields.size("relative_attention_max_distance", 128)?;
    // The encoder uses half of the buckets on each side, and half of those for single distances.
    if buckets < 4 || max_distance <= buckets / 2 {
        let message = format!(
            "`relative_attention_num_buckets` {buckets} and `relative_attention_max_distance` {max_distance} do \
                 not fit"
        );
        return Err(Diagnostic::new("M07", message)
            .help("choose at least 4 buckets, and a distance above half of them"));
    }
    let vocab = fields.size("vocab_size", 32_128)?;
    let padding = padding_row(fields, Some(0), vocab)?;
    let first = match fields.raw("decoder_start_token_id") {
        None | Some(Value::Null) => padding.unwrap_or(0),
        // A program makes it from a number in f32, which has no greater ones exactly.
        Some(value) => match value.as_u64().filter(|&token| token < vocab.min(1 << 24)) {
            Some(token) => token,
            None => return Err(fields.wrong("decoder_start_token_id", value, "a token of the vocabulary")),
        },
    };
    // Sequence lengths of training, and options of older versions.
    fields.skip(&["n_positions", "output_past", "initializer_factor"]);
    let hidden = fields.aliased_size(["d_model", "hidden_size"], 512)?;
    let heads = fields.aliased_size(["num_heads", "num_attention_heads"], 8)?;
    let sizes = Sizes {
        hidden,
        heads,
        kv_heads: heads,
        head_dim: fields.aliased_size(["d_kv", "head_dim"], 64)?,
        ffn: fields.size("d_ff", 2048)?,
        vocab,
        eps: fields.epsilon("layer_norm_epsilon", 1e-6)?,
        activation,
        layers: check_layers("num_layers", layers)?,
        max_positions: u64::MAX,
        tied: scaled && !own_head,
        padding: None,
    };
    let decoder_layers = check_layers("num_decoder_layers", decoder_layers)?;
    Ok(T5 { sizes, gated, decoder_layers, buckets, max_distance, scaled, first })
}
