//! Writing a cluster: the TOML that [`read`](super::read) reads, in the order of the description.

use std::fmt::Write;

use serde_json::{Map, Value};

use super::Cluster;

impl Cluster {
    /// The cluster file.
    pub fn to_toml(&self) -> String {
        let value = serde_json::to_value(self).expect("a cluster is numbers and texts");
        let mut out = String::new();
        if let Value::Object(table) = &value {
            section(&mut out, "", table);
        }
        out
    }
}

/// The keys of a table that stand on a line each, then the tables inside, each under its name.
fn section(out: &mut String, path: &str, table: &Map<String, Value>) {
    let (tables, lines): (Vec<_>, Vec<_>) = table.iter().partition(|(_, value)| is_section(value));
    // Writing to a string cannot fail.
    for (key, value) in lines {
        let _ = writeln!(out, "{key} = {}", line(value));
    }
    for (key, value) in tables {
        let path = if path.is_empty() { key.clone() } else { format!("{path}.{key}") };
        match value {
            Value::Array(items) => {
                for item in items.iter().filter_map(Value::as_object) {
                    let _ = writeln!(out, "\n[[{path}]]");
                    section(out, &path, item);
                }
            }
            Value::Object(inside) => {
                let _ = writeln!(out, "\n[{path}]");
                section(out, &path, inside);
            }
            Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
        }
    }
}

/// Whether a value is a table with a name of its own, or a list of them; a number with its source is on a line.
fn is_section(value: &Value) -> bool {
    match value {
        Value::Object(table) => !table.contains_key("value"),
        Value::Array(items) => items.iter().any(Value::is_object),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => false,
    }
}

fn line(value: &Value) -> String {
    match value {
        Value::Object(table) => {
            let pairs: Vec<String> =
                table.iter().map(|(key, value)| format!("{key} = {}", line(value))).collect();
            format!("{{ {} }}", pairs.join(", "))
        }
        Value::Array(items) => {
            let items: String = items.iter().map(|item| format!("    {},\n", line(item))).collect();
            format!("[\n{items}]")
        }
        Value::Number(n) => match n.as_f64() {
            Some(x) if n.is_f64() && x != 0.0 && !(1e-3..1e6).contains(&x.abs()) => format!("{x:e}"),
            Some(x) if n.is_f64() => format!("{x}"),
            Some(_) | None => n.to_string(),
        },
        // Texts of JSON are texts of TOML.
        Value::Null | Value::Bool(_) | Value::String(_) => value.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use crate::cluster::{Cluster, names};

    #[test]
    fn a_written_cluster_reads_as_it_was() {
        for name in names() {
            let cluster = Cluster::named(name).unwrap();
            let text = cluster.to_toml();
            let read = Cluster::parse(name, &text).unwrap_or_else(|d| panic!("{text}\n{}", d.render(None)));
            assert_eq!(read, cluster, "{text}");
        }
    }
}
