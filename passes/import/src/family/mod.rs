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
mod table;
mod uniform;

use std::borrow::Cow;

use ithaca_ir::diagnostic::nearest;
use ithaca_ir::{DType, Diagnostic};
use serde_json::{Map, Value, json};

use self::known::{GENERATION, INERT, must_be_neutral};
use self::table::{FAMILIES, Family, Reader};
use super::fields::Fields;
use super::spec::{Model, Structure};
use super::text::program_text;

/// The families that can be imported: `model_type` and a summary of its features.
pub fn families() -> impl Iterator<Item = (&'static str, &'static str)> {
    let texts = WITH_TEXT.map(|(name, _)| (name, "the text part, `text_config`; images are left out"));
    FAMILIES.iter().map(|family| (family.name, family.features)).chain(texts)
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
