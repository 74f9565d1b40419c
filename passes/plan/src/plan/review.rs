//! The differences between two plans as a reviewer reads them: a few lines for each section, figures beside each other.

use std::collections::BTreeMap;

use ithaca_ir::units::{bytes, seconds};
use ithaca_ir::wrap::wrapped;
use serde_json::Value;

use super::{AttentionPlan, Change, Outcome, Plan, diff, layout_text};

/// A part of a plan that a review covers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Section {
    /// The configuration of the model.
    Model,
    /// The cluster.
    Cluster,
    /// The workload, and the FLOPs that the model needs for it.
    Workload,
    /// The layouts that the planner searched.
    Search,
    /// GPUs, strategy, mesh, options, dimensions, attention and passes.
    Layout,
    /// Collectives: kind, axis, count and bytes.
    Collectives,
    /// Times of a step.
    Time,
    /// Memory.
    Memory,
    /// Notes.
    Notes,
    /// The ranking of the alternatives.
    Alternatives,
}

ithaca_ir::spellings! {
    Section {
        Model = "model",
        Cluster = "cluster",
        Workload = "workload" | "model_flops",
        Search = "search",
        Layout = "layout",
        Collectives = "collectives",
        Time = "time",
        Memory = "memory",
        Notes = "notes",
        Alternatives = "alternatives",
    }
}

impl Section {
    /// The section of a field of a plan.
    fn of(path: &str) -> Self {
        Self::parse(path.split(['.', '[']).next().unwrap_or_default()).unwrap_or(Section::Layout)
    }
}

/// What counts as a difference.
#[derive(Clone, Debug, PartialEq)]
pub struct ReviewOptions {
    /// The sections to compare.
    pub sections: Vec<Section>,
    /// Numbers that differ by at most this part of the larger one are equal.
    pub tolerance: f64,
}

impl Default for ReviewOptions {
    /// All sections but the ranking of the alternatives, and every difference of numbers.
    fn default() -> Self {
        let sections = Section::ALL.into_iter().filter(|section| *section != Section::Alternatives).collect();
        Self { sections, tolerance: 0.0 }
    }
}

/// The differences between two plans, by section.
#[derive(Clone, Debug, PartialEq)]
pub struct Review {
    /// Every field that differs.
    pub changes: Vec<Change>,
    /// The lines of each section that differs, in order; each has at least one.
    pub sections: Vec<(Section, Vec<String>)>,
}

/// The most lines of a review, the last of which counts those that are left out.
const MOST_LINES: usize = 12;

/// The columns of the names of sections.
const NAMES: usize = 13;

impl Review {
    /// At most a dozen lines, unless longer ones are broken at `width`: the first of every section, and as many others as
    /// there is room for.
    pub fn text(&self, width: usize) -> String {
        let mut out = String::new();
        let all: usize = self.sections.iter().map(|(_, lines)| lines.len()).sum();
        let mut room = if all > MOST_LINES { MOST_LINES - 1 } else { all } - self.sections.len();
        for (section, lines) in &self.sections {
            let shown = 1 + room.min(lines.len() - 1);
            room -= shown - 1;
            for (i, line) in lines[..shown].iter().enumerate() {
                let name = if i == 0 { section.name() } else { "" };
                let line = wrapped(&format!("{name:<NAMES$}{line}"), width, NAMES + 2);
                out.extend([&line, "\n"]);
            }
        }
        if let Some(over @ 1..) = all.checked_sub(MOST_LINES) {
            let rest = format!("{} more lines; --all lists every field", over + 1);
            out.push_str(&format!("{:NAMES$}{rest}\n", ""));
        }
        out
    }
}

/// Compares two plans.
pub fn review(left: &Plan, right: &Plan, options: &ReviewOptions) -> Review {
    let is_asked = |change: &Change| options.sections.contains(&Section::of(&change.path));
    let is_visible = |change: &Change| !is_within(change, options.tolerance);
    let changes: Vec<Change> = diff(left, right).into_iter().filter(is_asked).filter(is_visible).collect();
    let sections = Section::ALL.into_iter().filter_map(|section| {
        let own: Vec<&Change> = changes.iter().filter(|c| Section::of(&c.path) == section).collect();
        if own.is_empty() {
            return None;
        }
        let lines = match section {
            Section::Model => model(left, right, &own),
            Section::Layout => layout(left, right, &own),
            Section::Collectives => collectives(left, right, &own),
            Section::Time => time(left, right, &own),
            Section::Memory => memory(left, right, &own),
            Section::Notes => notes(left, right),
            Section::Alternatives => alternatives(left, right),
            Section::Workload | Section::Search => vec![fields(&own).join(", ")],
            Section::Cluster => Vec::new(),
        };
        Some((section, if lines.is_empty() { fields(&own) } else { lines }))
    });
    let sections = sections.collect();
    Review { changes, sections }
}

/// Whether a change is one of numbers within the tolerance.
fn is_within(change: &Change, tolerance: f64) -> bool {
    let number = |value: &Option<Value>| value.as_ref().and_then(Value::as_f64);
    match (number(&change.left), number(&change.right)) {
        (Some(a), Some(b)) => (a - b).abs() <= tolerance * a.abs().max(b.abs()),
        _ => false,
    }
}

/// The changed fields, by their paths without the section where it is the first part.
fn fields(changes: &[&Change]) -> Vec<String> {
    let own = |change: &&Change| {
        // One of several is named in brackets.
        let path = match change.path.split_once('.') {
            Some((section, rest)) if !section.contains('[') => rest,
            _ => change.path.as_str(),
        };
        let value = |value: &Option<Value>| match value {
            Some(Value::String(text)) => text.clone(),
            Some(Value::Object(_) | Value::Array(_)) => "…".to_owned(),
            Some(other) => other.to_string(),
            None => "none".to_owned(),
        };
        format!("{path}: {} -> {}", value(&change.left), value(&change.right))
    };
    changes.iter().map(own).collect()
}

/// The models, or the changed fields of the configuration.
fn model(left: &Plan, right: &Plan, own: &[&Change]) -> Vec<String> {
    let (a, b) = (&left.model, &right.model);
    if a.name != b.name {
        return vec![format!("{} -> {}", a.name, b.name)];
    }
    let config: Vec<&Change> = own.iter().copied().filter(|c| c.path.starts_with("model.config")).collect();
    fields(&config)
}

/// The change of a figure, with its part of the first.
fn change(a: f64, b: f64, unit: impl Fn(f64) -> String) -> String {
    let percent = if a > 0.0 { format!(" ({:+.1} %)", 100.0 * (b / a - 1.0)) } else { String::new() };
    format!("{} -> {}{percent}", unit(a), unit(b))
}

fn layout(left: &Plan, right: &Plan, own: &[&Change]) -> Vec<String> {
    let mut lines = Vec::new();
    let [a, b] = [left, right].map(|plan| layout_text(&plan.strategy, &plan.mesh));
    if a != b {
        lines.push(format!("{a} -> {b}"));
    }
    let of = |fields: &[&str]| -> Vec<&Change> {
        own.iter().copied().filter(|c| fields.iter().any(|field| c.path.starts_with(field))).collect()
    };
    lines.extend(fields(&of(&["gpus", "options"])));
    if !of(&["attention"]).is_empty() {
        let [a, b] = [left, right].map(attention);
        let names = a.keys().chain(b.keys().filter(|name| !a.contains_key(*name)));
        let movement =
            |of: &BTreeMap<&str, String>, name: &str| of.get(name).cloned().unwrap_or("none".to_owned());
        let changes = names.map(|name| (name, movement(&a, name), movement(&b, name)));
        let changes = changes.filter(|(_, a, b)| a != b);
        lines.extend(changes.map(|(name, a, b)| format!("attention of {name}: {a} -> {b}")));
    }
    // Dimensions and passes follow from these.
    if lines.is_empty() { fields(&of(&["dimensions", "pipeline"])) } else { lines }
}

/// The movements of each function, with the strategy where it is not that of the plan.
fn attention(plan: &Plan) -> BTreeMap<&str, String> {
    let mut movements: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    for AttentionPlan { function, strategy, movement } in &plan.attention {
        let own = if *strategy == plan.strategy { String::new() } else { format!("{strategy} ") };
        movements.entry(function).or_default().push(format!("{own}{movement}"));
    }
    movements.into_iter().map(|(function, movements)| (function, movements.join(", "))).collect()
}

/// Counts and bytes of a kind of collectives along an axis, all phases together.
fn by_axis(plan: &Plan) -> BTreeMap<(String, String), (u64, u64)> {
    let mut rows: BTreeMap<(String, String), (u64, u64)> = BTreeMap::new();
    for row in &plan.collectives {
        let sum = rows.entry((row.kind.clone(), row.axis.clone())).or_default();
        *sum = (sum.0 + row.count, sum.1 + row.bytes_sent_per_rank);
    }
    rows
}

fn collectives(left: &Plan, right: &Plan, own: &[&Change]) -> Vec<String> {
    let (a, b) = (by_axis(left), by_axis(right));
    let is_changed =
        |(kind, axis): &(String, String)| own.iter().any(|c| c.path.contains(&format!("[{kind} {axis} ")));
    let mut rows: Vec<&(String, String)> =
        a.keys().chain(b.keys().filter(|key| !a.contains_key(*key))).filter(|key| is_changed(key)).collect();
    let most = |key: &(String, String)| {
        let bytes = |rows: &BTreeMap<(String, String), (u64, u64)>| rows.get(key).map_or(0, |row| row.1);
        bytes(&a).max(bytes(&b))
    };
    rows.sort_by_key(|key| std::cmp::Reverse(most(key)));
    let text = |row: Option<&(u64, u64)>| match row {
        Some((count, sent)) => format!("{count} x, {}", bytes(*sent)),
        None => "none".to_owned(),
    };
    let line =
        |key: &(String, String)| format!("{}/{}: {} -> {}", key.0, key.1, text(a.get(key)), text(b.get(key)));
    rows.into_iter().map(line).collect()
}

fn time(left: &Plan, right: &Plan, own: &[&Change]) -> Vec<String> {
    let (a, b) = (&left.time, &right.time);
    let rows = [
        ("step", "step_seconds", a.step_seconds, b.step_seconds),
        ("compute", "compute_seconds", a.compute_seconds, b.compute_seconds),
        ("exposed", "exposed_seconds", a.exposed_seconds, b.exposed_seconds),
    ];
    let is_changed = |field: &str| own.iter().any(|c| c.path == format!("time.{field}"));
    let rows = rows.into_iter().filter(|row| is_changed(row.1));
    rows.map(|(name, _, a, b)| format!("{name} {}", change(a, b, seconds))).collect()
}

fn memory(left: &Plan, right: &Plan, own: &[&Change]) -> Vec<String> {
    let (a, b) = (&left.memory, &right.memory);
    let rows = [
        ("", "total", a.total, b.total),
        ("parameters ", "parameters", a.parameters, b.parameters),
        ("gradients ", "gradients", a.gradients, b.gradients),
        ("optimizer ", "optimizer", a.optimizer, b.optimizer),
        ("arena ", "arena", a.arena, b.arena),
    ];
    let is_changed = |field: &str| own.iter().any(|c| c.path == format!("memory.{field}"));
    let rows = rows.into_iter().filter(|row| is_changed(row.1));
    rows.map(|(name, _, a, b)| format!("{name}{}", change(a as f64, b as f64, |n| bytes(n as u64)))).collect()
}

fn notes(left: &Plan, right: &Plan) -> Vec<String> {
    let only = |sign: char, of: &Plan, other: &Plan| -> Vec<String> {
        let own = of.notes.iter().filter(|note| !other.notes.contains(note));
        own.map(|note| format!("{sign} {note}")).collect()
    };
    [only('-', left, right), only('+', right, left)].concat()
}

/// The layouts whose places in the ranking differ.
fn alternatives(left: &Plan, right: &Plan) -> Vec<String> {
    let places = |plan: &Plan| -> Vec<(String, bool)> {
        let fits = |outcome: &Outcome| matches!(outcome, Outcome::Chosen { .. } | Outcome::Slower { .. });
        plan.alternatives.iter().map(|a| (layout_text(&a.strategy, &a.mesh), fits(&a.outcome))).collect()
    };
    let (a, b) = (places(left), places(right));
    let place = |places: &[(String, bool)], layout: &str| -> String {
        match places.iter().position(|(other, _)| other == layout) {
            Some(at) if places[at].1 => format!("place {}", at + 1),
            Some(_) => "refused".to_owned(),
            None => "none".to_owned(),
        }
    };
    let all = b.iter().chain(a.iter().filter(|one| !b.iter().any(|other| other.0 == one.0)));
    let lines = all.filter_map(|(layout, _)| {
        let (from, to) = (place(&a, layout), place(&b, layout));
        (from != to).then(|| format!("{layout}: {from} -> {to}"))
    });
    lines.collect()
}
