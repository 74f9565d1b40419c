//! `import`: prices a layout that somebody runs by another framework, beside the best plan for it.

use std::fmt::Write;
use std::path::{Path, PathBuf};

use ithaca_ir::Diagnostic;
use ithaca_ir::units::seconds;
use ithaca_ir::wrap::wrapped;
use ithaca_passes::frameworks::{Framework, megatron_args};
use ithaca_passes::plan::{Alternative, Outcome, Plan, Rates};
use ithaca_passes::planner::{self, View};

use super::printed::{heading, noted, view};
use super::session::{CommandOutput, Session};
use crate::cli::{self, ImportArgs, PlanArgs};
use crate::error::{Failure, Result, of_arguments};
use crate::files;
use crate::request::{Answer, PlanRequest};
use crate::subject::{self, Model};

pub(super) fn import(args: &ImportArgs, session: &mut Session<'_>) -> Result<CommandOutput> {
    let view = view(args.table, session)?;
    let words = megatron_args::words(&text(&args.arguments)?);
    let run = megatron_args::read(&words, args.gpus, &args.ignore_flags).map_err(|diagnostics| Failure {
        diagnostics,
        source: None,
        context: None,
    })?;
    let model = match (&args.model, run.config) {
        (Some(path), _) => subject::model(path)?,
        (None, Some(config)) => {
            Model { name: "the model of the flags".to_owned(), config, folder: PathBuf::new() }
        }
        (None, None) => {
            let refusal =
                Diagnostic::new("C21", "the flags do not state the model's layers, width and heads");
            return Err(refusal.help("name the folder of its `config.json` by `--model`").into());
        }
    };
    if let Some(path) = &args.output {
        files::check_file(path)?;
    }
    let cluster = args.cluster.iter().flat_map(|name| ["--cluster".to_owned(), name.clone()]);
    let common: Vec<String> = run.workload.iter().cloned().chain(cluster).collect();
    (session.progress)("pricing the layout");
    let stated = asked(&model, &common, &run.layout, session)?;
    let mine = answer(&stated, session)?;
    (session.progress)("planning");
    let open = ["--gpus".to_owned(), args.gpus.to_string(), "--for".to_owned(), args.from.name().to_owned()];
    let best = answer(&asked(&model, &common, &open, session)?, session)?.plan()?;
    let json = best.to_json();
    if let Some(path) = &args.output {
        files::write(path, json.as_bytes())?;
    }
    let mut out = match mine {
        Answer::Plan(mine) => text_of(&mine, &best, &model.name, args.from, &view),
        Answer::Refused(refusal, rates) => {
            let is_large = |row: &&Alternative| matches!(row.outcome, Outcome::OutOfMemory { .. });
            let Some(row) = refusal.alternatives.iter().find(is_large).cloned() else {
                return Err(Failure::from(refusal.diagnostic));
            };
            let rows: Vec<Alternative> =
                best.alternatives.first().cloned().into_iter().chain([row]).collect();
            let view = View { refusals: planner::Refusals::Each, ..view };
            let table = planner::table(&rows, &rates, &view);
            let title = args.from.title();
            let sentence = format!(
                "your layout does not fit by these prices; the best that was found for {title} is above it"
            );
            format!(
                "{}\n{table}\n{}\n\n",
                heading(&best, &model.name, view.width),
                wrapped(&sentence, view.width, 2)
            )
        }
    };
    let place = args.model.as_ref().map_or("MODEL".to_owned(), |path| path.display().to_string());
    let command = ["ithaca", "plan", place.as_str()].into_iter().map(str::to_owned);
    let command: Vec<String> = command.chain(common).chain(run.layout).collect();
    out += &noted(&format!("the layout of the flags, here: {}", command.join(" ")), view.width);
    for note in &run.notes {
        out += &noted(note, view.width);
    }
    if let Some(path) = &args.output {
        // Writing to a string cannot fail.
        let _ = writeln!(out, "wrote {}", path.display());
    }
    Ok(CommandOutput::success(out))
}

/// The arguments of the other program: those of the command line, or the text of the file that it names.
///
/// # Errors
/// Those of the file, and `C00` for options of this program after it.
fn text(arguments: &[String]) -> Result<String> {
    let text = arguments.join(" ");
    let [first, rest @ ..] = arguments else { return Ok(text) };
    let is_flag = |word: &String| word.starts_with('-');
    let path = Path::new(first);
    if is_flag(first) || (rest.is_empty() && first.split_whitespace().any(|word| word.starts_with('-'))) {
        return Ok(text);
    }
    // A launcher and the script that it starts may be before the flags.
    match megatron_args::words(&text).first() {
        _ if rest.is_empty() => files::read_text(path),
        Some(word) if !is_flag(word) && path.is_file() => {
            let message =
                format!("`{first}` is a file of arguments, and others follow it: `{}`", rest.join(" "));
            Err(Diagnostic::new("C00", message)
                .help("name the options of `ithaca import` before the file")
                .into())
        }
        Some(word) if word == first && first.contains(['.', '/']) => {
            std::fs::metadata(path).map_err(|e| files::failed(path, &e))?;
            Ok(text)
        }
        Some(_) | None => Ok(text),
    }
}

/// The request of `ithaca plan` with these options.
fn asked(model: &Model, common: &[String], options: &[String], session: &Session<'_>) -> Result<PlanRequest> {
    let PlanArgs { workload, layout, narrowing, .. } =
        cli::arguments_of("plan", "MODEL", common.iter().chain(options))
            .map_err(|e| of_arguments("C00", &e))?;
    PlanRequest::of_args(session.registry, model.clone(), &workload, &layout, &narrowing)
}

fn answer(request: &PlanRequest, session: &Session<'_>) -> Result<Answer> {
    request.answer(session.registry, &request.program()?)
}

/// Both plans in a table, and the answer in a sentence.
fn text_of(mine: &Plan, best: &Plan, name: &str, from: Framework, view: &View) -> String {
    let mut out = heading(mine, name, view.width);
    out.push('\n');
    let (ours, theirs) = (best.time.step_seconds, mine.time.step_seconds);
    let mut rows = Vec::new();
    rows.extend(best.alternatives.first().cloned());
    rows.extend(
        mine.alternatives.first().map(|row| Alternative { outcome: beside(mine, best), ..row.clone() }),
    );
    if theirs <= ours {
        rows.reverse();
    }
    out.push_str(&planner::table(&rows, &Rates::of(mine), view));
    out.push('\n');
    let sentence = if theirs <= ours {
        format!(
            "your layout takes {} a step, and no faster one was found for {}",
            seconds(theirs),
            from.title()
        )
    } else {
        format!(
            "your layout takes {} a step, {:.2} times as long as the best that was found for {}, {}",
            seconds(theirs),
            theirs / ours,
            from.title(),
            seconds(ours)
        )
    };
    out + &wrapped(&sentence, view.width, 2) + "\n\n"
}

/// The outcome of a layout beside the best.
fn beside(mine: &Plan, best: &Plan) -> Outcome {
    let (a, b) = (&mine.time, &best.time);
    let part = |x: f64, what: &str| {
        let sign = if x < 0.0 { '-' } else { '+' };
        format!("{sign}{} {what}", seconds(x.abs()))
    };
    let idle = |t: &ithaca_passes::plan::Time| t.step_seconds - t.compute_seconds - t.exposed_seconds;
    let more = a.step_seconds - b.step_seconds;
    let parts = [
        (a.exposed_seconds - b.exposed_seconds, "exposed"),
        (a.compute_seconds - b.compute_seconds, "compute"),
        (idle(a) - idle(b), "idle"),
    ];
    // The rest is below the digits of the difference.
    let parts = parts.into_iter().filter(|(x, _)| x.abs() >= 0.005 * more.abs() && *x != 0.0);
    let parts: Vec<String> = parts.map(|(x, what)| part(x, what)).collect();
    let parts = if parts.is_empty() { "as fast".to_owned() } else { parts.join(", ") };
    Outcome::Slower {
        step_seconds: a.step_seconds,
        exposed_seconds: a.exposed_seconds,
        memory_bytes: mine.memory.total,
        slower_by_seconds: a.step_seconds - b.step_seconds,
        reason: format!("your layout: {parts}"),
    }
}
