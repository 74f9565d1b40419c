//! The table of families: the name, the features, the classes and the fields of each, and the reader of its description.

use ithaca_ir::Diagnostic;

use super::{bert, by_layer, deepseek, experts, gpt_oss, gpt2, llama4, t5, uniform};
use crate::fields::Fields;
use crate::spec::{Dropouts, Spec};

/// A `model_type` that can be imported.
pub(super) struct Family {
    /// The `model_type` of the description.
    pub(super) name: &'static str,
    /// The features, in a line.
    pub(super) features: &'static str,
    /// The library's classes that can be imported; the first is the default.
    pub(super) classes: &'static [&'static str],
    /// Fields that this family reads, and others must leave neutral.
    pub(super) own: &'static [&'static str],
    /// The fields of dropout.
    pub(super) dropout: DropoutFields,
    /// The reader of the other fields.
    pub(super) reader: Reader,
}

/// The reader of a family's fields.
pub(super) enum Reader {
    Decoder(fn(&mut Fields<'_>) -> Result<Spec, Diagnostic>),
    T5,
    Bert,
}

pub(super) static FAMILIES: [Family; 30] = [
    Family::new(
        "llama",
        "grouped heads, biases by flags; rotary default, linear, llama3, yarn",
        &["LlamaForCausalLM"],
        Reader::Decoder(uniform::llama),
    ),
    Family {
        dropout: DropoutFields {
            attention: ("attention_dropout", 0.1),
            residual: Some(("residual_dropout", 0.1)),
            embedding: None,
        },
        ..Family::new(
            "seed_oss",
            "as llama, with biased queries, keys and values by default",
            &["SeedOssForCausalLM"],
            Reader::Decoder(uniform::seed_oss),
        )
    },
    Family::new(
        "mistral",
        "grouped heads, one sliding window for all layers; rotary as llama",
        &["MistralForCausalLM"],
        Reader::Decoder(uniform::mistral),
    ),
    Family::new(
        "qwen2",
        "biased queries, keys and values; sliding windows by layer; rotary as llama",
        &["Qwen2ForCausalLM"],
        Reader::Decoder(by_layer::qwen2),
    ),
    Family::new(
        "qwen3",
        "normalised queries and keys; sliding windows by layer; rotary as llama",
        &["Qwen3ForCausalLM"],
        Reader::Decoder(by_layer::qwen3),
    ),
    Family::new(
        "arcee",
        "as llama, with a plain MLP of the square of ReLU",
        &["ArceeForCausalLM"],
        Reader::Decoder(uniform::arcee),
    ),
    Family::new(
        "ernie4_5",
        "as llama, biases by one flag, neighbours of rotated heads",
        &["Ernie4_5ForCausalLM"],
        Reader::Decoder(uniform::ernie4_5),
    ),
    Family {
        own: &["embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"],
        ..Family::new(
            "granite",
            "as llama, with factors of the embedding, scores, branches and logits",
            &["GraniteForCausalLM"],
            Reader::Decoder(uniform::granite),
        )
    },
    Family {
        own: &["pretraining_tp"],
        ..Family::new(
            "smollm3",
            "as llama, some layers without rotary positions; sliding windows by layer",
            &["SmolLM3ForCausalLM"],
            Reader::Decoder(by_layer::smollm3),
        )
    },
    Family {
        // The library reads `embd_pdrop` but does not apply it.
        dropout: DropoutFields { residual: Some(("resid_pdrop", 0.0)), ..DropoutFields::USUAL },
        ..Family::new(
            "phi3",
            "fused projections, partly rotated heads, one sliding window for all layers",
            &["Phi3ForCausalLM"],
            Reader::Decoder(uniform::phi3),
        )
    },
    Family::new(
        "gemma",
        "as llama, norms by weight + 1, scaled embedding",
        &["GemmaForCausalLM"],
        Reader::Decoder(uniform::gemma),
    ),
    Family {
        own: &["final_logit_softcapping", "attn_logit_softcapping", "query_pre_attn_scalar"],
        ..Family::new(
            "gemma2",
            "windows by layer, capped scores and logits, norms before and after; rotary as llama",
            &["Gemma2ForCausalLM"],
            Reader::Decoder(by_layer::gemma2),
        )
    },
    Family {
        own: &["final_logit_softcapping", "attn_logit_softcapping", "query_pre_attn_scalar"],
        ..Family::new(
            "gemma3_text",
            "as gemma2, queries and keys normalised, rotary by type of layer, nothing capped by default",
            &["Gemma3ForCausalLM"],
            Reader::Decoder(by_layer::gemma3),
        )
    },
    Family::new(
        "glm4",
        "norms before and after, neighbours of partly rotated heads, gate and up in one matrix; rotary as llama",
        &["Glm4ForCausalLM"],
        Reader::Decoder(uniform::glm4),
    ),
    Family::new(
        "olmo2",
        "queries and keys normalised over all heads, norms after; rotary as llama",
        &["Olmo2ForCausalLM"],
        Reader::Decoder(uniform::olmo2),
    ),
    Family::new(
        "olmo3",
        "as olmo2, sliding windows by layer",
        &["Olmo3ForCausalLM"],
        Reader::Decoder(by_layer::olmo3),
    ),
    Family::new(
        "exaone4",
        "as olmo3, each head normalised by itself, full layers without rotary positions",
        &["Exaone4ForCausalLM"],
        Reader::Decoder(by_layer::exaone4),
    ),
    Family {
        dropout: DropoutFields {
            residual: Some(("residual_dropout", 0.0)),
            embedding: Some(("embedding_dropout", 0.0)),
            ..DropoutFields::USUAL
        },
        ..Family::new(
            "starcoder2",
            "layer norms, plain MLP, biases by a flag, one sliding window; rotary as llama",
            &["Starcoder2ForCausalLM"],
            Reader::Decoder(uniform::starcoder2),
        )
    },
    Family {
        dropout: DropoutFields {
            residual: Some(("hidden_dropout", 0.0)),
            embedding: Some(("hidden_dropout", 0.0)),
            ..DropoutFields::USUAL
        },
        ..Family::new(
            "gpt_neox",
            "fused projections, partly rotated heads, parallel or serial residual, layer norms",
            &["GPTNeoXForCausalLM"],
            Reader::Decoder(uniform::gpt_neox),
        )
    },
    Family {
        dropout: DropoutFields {
            attention: ("attn_pdrop", 0.1),
            residual: Some(("resid_pdrop", 0.1)),
            embedding: Some(("embd_pdrop", 0.1)),
        },
        ..Family::new(
            "gpt2",
            "learned positions, layer norms, biases everywhere",
            &["GPT2LMHeadModel"],
            Reader::Decoder(gpt2::read),
        )
    },
    Family {
        own: experts::MIXTRAL_OWN,
        ..Family::new(
            "mixtral",
            "experts in every layer, shares of the best by softmax; else as mistral",
            &["MixtralForCausalLM"],
            Reader::Decoder(experts::mixtral),
        )
    },
    Family {
        own: experts::MIXTRAL_OWN,
        ..Family::new(
            "minimax_m2",
            "experts in every layer, chosen by sigmoid and bias; partly rotated heads, normalised over all",
            &["MiniMaxM2ForCausalLM"],
            Reader::Decoder(experts::minimax_m2),
        )
    },
    Family {
        own: experts::QWEN3_MOE_OWN,
        ..Family::new(
            "qwen3_moe",
            "experts by layer, one sliding window for all layers; else as qwen3",
            &["Qwen3MoeForCausalLM"],
            Reader::Decoder(experts::qwen3_moe),
        )
    },
    Family {
        own: deepseek::OWN,
        ..Family::new(
            "deepseek_v3",
            "latent attention, experts in groups, shared experts, dense first layers; rotary as llama",
            &["DeepseekV3ForCausalLM"],
            Reader::Decoder(deepseek::read),
        )
    },
    Family {
        own: deepseek::OWN,
        ..Family::new(
            "kimi_k2",
            "as deepseek_v3",
            &["DeepseekV3ForCausalLM"],
            Reader::Decoder(deepseek::read),
        )
    },
    Family {
        own: deepseek::OWN,
        ..Family::new(
            "glm4_moe",
            "experts as deepseek_v3; partly rotated heads, biased queries, keys and values by a flag",
            &["Glm4MoeForCausalLM"],
            Reader::Decoder(deepseek::glm4_moe),
        )
    },
    Family {
        own: gpt_oss::OWN,
        ..Family::new(
            "gpt_oss",
            "experts with biases in every layer, sinks of attention, windows by layer; rotary as llama",
            &["GptOssForCausalLM"],
            Reader::Decoder(gpt_oss::read),
        )
    },
    Family {
        own: llama4::OWN,
        ..Family::new(
            "llama4_text",
            "experts that read gated tokens, a shared one, attention in chunks by layer; rotary as llama",
            &["Llama4ForCausalLM"],
            Reader::Decoder(llama4::read),
        )
    },
    Family {
        own: t5::OWN,
        // One field for all places.
        dropout: DropoutFields {
            attention: ("dropout_rate", 0.1),
            residual: Some(("dropout_rate", 0.1)),
            embedding: Some(("dropout_rate", 0.1)),
        },
        ..Family::new(
            "t5",
            "encoder and decoder, biases by relative position, plain or gated MLP, head tied or not",
            &["T5ForConditionalGeneration", "T5WithLMHeadModel"],
            Reader::T5,
        )
    },
    Family {
        dropout: DropoutFields {
            attention: ("attention_probs_dropout_prob", 0.1),
            residual: Some(("hidden_dropout_prob", 0.1)),
            embedding: Some(("hidden_dropout_prob", 0.1)),
        },
        ..Family::new(
            "bert",
            "encoder: learned positions, token types, norms after; pooler or masked language model",
            &["BertModel", bert::MASKED_LM],
            Reader::Bert,
        )
    },
];

impl Family {
    /// A family with the usual field of dropout, all of whose other fields are common.
    const fn new(
        name: &'static str,
        features: &'static str,
        classes: &'static [&'static str],
        reader: Reader,
    ) -> Self {
        Self { name, features, classes, own: &[], dropout: DropoutFields::USUAL, reader }
    }
}

/// The fields of the rates of dropout in training, each with its default.
#[derive(Clone, Copy)]
pub(super) struct DropoutFields {
    /// Of attention weights.
    attention: (&'static str, f64),
    /// Of the outputs of attention and MLP.
    residual: Option<(&'static str, f64)>,
    /// Of the embedding's output.
    embedding: Option<(&'static str, f64)>,
}

impl DropoutFields {
    /// The fields of most families.
    const USUAL: Self = Self { attention: ("attention_dropout", 0.0), residual: None, embedding: None };

    /// The rates of dropout in training.
    pub(super) fn read(self, fields: &mut Fields<'_>) -> Result<Dropouts, Diagnostic> {
        let mut share = |field: Option<(&str, f64)>| match field {
            Some((name, default)) => fields.share(name, default),
            None => Ok(0.0),
        };
        Ok(Dropouts {
            attention: share(Some(self.attention))?,
            residual: share(self.residual)?,
            embedding: share(self.embedding)?,
        })
    }
}
