//! Commands as functions, for programs that embed Ithaca: options are arguments of the command line, results are values.

use std::path::PathBuf;
use std::sync::atomic::AtomicBool;

use clap::error::ErrorKind;
use clap::{CommandFactory, FromArgMatches};
use ithaca_passes::frameworks::Export;
use ithaca_passes::import;
use ithaca_passes::plan::Plan;
use ithaca_passes::registry::Registry;
use serde_json::Value;

pub use crate::commands::emit::Emitted;
pub use crate::commands::{CommandOutput, Session};

use crate::cli::{self, Cli, ExplainArgs, Mode, PlanArgs};
use crate::commands::{emit, explain, export, plan, repairs, verify};
use crate::error::{Failure, Result, of_arguments};
use crate::subject::Model;

/// The place of a model or a plan among the arguments.
const SUBJECT: &str = "-";

/// An option of a command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CommandOption {
    /// Its long name, without dashes.
    pub name: String,
    /// Whether it takes a value; otherwise it is there or not.
    pub takes_value: bool,
    /// The first sentences of its help.
    pub help: String,
}

/// The options of a command that are no paths of its own input and output, and do not shape the table of `plan`.
pub fn options(command: &str) -> Vec<CommandOption> {
    let cli = Cli::command();
    let Some(command) = cli.find_subcommand(command) else { return Vec::new() };
    let of_files = ["output", "report", "json", "check", "error-format", "help"];
    // A plan has rows, and no table.
    let of_table: &[&str] = if command.get_name() == "plan" { &["top", "all", "why-not"] } else { &[] };
    let is_option = |name: &&str| !of_files.contains(name) && !of_table.contains(name);
    let options = command.get_arguments().filter_map(|argument| {
        let name = argument.get_long().filter(is_option)?;
        Some(CommandOption {
            name: name.to_owned(),
            takes_value: argument.get_action().takes_values(),
            help: argument.get_help().map(ToString::to_string).unwrap_or_default(),
        })
    });
    options.collect()
}

/// A model of a configuration that is no file.
pub fn model(name: &str, config: &Value) -> Model {
    let config = import::text_part(config).into_owned();
    Model { name: name.to_owned(), config, folder: PathBuf::new() }
}

/// A plan, and the options without effect.
#[derive(Clone, Debug)]
pub struct Planned {
    /// The plan.
    pub plan: Plan,
    /// Notes on options without effect.
    pub notes: Vec<String>,
}

/// Plans a model. The search ends soon after `stop` is set, and its result means nothing then.
///
/// # Errors
/// As `ithaca plan`; the repairs are options.
pub fn plan(
    model: Model,
    options: &[String],
    session: &mut Session<'_>,
    stop: Option<&AtomicBool>,
) -> Result<Planned> {
    let args = plan_args(options)?;
    let answered = plan::answered(&args, model, session, stop)?;
    Ok(Planned { plan: answered.answer.plan()?, notes: answered.notes })
}

/// The repairs of a failure to plan: options in place of those that failed.
pub fn repairs(
    registry: &Registry,
    failure: &Failure,
    model: &Model,
    options: &[String],
) -> Vec<Vec<String>> {
    let arguments = [&["plan".to_owned(), SUBJECT.to_owned()], options].concat();
    let all = failure.diagnostics.iter().flat_map(|d| d.repairs.iter().map(|repair| (d.code, repair)));
    let repaired = all.filter(|(_, repair)| repair.starts_with("--")).filter_map(|(code, repair)| {
        let options = repairs::repaired(&arguments, repair).split_off(2);
        let args = plan_args(&options).ok()?;
        plan::replay(&args, model.clone(), registry, repairs::is_planned(code)).ok()?;
        Some(options)
    });
    repaired.collect()
}

fn plan_args(options: &[String]) -> Result<PlanArgs> {
    let args: PlanArgs = parsed("plan", options)?;
    if args.workload.mode == Some(Mode::Serve) {
        return Err(Failure::usage("`--mode serve` is a mode of the command line"));
    }
    match cli::first_given(&args.serving) {
        Some(flag) => Err(Failure::usage(format!("`{flag}` is an option of `--mode serve`"))),
        None => Ok(args),
    }
}

/// Explains a plan.
///
/// # Errors
/// As `ithaca explain`.
pub fn explain(plan: &Plan, options: &[String], session: &mut Session<'_>) -> Result<String> {
    explain::explained(plan, parsed::<ExplainArgs>("explain", options)?.table, session)
}

/// Compares the per-rank program of a plan with its whole program.
///
/// # Errors
/// As `ithaca verify`.
pub fn verify(plan: &Plan, options: &[String], session: &mut Session<'_>) -> Result<CommandOutput> {
    verify::of_plan(plan, &parsed("verify", options)?, session)
}

/// A plan as code.
///
/// # Errors
/// As `ithaca emit`.
pub fn emit(plan: &Plan, options: &[String], session: &mut Session<'_>) -> Result<Emitted> {
    emit::emitted(plan, &parsed("emit", options)?, session)
}

/// A plan in the words of another framework, and how the two differ.
///
/// # Errors
/// As `ithaca export`.
pub fn export(plan: &Plan, options: &[String], session: &mut Session<'_>) -> Result<Export> {
    export::exported(plan, &parsed("export", options)?, session)
}

/// The arguments of a command with these options.
fn parsed<Args: FromArgMatches>(command: &str, options: &[String]) -> Result<Args> {
    cli::arguments_of(command, SUBJECT, options).map_err(|error| match error.kind() {
        ErrorKind::DisplayHelp => Failure::usage("`--help` is an option of the command line"),
        _ => of_arguments("C00", &error).into(),
    })
}
