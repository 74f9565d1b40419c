//! `emit`: a plan as code.

use std::path::PathBuf;

use ithaca_codegen::{cuda, dot, json, mermaid, svg, torch, trace};
use ithaca_ir::diagnostic::counted;
use ithaca_ir::handover::Handover;
use ithaca_ir::schedule::Schedule;
use ithaca_ir::verify::verify;
use ithaca_ir::{DType, Diagnostic, Module, schedule, text};
use ithaca_passes::compile::{Compiled, compile_with};
use ithaca_passes::differentiate::{ADAMW, Offload, Training};
use ithaca_passes::import::{self, Mode, STEP, Workload};
use ithaca_passes::lower::lower;
use ithaca_passes::plan::{self, Plan};
use ithaca_passes::shard::Zero;
use ithaca_passes::simulate;

use super::generate;
use super::handover;
use super::session::{CommandOutput, Session};
use crate::cli::{EmitArgs, Target};
use crate::error::{Failure, Result};
use crate::job::Large;
use crate::{files, shrink, subject};

/// The runs of tasks that a trace lists: they take less than 20 MB.
const TRACED: usize = 70_000;

/// What a target is: a text, or files of a folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Emitted {
    /// One text.
    Text(String),
    /// Files by their paths in the folder.
    Files(Vec<(PathBuf, Vec<u8>)>),
}

pub(super) fn emit(args: &EmitArgs, session: &mut Session<'_>) -> Result<CommandOutput> {
    let plan = subject::plan(session.registry, &args.plan)?;
    if args.target == Target::Cuda && args.output.is_none() {
        let refusal = Diagnostic::new("C00", "`--target cuda` writes a folder, and no option names one");
        return Err(refusal.help("add it, as in `-o out/`").into());
    }
    match (emitted(&plan, args, session)?, &args.output) {
        (Emitted::Text(text), None) => Ok(CommandOutput::success(text)),
        (Emitted::Text(text), Some(path)) => {
            files::write(path, text.as_bytes())?;
            Ok(CommandOutput::success(format!("wrote {}\n", path.display())))
        }
        (Emitted::Files(list), folder) => {
            let folder = folder.as_deref().expect("a target of files has a folder, which was checked");
            files::write_all(folder, &list)?;
            let n = counted(list.len() as u64, "file");
            Ok(CommandOutput::success(format!("wrote {n} to {}\n", folder.display())))
        }
    }
}

/// Refuses programs of very many tasks, as rings of thousands of ranks have: the arguments of each differ along the ring.
fn refuse_long_program(schedule: &Schedule) -> Result<()> {
    /// The most tasks of all ranks along one axis: a program of as many is written in some ten seconds.
    const MOST: u64 = 1 << 23;
    let tasks: usize = schedule.frames.values().map(|frame| frame.tasks.len()).sum();
    let ranks = schedule.space.mesh.axes.values().map(|axis| axis.size).max().unwrap_or(1);
    if ranks.saturating_mul(tasks as u64) <= MOST {
        return Ok(());
    }
    let message = format!(
        "the program has {} on each of {} along an axis, and may have at most {MOST} in all",
        counted(tasks as u64, "task"),
        counted(ranks, "rank")
    );
    Err(Diagnostic::new("C14", message).help("use a shorter ring, or fewer micro-batches").into())
}

/// Where a timeline would have thousands of ranks of their own.
fn too_many_ranks_differ() -> Diagnostic {
    let message = "the ranks of this plan differ too much to simulate each of them, event by event";
    Diagnostic::new("C14", message)
        .help("`--order zigzag` or `striped` gives all ranks of a ring the same work")
}

/// The code of a plan; its path and that of the output are not used.
///
/// # Errors
/// Those of the plan, and what the target cannot express.
pub(crate) fn emitted(plan: &Plan, args: &EmitArgs, session: &mut Session<'_>) -> Result<Emitted> {
    let is_program = matches!(args.target, Target::Cuda | Target::Torch);
    if args.chunk.is_some() && !(is_program && plan.workload.mode == Mode::Decode) {
        let message = "`--chunk` goes with `--target cuda` or `torch` and a plan of decoding";
        return Err(Failure::usage(message));
    }
    if args.prompts.is_some() && !(is_program && plan.workload.mode == Mode::Decode) {
        return Err(Failure::usage(
            "`--prompts` goes with `--target cuda` or `torch` and a plan of decoding",
        ));
    }
    if args.two_pools && args.prompts.is_none() {
        return Err(Failure::usage("`--two-pools` goes with `--prompts`, the plan of the other pool"));
    }
    if args.autograd {
        return autograd(plan, args, session).map(Emitted::Text);
    }
    (session.progress)("compiling");
    let compiled = plan.compile(session.registry)?;
    let contents = match args.target {
        Target::Ir => text::print(&compiled.per_rank),
        Target::Schedule => schedule::print(&compiled.schedule),
        Target::Json => json::emit(&compiled.schedule),
        Target::Dot => dot::emit(&compiled.per_rank),
        Target::Svg => svg::emit(&compiled.per_rank),
        Target::Mermaid => mermaid::emit(&compiled.per_rank),
        Target::Trace => {
            let timeline = simulate::timeline(&plan.cluster, &compiled.schedule, TRACED);
            trace::emit("simulated", &timeline.ok_or_else(too_many_ranks_differ)?)
        }
        Target::Torch => {
            let workload = plan.workload.to_import()?;
            let whole = import::program(&plan.model.config, &plan.model.name, &workload)?;
            let prompts = prompts(plan, &compiled, args, session)?;
            let of = |step, prompts, handover| torch::Steps { step, prompts, handover };
            torch::emit(
                of(
                    &compiled.per_rank,
                    prompts.as_ref().map(|prompts| &*prompts.ranks.per_rank),
                    prompts.as_ref().and_then(|prompts| prompts.handover.as_ref()),
                ),
                of(&whole, prompts.as_ref().map(|prompts| &prompts.whole), None),
            )?
        }
        Target::Cuda => {
            refuse_long_program(&compiled.schedule)?;
            (session.progress)("compiling the reference");
            let workload = plan.workload.to_import()?;
            let program = import::program(&plan.model.config, &plan.model.name, &workload)?;
            // One device needs no layout, and has no stages.
            let reference = lower(verify(&program)?)?;
            let prompts = prompts(plan, &compiled, args, session)?;
            let whole = prompts.as_ref().map(|prompts| Ok::<_, Failure>(lower(verify(&prompts.whole)?)?));
            let whole = whole.transpose()?;
            let steps = |step, prompts: Option<_>, handover| -> Result<cuda::Steps<'_>> {
                let prompts = prompts.map(schedule::verify).transpose()?;
                Ok(cuda::Steps { step: schedule::verify(step)?, prompts, handover })
            };
            let of_ranks = prompts.as_ref().map(|prompts| &prompts.ranks.schedule);
            let handover = prompts.as_ref().and_then(|prompts| prompts.handover.as_ref());
            let ranks = steps(&compiled.schedule, of_ranks, handover)?;
            let emitted = cuda::emit(ranks, Some(steps(&reference, whole.as_ref(), None)?))?;
            let list = emitted.into_iter().map(|f| (PathBuf::from(f.path), f.contents.into_bytes()));
            return Ok(Emitted::Files(list.collect()));
        }
    };
    Ok(Emitted::Text(contents))
}

/// The forward pass of a training step under the layout of a plan, which PyTorch differentiates.
fn autograd(plan: &Plan, args: &EmitArgs, session: &mut Session<'_>) -> Result<String> {
    if args.target != Target::Torch || plan.workload.mode != Mode::Train {
        return Err(Failure::usage("`--autograd` goes with `--target torch` and a plan of training"));
    }
    let workload = plan.workload_in_stages()?;
    let options = plan.shard_options()?;
    let Training { stages, micro_batches, optimizer, clip, offload, .. } = workload.training;
    let refused = [
        (stages > 1, "stages of a pipeline"),
        (micro_batches > 1, "micro-batches"),
        (options.zero != Zero::Off, "ZeRO"),
        (optimizer.is_none(), "no optimizer"),
        (offload != Offload::None, "states in host memory"),
    ];
    if let Some((_, what)) = refused.into_iter().find(|(is_refused, _)| *is_refused) {
        let refusal =
            Diagnostic::new("S44", format!("the plan has {what}, which `--autograd` does not emit"));
        return Err(refusal
            .help(
                "plan with `--zero 0 --micro-batches 1`, without `pp` and `--offload`, or omit `--autograd`",
            )
            .into());
    }
    (session.progress)("compiling");
    let whole = import::import(&plan.model.config, &plan.model.name, &workload)?;
    let compiled = compile_with(session.registry, &whole, &options, &plan.cluster)?;
    let optimizer = torch::Optimizer { adamw: optimizer.unwrap_or(ADAMW), clip };
    Ok(torch::emit_autograd(&compiled.per_rank, &whole, &optimizer)?)
}

/// The steps of prompts of a program that decodes.
struct Prompts {
    ranks: Compiled,
    whole: Module,
    /// Where caches go from them to the steps of tokens; none where both lay them out alike, on the same ranks.
    handover: Option<Handover>,
}

/// The steps of prompts beside `tokens`, those of a plan of decoding: under its layout, or under that of `--prompts`.
///
/// # Errors
/// Those of the plan of prompts; `C04` where it has other sequences or caches than the steps of tokens.
fn prompts(
    plan: &Plan,
    tokens: &Compiled,
    args: &EmitArgs,
    session: &Session<'_>,
) -> Result<Option<Prompts>> {
    let workload = plan.workload.to_import()?;
    if workload.mode != Mode::Decode {
        return Ok(None);
    }
    let (ranks, whole) = match &args.prompts {
        None => prompts_alike(plan, &workload, args.chunk, session)?,
        Some(path) => prompts_of(plan, &subject::plan(session.registry, path)?, session)?,
    };
    let help = if shrink::has_rings(&tokens.per_rank) {
        let steps = if args.prompts.is_some() { "`--seq` of the plan of prompts" } else { "`--chunk`" };
        format!(
            "caches of sliding windows have room for a window and a step of {STEP} tokens, so {steps} is at most {STEP}"
        )
    } else {
        handover::SAME_CACHES.to_owned()
    };
    let handover = handover::between([&ranks.schedule, &tokens.schedule], args.two_pools, &help)?;
    let [senders, receivers] = &handover.processes;
    let is_alike = args.prompts.is_none() && handover.is_empty() && senders == receivers;
    Ok(Some(Prompts { ranks, whole, handover: (!is_alike).then_some(handover) }))
}

/// A step of prompts that a plan of its own describes.
///
/// # Errors
/// `C04` where it has other sequences or caches than the steps of tokens.
fn prompts_of(token: &Plan, plan: &Plan, session: &Session<'_>) -> Result<(Compiled, Module)> {
    let [of_token, workload] = [&token.workload, &plan.workload].map(plan::Workload::to_import);
    let (of_token, workload) = (of_token?, workload?);
    let number = |n: Option<u64>| n.map_or_else(|| "none".to_owned(), |n| n.to_string());
    let of = |plan: &Plan, workload: &Workload| {
        [
            ("tokens of a cache", number(workload.cache)),
            ("tokens of a page", number(workload.pages.map(|pages| pages.tokens))),
            ("pages", number(workload.pages.and_then(|pages| pages.count))),
            ("pages in host memory", number(workload.pages.and_then(|pages| pages.host))),
            ("type of activations", plan.workload.dtype.clone()),
            ("type of caches", workload.cache_type.map_or("that of activations", DType::name).to_owned()),
        ]
    };
    let differ = |(a, b): &(_, _)| a != b;
    let differing = of(token, &of_token).into_iter().zip(of(plan, &workload)).find(differ);
    let refused = |message: String| {
        Err(Diagnostic::new("C04", message)
            .help("plan both of one model, with the same `--context` and pages: prompts without `--mode decode`, and with the same `--batch` or a divisor of it")
            .into())
    };
    if workload.mode != Mode::Prefill || token.model.config != plan.model.config {
        return refused("`--prompts` is no plan of prompts of the same model".to_owned());
    }
    if let Some(((what, tokens), (_, prompts))) = differing {
        return refused(format!("{what}: {tokens} in the plan of tokens, {prompts} in that of prompts"));
    }
    let (few, many) = (workload.batch, of_token.batch);
    if !many.is_multiple_of(few) || (few < many && workload.pages.is_some()) {
        let in_pages = if workload.pages.is_some() { ", whose caches are in pages" } else { "" };
        return refused(format!(
            "{} in the plan of tokens{in_pages}, {few} in that of prompts",
            counted(many, "sequence")
        ));
    }
    let longest = workload.cache.unwrap_or(workload.sequence);
    if workload.sequence < longest && import::encodes_prompts(&plan.model.config, &workload.ignore)? {
        let message = format!(
            "steps of prompts of {} in caches of {longest}: the encoder of the model reads a prompt at once",
            counted(workload.sequence, "token")
        );
        return Err(Diagnostic::new("C04", message)
            .help(format!("plan the steps of prompts with `--seq {longest} --context {longest}`"))
            .into());
    }
    // One device computes the prompts of all sequences at once.
    let of_all = Workload { batch: many, ..workload };
    let whole = import::program(&plan.model.config, &plan.model.name, &of_all)?;
    Ok((plan.compile(session.registry)?, whole))
}

/// A step of prompts, under the layout of a plan and as the whole program.
fn prompts_alike(
    plan: &Plan,
    token: &Workload,
    chunk: Option<u64>,
    session: &Session<'_>,
) -> Result<(Compiled, Module)> {
    let longest = token.cache.unwrap_or(STEP);
    let sequence = if import::encodes_prompts(&plan.model.config, &token.ignore)? {
        match chunk {
            None => longest,
            Some(_) => return Err(generate::whole_prompts().into()),
        }
    } else {
        chunk.unwrap_or(STEP).min(longest)
    };
    let workload = Workload { mode: Mode::Prefill, sequence, ..token.clone() };
    let options = plan.shard_options()?;
    let whole = import::program(&plan.model.config, &plan.model.name, &workload)?;
    let workload = subject::staged(workload, &options.mesh);
    let large = Large { config: &plan.model.config, name: &plan.model.name, workload: &workload };
    let job = large.job(session.registry, (options, plan.cluster.clone()))?;
    Ok((job.compile()?, whole))
}
