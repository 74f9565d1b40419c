//! The verdict of `run` and `verify`: outputs against the whole program, or against a file.

use std::fmt::Write;

use ithaca_ir::diagnostic::printable;
use ithaca_ir::schedule::Schedule;
use ithaca_ir::{DType, Module};
use ithaca_kernels::compare::{self, Comparison, Mismatch, Verdict};
use ithaca_kernels::oracle::{Interpreted, Results};
use ithaca_kernels::step_checker::{Errors, StepChecker, TensorResult};
use ithaca_kernels::store::{Renamed, TensorSource};
use ithaca_kernels::{Outputs, Real, Storage};
use ithaca_passes::proof;

use crate::cli::{RunArgs, StorageArg};
use crate::error::{Failure, Result};
use crate::job::Job;

/// The default tolerance of a comparison with a file.
pub(super) const DEFAULT_TOLERANCE: f64 = 1e-4;

/// The tolerance of a comparison with a file: the one asked for, or the default for the narrowest stored type.
pub(super) fn tolerance(schedule: &Schedule, args: &RunArgs) -> f64 {
    let buffers = schedule.frames.values().flat_map(|frame| frame.buffers.values());
    let of = |dtype| match dtype {
        DType::F8E4M3 => 2e-1,
        DType::BF16 => 5e-2,
        DType::F16 => 1e-2,
        DType::F64 | DType::F32 | DType::I32 | DType::Bool => DEFAULT_TOLERANCE,
    };
    let default = match args.storage() {
        StorageArg::Typed => buffers.map(|buffer| of(buffer.dtype())).fold(DEFAULT_TOLERANCE, f64::max),
        StorageArg::Wide => DEFAULT_TOLERANCE,
    };
    args.tolerance.unwrap_or(default)
}

/// The output of decoding that has the tokens of each sequence.
pub(super) const TOKENS: &str = "tokens";
/// The output of decoding that has the logits of each of these tokens.
pub(super) const STEP_LOGITS: &str = "step_logits";

/// The verdict of outputs that agree.
const PASSED: &str = "passed";

/// A comparison with expected outputs.
pub(super) struct Report {
    /// A row per output, and the verdict.
    pub(super) text: String,
    /// Whether every output agrees.
    pub(super) passed: bool,
}

impl Report {
    /// That of `--unchecked`.
    pub(super) fn none() -> Self {
        Self { text: "compared with nothing\n".to_owned(), passed: true }
    }
}

/// The comparison of steps with the whole program.
pub(super) struct AgainstWhole<'a> {
    /// Those of the kinds of steps.
    checkers: Vec<StepChecker<'a>>,
    /// Why no layout is proven, if none is.
    unproven: Option<&'static str>,
    /// The steps that were compared.
    steps: u64,
    /// The kind of the last of them.
    kind: usize,
    /// The first step that is wrong, else the last one.
    rows: Vec<TensorResult>,
    passed: bool,
}

impl<'a> AgainstWhole<'a> {
    /// The comparison of steps of one kind or of several, each a job with its per-rank program; `storage` is that of the ranks.
    pub(super) fn new(kinds: &[(&'a Job, &Module)], storage: Storage) -> Self {
        let of = |(job, per_rank): &(&'a Job, &Module)| StepChecker {
            program: job.reference(),
            storage,
            parts: per_rank.space.mesh.ranks(),
        };
        let communicates = kinds.iter().any(|(_, per_rank)| proof::n_collectives(per_rank) > 0);
        let is_split = kinds.iter().any(|(_, per_rank)| {
            let types = per_rank.functions.values().flat_map(|f| f.values.values().map(|value| &value.ty));
            types.flat_map(|ty| &ty.layout.split).any(|axes| !axes.is_empty())
        });
        let unproven = match (communicates, is_split) {
            (true, _) => None,
            (false, true) => Some("ranks send nothing"),
            (false, false) => Some("nothing is split"),
        };
        let checkers = kinds.iter().map(of).collect();
        Self { checkers, unproven, steps: 0, kind: 0, rows: Vec::new(), passed: true }
    }

    /// Compares the results of a step of a kind from `before`. Steps after a wrong one are not compared.
    ///
    /// # Errors
    /// Those of the whole program.
    pub(super) fn step<T: Interpreted>(
        &mut self,
        kind: usize,
        before: (&dyn TensorSource, &dyn TensorSource),
        found: &Results<T>,
    ) -> Result<()> {
        if self.passed {
            let checker = &self.checkers[kind];
            self.steps += 1;
            self.kind = kind;
            self.rows = checker.step(before, found)?;
            self.passed = self.rows.iter().all(|row| checker.accepts(row));
        }
        Ok(())
    }

    /// The verdict of all steps, in lines of a width.
    pub(super) fn report(self, width: usize) -> Report {
        let Self { checkers, unproven, steps, kind, rows, passed } = self;
        let checker = &checkers[kind];
        let column = column(rows.iter().map(|row| row.name.as_str()), width);
        let mut text = row("output", column, &figures("error", "of one rank"));
        // Writing to a string cannot fail.
        for result in &rows {
            let name = &printable(&result.name);
            let mark = if checker.accepts(result) {
                String::new()
            } else {
                format!("  out of proportion: {:.0} times, by norm or element", result.ratio())
            };
            let cells = match &result.errors {
                Ok(Errors { ranks, one_rank }) => {
                    let [ranks, one_rank] = [ranks.relative, one_rank.relative].map(|x| format!("{x:.3e}"));
                    figures(&ranks, &one_rank) + &mark
                }
                Err(mismatch) => mismatch_text(name, mismatch),
            };
            text.push_str(&row(name, column, &cells));
        }
        let bound = checker.proportion();
        let _ = match (passed, unproven) {
            (true, None) => writeln!(text, "{PASSED}: no error is above {bound:.0} times that of one rank"),
            (true, Some(why)) => writeln!(
                text,
                "{why}: there is no communication to prove; outputs agree: no error is above {bound:.0} times that of \
                 one rank"
            ),
            (false, _) if steps > 1 => {
                writeln!(text, "FAILED in step {steps}: an error is above {bound:.0} times that of one rank")
            }
            (false, _) => writeln!(text, "FAILED: an error is above {bound:.0} times that of one rank"),
        };
        Report { text, passed }
    }
}

/// Compares outputs with those of a file; other outputs are not compared.
///
/// # Errors
/// `C10` for an unreadable file, `C00` for a file without any of the outputs.
pub(super) fn against_file<A: Real>(
    found: &Outputs<A>,
    file: &dyn TensorSource,
    tolerance: f64,
    width: usize,
) -> Result<Report> {
    let rows = compare::with_source(found, &Renamed::new(file, &[]).asked(found.keys().cloned()))?;
    if rows.is_empty() {
        return Err(none_expected(found));
    }
    Ok(table(&rows, tolerance, width))
}

/// The refusal of a file that has none of these outputs.
pub(super) fn none_expected<A: Real>(found: &Outputs<A>) -> Failure {
    let names: Vec<&str> = found.keys().map(String::as_str).collect();
    Failure::usage(format!("the file of expected outputs has none of the outputs: {}", names.join(", ")))
}

/// Compares outputs with others of the same names.
pub(super) fn against<A: Real>(
    found: &Outputs<A>,
    expected: &Outputs<f64>,
    tolerance: f64,
    width: usize,
) -> Report {
    table(&compare::outputs(found, expected), tolerance, width)
}

fn table(rows: &[Comparison], tolerance: f64, width: usize) -> Report {
    let column = column(rows.iter().map(|row| row.name.as_str()), width);
    let mut text = row("output", column, &figures("max |a-b|", "|a-b|/|b|"));
    let mut passed = true;
    for Comparison { name, verdict } in rows {
        let name = &printable(name);
        let within = verdict.within(tolerance);
        passed &= within;
        let mark = if within { "" } else { "  above tolerance" };
        let cells = match verdict {
            Verdict::Distance { max_abs, relative, scale: _ } => {
                figures(&format!("{max_abs:.3e}"), &format!("{relative:.3e}")) + mark
            }
            Verdict::Mismatch(mismatch) => mismatch_text(name, mismatch),
        };
        text.push_str(&row(name, column, &cells));
    }
    // Writing to a string cannot fail.
    let _ = writeln!(text, "{}: tolerance {tolerance:e}", if passed { PASSED } else { "FAILED" });
    Report { text, passed }
}

/// The figures of a row.
fn figures(a: &str, b: &str) -> String {
    format!("{a:>FIGURE$} {b:>FIGURE$}")
}

/// Columns of a figure.
const FIGURE: usize = 12;

/// Columns of the names of a table whose lines have a width.
fn column<'a>(names: impl Iterator<Item = &'a str>, width: usize) -> usize {
    let most = width.saturating_sub(2 * (FIGURE + 1));
    names.map(str::len).fold(20, usize::max).min(most)
}

/// A row: the cells beside the name, or below one that is wider than its column.
fn row(name: &str, column: usize, cells: &str) -> String {
    if name.len() <= column {
        format!("{name:<column$} {cells}\n")
    } else {
        format!("{name}\n{:column$} {cells}\n", "")
    }
}

/// The cells of a tensor without a distance.
fn mismatch_text(name: &str, mismatch: &Mismatch) -> String {
    match mismatch {
        Mismatch::Shape { found, expected } => of_shape(name, found, expected),
        Mismatch::NotFinite { at, found, expected } => not_finite(*at, *found, *expected),
        Mismatch::Missing => "was not computed".to_owned(),
    }
}

/// A tensor of another shape than expected.
fn of_shape(name: &str, found: &[usize], expected: &[usize]) -> String {
    let is_last =
        found.len() + 1 == expected.len() && found.first() == expected.first() && found[1..] == expected[2..];
    let beyond = match (found, expected) {
        ([_, found, ..], [_, expected, ..]) => found.saturating_sub(*expected),
        _ => 0,
    };
    let hint = match name {
        "logits" if is_last => {
            ": only those of the last token are computed; `--logits all` computes all".to_owned()
        }
        TOKENS | STEP_LOGITS if beyond > 0 => format!(": use {beyond} fewer `--steps`"),
        _ => String::new(),
    };
    format!("has shape {found:?}, expected {expected:?}{hint}")
}

/// An element that is infinite or NaN.
fn not_finite(at: usize, found: f64, expected: f64) -> String {
    let hint = if found.is_nan() { "; `--look-for-nan` names the task that writes the first" } else { "" };
    format!("is {found} at element {at}, expected {expected}{hint}")
}
