//! The ranked table: one line for each alternative, and why.

use ithaca_ir::units::{bytes, seconds};

use crate::plan::{Alternative, Outcome, mesh_text};

/// The alternatives as a table for a terminal, with a final newline.
///
/// Meshes of a strategy that are refused by the same rule share a line, which tells of the first.
pub fn table(alternatives: &[Alternative]) -> String {
    let head = ["strategy", "mesh", "step time", "exposed", "memory/GPU", "reason"].map(str::to_owned);
    let rows: Vec<[String; 6]> = std::iter::once(head).chain(rows(alternatives)).collect();
    let width = |column: usize| rows.iter().map(|r| r[column].chars().count()).max().unwrap_or(0);
    let [a, b, c, d, e] = [0, 1, 2, 3, 4].map(width);
    let mut text = String::new();
    for [strategy, mesh, step, exposed, memory, reason] in &rows {
        let line = format!("{strategy:<a$}  {mesh:<b$}  {step:>c$}  {exposed:>d$}  {memory:>e$}  {reason}");
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}

fn rows(alternatives: &[Alternative]) -> impl Iterator<Item = [String; 6]> {
    let alike = |a: &Alternative, b: &Alternative| match (&a.outcome, &b.outcome) {
        (Outcome::Refused { code: x, repairs: r, .. }, Outcome::Refused { code: y, repairs: s, .. }) => {
            a.strategy == b.strategy && x == y && r == s
        }
        _ => false,
    };
    alternatives.chunk_by(alike).map(|group| {
        let mut cells = row(&group[0]);
        if group.len() > 1 {
            cells[1] = format!("{}, {} more", cells[1], group.len() - 1);
        }
        cells
    })
}

fn row(alternative: &Alternative) -> [String; 6] {
    let Alternative { strategy, mesh, outcome } = alternative;
    let (figures, reason) = match outcome {
        Outcome::Chosen { step_seconds, exposed_seconds, memory_bytes, reason } => {
            (Some((*step_seconds, *exposed_seconds, *memory_bytes)), format!("chosen: {reason}"))
        }
        Outcome::Slower { step_seconds, exposed_seconds, memory_bytes, slower_by_seconds: _, reason } => {
            (Some((*step_seconds, *exposed_seconds, *memory_bytes)), reason.clone())
        }
        Outcome::OutOfMemory {
            step_seconds,
            exposed_seconds,
            memory_bytes,
            over_bytes,
            tensor,
            tensor_bytes,
        } => {
            let (over, largest) = (bytes(*over_bytes), bytes(*tensor_bytes));
            let reason = format!("out of memory by {over}: largest is {tensor}, {largest}");
            (Some((*step_seconds, *exposed_seconds, *memory_bytes)), reason)
        }
        Outcome::Refused { code, message, helps: _, repairs } => {
            let repairs = match repairs.as_slice() {
                [] => String::new(),
                some => format!(" (legal with {})", some.join(" or ")),
            };
            (None, format!("refused[{code}]: {message}{repairs}"))
        }
    };
    let figures = figures.map(|(step, exposed, memory)| [seconds(step), seconds(exposed), bytes(memory)]);
    let [step, exposed, memory] = figures.unwrap_or_else(|| ["-"; 3].map(str::to_owned));
    let mesh = if mesh.is_empty() { "-".to_owned() } else { mesh_text(mesh) };
    [strategy.clone(), mesh, step, exposed, memory, reason]
}
