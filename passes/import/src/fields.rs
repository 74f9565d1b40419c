//! Reads a JSON object field by field, and records which fields were read.
//!
//! A field may be absent, null or a value, and the library gives each case its own meaning; so do the readers here.
//! [`Fields::finish`] refuses fields that no reader asked for.

use std::collections::BTreeSet;

use ithaca_ir::{Diagnostic, Dim};
use serde_json::{Map, Value};

/// A JSON object and the names of the fields read so far.
pub(super) struct Fields<'a> {
    map: &'a Map<String, Value>,
    prefix: String,
    understood: BTreeSet<String>,
    neutral: BTreeSet<String>,
    ignore: &'a [String],
}

impl<'a> Fields<'a> {
    /// The fields of `map`; messages write `prefix` before their names.
    pub(super) fn new(map: &'a Map<String, Value>, prefix: impl Into<String>, ignore: &'a [String]) -> Self {
        Self { map, prefix: prefix.into(), understood: BTreeSet::new(), neutral: BTreeSet::new(), ignore }
    }

    /// The name of a field as messages and `ignore` spell it.
    pub(super) fn path(&self, name: &str) -> String {
        format!("{}{name}", self.prefix)
    }

    /// The field's value, null included; `None` when it is absent. The field counts as understood.
    pub(super) fn raw(&mut self, name: &str) -> Option<&'a Value> {
        self.understood.insert(name.to_owned());
        self.map.get(name)
    }

    /// The value, `None` when it is absent or null.
    pub(super) fn value(&mut self, name: &str) -> Option<&'a Value> {
        self.raw(name).filter(|v| !v.is_null())
    }

    /// A size of at least one: `default` when absent; null is refused.
    pub(super) fn size(&mut self, name: &str, default: u64) -> Result<u64, Diagnostic> {
        match self.raw(name) {
            None => Ok(default),
            Some(value) => self.read_size(name, value),
        }
    }

    /// A size that may be null: `absent` when absent, `None` when null.
    pub(super) fn nullable_size(
        &mut self,
        name: &str,
        absent: Option<u64>,
    ) -> Result<Option<u64>, Diagnostic> {
        match self.raw(name) {
            None => Ok(absent),
            Some(Value::Null) => Ok(None),
            Some(value) => self.read_size(name, value).map(Some),
        }
    }

    /// A size that two names may give; they must agree.
    pub(super) fn aliased_size(&mut self, names: [&str; 2], default: u64) -> Result<u64, Diagnostic> {
        let [name, alias] = names;
        let mut size = self.size(name, default)?;
        if self.raw(alias).is_some() {
            let other = self.size(alias, default)?;
            if self.map.contains_key(name) && other != size {
                return Err(Diagnostic::new(
                    "M07",
                    format!(
                        "`{}` is {size}, but its alias `{}` is {other}",
                        self.path(name),
                        self.path(alias)
                    ),
                ));
            }
            size = other;
        }
        Ok(size)
    }

    /// A count, which may be zero.
    pub(super) fn count(&mut self, name: &str, default: u64) -> Result<u64, Diagnostic> {
        match self.raw(name) {
            None => Ok(default),
            Some(value) => value
                .as_u64()
                .filter(|&n| n <= Dim::MAX_SIZE)
                .ok_or_else(|| self.wrong(name, value, "a count, zero or more")),
        }
    }

    /// A finite number, `None` when absent or null.
    pub(super) fn number(&mut self, name: &str) -> Result<Option<f64>, Diagnostic> {
        match self.value(name) {
            None => Ok(None),
            Some(value) => value
                .as_f64()
                .filter(|x| x.is_finite())
                .map(Some)
                .ok_or_else(|| self.wrong(name, value, "a number")),
        }
    }

    /// A positive number, `None` when absent or null.
    pub(super) fn positive(&mut self, name: &str) -> Result<Option<f64>, Diagnostic> {
        match self.number(name)? {
            Some(x) if x <= 0.0 => {
                Err(Diagnostic::new("M04", format!("`{}` is {x}; it must be positive", self.path(name))))
            }
            x => Ok(x),
        }
    }

    /// A number that is not negative; `default` when absent.
    pub(super) fn epsilon(&mut self, name: &str, default: f64) -> Result<f64, Diagnostic> {
        if let Some(Value::Null) = self.raw(name) {
            return Err(self.wrong(name, &Value::Null, "a number"));
        }
        match self.number(name)?.unwrap_or(default) {
            x if x < 0.0 => {
                Err(Diagnostic::new("M04", format!("`{}` is {x}; it must not be negative", self.path(name))))
            }
            x => Ok(x),
        }
    }

    /// A rate from 0 to below 1: `default` when absent, zero when null or ignored.
    pub(super) fn share(&mut self, name: &str, default: f64) -> Result<f64, Diagnostic> {
        self.neutral.insert(name.to_owned());
        let value = match self.map.get(name) {
            None => return Ok(default),
            Some(value) if value.is_null() || self.ignores(name) => return Ok(0.0),
            Some(value) => value,
        };
        match value.as_f64() {
            Some(x) if (0.0..1.0).contains(&x) => Ok(x),
            Some(x) => Err(Diagnostic::new(
                "M04",
                format!("`{}` is {x}; it must be from 0 to below 1", self.path(name)),
            )),
            None => Err(self.wrong(name, value, "a number")),
        }
    }

    /// A flag, `None` when absent or null.
    pub(super) fn flag_or_null(&mut self, name: &str) -> Result<Option<bool>, Diagnostic> {
        match self.value(name) {
            None => Ok(None),
            Some(value) => value.as_bool().map(Some).ok_or_else(|| self.wrong(name, value, "true or false")),
        }
    }

    /// A flag; `default` when absent.
    pub(super) fn flag(&mut self, name: &str, default: bool) -> Result<bool, Diagnostic> {
        match self.raw(name) {
            None => Ok(default),
            Some(value) => value.as_bool().ok_or_else(|| self.wrong(name, value, "true or false")),
        }
    }

    /// A word, `None` when absent or null.
    pub(super) fn word(&mut self, name: &str) -> Result<Option<&'a str>, Diagnostic> {
        match self.value(name) {
            None => Ok(None),
            Some(value) => value.as_str().map(Some).ok_or_else(|| self.wrong(name, value, "a word")),
        }
    }

    /// A list of words, `None` when absent or null.
    pub(super) fn words(&mut self, name: &str) -> Result<Option<Vec<&'a str>>, Diagnostic> {
        let Some(value) = self.value(name) else { return Ok(None) };
        let words: Option<Vec<&str>> =
            value.as_array().and_then(|items| items.iter().map(Value::as_str).collect());
        words.map(Some).ok_or_else(|| self.wrong(name, value, "a list of words"))
    }

    /// A list of counts, `None` when absent or null.
    pub(super) fn counts(&mut self, name: &str) -> Result<Option<Vec<u64>>, Diagnostic> {
        let Some(value) = self.value(name) else { return Ok(None) };
        let counts: Option<Vec<u64>> =
            value.as_array().and_then(|items| items.iter().map(Value::as_u64).collect());
        counts.map(Some).ok_or_else(|| self.wrong(name, value, "a list of counts"))
    }

    /// An object, `None` when absent, null or empty.
    pub(super) fn object(&mut self, name: &str) -> Result<Option<&'a Map<String, Value>>, Diagnostic> {
        match self.value(name) {
            None => Ok(None),
            Some(Value::Object(map)) => Ok(Some(map).filter(|m| !m.is_empty())),
            Some(value) => Err(self.wrong(name, value, "an object")),
        }
    }

    /// Refuses the field unless it is absent, null, empty, one of `neutral`, or ignored.
    pub(super) fn neutral(&mut self, name: &str, neutral: &[Value]) -> Result<(), Diagnostic> {
        self.neutral.insert(name.to_owned());
        let Some(value) = self.map.get(name) else { return Ok(()) };
        let numbers_agree = |n: &Value| n.as_f64().is_some() && n.as_f64() == value.as_f64();
        if is_empty(value) || self.ignores(name) || neutral.iter().any(|n| n == value || numbers_agree(n)) {
            return Ok(());
        }
        Err(self.unsupported(name, value).help(format!(
            "if it has no influence on the logits or on the loss in training, pass --ignore-field {}",
            self.path(name)
        )))
    }

    /// Refuses fields that were not read, are not `inert` and are not ignored; refuses ignored fields that were read.
    ///
    /// A null or empty value is accepted under any name.
    pub(super) fn finish(self, inert: &[&[&str]]) -> Result<(), Diagnostic> {
        for (name, value) in self.map {
            let understood = self.understood.contains(name);
            if understood && self.ignores(name) {
                return Err(Diagnostic::new(
                    "M12",
                    format!(
                        "field `{}` is understood, so it cannot be ignored; its value is {}",
                        self.path(name),
                        show(value)
                    ),
                )
                .help("change the value in the description instead"));
            }
            let known = understood
                || self.neutral.contains(name)
                || inert.iter().any(|list| list.contains(&name.as_str()));
            if !known && !is_empty(value) && !self.ignores(name) {
                return Err(Diagnostic::new(
                    "M06",
                    format!(
                        "unknown field `{}` is {}; it may change the computation",
                        self.path(name),
                        show(value)
                    ),
                )
                .help(format!(
                    "if it has no influence on the logits or on the loss in training, pass --ignore-field {}",
                    self.path(name)
                )));
            }
        }
        Ok(())
    }

    /// The refusal of a value that asks for an unsupported computation.
    pub(super) fn unsupported(&self, name: &str, value: &Value) -> Diagnostic {
        Diagnostic::new(
            "M05",
            format!(
                "`{}` is {}, which changes the computation and is not supported",
                self.path(name),
                show(value)
            ),
        )
    }

    /// The refusal of a value of the wrong type.
    pub(super) fn wrong(&self, name: &str, value: &Value, expected: &str) -> Diagnostic {
        Diagnostic::new("M03", format!("`{}` is {}; expected {expected}", self.path(name), show(value)))
    }

    fn ignores(&self, name: &str) -> bool {
        let path = self.path(name);
        self.ignore.contains(&path)
    }

    fn read_size(&self, name: &str, value: &Value) -> Result<u64, Diagnostic> {
        let max = Dim::MAX_SIZE;
        match value.as_u64() {
            Some(n) if (1..=max).contains(&n) => Ok(n),
            _ if value.is_number() => Err(Diagnostic::new(
                "M04",
                format!("`{}` is {value}; expected a whole number from 1 to {max}", self.path(name)),
            )),
            _ => Err(self.wrong(name, value, "a whole number")),
        }
    }
}

fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Array(items) => items.is_empty(),
        Value::Object(map) => map.is_empty(),
        Value::Bool(_) | Value::Number(_) | Value::String(_) => false,
    }
}

/// A value for a message, shortened when long.
fn show(value: &Value) -> String {
    const MAX: usize = 60;
    let text = value.to_string();
    match text.char_indices().nth(MAX) {
        None => text,
        Some((at, _)) => format!("{}…", &text[..at]),
    }
}
