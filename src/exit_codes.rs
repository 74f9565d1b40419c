//! The exit codes of the commands, for the reference page.

use std::fmt::Write;

use clap::CommandFactory;

use crate::cli::Cli;

/// The commands that end with 1, and the difference that it means. Every command ends with 0 after success, and with 2 after
/// an error.
pub const DIFFERENCES: &[(&str, &str)] = &[
    ("plan", "with `--check`: another plan would be chosen for the request of the plan"),
    ("check", "a plan differs from the committed one, is not committed, or is committed and not named"),
    ("run", "outputs differ from the expected ones by more than the tolerance"),
    ("verify", "the per-rank program does not compute what the whole program computes"),
    ("diff", "the plans differ"),
];

/// The page `docs/book/src/exit-codes.md`.
pub fn reference() -> String {
    let mut out = String::from(
        "# Exit codes\n\n\
         A command ends with 0 after success, with 1 where it found a difference, and with 2 after an error: a mistake on the\n\
         command line, a file that cannot be read, a request that nothing satisfies. Errors are on standard error, with \
         [codes](diagnostics.md)\n\
         of their own; `--error-format json` prints one JSON object a line.\n\n\
         | command | 1 means |\n|---|---|\n",
    );
    for command in Cli::command().get_subcommands() {
        let name = command.get_name();
        let difference =
            DIFFERENCES.iter().find(|(of, _)| *of == name).map_or("is not used", |(_, text)| text);
        // Writing to a string cannot fail.
        let _ = writeln!(out, "| `ithaca {name}` | {difference} |");
    }
    out
}
