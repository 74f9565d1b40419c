//! `completions`: a script for a shell.

use clap::CommandFactory;

use super::session::Done;
use crate::cli::{Cli, CompletionsArgs};
use crate::error::Result;

pub(super) fn completions(args: &CompletionsArgs) -> Result<Done> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "ithaca", &mut script);
    Ok(Done::success(String::from_utf8_lossy(&script)))
}
