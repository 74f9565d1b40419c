//! `emit`: a plan as code.

use std::path::PathBuf;

use ithaca_codegen::{cuda, dot, json, mermaid, svg, torch, trace};
use ithaca_ir::diagnostic::counted;
use ithaca_ir::schedule::Schedule;
use ithaca_ir::verify::verify;
use ithaca_ir::{Diagnostic, Module, schedule, text};
use ithaca_passes::compile::{Compiled, compile_with};
use ithaca_passes::differentiate::{ADAMW, Training};
use ithaca_passes::import::{self, Mode, Workload};
use ithaca_passes::lower::lower;
use ithaca_passes::plan::Plan;
use ithaca_passes::shard::Zero;
use ithaca_passes::simulate;

use super::generate;
use super::session::{Done, Session};
use crate::cli::{EmitArgs, Target};
use crate::error::{Failure, Result};
use crate::job::Large;
use crate::{files, subject};

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

/// The most tokens of a prompt in one step, unless arguments state them.
const CHUNK: u64 = 512;

pub(super) fn emit(args: &EmitArgs, session: &mut Session<'_>) -> Result<Done> {
    let plan = subject::plan(session.registry, &args.plan)?;
    if args.target == Target::Cuda && args.output.is_none() {
        let refusal = Diagnostic::new("C00", "`--target cuda` writes a folder, and no option names one");
        return Err(refusal.help("add it, as in `-o out/`").into());
    }
    match (emitted(&plan, args, session)?, &args.output) {
        (Emitted::Text(text), None) => Ok(Done::success(text)),
        (Emitted::Text(text), Some(path)) => {
            files::write(path, text.as_bytes())?;
            Ok(Done::success(format!("wrote {}\n", path.display())))
        }
        (Emitted::Files(list), folder) => {
            let folder = folder.as_deref().expect("a target of files has a folder, which was checked");
            files::write_all(folder, &list)?;
            let n = counted(list.len() as u64, "file");
            Ok(Done::success(format!("wrote {n} to {}\n", folder.display())))
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
            trace::emit("simulated", &simulate::timeline(&plan.cluster, &compiled.schedule, TRACED))
        }
        Target::Torch => {
            let workload = plan.workload.to_import()?;
            let whole = import::program(&plan.model.config, &plan.model.name, &workload)?;
            let prompts = match workload.mode {
                Mode::Decode => Some(prompts(plan, &workload, args.chunk, session)?),
                Mode::Prefill | Mode::Train => None,
            };
            let (of_ranks, of_whole) =
                prompts.as_ref().map(|(ranks, whole)| (&*ranks.per_rank, whole)).unzip();
            torch::emit(
                torch::Steps { step: &compiled.per_rank, prompts: of_ranks },
                torch::Steps { step: &whole, prompts: of_whole },
            )?
        }
        Target::Cuda => {
            refuse_long_program(&compiled.schedule)?;
            (session.progress)("compiling the reference");
            let workload = plan.workload.to_import()?;
            let program = import::program(&plan.model.config, &plan.model.name, &workload)?;
            // One device needs no layout, and has no stages.
            let reference = lower(verify(&program)?)?;
            let prompts = match workload.mode {
                Mode::Decode => {
                    let (ranks, whole) = prompts(plan, &workload, args.chunk, session)?;
                    Some([ranks.schedule, lower(verify(&whole)?)?])
                }
                Mode::Prefill | Mode::Train => None,
            };
            let steps = |step, i: usize| -> Result<cuda::Steps<'_>> {
                let prompts = prompts.as_ref().map(|of| schedule::verify(&of[i])).transpose()?;
                Ok(cuda::Steps { step: schedule::verify(step)?, prompts })
            };
            let emitted = cuda::emit(steps(&compiled.schedule, 0)?, Some(steps(&reference, 1)?))?;
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
    let Training { stages, micro_batches, optimizer, clip, .. } = workload.training;
    let refused = [
        (stages > 1, "stages of a pipeline"),
        (micro_batches > 1, "micro-batches"),
        (options.zero != Zero::Off, "ZeRO"),
        (optimizer.is_none(), "no optimizer"),
    ];
    if let Some((_, what)) = refused.into_iter().find(|(is_refused, _)| *is_refused) {
        let refusal =
            Diagnostic::new("S44", format!("the plan has {what}, which `--autograd` does not emit"));
        return Err(refusal
            .help("plan with `--zero 0 --micro-batches 1` and without `pp`, or omit `--autograd`")
            .into());
    }
    (session.progress)("compiling");
    let whole = import::import(&plan.model.config, &plan.model.name, &workload)?;
    let compiled = compile_with(session.registry, &whole, &options, &plan.cluster)?;
    let optimizer = torch::Optimizer { adamw: optimizer.unwrap_or(ADAMW), clip };
    Ok(torch::emit_autograd(&compiled.per_rank, &whole, &optimizer)?)
}

/// A step of prompts, under the layout of a plan and as the whole program.
fn prompts(
    plan: &Plan,
    token: &Workload,
    chunk: Option<u64>,
    session: &Session<'_>,
) -> Result<(Compiled, Module)> {
    let longest = token.cache.unwrap_or(CHUNK);
    let sequence = if import::encodes_prompts(&plan.model.config, &token.ignore)? {
        match chunk {
            None => longest,
            Some(_) => return Err(generate::whole_prompts().into()),
        }
    } else {
        chunk.unwrap_or(CHUNK).min(longest)
    };
    let workload = Workload { mode: Mode::Prefill, sequence, ..token.clone() };
    let options = plan.shard_options()?;
    let whole = import::program(&plan.model.config, &plan.model.name, &workload)?;
    let workload = subject::staged(workload, &options.mesh);
    let large = Large { config: &plan.model.config, name: &plan.model.name, workload: &workload };
    let job = large.job(session.registry, (options, plan.cluster.clone()))?;
    Ok((job.compile()?, whole))
}
