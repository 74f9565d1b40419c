//! BERT (Devlin et al., arXiv 1810.04805): tokens, positions and types of token are embedded, every token sees every
//! other, norms stand behind attention and MLP.
//!
//! `architectures` decides on the head: `BertModel`, the default, or `BertForMaskedLM`.

use ithaca_ir::{DType, Diagnostic};
use serde_json::json;

use super::sizes::{derived_head_dim, padding_row, read_activation};
use crate::fields::Fields;
use crate::spec::{Bert, BertHead, check_layers};

/// The library's class with the head of a masked language model.
pub(super) const MASKED_LM: &str = "BertForMaskedLM";

pub(super) fn read(fields: &mut Fields<'_>, dtype: DType, architecture: &str) -> Result<Bert, Diagnostic> {
    // A decoder would see the tokens before only.
    fields.neutral("is_decoder", &[json!(false)])?;
    // The library computes no other, and older versions did.
    fields.neutral("position_embedding_type", &[json!("absolute")])?;
    let tied = fields.flag("tie_word_embeddings", true)?;
    let head = match architecture == MASKED_LM {
        true => BertHead::MaskedLm { tied },
        false => BertHead::Pooler,
    };
    // Left by the first implementation, which the library never read.
    for name in [
        "directionality",
        "output_past",
        "pooler_fc_size",
        "pooler_num_attention_heads",
        "pooler_num_fc_layers",
        "pooler_size_per_head",
        "pooler_type",
    ] {
        let _ = fields.raw(name);
    }
    let hidden = fields.size("hidden_size", 768)?;
    let heads = fields.size("num_attention_heads", 12)?;
    derived_head_dim(("hidden_size", hidden), ("num_attention_heads", heads))?;
    let layers = fields.count("num_hidden_layers", 12)?;
    let vocab = fields.size("vocab_size", 30_522)?;
    Ok(Bert {
        dtype,
        hidden,
        heads,
        ffn: fields.size("intermediate_size", 3072)?,
        vocab,
        padding: padding_row(fields, Some(0), vocab)?,
        types: fields.size("type_vocab_size", 2)?,
        positions: fields.size("max_position_embeddings", 512)?,
        eps: fields.epsilon("layer_norm_eps", 1e-12)?,
        activation: read_activation(fields, "hidden_act", "gelu")?,
        layers: check_layers("num_hidden_layers", layers)?,
        head,
    })
}
