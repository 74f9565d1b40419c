//! Settings of a framework: a key and a value, spelled as flags, as Python, as JSON or as YAML.

use ithaca_ir::DType;
use serde_json::{Map, Value};

/// A setting; a dot in the key separates sections.
#[derive(Clone, Debug, PartialEq)]
pub struct Setting {
    /// The key.
    pub key: String,
    /// The value: `true` is a flag without a value.
    pub value: Value,
}

/// Settings as they are collected.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Settings(pub(crate) Vec<Setting>);

impl Settings {
    pub(crate) fn set(&mut self, key: &str, value: impl Into<Value>) {
        self.0.push(Setting { key: key.to_owned(), value: value.into() });
    }

    /// A number that is more than one.
    pub(crate) fn degree(&mut self, key: &str, value: u64) {
        if value > 1 {
            self.set(key, value);
        }
    }

    pub(crate) fn flag(&mut self, key: &str, is_set: bool) {
        if is_set {
            self.set(key, true);
        }
    }
}

/// The name of an element type in settings of Megatron-LM and DeepSpeed.
pub(crate) fn precision(dtype: DType) -> &'static str {
    match dtype {
        DType::BF16 => "bf16",
        DType::F16 => "fp16",
        _ => "fp32",
    }
}

/// The words of a command line: `--key`, then the value.
pub(crate) fn words(settings: &[Setting]) -> Vec<String> {
    settings
        .iter()
        .map(|Setting { key, value }| match value {
            Value::Bool(true) => format!("--{key}"),
            Value::Array(items) => {
                let items: Vec<String> = items.iter().map(plain).collect();
                format!("--{key} {}", items.join(" "))
            }
            Value::String(text) if text.contains(['|', '*', ' ']) => format!("--{key} '{text}'"),
            Value::Null | Value::Bool(false) | Value::Number(_) | Value::String(_) | Value::Object(_) => {
                format!("--{key} {}", plain(value))
            }
        })
        .collect()
}

fn plain(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::Array(_) | Value::Object(_) => {
            value.to_string()
        }
    }
}

/// A value as Python writes it.
pub(crate) fn python(value: &Value) -> String {
    match value {
        Value::Null => "None".to_owned(),
        Value::Bool(true) => "True".to_owned(),
        Value::Bool(false) => "False".to_owned(),
        Value::Array(items) => format!("[{}]", items.iter().map(python).collect::<Vec<_>>().join(", ")),
        Value::Number(_) | Value::String(_) | Value::Object(_) => value.to_string(),
    }
}

/// Settings as a tree, sections nested.
pub(crate) fn tree(settings: &[Setting]) -> Value {
    let mut root = Map::new();
    for Setting { key, value } in settings {
        let mut at = &mut root;
        let (sections, last) = key.rsplit_once('.').map_or((None, key.as_str()), |(s, last)| (Some(s), last));
        for section in sections.iter().flat_map(|s| s.split('.')) {
            let entry = at.entry(section).or_insert_with(|| Value::Object(Map::new()));
            at = match entry {
                Value::Object(map) => map,
                _ => unreachable!("a key is a section or a value, not both"),
            };
        }
        at.insert(last.to_owned(), value.clone());
    }
    Value::Object(root)
}

/// Settings that follow from others, and are left out of tables.
const COMPANIONS: [&str; 4] =
    ["ckpt-format", "no-gradient-accumulation-fusion", "recompute-method", "checkpoint.ckpt_format"];

/// Settings in a line of a table, in the spelling of a command line or as `key=value`; degrees of one are left out.
pub fn row(settings: &[Setting], is_command: bool) -> String {
    let is_shown = |s: &&Setting| !COMPANIONS.contains(&s.key.as_str()) && s.value != 1;
    let settings: Vec<Setting> = settings.iter().filter(is_shown).cloned().collect();
    if is_command {
        return words(&settings).join(" ");
    }
    let each = settings.iter().map(|Setting { key, value }| {
        let key = key.rsplit('.').next().unwrap_or(key);
        match value {
            Value::String(text) => format!("{key}={text}"),
            Value::Null | Value::Bool(_) | Value::Number(_) | Value::Array(_) | Value::Object(_) => {
                format!("{key}={}", python(value))
            }
        }
    });
    each.collect::<Vec<_>>().join(" ")
}
