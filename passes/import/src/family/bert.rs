//! BERT (Devlin et al., arXiv 1810.04805): embeddings of tokens, positions and token types, full attention, norms after
//! attention and MLP.
//!
//! `architectures` selects the head: `BertModel`, the default, or `BertForMaskedLM`.

use ithaca_ir::Diagnostic;
use serde_json::json;

use super::sizes::{Defaults, HeadDim, KvHeads, Padding, read_sizes};
use crate::fields::Fields;
use crate::spec::{Bert, BertHead};

/// The library's class with the head of a masked language model.
pub(super) const MASKED_LM: &str = "BertForMaskedLM";

pub(super) fn read(fields: &mut Fields<'_>, architecture: &str) -> Result<Bert, Diagnostic> {
    // A decoder would have causal attention.
    fields.neutral("is_decoder", &[json!(false)])?;
    // The library supports this value only; older versions had others.
    fields.neutral("position_embedding_type", &[json!("absolute")])?;
    // Fields of the first implementation, which the library never read.
    fields.skip(&[
        "directionality",
        "output_past",
        "pooler_fc_size",
        "pooler_num_attention_heads",
        "pooler_num_fc_layers",
        "pooler_size_per_head",
        "pooler_type",
    ]);
    let defaults = Defaults {
        vocab: 30_522,
        hidden: 768,
        ffn: 3072,
        layers: 12,
        heads: 12,
        head_dim: HeadDim::Quotient,
        kv_heads: KvHeads::NoField,
        max_positions: 512,
        eps: ("layer_norm_eps", 1e-12),
        activation: ("hidden_act", "gelu"),
        tied: true,
        padding: Padding::Token(0),
    };
    let sizes = read_sizes(fields, &defaults)?;
    let head = if architecture == MASKED_LM { BertHead::MaskedLm } else { BertHead::Pooler };
    Ok(Bert { sizes, types: fields.size("type_vocab_size", 2)?, head })
}
