//! What changed between two plans, field by field.

use std::fmt;

use serde_json::Value;

use crate::plan::Plan;

/// A field that differs.
#[derive(Clone, Debug, PartialEq)]
pub struct Change {
    /// The path of the field, for example `memory.total` or `collectives[all_to_all ulysses forward].count`.
    pub path: String,
    /// The value of the first plan; `None` when it has no such field.
    pub left: Option<Value>,
    /// The value of the second plan; `None` when it has no such field.
    pub right: Option<Value>,
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.left, &self.right) {
            (Some(left), Some(right)) => write!(f, "{}: {left} -> {right}", self.path),
            (Some(left), None) => write!(f, "{}: {left} only on the left", self.path),
            (None, Some(right)) => write!(f, "{}: {right} only on the right", self.path),
            (None, None) => write!(f, "{}: equal", self.path),
        }
    }
}

/// What differs, in the order of the document. Items of lists that have a name (collectives, alternatives, tensors)
/// are compared by it, others by position.
pub fn diff(left: &Plan, right: &Plan) -> Vec<Change> {
    let value = |plan| serde_json::to_value(plan).expect("a plan is JSON");
    let mut changes = Vec::new();
    compare("", &value(left), &value(right), &mut changes);
    changes
}

fn compare(path: &str, left: &Value, right: &Value, changes: &mut Vec<Change>) {
    match (left, right) {
        _ if left == right => {}
        (Value::Object(l), Value::Object(r)) => {
            let join = |key: &str| if path.is_empty() { key.to_owned() } else { format!("{path}.{key}") };
            let keys = l.keys().chain(r.keys().filter(|k| !l.contains_key(*k)));
            for key in keys {
                compare_items(join(key), l.get(key), r.get(key), changes);
            }
        }
        (Value::Array(l), Value::Array(r)) => {
            let (l, r) = (labelled(l), labelled(r));
            let find = |items: &[(String, &Value)], label: &str| -> Option<Value> {
                items.iter().find(|i| i.0 == label).map(|i| i.1.clone())
            };
            let labels = l.iter().chain(r.iter().filter(|i| find(&l, &i.0).is_none())).map(|i| &i.0);
            for label in labels {
                let (l, r) = (find(&l, label), find(&r, label));
                compare_items(format!("{path}[{label}]"), l.as_ref(), r.as_ref(), changes);
            }
        }
        _ => compare_items(path.to_owned(), Some(left), Some(right), changes),
    }
}

fn compare_items(path: String, left: Option<&Value>, right: Option<&Value>, changes: &mut Vec<Change>) {
    match (left, right) {
        (Some(l), Some(r)) if same_shape(l, r) => compare(&path, l, r, changes),
        (l, r) if l == r => {}
        (left, right) => changes.push(Change { path, left: left.cloned(), right: right.cloned() }),
    }
}

fn same_shape(left: &Value, right: &Value) -> bool {
    matches!((left, right), (Value::Object(_), Value::Object(_)) | (Value::Array(_), Value::Array(_)))
}

/// Items with their labels: kind, axis and phase; function and movement; strategy and mesh; name; else the
/// position.
fn labelled(items: &[Value]) -> Vec<(String, &Value)> {
    let label = |i: usize, item: &Value| -> String {
        let text = |key: &str| item.get(key).and_then(Value::as_str);
        if let (Some(function), Some(movement)) = (text("function"), text("movement")) {
            return format!("{function} {movement}");
        }
        match (text("kind"), text("strategy"), text("name")) {
            (Some(kind), _, _) => {
                [Some(kind), text("axis"), text("phase")].into_iter().flatten().collect::<Vec<_>>().join(" ")
            }
            (None, Some(strategy), _) => format!("{strategy} {}", mesh(item)),
            (None, None, Some(name)) => name.to_owned(),
            (None, None, None) => i.to_string(),
        }
    };
    let mut labelled: Vec<(String, &Value)> = Vec::with_capacity(items.len());
    for (i, item) in items.iter().enumerate() {
        let mut unique = label(i, item);
        if labelled.iter().any(|l| l.0 == unique) {
            unique = format!("{unique} #{i}");
        }
        labelled.push((unique, item));
    }
    labelled
}

fn mesh(item: &Value) -> String {
    let axes = item.get("mesh").and_then(Value::as_array).map_or(&[][..], Vec::as_slice);
    let axis = |a: &Value| Some(format!("{}={}", a.get("axis")?.as_str()?, a.get("size")?.as_u64()?));
    axes.iter().filter_map(axis).collect::<Vec<_>>().join(",")
}
