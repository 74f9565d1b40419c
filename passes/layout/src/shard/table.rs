//! The table of strategies: the layout of each, read off its placement.

use std::fmt::Write;

use ithaca_ir::Mesh;
use ithaca_ir::mesh::AxisId;

use super::strategy::{Placement, Strategy};
use crate::movement::Reach;
use crate::registry::Registry;

/// The table of strategies and of movements, for a terminal.
///
/// Tensors are `b` sequences of `s` tokens (`t` in a cache of keys) with `h` heads, and `e` experts; `s@(ring,ulysses)` is
/// a sequence that both axes split, `ring` first.
pub fn strategies(registry: &Registry) -> String {
    let mut out = String::new();
    // Writing to a string cannot fail.
    for strategy in registry.strategies() {
        let mesh = Mesh::new(strategy.axes().iter().map(|&axis| (axis, 2)));
        let axes: Vec<AxisId> = mesh.axes.ids().collect();
        let mut placement = Placement::default();
        strategy.place(&axes, &mut placement);
        let _ = writeln!(out, "{:<22} {}", strategy.name(), strategy.summary());
        let _ = writeln!(out, "{:<22} axes: {}", "", axes_text(strategy));
        let _ = writeln!(
            out,
            "{:<22} outside attention: {}; inside: {}; movement: {}",
            "",
            outside(&placement, &mesh),
            inside(&placement, &mesh),
            placement.movement.as_deref().unwrap_or(crate::movement::LOCAL),
        );
        let _ = writeln!(out, "{:<22} legal: {}", "", strategy.legality());
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
    out.push_str(
        "\n`--movement` names another movement than the strategy's, `--cross-movement` one for attention whose keys are\n\
         another sequence than its queries; `--sequence-axes s=AXIS` splits a sequence by axes of its own.\n",
    );
    out
}

fn axes_text(strategy: &dyn Strategy) -> String {
    match strategy.axes() {
        [] => "none".to_owned(),
        axes => axes.join(", "),
    }
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
