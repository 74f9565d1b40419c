//! The families of models, and the fields that they share.
//!
//! Defaults of absent fields are those of the library's configuration classes (`LlamaConfig`, …), version 5.

mod bert;
mod by_layer;
mod deepseek;
mod experts;
mod gpt2;
mod gpt_oss;
mod known;
mod llama4;
mod sizes;
mod t5;
mod uniform;

use std::borrow::Cow;

use ithaca_ir::diagnostic::nearest;
use ithaca_ir::{DType, Diagnostic};
use serde_json::{Map, Value, json};

use self::known::{GENERATION, INERT, must_be_neutral};
use super::fields::Fields;
use super::spec::{Dropouts, Model, Spec, Structure};
use super::text::program_text;

/// The families that can be imported: `model_type` and a summary of its features.
pub fn families() -> impl Iterator<Item = (&'static str, &'static str)> {
    let texts = WITH_TEXT.map(|(name, _)| (name, "the text part, `text_config`; images are left out"));
    FAMILIES.iter().map(|family| (family.name, family.features)).chain(texts)
}

/// A `model_type` that can be imported.
struct Family {
    /// The `model_type` of the description.
    name: &'static str,
    /// The features, in a line.
    features: &'static str,
    /// The library's classes that can be imported; the first is the default.
    classes: &'static [&'static str],
    /// Fields that this family reads, and others must leave neutral.
    own: &'static [&'static str],
    /// The fields of dropout.
    dropout: DropoutFields,
    /// The reader of the other fields.
    reader: Reader,
}

/// The reader of a family's fields.
enum Reader {
    Decoder(fn(&mut Fields<'_>) -> Result<Spec, Diagnostic>),
    T5,
    Bert,
}

static FAMILIES: [Family; 30] = [
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
struct DropoutFields {
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
    fn read(self, fields: &mut Fields<'_>) -> Result<Dropouts, Diagnostic> {
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

/// Models of text and images whose text part is imported, with the `model_type` of that part where it states none.
const WITH_TEXT: [(&str, &str); 3] =
    [("mistral3", "mistral"), ("gemma3", "gemma3_text"), ("llama4", "llama4_text")];

/// The text part of the description of a model of text and images; the description itself of all others.
///
/// The part is `text_config`, with the element type of the whole where it has none of its own, and with the whole's answer to whether
/// the embedding is also the head: the library ties the weights of the whole model.
pub fn text_part(config: &Value) -> Cow<'_, Value> {
    let kind = config.get("model_type").and_then(Value::as_str);
    let known = WITH_TEXT.into_iter().find(|(name, _)| kind == Some(name));
    let part = config.get("text_config").and_then(Value::as_object);
    let (Some((_, of_text)), Some(part)) = (known, part) else { return Cow::Borrowed(config) };
    let mut part = part.clone();
    part.entry("model_type").or_insert_with(|| of_text.into());
    let is_stated = ["dtype", "torch_dtype"].iter().any(|key| part.get(*key).is_some_and(|v| !v.is_null()));
    let inherited: &[&str] =
        if is_stated { &["tie_word_embeddings"] } else { &["dtype", "torch_dtype", "tie_word_embeddings"] };
    for key in inherited {
        if let Some(value) = config.get(*key) {
            part.insert((*key).to_owned(), value.clone());
        }
    }
    // The class of the whole has its head, whatever class the part was made by.
    part.remove("architectures");
    Cow::Owned(Value::Object(part))
}

/// Reads a description.
///
/// # Errors
/// `M01` to `M07`, `M11`, `M12`.
pub(super) fn read(config: &Value, ignore: &[String]) -> Result<Model, Diagnostic> {
    if program_text(config).is_some() {
        let message = "a program in text form has no configuration of a model, which this needs";
        return Err(Diagnostic::new("M02", message).help("use the model's folder or its config.json"));
    }
    let config = &*text_part(config);
    let map = config.as_object().ok_or_else(|| {
        Diagnostic::new("M01", format!("a model is described by a JSON object, not by {}", kind_of(config)))
    })?;
    let fields = &mut Fields::new(map, "", ignore);
    let family = read_family(fields, |name| read(&renamed(map, name), ignore).map(drop))?;
    let class = read_class(fields, family)?;
    let dtype = read_dtype(fields)?;
    let has_scaled_weights = has_scaled_weights(map);
    for (name, neutral) in must_be_neutral().into_iter().filter(|(name, _)| !family.own.contains(name)) {
        if name == QUANTIZATION && has_scaled_weights {
            fields.skip(&[name]);
        } else {
            fields.neutral(name, &neutral)?;
        }
    }
    let structure = match family.reader {
        Reader::Decoder(read) => Structure::Decoder(Box::new(read(fields)?)),
        Reader::T5 => Structure::T5(t5::read(fields)?),
        Reader::Bert => Structure::Bert(bert::read(fields, class)?),
    };
    let dropout = family.dropout.read(fields)?;
    fields.finish(&[INERT, GENERATION])?;
    Ok(Model { family: family.name, dtype, structure, dropout })
}

/// The field of how weights are stored in fewer bits.
const QUANTIZATION: &str = "quantization_config";

/// How weights of a description are stored in fewer bits than they are computed in; nothing where they are not.
pub fn stored_weights(config: &Value) -> Option<String> {
    let config = text_part(config);
    let config = config.as_object().filter(|config| has_scaled_weights(config))?;
    Some(config[QUANTIZATION]["quant_method"].as_str()?.to_owned())
}

/// Whether weights are stored in few bits with a scale for each block: eight bits and blocks of 128 × 128, or four bits and blocks of
/// 32. They are read as their products. Inputs of such products that a server rounds to eight bits as well stay as they are.
fn has_scaled_weights(config: &Map<String, Value>) -> bool {
    let Some(Value::Object(how)) = config.get(QUANTIZATION) else { return false };
    match how.get("quant_method").and_then(Value::as_str) {
        Some("mxfp4") => true,
        Some("fp8") => {
            how.get("weight_block_size") == Some(&json!([128, 128]))
                && how.get("fmt").is_none_or(|format| format == "e4m3")
        }
        _ => false,
    }
}

/// The description with another `model_type`, and the class that goes with it.
fn renamed(config: &Map<String, Value>, name: &str) -> Value {
    let mut config = config.clone();
    config.insert("model_type".to_owned(), json!(name));
    config.remove("architectures");
    Value::Object(config)
}

/// The family of a description; `reads` is whether the description can be read as of another one.
fn read_family(
    fields: &mut Fields<'_>,
    reads: impl Fn(&str) -> Result<(), Diagnostic>,
) -> Result<&'static Family, Diagnostic> {
    let names = || families().map(|(name, _)| name);
    let Some(name) = fields.word("model_type")? else {
        let refusal = Diagnostic::new("M02", "the description has no `model_type`");
        return Err(refusal.names("supported", "", names()));
    };
    FAMILIES.iter().find(|family| family.name == name).ok_or_else(|| {
        if let Some((_, of_text)) = WITH_TEXT.iter().find(|(known, _)| *known == name) {
            let message =
                format!("`model_type` \"{name}\" is a model with a text part, and `text_config` is missing");
            return Diagnostic::new("M02", message)
                .help(format!("a text model by itself has `\"model_type\": \"{of_text}\"`"));
        }
        let message = format!("`model_type` \"{name}\" is not supported");
        let refusal = Diagnostic::new("M02", message);
        let of_nearest = |near: &str| {
            // One with an image part is read as its text part, by that one's name.
            let is_text = FAMILIES.iter().any(|family| family.name == near);
            match is_text.then(|| reads(near)) {
                Some(Err(other)) => {
                    format!("the nearest, `{near}`, does not describe it: {}", other.message)
                }
                Some(Ok(())) | None => format!("did you mean `{near}`?"),
            }
        };
        let refusal = nearest(&name.to_lowercase(), names())
            .map(of_nearest)
            .into_iter()
            .fold(refusal, Diagnostic::help);
        refusal.names("supported", "", names())
    })
}

/// The class of `architectures` that can be imported, or the default.
fn read_class(fields: &mut Fields<'_>, family: &Family) -> Result<&'static str, Diagnostic> {
    let named = fields.words("architectures")?.unwrap_or_default();
    if named.is_empty() {
        return Ok(family.classes[0]);
    }
    family.classes.iter().find(|class| named.contains(class)).copied().ok_or_else(|| {
        let head = match family.reader {
            Reader::Decoder(_) | Reader::T5 => "a language model's",
            Reader::Bert => "a pooler or a masked language model's",
        };
        let message = format!("`architectures` is [{}], whose head is not {head}", named.join(", "));
        let help = format!("a {} is imported as {}", family.name, family.classes.join(" or "));
        Diagnostic::new("M11", message).help(help)
    })
}

/// The element type: `dtype`, else the older `torch_dtype`, else f32.
fn read_dtype(fields: &mut Fields<'_>) -> Result<DType, Diagnostic> {
    let (new, old) = (fields.word("dtype")?, fields.word("torch_dtype")?);
    let Some(word) = new.or(old) else { return Ok(DType::F32) };
    DType::parse(word.strip_prefix("torch.").unwrap_or(word)).filter(|d| d.is_arithmetic()).ok_or_else(|| {
        Diagnostic::new("M05", format!("element type \"{word}\" is not supported"))
            .help("supported: float32, bfloat16, float16, float64")
            .repairs(["--dtype bf16".to_owned()])
    })
}

fn kind_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a flag",
        Value::Number(_) => "a number",
        Value::String(_) => "a text",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}
