//! Repairs as whole commands: the arguments of the process with the options of a repair in place of theirs.
//!
//! A repair that replaces the layout also drops options that the new layout refuses. A command is offered only if it was
//! replayed as it is printed: a plan is made, and the job of a run or a proof compiled.

use clap::{CommandFactory, Parser};
use ithaca_passes::shard::parse_mesh;
use ithaca_passes::shard::strategy::STAGE_AXIS;

use super::session::Session;
use super::{generate, plan, run, verify};
use crate::cli::{Cli, Command, Mode};
use crate::error::Failure;
use crate::subject;

/// The failure with repairs that are commands.
pub(super) fn as_commands(mut failure: Failure, session: &Session<'_>) -> Failure {
    let [program, arguments @ ..] = session.arguments.as_slice() else { return failure };
    let program = program.rsplit(['/', '\\']).next().unwrap_or("ithaca");
    for diagnostic in &mut failure.diagnostics {
        let repairs = std::mem::take(&mut diagnostic.repairs);
        let commands = repairs.into_iter().filter_map(|repair| {
            if !repair.starts_with("--") {
                return Some(repair);
            }
            let repaired = repaired(arguments, &repair);
            works(&repaired, diagnostic.code, session).then(|| {
                let words = repaired.iter().map(|word| quoted(word));
                std::iter::once(program.to_owned()).chain(words).collect::<Vec<_>>().join(" ")
            })
        });
        diagnostic.repairs = commands.collect();
    }
    failure
}

/// The arguments with the options of a repair in place of theirs.
pub(crate) fn repaired(arguments: &[String], repair: &str) -> Vec<String> {
    let words: Vec<&str> = repair.split_whitespace().collect();
    let value = |flag: &str| words.iter().position(|&w| w == flag).and_then(|at| words.get(at + 1).copied());
    let mesh = value("--mesh").and_then(|mesh| parse_mesh(mesh).ok());
    let mut replaced: Vec<&str> = words.iter().copied().filter(|word| word.starts_with("--")).collect();
    let mut added: Vec<String> = words.iter().map(|&word| word.to_owned()).collect();
    if words.contains(&"--pad-sequence") {
        replaced.push("--uneven-sequence");
    }
    let is_given = |flag: &str| arguments.iter().any(|a| a == flag || a.starts_with(&format!("{flag}=")));
    if value("--strategy").is_some() {
        // The new layout has its own mesh, only stages of a pipeline have an order, and nothing else is searched.
        replaced.extend(["--mesh", "--only", "--without", "--max-tp"]);
        if mesh.as_ref().and_then(|mesh| mesh.axis(STAGE_AXIS)).is_none() {
            replaced.push("--pipeline");
            replaced.push("--train chunks");
        }
        let ranks = mesh.map_or(1, |mesh| mesh.ranks());
        let is_plan = arguments.iter().any(|argument| argument == "plan");
        if value("--gpus").is_none() && (is_given("--gpus") || (is_plan && value("--mesh").is_none())) {
            replaced.push("--gpus");
            added.splice(0..0, ["--gpus".to_owned(), ranks.to_string()]);
        }
    }
    let mut kept = Vec::new();
    let mut rest = arguments.iter();
    while let Some(argument) = rest.next() {
        let (flag, inline) = match argument.split_once('=') {
            Some((flag, value)) if flag.starts_with("--") => (flag, Some(value.to_owned())),
            _ => (argument.as_str(), None),
        };
        let is_inline = inline.is_some();
        let value = inline.or_else(|| takes_value(flag).then(|| rest.next().cloned()).flatten());
        let chunks =
            flag == "--train" && value.as_deref().is_some_and(|value| value.trim().starts_with("chunks="));
        if replaced.contains(&flag) || (chunks && replaced.contains(&"--train chunks")) {
            continue;
        }
        kept.push(argument.clone());
        kept.extend(value.filter(|_| !is_inline));
    }
    kept.extend(added);
    kept
}

/// Whether a long option of any command takes a value.
fn takes_value(flag: &str) -> bool {
    let Some(name) = flag.strip_prefix("--") else { return false };
    let cli = Cli::command();
    let options = cli.get_subcommands().flat_map(clap::Command::get_arguments).chain(cli.get_arguments());
    let mut same = options.filter(|option| option.get_long() == Some(name));
    same.any(|option| option.get_action().takes_values())
}

/// Whether the arguments are a command that works, in place of one that was refused with this code.
fn works(arguments: &[String], code: &str, session: &Session<'_>) -> bool {
    let Ok(cli) = Cli::try_parse_from(std::iter::once("ithaca").chain(arguments.iter().map(String::as_str)))
    else {
        return false;
    };
    match cli.command {
        // The deployment was found, and the nearest form.
        Command::Plan(args) if args.workload.mode == Some(Mode::Serve) => code == "P33",
        Command::Export(_) => code == "P34",
        Command::Plan(args) => args.model.as_deref().is_some_and(|model| {
            let replayed = subject::described(model)
                .and_then(|model| plan::replay(&args, model, session.registry, is_planned(code)));
            replayed.is_ok()
        }),
        Command::Run(args) if generate::is_asked(&args) => generate::replay(&args, session).is_ok(),
        Command::Run(args) => run::replay(&args, session).is_ok(),
        Command::Verify(args) => verify::replay(&args, session).is_ok(),
        _ => false,
    }
}

/// Whether repairs of this code are the planner's, which has compiled a layout for each.
pub(crate) fn is_planned(code: &str) -> bool {
    code.starts_with('P')
}

/// A word as a shell reads it.
fn quoted(word: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_./=,+:@%".contains(c);
    if !word.is_empty() && word.chars().all(is_plain) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', "'\\''"))
}
