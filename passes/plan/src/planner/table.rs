//! The ranked table: a row for each distinct plan, at most as wide as the terminal, and the refusals by reason.

use std::collections::BTreeMap;
use std::fmt::Write;

use ithaca_ir::diagnostic::counted;
use ithaca_ir::units::{bytes, seconds};
use ithaca_ir::wrap::wrapped;

use crate::plan::{Alternative, Outcome, Rates, layout_text, mesh_text};

/// How much of the alternatives a table shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct View {
    /// Columns of the terminal.
    pub width: usize,
    /// The plans.
    pub rows: Rows,
    /// The layouts that do not fit or are not legal.
    pub refusals: Refusals,
}

/// The plans of a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rows {
    /// So many of the best.
    Top(usize),
    /// All.
    All,
}

/// The refusals of a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusals {
    /// A line for each reason.
    Summed,
    /// A line for each layout.
    Each,
}

/// The cells of a row that are numbers.
const FIGURES: usize = 5;

/// The gap between columns.
const GAP: &str = "  ";

/// The indent of a reason below its row.
const INDENT: usize = 4;

struct Row {
    strategy: String,
    mesh: String,
    figures: [String; FIGURES],
    reason: String,
}

/// The alternatives for a terminal, with a final newline.
pub fn table(alternatives: &[Alternative], rates: &Rates, view: &View) -> String {
    let mut out = String::new();
    let (plans, others): (Vec<&Alternative>, Vec<&Alternative>) =
        alternatives.iter().partition(|a| is_plan(&a.outcome));
    if !plans.is_empty() {
        let shown = match view.rows {
            Rows::All => plans.len(),
            Rows::Top(n) => n.min(plans.len()),
        };
        let rows: Vec<Row> = plans[..shown].iter().map(|a| row(a, rates, view.rows)).collect();
        out.push_str(&aligned(&rows, rates, view.width));
        let line = match plans.len() - shown {
            0 => String::new(),
            1 => "1 slower plan is not shown (--all)\n".to_owned(),
            n => format!("{n} slower plans are not shown (--all)\n"),
        };
        out.push_str(&line);
    }
    match view.refusals {
        Refusals::Summed => summed(&others, view.width, &mut out),
        Refusals::Each => each(&others, view.width, &mut out),
    }
    out
}

/// Whether an alternative fits and is legal.
fn is_plan(outcome: &Outcome) -> bool {
    match outcome {
        Outcome::Chosen { .. } | Outcome::Slower { .. } => true,
        Outcome::OutOfMemory { .. } | Outcome::Refused { .. } => false,
    }
}

fn row(alternative: &Alternative, rates: &Rates, rows: Rows) -> Row {
    let Alternative { strategy, mesh, flags, settings, also, outcome } = alternative;
    let (step, exposed, memory, reason) = match outcome {
        Outcome::Chosen { step_seconds, exposed_seconds, memory_bytes, reason }
        | Outcome::Slower { step_seconds, exposed_seconds, memory_bytes, slower_by_seconds: _, reason } => {
            (*step_seconds, *exposed_seconds, *memory_bytes, reason.clone())
        }
        Outcome::OutOfMemory { .. } | Outcome::Refused { .. } => unreachable!("rows are plans"),
    };
    let others = if rows == Rows::All && !also.is_empty() {
        format!("; the same program as {}", also.join(", "))
    } else {
        String::new()
    };
    let rate = |tokens: f64| if tokens < 100.0 { format!("{tokens:.2}") } else { format!("{tokens:.0}") };
    let tokens = rate(rates.tokens_per_gpu(step));
    let utilization =
        if rates.decodes { rate(1.0 / step) } else { format!("{:.1} %", 100.0 * rates.utilization(step)) };
    Row {
        strategy: strategy.clone(),
        mesh: mesh_text(mesh),
        figures: [seconds(step), tokens, utilization, seconds(exposed), bytes(memory)],
        reason: {
            let parts = [settings.as_str(), flags.as_str(), reason.as_str()];
            let parts: Vec<&str> = parts.into_iter().filter(|part| !part.is_empty()).collect();
            format!("{}{others}", parts.join("; "))
        },
    }
}

impl Row {
    /// The strategy and the mesh in one text.
    fn layout(&self) -> String {
        format!("{} {}", self.strategy, self.mesh).trim_end().to_owned()
    }
}

/// Rows under their heads: in a line each if that fits the width, else with the reason in lines of its own, and with the
/// strategy in a line of its own where it is too long.
fn aligned(rows: &[Row], rates: &Rates, width: usize) -> String {
    let utilization = if rates.decodes { "tok/s/user" } else { "MFU" };
    let head = Row {
        strategy: "strategy and mesh".to_owned(),
        mesh: String::new(),
        figures: ["step time", "tok/s/GPU", utilization, "exposed", "memory"].map(str::to_owned),
        reason: "reason".to_owned(),
    };
    let all = || std::iter::once(&head).chain(rows);
    let length = |text: &str| text.chars().count();
    let columns: [usize; FIGURES] =
        std::array::from_fn(|i| all().map(|row| length(&row.figures[i])).max().unwrap_or(0));
    let figures: usize = columns.iter().map(|column| column + GAP.len()).sum();
    let longest_layout = all().map(|row| length(&row.layout())).max().unwrap_or(0);
    let longest_reason = all().map(|row| length(&row.reason)).max().unwrap_or(0);
    let in_a_line = longest_layout + figures + GAP.len() + longest_reason <= width;
    let room = width.saturating_sub(figures);
    // The lines of the layout; the figures are beside the last.
    let layout = |row: &Row| -> Vec<String> {
        let whole = row.layout();
        if in_a_line || length(&whole) <= room {
            return vec![whole];
        }
        if length(&row.mesh) + GAP.len() > room {
            return wrapped(&whole, width, INDENT).lines().chain([""]).map(str::to_owned).collect();
        }
        let strategy = wrapped(&row.strategy, width, INDENT);
        strategy.lines().map(str::to_owned).chain([format!("{GAP}{}", row.mesh)]).collect()
    };
    let first = all().filter_map(|row| layout(row).pop()).map(|line| length(&line)).max().unwrap_or(0);
    let mut out = String::new();
    for (i, row) in all().enumerate() {
        let mut lines = layout(row);
        let mut line = format!("{:<first$}", lines.pop().unwrap_or_default());
        for (figure, column) in row.figures.iter().zip(columns) {
            // Writing to a string cannot fail.
            let _ = write!(line, "{GAP}{figure:>column$}");
        }
        if in_a_line {
            line = format!("{line}{GAP}{}", row.reason);
        }
        for line in lines.iter().map(String::as_str).chain([line.trim_end()]) {
            out.extend([line, "\n"]);
        }
        if !in_a_line && i > 0 {
            let reason = wrapped(&format!("{:INDENT$}{}", "", row.reason), width, INDENT);
            out.extend([&reason, "\n"]);
        }
    }
    out
}

/// A line for each reason, with the number of layouts.
fn summed(others: &[&Alternative], width: usize, out: &mut String) {
    let mut too_large: Vec<(u64, &Alternative)> = Vec::new();
    let mut refused: BTreeMap<&str, (u64, &str)> = BTreeMap::new();
    for alternative in others {
        match &alternative.outcome {
            Outcome::OutOfMemory { over_bytes, .. } => too_large.push((*over_bytes, alternative)),
            Outcome::Refused { code, message, .. } => {
                refused.entry(code).or_insert((0, message)).0 += 1;
            }
            Outcome::Chosen { .. } | Outcome::Slower { .. } => {}
        }
    }
    let mut lines = Vec::new();
    let n = too_large.len() as u64;
    if let Some((over, nearest)) = too_large.iter().min_by_key(|(over, _)| *over) {
        let verb = if n == 1 { "does" } else { "do" };
        let layout = layout_text(&nearest.strategy, &nearest.mesh);
        let layout = format!("{layout} {}", nearest.flags);
        let layout = layout.trim_end();
        lines.push(format!("{} {verb} not fit: {layout} lacks {}", counted(n, "layout"), bytes(*over)));
    }
    let mut refused: Vec<_> = refused.into_iter().collect();
    refused.sort_by_key(|(_, (n, _))| std::cmp::Reverse(*n));
    for (code, (n, message)) in refused {
        let verb = if n == 1 { "is" } else { "are" };
        let as_in = if n == 1 { "" } else { "as in " };
        lines.push(format!("{} {verb} refused[{code}]: {as_in}{message}", counted(n, "layout")));
    }
    if let Some(last) = lines.last_mut() {
        last.push_str(" (--why-not)");
    }
    for line in lines {
        out.push_str(&wrapped(&line, width, INDENT));
        out.push('\n');
    }
}

/// A line for each layout.
fn each(others: &[&Alternative], width: usize, out: &mut String) {
    for Alternative { strategy, mesh, flags, settings: _, also: _, outcome } in others {
        let layout = format!("{} {flags}", layout_text(strategy, mesh));
        let layout = layout.trim_end();
        let line = match outcome {
            Outcome::OutOfMemory { memory_bytes, over_bytes, part, part_bytes, .. } => format!(
                "{layout}: does not fit, {} is {} too large; the largest part is {part}, {}",
                bytes(*memory_bytes),
                bytes(*over_bytes),
                bytes(*part_bytes)
            ),
            Outcome::Refused { code, message, helps: _, repairs } => {
                let repairs = match repairs.as_slice() {
                    [] => String::new(),
                    some => format!(" (legal with {})", some.join(" or ")),
                };
                format!("{layout}: refused[{code}]: {message}{repairs}")
            }
            Outcome::Chosen { .. } | Outcome::Slower { .. } => continue,
        };
        out.push_str(&wrapped(&line, width, INDENT));
        out.push('\n');
    }
}
