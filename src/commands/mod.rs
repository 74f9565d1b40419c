//! The commands, a file each.

use std::path::PathBuf;

mod calibrate;
mod check;
mod completions;
mod decoding;
mod device;
mod diff;
pub(crate) mod emit;
pub(crate) mod explain;
pub(crate) mod export;
mod fault;
mod generate;
mod handover;
mod import;
mod init;
mod launch;
mod list;
mod merge_weights;
mod opt;
mod per_rank_text;
pub(crate) mod plan;
mod printed;
mod prove;
pub(crate) mod repairs;
mod report;
mod run;
mod schedule_text;
mod serve;
mod session;
mod shard_weights;
mod verdict;
pub(crate) mod verify;

use crate::cli::{Cli, Command};
use crate::error::Result;
use crate::kind::Kind;

pub use session::{CommandOutput, Session};

/// Runs the command of the command line.
///
/// # Errors
/// The diagnostics of the refusal; the exit code is 2.
pub fn run(cli: Cli, session: &mut Session<'_>) -> Result<CommandOutput> {
    let model = to_shrink(&cli.command).cloned();
    dispatch(cli, session).map_err(|mut failure| {
        let is_fixed = |path| matches!(Kind::of(path), Ok(Kind::Program(_) | Kind::Schedule));
        let shrinks = |code: &str| code == "C11" && model.as_deref().is_some_and(|path| !is_fixed(path));
        for diagnostic in failure.diagnostics.iter_mut().filter(|d| shrinks(d.code)) {
            diagnostic.helps.push("run a small model of the same structure with `--shrink`".to_owned());
        }
        repairs::as_commands(failure, session)
    })
}

/// What `--shrink` would make smaller, where it is not given; prompts are continued as they are.
fn to_shrink(command: &Command) -> Option<&PathBuf> {
    let subject = match command {
        Command::Run(args) if !generate::is_asked(args) => &args.subject,
        Command::Verify(args) => &args.subject,
        _ => return None,
    };
    (!subject.shrink).then_some(&subject.subject)
}

fn dispatch(cli: Cli, session: &mut Session<'_>) -> Result<CommandOutput> {
    match cli.command {
        Command::Plan(args) => plan::plan(&args, session),
        Command::Init(args) => init::init(&args),
        Command::Check(args) => check::check(&args, session),
        Command::Emit(args) => emit::emit(&args, session),
        Command::Export(args) => export::export(&args, session),
        Command::Import(args) => import::import(&args, session),
        Command::Run(args) if args.launch => launch::run(&args, session),
        Command::Run(args) if generate::is_asked(&args) => generate::run(&args, session, None),
        Command::Run(args) => run::run(&args, session),
        Command::Verify(args) => verify::verify(&args, session),
        Command::ShardWeights(args) => shard_weights::shard_weights(&args, session),
        Command::MergeWeights { shards, output } => merge_weights::merge_weights(&shards, &output, session),
        Command::Diff(args) => diff::diff(&args, session),
        Command::Opt(args) => opt::opt(&args, session),
        Command::Report(args) => report::report(&args, session),
        Command::Explain(args) => explain::explain(&args, session),
        Command::Calibrate(args) => calibrate::calibrate(&args, session),
        Command::List { listing } => list::list(listing, session),
        Command::Completions { shell } => Ok(completions::completions(shell)),
    }
}
