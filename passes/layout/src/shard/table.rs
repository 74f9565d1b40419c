//! The table of strategies: the layout of each, read off its placement.

use std::fmt::Write;

use ithaca_ir::Mesh;
use ithaca_ir::mesh::AxisId;
use ithaca_ir::wrap::wrapped;

use super::strategy::{Placement, Strategy};
use crate::movement::Reach;
use crate::registry::Registry;

/// A strategy in the table.
///
/// Tensors are `b` sequences of `s` tokens (`t` in a cache of keys) with `h` heads, and `e` experts; `s@(ring,ulysses)` is
/// a sequence that both axes split, `ring` first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    /// Its name.
    pub name: &'static str,
    /// One sentence, with its source.
    pub summary: &'static str,
    /// Its mesh axes.
    pub axes: &'static [&'static str],
    /// The layout outside attention.
    pub outside: String,
    /// The layout inside attention.
    pub inside: String,
    /// The movement of keys and queries.
    pub movement: String,
    /// When it is legal.
    pub legality: &'static str,
}

/// A row for each strategy, its layouts read off its placement.
pub fn rows(registry: &Registry) -> Vec<Row> {
    let row = |strategy: &'static dyn Strategy| {
        let mesh = Mesh::new(strategy.axes().iter().map(|&axis| (axis, 2)));
        let axes: Vec<AxisId> = mesh.axes.ids().collect();
        let mut placement = Placement::default();
        strategy.place(&axes, &mut placement);
        Row {
            name: strategy.name(),
            summary: strategy.summary(),
            axes: strategy.axes(),
            outside: outside(&placement, &mesh),
            inside: inside(&placement, &mesh),
            movement: placement.movement.unwrap_or_else(|| crate::movement::LOCAL.to_owned()),
            legality: strategy.legality(),
        }
    };
    registry.strategies().map(row).collect()
}

/// The column of the text beside a name.
const INDENT: usize = 23;

/// The table of strategies and of movements, for a terminal of so many columns.
pub fn strategies(registry: &Registry, width: usize) -> String {
    let mut out = String::new();
    // Writing to a string cannot fail.
    for row in rows(registry) {
        let Row { name, summary, axes, outside, inside, movement, legality } = row;
        let axes = if axes.is_empty() { "none".to_owned() } else { axes.join(", ") };
        let _ = writeln!(out, "{name:<22} {summary}");
        let _ = writeln!(out, "{:<22} axes: {axes}", "");
        let _ =
            writeln!(out, "{:<22} outside attention: {outside}; inside: {inside}; movement: {movement}", "");
        let _ = writeln!(out, "{:<22} legal: {legality}", "");
    }
    let _ = writeln!(out, "\nMovements, by which keys and queries meet that lie on different ranks:");
    let _ = writeln!(out, "{:<22} keys are whole on every rank", crate::movement::LOCAL);
    for movement in registry.movements() {
        let _ = writeln!(out, "{:<22} {}", movement.name(), movement.summary());
        let _ = writeln!(out, "{:<22} legal: {}", "", movement.legality());
        for (option, meaning) in movement.options() {
            let _ = writeln!(out, "{:<22} option {}({option}=N): {meaning}", "", movement.name());
        }
        if movement.reach() == Reach::AnyAxes {
            let _ = writeln!(out, "{:<22} serves queries on any axes, as in cross-attention", "");
        }
    }
    let rows = out.lines().map(|line| wrapped(line, width, INDENT) + "\n").collect::<String>();
    let options = "`--movement` names another movement than the strategy's, `--cross-movement` one for attention whose keys are \
                   another sequence than its queries; `--sequence-axes s=AXIS` splits a sequence by axes of its own.";
    format!("{rows}\n{}\n", wrapped(options, width, 0))
}

fn outside(placement: &Placement, mesh: &Mesh) -> String {
    let parts = [
        split("b", &placement.batch, mesh),
        split("s", &placement.residual_sequence(), mesh),
        split("weights by h", &placement.weights, mesh),
        split("t", &placement.cache, mesh),
        split("e", &placement.experts, mesh),
    ];
    joined(parts)
}

fn inside(placement: &Placement, mesh: &Mesh) -> String {
    let parts = [
        split("b", &placement.batch, mesh),
        split("s", &placement.attention_sequence(), mesh),
        split("t", &placement.cache, mesh),
        split("h", &placement.attention_heads(), mesh),
    ];
    joined(parts)
}

fn joined<const N: usize>(parts: [Option<String>; N]) -> String {
    let parts: Vec<String> = parts.into_iter().flatten().collect();
    if parts.is_empty() { "whole".to_owned() } else { parts.join(" ") }
}

fn split(dim: &str, axes: &[AxisId], mesh: &Mesh) -> Option<String> {
    let names: Vec<&str> = axes.iter().map(|&a| mesh.axes[a].name.as_str()).collect();
    match names.as_slice() {
        [] => None,
        [one] => Some(format!("{dim}@{one}")),
        many => Some(format!("{dim}@({})", many.join(","))),
    }
}
