//! Reading a cluster: TOML in, a cluster whose every number is possible out.
//!
//! Unknown and missing keys are reported together, so that a new file is mended in one go.

use std::sync::LazyLock;

use ithaca_ir::diagnostic::{counted, nearest};
use ithaca_ir::{Diagnostic, Span};
use ithaca_pass::options::names;
use schemars::schema_for;
use serde_json::{Map, Value};
use toml::de::{DeTable, DeValue};

use super::check::check;
use super::{Cluster, Sourced};

/// The cluster in `text`.
pub(super) fn parse(name: &str, text: &str) -> Result<Cluster, Diagnostic> {
    let refuse = |message: String, span: Option<std::ops::Range<usize>>| {
        let span = span.map_or(Span::default(), |s| Span::new(s.start, s.end));
        Diagnostic::new("M20", message).at(span)
    };
    let is_not_toml =
        |e: toml::de::Error| refuse(format!("`{name}` is not TOML: {}", first_line(e.message())), e.span());
    let document = DeTable::parse(text).map_err(is_not_toml)?;
    let mut keys = Keys::default();
    keys.compare(Shape::cluster(), "", document.get_ref());
    if let Some(message) = keys.message(name) {
        let span = keys.unknown.first().map(|unknown| &unknown.span);
        let span = span.or(keys.bare.first().map(|bare| &bare.span));
        let refusal = refuse(message, span.cloned());
        let refusal = keys.suggestion().iter().fold(refusal, |d, suggestion| d.help(suggestion));
        return Err(refusal.help(keys.bare.first().map_or(HELP.to_owned(), |bare| bare.repair(text))));
    }
    let deserializer = toml::Deserializer::parse(text).map_err(is_not_toml)?;
    let cluster: Cluster = serde_path_to_error::deserialize(deserializer).map_err(|e| {
        let path = e.path().to_string();
        let error = e.into_inner();
        let problem = first_line(error.message());
        let place = if path == "." { String::new() } else { format!(", key `{path}`") };
        refuse(format!("cluster `{name}`{place}: {problem}"), error.span()).help(HELP)
    })?;
    check(&cluster)?;
    Ok(cluster)
}

const HELP: &str = "every number is written `{ value = 1.0, source = \"where it comes from\" }`";

fn first_line(message: &str) -> &str {
    message.lines().next().unwrap_or_default()
}

/// The schema of a table: its keys, and the tables inside.
#[derive(Clone, Copy)]
struct Shape(&'static Map<String, Value>);

impl Shape {
    fn cluster() -> Self {
        Self(SCHEMA.as_object().expect("a schema of a struct is an object"))
    }

    /// The schema of a table, or of the tables of a list; nothing for other values.
    fn of(schema: &'static Value) -> Option<Self> {
        if let Some(path) = schema["$ref"].as_str() {
            return Self::of(SCHEMA.pointer(path.trim_start_matches('#'))?);
        }
        let inside = schema.get("items").or(schema["anyOf"].get(0));
        match inside {
            Some(inside) => Self::of(inside),
            None => schema.as_object().filter(|table| table.contains_key("properties")).map(Self),
        }
    }

    fn keys(self) -> impl Iterator<Item = &'static str> {
        self.0["properties"].as_object().into_iter().flat_map(Map::keys).map(String::as_str)
    }

    fn inside(self, key: &str) -> Option<Self> {
        Self::of(&self.0["properties"][key])
    }

    fn is_optional(self, key: &str) -> bool {
        !self.0["required"].as_array().is_some_and(|keys| keys.iter().any(|required| required == key))
    }

    fn is_number(self) -> bool {
        self.keys().eq(names::<Sourced<f64>>().iter().copied())
    }
}

static SCHEMA: LazyLock<Value> = LazyLock::new(|| schema_for!(Cluster).to_value());

/// Keys of a file that are not those of a cluster.
#[derive(Default)]
struct Keys {
    unknown: Vec<Unknown>,
    /// Paths of missing keys.
    missing: Vec<String>,
    /// Values without a source.
    bare: Vec<Bare>,
}

struct Bare {
    path: String,
    key: String,
    is_optional: bool,
    span: std::ops::Range<usize>,
}

impl Bare {
    /// The value in `text` with a source; an optional key that is zero is left out.
    fn repair(&self, text: &str) -> String {
        let Bare { key, is_optional, .. } = self;
        let value = text.get(self.span.clone()).unwrap_or("1.0");
        if *is_optional && value.parse() == Ok(0.0) {
            return format!("leave `{key}` out: it is optional, and cannot be zero");
        }
        let or = if *is_optional { ", or leave it out" } else { "" };
        format!("write `{key} = {{ value = {value}, source = \"where it comes from\" }}`{or}")
    }
}

struct Unknown {
    path: String,
    key: String,
    nearest: Option<&'static str>,
    span: std::ops::Range<usize>,
}

impl Keys {
    /// Compares a table at `path` with its shape.
    fn compare(&mut self, shape: Shape, path: &str, table: &DeTable<'_>) {
        let path_of = |key: &str| if path.is_empty() { key.to_owned() } else { format!("{path}.{key}") };
        let mut present = Vec::new();
        for (spanned, value) in table {
            let key: &str = spanned.get_ref();
            present.push(key);
            if !shape.keys().any(|known| known == key) {
                let nearest = nearest(key, shape.keys());
                let unknown =
                    Unknown { path: path_of(key), key: key.to_owned(), nearest, span: spanned.span() };
                self.unknown.push(unknown);
                continue;
            }
            let Some(inside) = shape.inside(key) else { continue };
            if inside.is_number() && !matches!(value.get_ref(), DeValue::Table(_)) {
                let is_optional = shape.is_optional(key);
                let bare = Bare { path: path_of(key), key: key.to_owned(), is_optional, span: value.span() };
                self.bare.push(bare);
                continue;
            }
            match value.get_ref() {
                DeValue::Table(table) => self.compare(inside, &path_of(key), table),
                DeValue::Array(items) => {
                    for (i, item) in items.iter().enumerate() {
                        if let DeValue::Table(table) = item.get_ref() {
                            self.compare(inside, &format!("{}[{i}]", path_of(key)), table);
                        }
                    }
                }
                // Another type than a table is refused when the value is read.
                DeValue::String(_)
                | DeValue::Integer(_)
                | DeValue::Float(_)
                | DeValue::Boolean(_)
                | DeValue::Datetime(_) => {}
            }
        }
        let missing = shape.keys().filter(|key| !present.contains(key) && !shape.is_optional(key));
        self.missing.extend(missing.map(path_of));
    }

    /// What is wrong, if something is.
    fn message(&self, name: &str) -> Option<String> {
        let list = |verb: &str, kind: &str, paths: Vec<&str>| {
            let quoted: Vec<String> = paths.iter().map(|path| format!("`{path}`")).collect();
            let number = counted(paths.len() as u64, kind);
            (!paths.is_empty()).then(|| format!("{verb} {number}: {}", quoted.join(", ")))
        };
        let unknown = list("has", "unknown key", self.unknown.iter().map(|u| u.path.as_str()).collect());
        let missing = list("lacks", "key", self.missing.iter().map(String::as_str).collect());
        let bare = list("gives no source for", "value", self.bare.iter().map(|b| b.path.as_str()).collect());
        let parts: Vec<String> = unknown.into_iter().chain(missing).chain(bare).collect();
        (!parts.is_empty()).then(|| format!("cluster `{name}` {}", parts.join("; it ")))
    }

    /// The keys that unknown ones probably stand for.
    fn suggestion(&self) -> Option<String> {
        let near = self.unknown.iter().filter_map(|u| Some(format!("`{}` for `{}`", u.nearest?, u.key)));
        let near: Vec<String> = near.collect();
        (!near.is_empty()).then(|| format!("did you mean {}?", near.join(", ")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::{Accelerator, Efficiency, Level, Peak};

    const H100: &str = include_str!("../../clusters/dgx-h100.toml");

    #[test]
    fn unknown_and_missing_keys_are_reported_at_once() {
        let text = H100
            .replacen("[accelerator.peak]", "colour = \"green\"\n[accelerator.peak]", 1)
            .replacen("contention =", "contentoin =", 1)
            .replacen("bf16 =", "# bf16 =", 1);
        let d = parse("mine.toml", &text).unwrap_err();
        assert_eq!(
            d.message,
            "cluster `mine.toml` has 2 unknown keys: `accelerator.colour`, `levels[0].contentoin`; it lacks 2 keys: \
             `accelerator.peak.bf16`, `levels[0].contention`"
        );
        assert_eq!(d.helps[0], "did you mean `contention` for `contentoin`?");
        assert!(d.span.is_some_and(|span| text[span.start as usize..].starts_with("colour")));
    }

    #[test]
    fn a_number_alone_is_refused_with_the_table_to_write() {
        let with = |number: &str| {
            let text = H100.replacen("ring_start = {", &format!("ring_start = {number} # {{"), 1);
            let d = parse("mine.toml", &text).unwrap_err();
            assert_eq!(d.message, "cluster `mine.toml` gives no source for 1 value: `levels[0].ring_start`");
            assert!(d.span.is_some_and(|span| text[span.start as usize..].starts_with(number)));
            d.helps
        };
        let table =
            "write `ring_start = { value = 25e-6, source = \"where it comes from\" }`, or leave it out";
        assert_eq!(with("25e-6"), [table]);
        assert_eq!(with("0"), ["leave `ring_start` out: it is optional, and cannot be zero"]);
    }

    #[test]
    fn the_page_on_cluster_files_has_every_key_and_an_example_that_parses() {
        let page = include_str!("../../../../docs/book/src/clusters.md");
        let shapes = [names::<Cluster>(), names::<Accelerator>(), names::<Level>()];
        for key in shapes.concat() {
            let is_described =
                [format!("`{key}`"), format!("`{key}.")].iter().any(|name| page.contains(name));
            assert!(is_described, "{key}");
        }
        for key in names::<Peak>().iter().map(|key| format!("`peak.{key}`")) {
            assert!(page.contains(&key), "{key}");
        }
        for key in names::<Efficiency>().iter().map(|key| format!("`efficiency.{key}`")) {
            assert!(page.contains(&key), "{key}");
        }
        let example = page.rsplit("```toml\n").next().and_then(|rest| rest.split("```").next()).unwrap();
        parse("docs/book/src/clusters.md", example).unwrap();
    }
}
