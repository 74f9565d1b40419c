//! The families of models, and what they share.
//!
//! Defaults of absent fields are those of the library's configuration classes (`LlamaConfig`, …), version 5.

mod bert;
mod deepseek;
mod experts;
mod gemma2;
mod gpt2;
mod gpt_neox;
mod known;
mod layer_types;
mod llama;
mod mistral;
mod mixtral;
mod olmo2;
mod phi3;
mod qwen;
mod qwen_moe;
mod sizes;
mod starcoder2;
mod t5;

use ithaca_ir::{DType, Diagnostic};
use serde_json::Value;

use self::known::{GENERATION, INERT, must_be_neutral};
use super::fields::Fields;
use super::spec::{Dropouts, Family, Model, Spec, Structure};

/// The families that can be imported: `model_type` and what it covers.
pub const FAMILIES: [(&str, &str); 15] = [
    ("llama", "grouped heads, biases by flags; rotary default, linear, llama3, yarn"),
    ("mistral", "grouped heads, one sliding window for all layers; rotary as llama"),
    ("qwen2", "biased queries, keys and values; sliding windows by layer; rotary as llama"),
    ("qwen3", "normalised queries and keys; sliding windows by layer; rotary as llama"),
    ("phi3", "fused projections, partly rotated heads, one sliding window for all layers"),
    ("gemma2", "windows by layer, capped scores and logits, norms before and after; rotary as llama"),
    ("olmo2", "queries and keys normalised over all heads, norms after; rotary as llama"),
    ("starcoder2", "layer norms, plain MLP, biases by a flag, one sliding window; rotary as llama"),
    ("gpt_neox", "fused projections, partly rotated heads, parallel or serial residual, layer norms"),
    ("gpt2", "learned positions, layer norms, biases everywhere"),
    ("mixtral", "experts in every layer, shares of the best by softmax; else as mistral"),
    ("qwen3_moe", "experts by layer, one sliding window for all layers; else as qwen3"),
    (
        "deepseek_v3",
        "latent attention, experts in groups beside shared ones, dense first layers; rotary as llama",
    ),
    ("t5", "encoder and decoder, biases by relative position, plain or gated MLP, head tied or not"),
    ("bert", "encoder: learned positions, types of token, norms after; pooler or masked language model"),
];

/// A `model_type` that can be imported.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ModelType {
    Decoder(Family),
    T5,
    Bert,
}

impl Family {
    /// The library's class with a language model's head.
    fn architectures(self) -> &'static [&'static str] {
        match self {
            Family::Llama => &["LlamaForCausalLM"],
            Family::Mistral => &["MistralForCausalLM"],
            Family::Qwen2 => &["Qwen2ForCausalLM"],
            Family::Qwen3 => &["Qwen3ForCausalLM"],
            Family::Phi3 => &["Phi3ForCausalLM"],
            Family::Gemma2 => &["Gemma2ForCausalLM"],
            Family::Olmo2 => &["Olmo2ForCausalLM"],
            Family::Starcoder2 => &["Starcoder2ForCausalLM"],
            Family::GptNeox => &["GPTNeoXForCausalLM"],
            Family::Gpt2 => &["GPT2LMHeadModel"],
            Family::Mixtral => &["MixtralForCausalLM"],
            Family::Qwen3Moe => &["Qwen3MoeForCausalLM"],
            Family::DeepseekV3 => &["DeepseekV3ForCausalLM"],
        }
    }
}

impl ModelType {
    /// The spelling of the description.
    fn name(self) -> &'static str {
        match self {
            ModelType::Decoder(family) => family.name(),
            ModelType::T5 => "t5",
            ModelType::Bert => "bert",
        }
    }

    fn named(name: &str) -> Option<Self> {
        let decoders = Family::ALL.into_iter().map(ModelType::Decoder);
        decoders.chain([ModelType::T5, ModelType::Bert]).find(|t| t.name() == name)
    }

    /// The library's classes that are imported, the first where the description names none.
    fn architectures(self) -> &'static [&'static str] {
        match self {
            ModelType::Decoder(family) => family.architectures(),
            // The second is the name that the first had.
            ModelType::T5 => &["T5ForConditionalGeneration", "T5WithLMHeadModel"],
            ModelType::Bert => &["BertModel", bert::MASKED_LM],
        }
    }

    /// Fields that this type reads, and others must leave neutral.
    fn own(self) -> &'static [&'static str] {
        match self {
            ModelType::Decoder(Family::Gemma2) => gemma2::OWN,
            ModelType::Decoder(Family::Mixtral) => mixtral::OWN,
            ModelType::Decoder(Family::Qwen3Moe) => qwen_moe::OWN,
            ModelType::Decoder(Family::DeepseekV3) => deepseek::OWN,
            ModelType::T5 => t5::OWN,
            ModelType::Decoder(_) | ModelType::Bert => &[],
        }
    }

    /// The fields of dropout.
    fn dropouts(self) -> DropoutFields {
        let none = DropoutFields { attention: ("attention_dropout", 0.0), residual: None, embedding: None };
        match self {
            ModelType::Decoder(family) => match family {
                Family::Llama
                | Family::Mistral
                | Family::Qwen2
                | Family::Qwen3
                | Family::Gemma2
                | Family::Olmo2
                | Family::Mixtral
                | Family::Qwen3Moe
                | Family::DeepseekV3 => none,
                // The library reads `embd_pdrop` and drops nothing by it.
                Family::Phi3 => DropoutFields { residual: Some(("resid_pdrop", 0.0)), ..none },
                Family::Starcoder2 => DropoutFields {
                    residual: Some(("residual_dropout", 0.0)),
                    embedding: Some(("embedding_dropout", 0.0)),
                    ..none
                },
                Family::GptNeox => {
                    let hidden = Some(("hidden_dropout", 0.0));
                    DropoutFields { residual: hidden, embedding: hidden, ..none }
                }
                Family::Gpt2 => DropoutFields {
                    attention: ("attn_pdrop", 0.1),
                    residual: Some(("resid_pdrop", 0.1)),
                    embedding: Some(("embd_pdrop", 0.1)),
                },
            },
            // One field for all.
            ModelType::T5 => {
                let all = ("dropout_rate", 0.1);
                DropoutFields { attention: all, residual: Some(all), embedding: Some(all) }
            }
            ModelType::Bert => {
                let hidden = Some(("hidden_dropout_prob", 0.1));
                DropoutFields {
                    attention: ("attention_probs_dropout_prob", 0.1),
                    residual: hidden,
                    embedding: hidden,
                }
            }
        }
    }
}

/// The fields that say what is dropped in training, each with its value where it is absent.
#[derive(Clone, Copy)]
struct DropoutFields {
    /// Of attention's weights.
    attention: (&'static str, f64),
    /// Of what blocks add to the stream.
    residual: Option<(&'static str, f64)>,
    /// Of what the embedding gives.
    embedding: Option<(&'static str, f64)>,
}

/// Reads a description.
///
/// # Errors
/// `M01` to `M07`, `M11`, `M12`.
pub(super) fn read(config: &Value, ignore: &[String]) -> Result<Model, Diagnostic> {
    let map = config.as_object().ok_or_else(|| {
        Diagnostic::new("M01", format!("a model is described by a JSON object, not by {}", kind_of(config)))
    })?;
    let mut fields = Fields::new(map, "", ignore);
    let model_type = read_model_type(&mut fields)?;
    let architecture = read_architecture(&mut fields, model_type)?;
    let dtype = read_dtype(&mut fields)?;
    let own = model_type.own();
    for (name, neutral) in must_be_neutral().into_iter().filter(|(name, _)| !own.contains(name)) {
        fields.neutral(name, &neutral)?;
    }
    let structure = match model_type {
        ModelType::Decoder(family) => {
            Structure::Decoder(Box::new(read_decoder(family, &mut fields, dtype, ignore)?))
        }
        ModelType::T5 => Structure::T5(t5::read(&mut fields, dtype)?),
        ModelType::Bert => Structure::Bert(bert::read(&mut fields, dtype, architecture)?),
    };
    let dropout = read_dropout(&mut fields, model_type)?;
    fields.finish(&[INERT, GENERATION])?;
    Ok(Model { structure, dropout })
}

fn read_decoder<'a>(
    family: Family,
    fields: &mut Fields<'a>,
    dtype: DType,
    ignore: &'a [String],
) -> Result<Spec, Diagnostic> {
    match family {
        Family::Llama => llama::read(fields, dtype, ignore),
        Family::Mistral => mistral::read(fields, dtype, ignore),
        Family::Qwen2 => qwen::read_qwen2(fields, dtype, ignore),
        Family::Qwen3 => qwen::read_qwen3(fields, dtype, ignore),
        Family::Phi3 => phi3::read(fields, dtype, ignore),
        Family::Gemma2 => gemma2::read(fields, dtype, ignore),
        Family::Olmo2 => olmo2::read(fields, dtype, ignore),
        Family::Starcoder2 => starcoder2::read(fields, dtype, ignore),
        Family::GptNeox => gpt_neox::read(fields, dtype, ignore),
        Family::Gpt2 => gpt2::read(fields, dtype),
        Family::Mixtral => mixtral::read(fields, dtype, ignore),
        Family::Qwen3Moe => qwen_moe::read(fields, dtype, ignore),
        Family::DeepseekV3 => deepseek::read(fields, dtype, ignore),
    }
}

/// What is dropped in training.
fn read_dropout(fields: &mut Fields<'_>, model_type: ModelType) -> Result<Dropouts, Diagnostic> {
    let DropoutFields { attention, residual, embedding } = model_type.dropouts();
    let mut share = |field: Option<(&'static str, f64)>| match field {
        Some((name, default)) => fields.share(name, default),
        None => Ok(0.0),
    };
    Ok(Dropouts {
        attention: share(Some(attention))?,
        residual: share(residual)?,
        embedding: share(embedding)?,
    })
}

fn read_model_type(fields: &mut Fields<'_>) -> Result<ModelType, Diagnostic> {
    let families = || FAMILIES.iter().map(|&(name, _)| name);
    let Some(name) = fields.word("model_type")? else {
        let refusal = Diagnostic::new("M02", "the description has no `model_type`");
        return Err(refusal.names("supported", "", families()));
    };
    ModelType::named(name).ok_or_else(|| {
        Diagnostic::new("M02", format!("`model_type` \"{name}\" is not supported")).names(
            "supported",
            &name.to_lowercase(),
            families(),
        )
    })
}

/// The library's class that is imported.
fn read_architecture(fields: &mut Fields<'_>, model_type: ModelType) -> Result<&'static str, Diagnostic> {
    let known = model_type.architectures();
    match fields.words("architectures")? {
        Some(names) if !names.is_empty() => {
            known.iter().find(|k| names.contains(k)).copied().ok_or_else(|| {
                let what = match model_type {
                    ModelType::Decoder(_) | ModelType::T5 => "a language model's",
                    ModelType::Bert => "a pooler or a masked language model's",
                };
                Diagnostic::new(
                    "M11",
                    format!("`architectures` is [{}], whose head is not {what}", names.join(", ")),
                )
                .help(format!(
                    "a {} is imported as {}",
                    model_type.name(),
                    known.join(" or ")
                ))
            })
        }
        _ => Ok(known[0]),
    }
}

/// The element type: `dtype`, else the older `torch_dtype`, else f32.
fn read_dtype(fields: &mut Fields<'_>) -> Result<DType, Diagnostic> {
    let (new, old) = (fields.word("dtype")?, fields.word("torch_dtype")?);
    let Some(word) = new.or(old) else { return Ok(DType::F32) };
    DType::parse(word.strip_prefix("torch.").unwrap_or(word)).filter(|d| d.is_float()).ok_or_else(|| {
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
