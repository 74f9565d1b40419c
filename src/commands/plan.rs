//! `plan`: chooses a layout, and says why.

use std::fmt::Write;
use std::sync::atomic::AtomicBool;

use ithaca_ir::units::seconds;
use ithaca_ir::wrap::wrapped;
use ithaca_ir::{Diagnostic, Module};
use ithaca_passes::import::{self, Mode, Workload};
use ithaca_passes::plan::{Effort, Plan, Rates};
use ithaca_passes::planner::{self, View};
use ithaca_passes::registry::Registry;
use ithaca_passes::shard::strategy::STAGE_AXIS;

use super::printed::{heading, host_memory, noted, view};
use super::session::{CommandOutput, Session};
use super::{check, decoding, report, serve};
use crate::cli::{self, PlanArgs};
use crate::error::{Failure, Result};
use crate::request::{Answer, PlanRequest};
use crate::subject::Model;
use crate::{files, ineffective, subject};

pub(super) fn plan(args: &PlanArgs, session: &mut Session<'_>) -> Result<CommandOutput> {
    let view = view(args.table, session)?;
    if let Some(plan) = &args.check {
        return check::again(plan, args, session);
    }
    if args.workload.mode == Some(cli::Mode::Serve) {
        return serve::serve(args, &view, session);
    }
    if let Some(flag) = cli::first_given(&args.serving) {
        let refusal = Diagnostic::new("C00", format!("`{flag}` is an option of `--mode serve`"));
        return Err(refusal.help("add `--mode serve`, or omit it").into());
    }
    let model = args.model.as_deref().expect("the model is required without `--check`");
    let model = subject::described(model)?;
    let name = model.name.clone();
    for path in args.output.iter().chain(&args.report) {
        files::check_file(path)?;
    }
    let Answered { request, answer, notes } = answered(args, model, session, None)?;
    let plan = match answer {
        Answer::Plan(plan) => *plan,
        Answer::Refused(refusal, rates) => {
            // The layouts are printed where they were asked for.
            let is_asked = args.table.all || args.table.why_not;
            let context = is_asked.then(|| planner::table(&refusal.alternatives, &rates, &view));
            let context = context.filter(|table| !table.is_empty());
            return Err(Failure { context, ..Failure::from(refusal.diagnostic) });
        }
    };
    let json = plan.to_json();
    if let Some(path) = &args.output {
        files::write(path, json.as_bytes())?;
    }
    if let Some(path) = &args.report {
        report::write(&plan, path, session)?;
    }
    if args.json {
        return Ok(CommandOutput::success(json));
    }
    let mut out = summary(&plan, &name, &view);
    let text = decoding::summary(session.registry, &request, &plan)?;
    out.extend(text.iter().map(|line| wrapped(line, view.width, 2) + "\n"));
    for note in &notes {
        out.push_str(&noted(note, view.width));
    }
    for path in args.output.iter().chain(&args.report) {
        // Writing to a string cannot fail.
        let _ = writeln!(out, "wrote {}", path.display());
    }
    Ok(CommandOutput::success(out))
}

/// A request and its answer.
pub(crate) struct Answered {
    /// The request.
    pub(crate) request: PlanRequest,
    /// Its answer.
    pub(crate) answer: Answer,
    /// Options without effect.
    pub(crate) notes: Vec<String>,
}

/// Plans what arguments describe; the search ends soon after `stop` is set, and its answer means nothing then.
///
/// # Errors
/// Those of the arguments and of the model.
pub(crate) fn answered(
    args: &PlanArgs,
    model: Model,
    session: &mut Session<'_>,
    stop: Option<&AtomicBool>,
) -> Result<Answered> {
    (session.progress)("importing");
    let (request, module, ineffective_dropout) = requested(args, model, session.registry)?;
    (session.progress)("planning");
    let answer = request.answer_until(session.registry, &module, stop)?;
    let has_no_stages = |plan: &Plan| !plan.mesh.iter().any(|axis| axis.axis == STAGE_AXIS);
    let is_staged = !matches!(&answer, Answer::Plan(plan) if has_no_stages(plan));
    let is_forward = request.workload.mode != Mode::Train;
    let of_stages = [
        ("--pipeline", args.workload.pipeline.is_some()),
        ("--train stage_layers", !request.workload.training.stage_layers.is_empty()),
        ("--micro-batches", is_forward && request.workload.training.micro_batches > 1),
    ];
    let ineffective = of_stages.into_iter().filter(|(_, is_given)| *is_given && !is_staged);
    let of_stages = ineffective.map(|(flag, _)| format!("`{flag}` has no effect: the plan has no stages"));
    let mut notes: Vec<String> = of_stages.chain(ineffective_dropout).collect();
    if let Answer::Plan(plan) = &answer {
        notes.extend(faster_nearby(&request, plan, session.registry, stop));
    }
    Ok(Answered { request, answer, notes })
}

/// Notes on requests near one whose layout is searched that take less time: fewer GPUs where their number is no power of two, such
/// as 72, and in a forward pass more sequences, which divide by the GPUs. Layouts have few ways to split heads, sequences and
/// batches by odd factors. Nothing is noted where such a request is refused.
fn faster_nearby(
    request: &PlanRequest,
    plan: &Plan,
    registry: &Registry,
    stop: Option<&AtomicBool>,
) -> Vec<String> {
    let PlanRequest { workload, gpus, search, .. } = request;
    if search.strategy.is_some() || search.mesh.is_some() {
        return Vec::new();
    }
    let mut search = search.clone();
    search.narrowing.effort = Effort::Low;
    let fewer = (!gpus.is_power_of_two()).then(|| {
        let fewer = 1 << gpus.ilog2();
        let of_fewer = PlanRequest { gpus: fewer, search: search.clone(), ..request.clone() };
        (of_fewer, format!("{fewer} of the {gpus} GPUs take"), format!("--gpus {fewer}"))
    });
    let batch = workload.batch;
    let unit = match gpus {
        gpus if batch >= *gpus => *gpus,
        gpus if gpus.is_power_of_two() => batch.next_power_of_two(),
        gpus => gpus >> gpus.trailing_zeros(),
    };
    let more = batch.next_multiple_of(unit);
    let may_grow = workload.mode != Mode::Train
        && workload.pages.is_none()
        && import::program_text(&request.model.config).is_none();
    let larger = (may_grow && more > batch && more < 2 * batch).then(|| {
        let workload = Workload { batch: more, ..workload.clone() };
        let text = format!("a step of {more} sequences takes");
        (PlanRequest { workload, search: search.clone(), ..request.clone() }, text, format!("--batch {more}"))
    });
    let mut notes = Vec::new();
    for (request, text, option) in fewer.into_iter().chain(larger) {
        let answer = request.program().and_then(|module| request.answer_until(registry, &module, stop));
        let Ok(Answer::Plan(other)) = answer else { continue };
        let [ours, theirs] = [plan, &other].map(|plan| plan.time.step_seconds);
        // A smaller difference is within the error of prices.
        if theirs < 0.95 * ours {
            notes.push(format!("{text} {} in place of {} (`{option}`)", seconds(theirs), seconds(ours)));
        }
    }
    notes
}

/// The request of arguments, its program, and notes on options of training.
fn requested(
    args: &PlanArgs,
    model: Model,
    registry: &Registry,
) -> Result<(PlanRequest, Module, Vec<String>)> {
    let request = PlanRequest::of_args(registry, model, &args.workload, &args.layout, &args.narrowing)?;
    let module = request.program()?;
    let PlanRequest { model, workload, .. } = &request;
    let as_configured = |workload: &Workload| import::program(&model.config, &model.name, workload);
    let notes = ineffective::training_notes(workload, &module, as_configured)?;
    Ok((request, module, notes))
}

/// Whether arguments have a plan; where that `is_planned` already, whether they are a request.
///
/// # Errors
/// Those of the arguments and of the model, and why nothing satisfies the request.
pub(crate) fn replay(args: &PlanArgs, model: Model, registry: &Registry, is_planned: bool) -> Result<()> {
    let (request, module, _) = requested(args, model, registry)?;
    if !is_planned {
        request.answer(registry, &module)?.plan()?;
    }
    Ok(())
}

/// The plan for a terminal: the request, the ranked table, the notes.
fn summary(plan: &Plan, name: &str, view: &View) -> String {
    let mut out = heading(plan, name, view.width);
    out.push('\n');
    out.push_str(&planner::table(&plan.alternatives, &Rates::of(plan), view));
    out.push('\n');
    let of_training = plan.workload.training.is_some();
    for note in host_memory(plan).filter(|_| of_training).iter().chain(&plan.notes).chain(&plan.assumptions())
    {
        out.push_str(&noted(note, view.width));
    }
    out
}
