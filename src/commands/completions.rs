//! `completions`: a script for a shell.

use clap::CommandFactory;
use clap_complete::Shell;

use super::session::Done;
use crate::cli::Cli;

pub(super) fn completions(shell: Shell) -> Done {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "ithaca", &mut script);
    Done::success(String::from_utf8_lossy(&script))
}
