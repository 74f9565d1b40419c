//! The reference page of operations, made from the table.

use std::fmt::Write;

use super::{Family, OpInfo, TABLE};

/// The page `docs/operations.md`.
pub fn reference() -> String {
    let mut out = String::from(
        "# Operations\n\nThis page is made from the table of operations in `ir/src/ops/table.rs`; do not edit it.\n",
    );
    let mut family = None;
    for row in TABLE {
        if family != Some(row.family) {
            family = Some(row.family);
            let (title, about) = heading(row.family);
            write_str(&mut out, format_args!("\n## {title}\n\n{about}\n"));
        }
        write_row(&mut out, row);
    }
    out
}

fn write_row(out: &mut String, row: &OpInfo) {
    let OpInfo { name, family: _, operands, signature, attrs, summary } = row;
    write_str(out, format_args!("\n### `{name}`\n\n`{signature}`\n\n{summary}.\n"));
    if operands.start() != operands.end() {
        write_str(out, format_args!("\nTakes {} to {} operands.\n", operands.start(), operands.end()));
    }
    if !attrs.is_empty() {
        out.push_str("\n| attribute | meaning |\n|---|---|\n");
        for (attr, meaning) in *attrs {
            write_str(out, format_args!("| `{attr}` | {meaning} |\n"));
        }
    }
}

fn heading(family: Family) -> (&'static str, &'static str) {
    match family {
        Family::Source => ("Sources", "Where values come from; the stated type says which and where."),
        Family::Linear => ("Products and look-ups", "Sums over the dimensions that the result lacks."),
        Family::Elementwise => ("Element by element", "Every dimension may be split."),
        Family::Norm => ("Normalisation", "The normalised dimension stays whole on each rank."),
        Family::Random => (
            "Random numbers",
            "Drawn by position along each dimension, so that every layout, order and shard draws the same.",
        ),
        Family::Attention => ("Attention", "Heads are one factor, query heads and key/value heads alike."),
        Family::Experts => {
            ("Mixtures of experts", "Which experts a token goes to, the way there and the way back.")
        }
        Family::Training => {
            ("Training", "The loss, gradients that are kernels of their own, and the optimizer.")
        }
        Family::Structure => ("Functions", "A model is `main`, which calls a function per kind of block."),
        Family::Layout => ("Changes of layout", "Communication and slices; values stay what they are."),
    }
}

fn write_str(out: &mut String, args: std::fmt::Arguments<'_>) {
    out.write_fmt(args).expect("writing to a string does not fail");
}
