//! The commands, a file each.

mod completions;
mod device;
mod diff;
mod emit;
mod explain;
mod fault;
mod launch;
mod list;
mod merge_weights;
mod opt;
mod plan;
mod run;
mod schedule_text;
mod shard_weights;
mod verify;

use ithaca_passes::registry::Registry;

use crate::cli::{Cli, Command};
use crate::error::Result;

/// What a command may use of the outside.
pub struct Session<'a> {
    /// The strategies and movements that there are.
    pub registry: &'a Registry,
    /// Called with what is being done, for a person who waits.
    pub progress: &'a mut dyn FnMut(&str),
    /// Variables of the environment, by which a launcher says which process this is.
    pub environment: &'a dyn Fn(&str) -> Option<String>,
}

/// What a command did.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Done {
    /// For standard output.
    pub text: String,
    /// The exit code: 0, or 1 when something differs.
    pub code: u8,
}

impl Done {
    /// Success, with this to say.
    pub fn success(text: impl Into<String>) -> Self {
        Self { text: text.into(), code: 0 }
    }
}

/// Does what the command line asks.
///
/// # Errors
/// Diagnostics of whatever refused; the exit code is 2 then.
pub fn run(cli: Cli, session: &mut Session<'_>) -> Result<Done> {
    match cli.command {
        Command::Plan(args) => plan::plan(&args, session),
        Command::Emit(args) => emit::emit(&args, session),
        Command::Run(args) => run::run(&args, session),
        Command::Verify(args) => verify::verify(&args, session),
        Command::ShardWeights(args) => shard_weights::shard_weights(&args, session),
        Command::MergeWeights(args) => merge_weights::merge_weights(&args, session),
        Command::Diff(args) => diff::diff(&args, session),
        Command::Opt(args) => opt::opt(&args, session),
        Command::Explain(args) => explain::explain(&args, session),
        Command::List(args) => list::list(&args, session),
        Command::Completions(args) => completions::completions(&args),
    }
}
