//! The answer for a terminal.

use std::fmt::Write;

use ithaca_ir::diagnostic::counted;
use ithaca_ir::units::seconds;
use ithaca_ir::wrap::wrapped;
use ithaca_passes::planner::{Rows, View};

use super::super::printed::noted;
use super::document::{Document, Row};

/// The indent of a deployment below its figures.
const INDENT: usize = 4;

/// The answer for a terminal.
pub(super) fn answer(document: &Document, view: &View) -> String {
    let mut out = wrapped(&document.request, view.width, 2) + "\n\n";
    out.extend(document.answer.iter().map(|line| wrapped(line, view.width, 2) + "\n"));
    out.push('\n');
    out.push_str(&frontier(&document.frontier, view));
    if !document.notes.is_empty() {
        out.push('\n');
    }
    out.extend(document.notes.iter().map(|note| noted(note, view.width)));
    out.push_str("\nplans of the steps of the first, which price caches that are full:\n");
    for command in &document.commands {
        let _ = writeln!(out, "  {command}");
    }
    out
}

/// The table of deployments, the fewest GPUs first.
fn frontier(rows: &[Row], view: &View) -> String {
    let mut out = "GPUs  tok/s/user  tok/s/GPU  first token   per token\n".to_owned();
    let shown = match view.rows {
        Rows::All => rows.len(),
        Rows::Top(n) => n,
    };
    for row in rows.iter().rev().take(shown) {
        let _ = writeln!(
            out,
            "{:>4}  {:>10.1}  {:>9.1}  {:>11}  {:>10}",
            row.deployment.gpus,
            row.tokens_per_second_and_user,
            row.tokens_per_second_and_gpu,
            seconds(row.deployment.first_token_seconds),
            seconds(row.deployment.token_seconds)
        );
        let text = format!("{:INDENT$}{}", "", row.words);
        out.push_str(&(wrapped(&text, view.width, INDENT) + "\n"));
    }
    let left = rows.len().saturating_sub(shown);
    if left > 0 {
        let _ = writeln!(
            out,
            "{} faster for a user on more GPUs not shown (--all)",
            counted(left as u64, "deployment")
        );
    }
    out
}
