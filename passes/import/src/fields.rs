//! Reads a JSON object field by field, and records which fields were read.
//!
//! A field may be absent, null or a value, and the library gives each case its own meaning; so do the readers here.
//! [`Fields::finish`] refuses fields that no reader asked for.

use std::collections::BTreeSet;
use std::fmt::Display;

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

    /// The names of the fields to ignore.
    pub(super) fn ignored(&self) -> &'a [String] {
        self.ignore
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

    /// Accepts fields that have no influence in this family, whatever their values.
    pub(super) fn skip(&mut self, names: &[&str]) {
        self.understood.extend(names.iter().map(|&name| name.to_owned()));
    }

    /// A value that `read` understands, `None` when it is absent or null.
    fn optional<T>(
        &mut self,
        name: &str,
        expected: &str,
        read: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>, Diagnostic> {
        match self.raw(name) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => read(value).map(Some).ok_or_else(|| self.wrong(name, value, expected)),
        }
    }

    /// A value that `read` understands, `default` when it is absent; null is refused.
    fn required<T>(
        &mut self,
        name: &str,
        default: T,
        expected: &str,
        read: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<T, Diagnostic> {
        match self.raw(name) {
            None => Ok(default),
            Some(value) => read(value).ok_or_else(|| self.wrong(name, value, expected)),
        }
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
    pub(super) fn aliased_size(&mut self, [name, alias]: [&str; 2], default: u64) -> Result<u64, Diagnostic> {
        let size = self.size(name, default)?;
        let other = self.size(alias, size)?;
        if self.map.contains_key(name) && other != size {
            let (name, alias) = (self.path(name), self.path(alias));
            let message = format!("`{name}` is {size}, but its alias `{alias}` is {other}");
            return Err(Diagnostic::new("M07", message));
        }
        Ok(other)
    }

    /// A count, which may be zero; callers have its limit.
    pub(super) fn count(&mut self, name: &str, default: u64) -> Result<u64, Diagnostic> {
        self.required(name, default, "a count, zero or more", Value::as_u64)
    }

    /// A finite number, `None` when absent or null.
    pub(super) fn number(&mut self, name: &str) -> Result<Option<f64>, Diagnostic> {
        self.optional(name, "a number", finite)
    }

    /// A positive number, `None` when absent or null.
    pub(super) fn positive(&mut self, name: &str) -> Result<Option<f64>, Diagnostic> {
        match self.number(name)? {
            Some(x) if x <= 0.0 => Err(self.refusal("M04", name, x, "it must be positive")),
            x => Ok(x),
        }
    }

    /// A number that is not negative; `default` when absent.
    pub(super) fn epsilon(&mut self, name: &str, default: f64) -> Result<f64, Diagnostic> {
        match self.required(name, default, "a number", finite)? {
            x if x < 0.0 => Err(self.refusal("M04", name, x, "it must not be negative")),
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
            Some(x) => Err(self.refusal("M04", name, x, "it must be from 0 to below 1")),
            None => Err(self.wrong(name, value, "a number")),
        }
    }

    /// A flag, `None` when absent or null.
    pub(super) fn flag_or_null(&mut self, name: &str) -> Result<Option<bool>, Diagnostic> {
        self.optional(name, "true or false", Value::as_bool)
    }

    /// A flag; `default` when absent.
    pub(super) fn flag(&mut self, name: &str, default: bool) -> Result<bool, Diagnostic> {
        self.required(name, default, "true or false", Value::as_bool)
    }

    /// A word, `None` when absent or null.
    pub(super) fn word(&mut self, name: &str) -> Result<Option<&'a str>, Diagnostic> {
        self.optional(name, "a word", Value::as_str)
    }

    /// A list of words, `None` when absent or null.
    pub(super) fn words(&mut self, name: &str) -> Result<Option<Vec<&'a str>>, Diagnostic> {
        self.optional(name, "a list of words", |value| value.as_array()?.iter().map(Value::as_str).collect())
    }

    /// A list of counts, `None` when absent or null.
    pub(super) fn counts(&mut self, name: &str) -> Result<Option<Vec<u64>>, Diagnostic> {
        self.optional(name, "a list of counts", |value| value.as_array()?.iter().map(Value::as_u64).collect())
    }

    /// An object, `None` when absent, null or empty.
    pub(super) fn object(&mut self, name: &str) -> Result<Option<&'a Map<String, Value>>, Diagnostic> {
        Ok(self.optional(name, "an object", Value::as_object)?.filter(|map| !map.is_empty()))
    }

    /// Refuses the field unless it is absent, null, empty, one of `neutral`, or ignored.
    pub(super) fn neutral(&mut self, name: &str, neutral: &[Value]) -> Result<(), Diagnostic> {
        self.neutral.insert(name.to_owned());
        let Some(value) = self.map.get(name) else { return Ok(()) };
        let numbers_agree = |n: &Value| n.as_f64().is_some() && n.as_f64() == value.as_f64();
        if is_empty(value) || self.ignores(name) || neutral.iter().any(|n| n == value || numbers_agree(n)) {
            return Ok(());
        }
        Err(self.unsupported(name, value).help(self.how_to_ignore(name)))
    }

    /// Refuses fields that were not read, are not `inert` and are not ignored; refuses ignored fields that were read.
    ///
    /// A null or empty value is accepted under any name.
    pub(super) fn finish(&self, inert: &[&[&str]]) -> Result<(), Diagnostic> {
        for (name, value) in self.map {
            let (path, shown) = (self.path(name), show(value));
            let understood = self.understood.contains(name);
            if understood && self.ignores(name) {
                let message =
                    format!("field `{path}` is understood, so it cannot be ignored; its value is {shown}");
                return Err(
                    Diagnostic::new("M12", message).help("change the value in the description instead")
                );
            }
            let known = understood
                || self.neutral.contains(name)
                || inert.iter().any(|list| list.contains(&name.as_str()));
            if !known && !is_empty(value) && !self.ignores(name) {
                let message = format!("unknown field `{path}` is {shown}; it may change the computation");
                return Err(Diagnostic::new("M06", message).help(self.how_to_ignore(name)));
            }
        }
        Ok(())
    }

    /// The refusal of a value that asks for an unsupported computation.
    pub(super) fn unsupported(&self, name: &str, value: &Value) -> Diagnostic {
        let (path, shown) = (self.path(name), show(value));
        let message = format!("`{path}` is {shown}, which changes the computation and is not supported");
        Diagnostic::new("M05", message)
    }

    /// The refusal of a value of the wrong type.
    pub(super) fn wrong(&self, name: &str, value: &Value, expected: &str) -> Diagnostic {
        self.refusal("M03", name, show(value), &format!("expected {expected}"))
    }

    fn refusal(&self, code: &'static str, name: &str, value: impl Display, rule: &str) -> Diagnostic {
        Diagnostic::new(code, format!("`{}` is {value}; {rule}", self.path(name)))
    }

    fn how_to_ignore(&self, name: &str) -> String {
        let path = self.path(name);
        format!("if it has no influence on the logits or on the loss in training, pass --ignore-field {path}")
    }

    fn ignores(&self, name: &str) -> bool {
        let path = self.path(name);
        self.ignore.contains(&path)
    }

    fn read_size(&self, name: &str, value: &Value) -> Result<u64, Diagnostic> {
        let max = Dim::MAX_SIZE;
        match value.as_u64() {
            Some(n) if (1..=max).contains(&n) => Ok(n),
            _ if value.is_number() => {
                let rule = format!("expected a whole number from 1 to {max}");
                Err(self.refusal("M04", name, value, &rule))
            }
            _ => Err(self.wrong(name, value, "a whole number")),
        }
    }
}

fn finite(value: &Value) -> Option<f64> {
    value.as_f64().filter(|x| x.is_finite())
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
