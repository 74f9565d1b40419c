//! Options without effect: they are refused or noted, with the reason.
//!
//! The checks here need no layout. Whether a layout uses an option, such as a token order or `--zero`, is known once it is
//! made; the notes of its plan name the options without effect.

use std::path::Path;

use ithaca_ir::ops::cache::CACHE;
use ithaca_ir::schedule::Schedule;
use ithaca_ir::{DType, Diagnostic, Diagnostics, Level, Mesh, Module, Op};
use ithaca_passes::differentiate::{DropoutChoice, GradientType, PipelineOrder, Training};
use ithaca_passes::import::{Mode, Workload};
use ithaca_passes::registry::Registry;
use ithaca_passes::shard::strategy::STAGE_AXIS;
use serde_json::Value;

use crate::cli::{
    self, DeviceArg, LayoutArgs, OptArgs, RunArgs, StorageArg, SubjectArgs, VerifyArgs, WorkloadArgs,
};
use crate::error::{Failure, Result};
use crate::kind::{self, ExpectedKind, Kind};

/// An option of the training step, as given.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Setting {
    /// Its name in a pipeline: `micro_batches`.
    pub key: String,
    /// Its value.
    pub value: String,
    /// Its spelling: `--micro-batches 4`, `--train lr=1e-4`.
    pub written: String,
}

/// Refuses `option` if it is given without effect: `why` completes a sentence that begins with the option, `help` is the
/// repair, or empty.
fn refuse_if(is_ineffective: bool, option: &str, why: &str, help: &str) -> Result<()> {
    if !is_ineffective {
        return Ok(());
    }
    let refusal = Diagnostic::new("C00", format!("`{option}` {why}"));
    Err(if help.is_empty() { refusal } else { refusal.help(help) }.into())
}

/// The options of the training step.
///
/// # Errors
/// `C00` in another mode, for an option that is given twice, and for a text that is not `KEY=VALUE`.
pub fn settings(args: &WorkloadArgs, mode: Mode) -> Result<Vec<Setting>> {
    let WorkloadArgs {
        recompute, loss_chunks, micro_batches, pipeline, offload, training, shift_labels, ..
    } = args;
    let why = "is an option of prefill, and the mode is train";
    refuse_if(args.logits.is_some() && mode == Mode::Train, "--logits", why, "leave it out")?;
    let flags = [
        ("recompute", recompute),
        ("loss_chunks", loss_chunks),
        ("micro_batches", micro_batches),
        ("pipeline", pipeline),
        ("offload", &offload.clone().filter(|states| states == "optimizer")),
    ];
    let why = format!("is an option of training, and the mode is {}", mode.name());
    let of_training = |option: &str, is_given: bool| {
        refuse_if(is_given && mode != Mode::Train, option, &why, "add `--mode train`")
    };
    let mut settings: Vec<Setting> = Vec::new();
    for (key, value) in flags {
        let flag = format!("--{}", key.replace('_', "-"));
        // Stages of a forward pass compute micro-batches side by side as well.
        let option = if key == "offload" { "--offload optimizer" } else { &flag };
        of_training(option, value.is_some() && key != "micro_batches")?;
        let setting = |value: &String| Setting {
            key: key.to_owned(),
            value: value.clone(),
            written: format!("{flag} {value}"),
        };
        settings.extend(value.as_ref().map(setting));
    }
    of_training("--train", !training.is_empty())?;
    of_training("--shift-labels", *shift_labels)?;
    for item in training {
        let (key, value) = item.split_once('=').ok_or_else(|| {
            Failure::usage(format!("`--train {item}` is not KEY=VALUE, as in `--train recompute=full`"))
        })?;
        let (key, value) = (key.trim().to_owned(), value.trim().to_owned());
        let written = format!("--train {item}");
        if let Some(other) = settings.iter().find(|s| s.key == key) {
            let message = format!("`{written}` and `{}` set the same option twice", other.written);
            return Err(Failure::usage(message));
        }
        settings.push(Setting { key, value, written });
    }
    Ok(settings)
}

/// The training step of these settings.
///
/// # Errors
/// As [`Training::from_pipeline`], with the option as it was written.
pub fn training(settings: &[Setting]) -> Result<Training> {
    let pairs: Vec<(String, String)> = settings.iter().map(|s| (s.key.clone(), s.value.clone())).collect();
    let refused = |mut refusal: Diagnostic| {
        for Setting { key, value, written } in settings {
            let of_pass = format!("option `{key}={value}` of `differentiate`");
            refusal.message = refusal.message.replace(&of_pass, &format!("`{written}`"));
        }
        refusal
    };
    Ok(Training::from_pipeline(&pairs).map_err(refused)?)
}

/// Options of pipeline stages need stages; `stages` is their number in the mesh, where it is known.
///
/// # Errors
/// `C00`.
pub fn pipeline(args: &WorkloadArgs, (workload, stages): (&Workload, Option<u64>)) -> Result<()> {
    let Workload { mode, training, .. } = workload;
    for Setting { key, written, .. } in &settings(args, *mode)? {
        let (is_ineffective, why, help) = match (key.as_str(), stages) {
            ("micro_batches", Some(0 | 1)) => (
                *mode != Mode::Train && training.micro_batches > 1,
                "keeps the stages of a pipeline busy, and the layout has no stages".to_owned(),
                "add stages, as in `--strategy pipeline --mesh pp=2`",
            ),
            ("stages", Some(n)) if n > 1 => {
                let why = format!("contradicts `{STAGE_AXIS}={n}` of the mesh");
                (n != training.stages, why, "omit it: the mesh sets the number of stages")
            }
            ("pipeline", Some(0 | 1)) => (
                true,
                "orders the stages of a pipeline, and the layout has no stages".to_owned(),
                "add stages, as in `--strategy pipeline --mesh pp=2 --micro-batches 4`",
            ),
            ("stage_layers", Some(0 | 1)) => (
                true,
                "states the layers of stages, and the layout has no stages".to_owned(),
                "add stages, as in `--strategy pipeline --mesh pp=2 --micro-batches 4`",
            ),
            ("chunks", _) => (
                training.pipeline != PipelineOrder::Interleaved,
                "is for interleaved stages, and the stages are not interleaved".to_owned(),
                "add `--pipeline interleaved`",
            ),
            _ => continue,
        };
        refuse_if(is_ineffective, written, &why, help)?;
    }
    Ok(())
}

/// The number of stages of all layouts of a request; `None` where a search may try several numbers.
pub fn stages_of(registry: &Registry, layout: &LayoutArgs, mesh: Option<&Mesh>) -> Option<u64> {
    let of_mesh = |mesh: &Mesh| mesh.axis(STAGE_AXIS).map_or(1, |axis| mesh.size(axis));
    let named = layout.strategy.as_deref().map(|name| registry.product(name));
    let has_stages = match named {
        Some(Ok(strategies)) => strategies.iter().any(|s| s.axes().contains(&STAGE_AXIS)),
        // The planner refuses the strategy.
        Some(Err(_)) => true,
        None => mesh.is_none(),
    };
    match (has_stages, mesh) {
        (true, None) => None,
        (_, Some(mesh)) => Some(of_mesh(mesh)),
        (false, None) => Some(1),
    }
}

/// `--cluster` for a layout that is fixed: only its prices of collectives matter.
///
/// # Errors
/// `C00`.
pub fn layout(args: &LayoutArgs, mesh: &Mesh) -> Result<()> {
    refuse_if(
        args.cluster.is_some() && mesh.ranks() == 1,
        "--cluster",
        "has the prices of collectives, and one device has no collectives",
        "`ithaca plan` with `--gpus 1` prints the time of a step on the cluster",
    )
}

/// A note on `--fuse` where it has no effect that the passes would note.
pub fn layout_notes(args: &LayoutArgs, mesh: &Mesh) -> Option<String> {
    let fuse = args.fuse.as_deref().filter(|_| mesh.ranks() == 1)?;
    let is_ineffective = fuse.split('+').all(|pass| matches!(pass.trim(), "fold" | "pack"));
    is_ineffective.then(|| format!("`--fuse {fuse}` has no effect: one device has no collectives"))
}

/// Notes on options of the training step that change nothing: `step` is the program with them, `made` makes the program of other
/// options.
///
/// # Errors
/// Those of `made`.
pub fn training_notes(
    workload: &Workload,
    step: &Module,
    made: impl Fn(&Workload) -> std::result::Result<Module, Diagnostics>,
) -> Result<Vec<String>> {
    let Workload { mode, training, .. } = workload;
    if *mode != Mode::Train {
        return Ok(Vec::new());
    }
    let usual = [
        (
            Training { dropout: DropoutChoice::Config, ..training.clone() },
            "`--train dropout=off` has no effect: the configuration drops nothing",
        ),
        (
            Training { gradients: GradientType::Full, ..training.clone() },
            "`--train gradients=weights` has no effect: weights have the type of sums",
        ),
    ];
    let mut notes = Vec::new();
    for (usual, note) in usual.into_iter().filter(|(usual, _)| usual != training) {
        let usual = made(&Workload { training: usual, ..workload.clone() })?;
        notes.extend((usual.functions == step.functions).then(|| note.to_owned()));
    }
    Ok(notes)
}

/// `--ignore-field` needs a field that exists.
///
/// # Errors
/// `C00` for a field that the configuration does not have.
pub fn ignored(fields: &[String], config: &Value) -> Result<()> {
    for field in fields {
        let nested = field.split('.').try_fold(config, |at, name| at.get(name));
        refuse_if(
            nested.or_else(|| config.get(field)).is_none(),
            &format!("--ignore-field {field}"),
            "names a field that the configuration does not have",
            "",
        )?;
    }
    Ok(())
}

/// Options of `run` that need another device, a training step, or a comparison.
///
/// # Errors
/// `C00`.
pub fn run(args: &RunArgs, program: &Module) -> Result<()> {
    self::steps(args.steps, program)?;
    if let Some(option) = cli::first_given(&args.decoding) {
        let (why, help) = match kind::expect(&args.subject.subject, ExpectedKind::Subject)? {
            Kind::Plan => (
                "is for decoding token by token, and a plan is one step",
                "name the model and the layout in place of the plan: `ithaca run MODEL --mode decode --strategy … --mesh …`",
            ),
            _ => ("is for decoding", "add `--mode decode`, or omit it"),
        };
        refuse_if(true, &option, why, help)?;
    }
    any_run(args)
}

/// A plan of decoding is for tokens of caches of a length, whatever the prompts were.
///
/// # Errors
/// `C00`.
pub fn length(args: &WorkloadArgs) -> Result<()> {
    let is_decoding = args.mode == Some(cli::Mode::Decode);
    let why = "is the length of a step of prompts, and a step of decoding has one token of each sequence";
    refuse_if(is_decoding && args.seq.is_some(), "--seq", why, "use `--context` for the tokens in a cache")
}

/// Options of `run --mode decode`.
///
/// # Errors
/// `C00`.
pub fn decoding(args: &RunArgs) -> Result<()> {
    let RunArgs { save, resume, timings, trace, fault, .. } = args;
    let has_prompts = args.decoding.prompt.is_some() || args.subject.inputs.is_some();
    let why = "is the length of random prompts, and prompts are given";
    refuse_if(args.subject.workload.seq.is_some() && has_prompts, "--seq", why, "leave it out")?;
    let others = [
        ("--save", save.is_some(), "`--save-cache` writes the caches of decoding"),
        ("--resume", resume.is_some(), "`--prefix` continues from caches"),
        ("--timings", *timings, "omit it"),
        ("--trace", trace.is_some(), "omit it"),
        ("--fault", fault.is_some(), "omit it"),
    ];
    for (option, is_given, help) in others {
        refuse_if(is_given, option, "is for runs of one schedule, and decoding has two", help)?;
    }
    any_run(args)
}

fn any_run(args: &RunArgs) -> Result<()> {
    let RunArgs { collectives, tolerance, expect, device, .. } = args;
    refuse_if(
        collectives.is_some() && *device == DeviceArg::Cpu,
        "--collectives",
        "goes with `--device cuda`",
        "omit it: on the processor collectives are copies in memory",
    )?;
    self::tolerance(*tolerance, expect.as_deref())
}

fn tolerance(tolerance: Option<f64>, expect: Option<&Path>) -> Result<()> {
    refuse_if(
        tolerance.is_some() && expect.is_none(),
        "--tolerance",
        "limits the error against `--expect`, and no outputs are expected",
        "errors against the whole program are judged by those of one rank",
    )
}

/// Several steps need states that carry over from step to step.
///
/// # Errors
/// `C00`.
pub fn steps(n: u64, program: &Module) -> Result<()> {
    let mut nodes = program.functions.values().flat_map(|f| &f.nodes);
    // A step of decoding appends to caches at the places that its inputs say.
    let has_state =
        nodes.any(|node| matches!(&node.op, Op::Assign { binding, .. } if !binding.name.starts_with(CACHE)));
    refuse_if(
        n > 1 && !has_state,
        &format!("--steps {n}"),
        "are steps of training, and the program has no state that carries over",
        "add `--mode train`, or `--mode decode` for tokens",
    )
}

/// Notes on options of `run` that have no effect on a schedule.
pub fn run_notes(args: &RunArgs, schedule: &Schedule) -> Vec<String> {
    let mut buffers = schedule.frames.values().flat_map(|frame| frame.buffers.values());
    let is_narrow = buffers.any(|buffer| matches!(buffer.dtype(), DType::BF16 | DType::F16));
    let is_ineffective =
        args.storage == Some(StorageArg::Typed) && args.device == DeviceArg::Cpu && !is_narrow;
    is_ineffective
        .then(|| "`--storage typed` has no effect: no value has 16 bits".to_owned())
        .into_iter()
        .collect()
}

/// Options of `opt` that need a pass.
///
/// # Errors
/// `C00`.
pub fn opt(args: &OptArgs, n_passes: usize) -> Result<()> {
    let needs_pass = |option: &str, is_given: bool, why: &str| {
        let help = "name passes with `--pipeline`, or rules with `--rules`";
        let why = format!("{why}, and no pass is named");
        refuse_if(is_given && n_passes == 0, option, &why, help)
    };
    needs_pass("--print-after", args.print_after.is_some(), "prints the program after a pass")?;
    needs_pass("--verify-each", args.verify_each, "reports the verification after a pass")?;
    needs_pass("--stop-after", args.stop_after.is_some(), "counts rewrites of passes")?;
    needs_pass("--cluster", args.cluster.is_some(), "has the prices by which passes choose")
}

/// The seed of random weights or inputs.
///
/// # Errors
/// `C00` for a seed where weights and inputs are read from files.
pub fn seed(args: &SubjectArgs, is_random: bool) -> Result<u64> {
    refuse_if(
        args.seed.is_some() && !is_random,
        "--seed",
        "is for random weights and inputs, and both are read from files",
        "",
    )?;
    Ok(args.seed.unwrap_or(0))
}

/// Options of `verify` for a plan, a model or a program.
///
/// # Errors
/// `C00`.
pub fn verify(args: &VerifyArgs) -> Result<()> {
    let subject = args.subject.subject.display();
    refuse_if(
        args.program.is_some(),
        "--program",
        &format!(
            "names the program of a schedule or a per-rank program in text form, and `{subject}` is neither"
        ),
        "omit it: plans, models and whole programs need no other program",
    )?;
    tolerance(args.tolerance, args.expect.as_deref())
}

/// Options of `verify` for a per-rank program in text form: without a program to compare with, none.
///
/// # Errors
/// `C00`.
pub fn verify_per_rank(args: &VerifyArgs) -> Result<()> {
    let SubjectArgs { workload, layout, .. } = &args.subject;
    if let Some(option) = cli::first_given(layout) {
        return refuse_if(true, &option, "has no meaning for a per-rank program: its layout is fixed", "");
    }
    if args.program.is_some() {
        return Ok(());
    }
    let Some(option) = cli::first_given(workload).or(comparison(args)) else { return Ok(()) };
    let why = "is about the comparison with a whole program, and none is named";
    refuse_if(true, &option, why, "add `--program FILE`, with a plan, a model or a whole program")
}

/// The first option about the data of a comparison.
fn comparison(args: &VerifyArgs) -> Option<String> {
    let VerifyArgs { subject, steps, expect, tolerance, program: _ } = args;
    let SubjectArgs { subject: _, workload: _, layout: _, inputs, weights, shrink, seed } = subject;
    let others = [
        ("--inputs", inputs.is_some()),
        ("--weights", weights.is_some()),
        ("--shrink", *shrink),
        ("--seed", seed.is_some()),
        ("--steps", *steps > 1),
        ("--expect", expect.is_some()),
        ("--tolerance", tolerance.is_some()),
    ];
    let (first, _) = others.into_iter().find(|(_, is_given)| *is_given)?;
    Some(first.to_owned())
}

/// Options of `verify` for a schedule in text form: only `--program`, and `--cluster` for a whole program.
///
/// # Errors
/// `C00`.
pub fn verify_schedule(args: &VerifyArgs, program: Option<Kind>) -> Result<()> {
    let SubjectArgs { workload, layout, .. } = &args.subject;
    let mut layout = layout.clone();
    if program == Some(Kind::Program(Level::Program)) {
        layout.cluster = None;
    }
    let Some(option) = cli::first_given(workload).or(cli::first_given(&layout)).or(comparison(args)) else {
        return Ok(());
    };
    let why = "has no meaning for a schedule: its layout and data are fixed";
    refuse_if(true, &option, why, "")
}
