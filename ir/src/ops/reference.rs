//! The reference page of operations, made from the table.

use std::fmt::Write;

use crate::ops::info::{AttrInfo, Class, Family, OpInfo, Unit};
use crate::ops::table::op::TABLE;

/// The page `docs/book/src/operations.md`.
pub fn reference() -> String {
    let mut out = String::from(
        "# Operations\n\nThis page is generated from the declarations in `ir/src/ops/table/`; do not edit it.\n\nThe class \
         says how an operation relates to the program: *compute*, each rank computes its results from its own operands; \
         *layout* changes a layout, and *collective* does with communication; *effect* reads or writes what outlives a \
         step, or runs a function. The unit is the part of a device that limits its kernel.\n",
    );
    for family in Family::ALL {
        let (title, about) = heading(family);
        write_str(&mut out, format_args!("\n## {title}\n\n{about}\n"));
        TABLE.iter().filter(|info| info.family == family).for_each(|info| write_op(&mut out, info));
    }
    out
}

fn write_op(out: &mut String, info: &OpInfo) {
    let OpInfo { name, class, unit, signature, summary, .. } = info;
    write_str(out, format_args!("\n### `{name}`\n\n`{signature}`\n\n{summary}\n"));
    let class = match class {
        Class::Compute => "compute",
        Class::Layout => "layout",
        Class::Collective => "collective",
        Class::Effect => "effect",
    };
    let unit = match unit {
        Unit::NoKernel => "",
        Unit::Matmul => ", matrix units",
        Unit::Attention => ", matrix units (attention)",
        Unit::Vector => ", vector units",
    };
    let operands = info.operand_count();
    write_str(out, format_args!("\nClass {class}{unit}; {operands}.\n"));
    let attrs = info.attrs();
    if attrs.is_empty() {
        return;
    }
    out.push_str("\n| attribute | value | default | meaning |\n|---|---|---|---|\n");
    for attr in attrs {
        let AttrInfo { name, kind, default, meaning, parts: _ } = attr;
        let default = default.map_or(String::new(), default_text);
        write_str(out, format_args!("| `{name}` | {kind} | {default} | {meaning} |\n"));
    }
}

/// A default of the source code as the text form spells it: `Pairs::Halves` is `halves`, `None` is none.
fn default_text(source: &str) -> String {
    match source {
        "None" | "Vec::new()" => "none".to_owned(),
        _ => format!("`{}`", source.rsplit("::").next().unwrap_or(source).to_lowercase()),
    }
}

fn heading(family: Family) -> (&'static str, &'static str) {
    match family {
        Family::Source => {
            ("Sources", "The origins of values; the stated type says which elements, and where.")
        }
        Family::Linear => ("Products and look-ups", "Sums over the dimensions that the result lacks."),
        Family::Elementwise => ("Element by element", "Every dimension may be split."),
        Family::Norm => ("Normalisation", "The normalised dimension stays whole on each rank."),
        Family::Random => (
            "Random numbers",
            "Drawn by position along each dimension, so that every layout, order and shard draws the same.",
        ),
        Family::Attention => ("Attention", "Heads are one factor, query heads and key/value heads alike."),
        Family::Cache => (
            "Caches",
            "A step continues sequences: `start` is the number of tokens of each before it, `end` after it; both are values, so that a \
             sequence may have any number of tokens up to the capacity of its cache, and a step any number of new ones.",
        ),
        Family::Experts => {
            ("Mixtures of experts", "The choice of experts for each token, dispatch to them and combination.")
        }
        Family::Training => ("Training", "The loss, gradients with kernels of their own, and the optimizer."),
        Family::Structure => ("Functions", "A model is `main`, which calls a function per kind of block."),
        Family::Layout => ("Changes of layout", "Communication and slices; values stay the same."),
    }
}

fn write_str(out: &mut String, args: std::fmt::Arguments<'_>) {
    out.write_fmt(args).expect("writing to a string does not fail");
}
