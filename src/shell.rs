//! The command line as a program: the only module that prints and reads the environment.
//!
//! A program that calls [`main`] with its own registry is an `ithaca` with further strategies.

use std::io::{IsTerminal, Write};
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use indicatif::{ProgressBar, ProgressStyle};
use ithaca_ir::diagnostic::printable_lines;
use ithaca_ir::wrap::wrapped;
use ithaca_passes::registry::Registry;

use crate::cli::{Cli, ErrorFormat};
use crate::commands::{self, Session};
use crate::error::{Failure, of_arguments};

/// Runs the command of the arguments of this process, with the strategies and movements of `registry`. Prints the outcome
/// and returns the exit code: 0 for success, 1 for a difference, 2 for an error.
pub fn main(registry: &Registry) -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            // Help and version are not errors. The exit code of clap for an error is 2, as for all errors here.
            let wants_json = std::env::args().any(|a| a == "--error-format=json")
                || std::env::args()
                    .collect::<Vec<_>>()
                    .windows(2)
                    .any(|w| w[0] == "--error-format" && w[1] == "json");
            if wants_json && error.use_stderr() {
                return fail(&Failure::from(of_arguments("C00", &error)), ErrorFormat::Json);
            }
            let code = if error.use_stderr() { 2 } else { 0 };
            // Printing fails only when the reader is gone; the exit code still tells the outcome.
            let _ = error.print();
            return ExitCode::from(code);
        }
    };
    let format = cli.error_format;
    let (mut shown, is_terminal) = (None, std::io::stderr().is_terminal());
    let mut report = |activity: &str| {
        if is_terminal {
            shown.get_or_insert_with(spinner).set_message(activity.to_owned());
        }
    };
    let environment = |name: &str| std::env::var(name).ok();
    let mut session = Session {
        registry,
        progress: &mut report,
        arguments: std::env::args().collect(),
        width: width(),
        environment: &environment,
    };
    let outcome = commands::run(cli, &mut session);
    if let Some(spinner) = shown {
        spinner.finish_and_clear();
    }
    match outcome {
        Ok(done) => {
            let written = std::io::stdout().lock().write_all(printable_lines(&done.text).as_bytes());
            match written {
                Ok(()) => ExitCode::from(done.code),
                // The reader of a pipe may close it early.
                Err(e) if e.kind() == std::io::ErrorKind::BrokenPipe => ExitCode::from(done.code),
                Err(e) => fail(&Failure::io("standard output", &e), format),
            }
        }
        Err(failure) => fail(&failure, format),
    }
}

/// Columns where the output is not a terminal.
const COLUMNS: usize = 120;

/// The fewest columns that tables are made for.
const FEWEST_COLUMNS: usize = 60;

/// Columns of standard output.
fn width() -> usize {
    columns(std::io::stdout()).unwrap_or(COLUMNS)
}

/// Columns of a terminal, which may be known where its rows are not.
#[cfg(unix)]
fn columns(stream: impl std::os::fd::AsFd) -> Option<usize> {
    let size = rustix::termios::tcgetwinsize(stream).ok()?;
    (size.ws_col > 0).then(|| usize::from(size.ws_col).max(FEWEST_COLUMNS))
}

#[cfg(not(unix))]
fn columns<S>(_: S) -> Option<usize> {
    None
}

/// A failure in lines of the width of the terminal that it is printed to; commands stay whole.
fn in_lines(failure: &Failure) -> String {
    let Some(width) = columns(std::io::stderr()) else { return failure.render() };
    let text = failure.render_within(width);
    let lines = text.lines().map(|line| {
        let start = line.trim_start();
        let indent = line.len() - start.len();
        if start.starts_with("error[") || start.starts_with("= help: ") {
            wrapped(line, width, indent + 4) + "\n"
        } else {
            format!("{line}\n")
        }
    });
    lines.collect()
}

fn fail(failure: &Failure, format: ErrorFormat) -> ExitCode {
    let text = match format {
        ErrorFormat::Human => printable_lines(&in_lines(failure)),
        ErrorFormat::Json => failure.to_json(),
    };
    // There is no other place to report a failed write to.
    let _ = write!(std::io::stderr().lock(), "{text}");
    ExitCode::from(2)
}

fn spinner() -> ProgressBar {
    let style = ProgressStyle::with_template("{spinner} {msg} ({elapsed})")
        .unwrap_or_else(|_| ProgressStyle::default_spinner());
    let bar = ProgressBar::new_spinner().with_style(style);
    bar.enable_steady_tick(Duration::from_millis(100));
    bar
}
