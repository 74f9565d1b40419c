//! `completions`: a script for a shell.

use clap::CommandFactory;
use clap_complete::Shell;

use super::session::CommandOutput;
use crate::cli::Cli;

pub(super) fn completions(shell: Shell) -> CommandOutput {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "ithaca", &mut script);
    CommandOutput::success(String::from_utf8_lossy(&script))
}
