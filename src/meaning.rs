//! Which option means something where: what is asked for in vain is refused, with the reason.
//!
//! Here is what is known before anything is laid out. Whether a layout has a use for an option, such as a token order or
//! `--zero`, is known when it is made; those that have none say so in the notes of their plan.

use ithaca_ir::schedule::Schedule;
use ithaca_ir::{DType, Diagnostic, Diagnostics, Level, Mesh, Module};
use ithaca_passes::differentiate::{DropoutChoice, PipelineOrder, Training};
use ithaca_passes::import::{Mode, Workload};
use ithaca_passes::registry::Registry;
use ithaca_passes::shard::strategy::{self, STAGE_AXIS};
use serde_json::Value;

use crate::cli::{
    DeviceArg, LayoutArgs, OptArgs, RunArgs, StorageArg, SubjectArgs, VerifyArgs, WorkloadArgs,
};
use crate::error::{Failure, Result};
use crate::kind::Kind;
use crate::subject::Job;

/// An option of the training step as it was given.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Setting {
    /// Its name in a pipeline, as `micro_batches`.
    pub key: String,
    /// Its value.
    pub value: String,
    /// As it was written: `--micro-batches 4`, `--train lr=1e-4`.
    pub written: String,
}

/// An option, whether it was given, and what has to be so for it to mean something.
type Row<'a> = (&'a str, bool, std::result::Result<(), Vain>);

/// Why an option has no meaning, and what to do.
struct Vain {
    why: String,
    help: &'static str,
}

fn vain(why: impl Into<String>, help: &'static str) -> Vain {
    Vain { why: why.into(), help }
}

/// Refuses the first option that was given in vain.
fn refuse<'a>(rows: impl IntoIterator<Item = Row<'a>>) -> Result<()> {
    for (option, is_given, meaning) in rows {
        if let (true, Err(Vain { why, help })) = (is_given, meaning) {
            let refusal = Diagnostic::new("C00", format!("`{option}` {why}"));
            return Err(if help.is_empty() { refusal } else { refusal.help(help) }.into());
        }
    }
    Ok(())
}

fn unless(is_vain: bool, why: impl Into<String>, help: &'static str) -> std::result::Result<(), Vain> {
    if is_vain { Err(vain(why, help)) } else { Ok(()) }
}

/// The options of the training step.
///
/// # Errors
/// `C00` where the mode is another, for an option that is said twice, and for what is no `KEY=VALUE`.
pub fn settings(args: &WorkloadArgs, mode: Mode) -> Result<Vec<Setting>> {
    let WorkloadArgs { recompute, loss_chunks, micro_batches, pipeline, training, shift_labels, .. } = args;
    let flags = [
        ("recompute", recompute),
        ("loss_chunks", loss_chunks),
        ("micro_batches", micro_batches),
        ("pipeline", pipeline),
    ];
    let of_training = |option: &str, is_given: bool| {
        let why = format!("is an option of training, and the mode is {}", mode.name());
        refuse([(option, is_given, unless(mode != Mode::Train, why, "add `--mode train`"))])
    };
    let mut settings: Vec<Setting> = Vec::new();
    for (key, value) in flags {
        let flag = format!("--{}", key.replace('_', "-"));
        of_training(&flag, value.is_some())?;
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
            let message = format!("`{written}` and `{}` are one option, said twice", other.written);
            return Err(Failure::usage(message));
        }
        settings.push(Setting { key, value, written });
    }
    Ok(settings)
}

/// What orders and cuts stages of a pipeline has a meaning where there are some; `stages` says how many the mesh has,
/// where that is known.
///
/// # Errors
/// `C00`.
pub fn pipeline(args: &WorkloadArgs, training: &Training, stages: Option<u64>) -> Result<()> {
    let settings = settings(args, Mode::Train)?;
    let interleaved = training.pipeline == PipelineOrder::Interleaved;
    let number = training.stages;
    for Setting { key, written, .. } in &settings {
        let meaning = match (key.as_str(), stages) {
            ("stages", Some(n)) if n > 1 => {
                unless(n != number, format!("and `{STAGE_AXIS}={n}` of the mesh do not go together"), "")
            }
            ("pipeline", Some(0 | 1)) => Err(vain(
                "says in which order stages run, and the layout has no stages",
                "as in `--strategy pipeline --mesh pp=2 --micro-batches 4`",
            )),
            ("chunks", _) => unless(
                !interleaved,
                "is for stages that are interleaved, and these are not",
                "add `--pipeline interleaved`",
            ),
            _ => Ok(()),
        };
        refuse([(written.as_str(), true, meaning)])?;
    }
    Ok(())
}

/// How many stages the layouts of a request have, where all have as many; nothing where a search may try several.
pub fn stages_of(
    registry: &Registry,
    layout: &LayoutArgs,
    mesh: Option<&Mesh>,
    training: &Training,
) -> Option<u64> {
    let of_mesh = |mesh: &Mesh| mesh.axis(STAGE_AXIS).map_or(1, |axis| mesh.size(axis));
    let named = layout.strategy.as_deref().map(|name| strategy::product(registry, name));
    let has_stages = match named {
        Some(Ok(strategies)) => strategies.iter().any(|s| s.axes().contains(&STAGE_AXIS)),
        // Another rule refuses it.
        Some(Err(_)) => true,
        None => mesh.is_none() && training.micro_batches > 1,
    };
    match (has_stages, mesh) {
        (true, None) => None,
        (_, Some(mesh)) => Some(of_mesh(mesh)),
        (false, None) => Some(1),
    }
}

/// Options of a layout that is settled, of something that is run or verified here.
///
/// # Errors
/// `C00`.
pub fn layout(args: &LayoutArgs, mesh: &Mesh) -> Result<()> {
    let why = "names the prices by which collectives are chosen, and one device has no collectives";
    let help = "what a step takes there is said by `ithaca plan` with `--gpus 1`";
    refuse([("--cluster", args.cluster.is_some(), unless(mesh.ranks() == 1, why, help))])
}

/// What is to be said of options of a layout that change nothing of it, beside what its passes say.
pub fn layout_notes(args: &LayoutArgs, mesh: &Mesh) -> Option<String> {
    let fuse = args.fuse.as_deref().filter(|_| mesh.ranks() == 1)?;
    let is_idle = fuse.split('+').all(|pass| matches!(pass.trim(), "fold" | "pack"));
    is_idle.then(|| format!("`--fuse {fuse}` has no effect: one device has no collectives"))
}

/// What is to be said of options of a training step that change nothing of it: `step` is what they make of a program,
/// `as_configured` what it is where all is dropped that the configuration says.
///
/// # Errors
/// Those of `as_configured`.
pub fn training_notes(
    workload: &Workload,
    step: &Module,
    as_configured: impl FnOnce(&Workload) -> std::result::Result<Module, Diagnostics>,
) -> Result<Option<String>> {
    if workload.mode != Mode::Train || workload.training.dropout != DropoutChoice::Off {
        return Ok(None);
    }
    let training = Training { dropout: DropoutChoice::Config, ..workload.training.clone() };
    let configured = as_configured(&Workload { training, ..workload.clone() })?;
    let is_idle = configured.functions == step.functions;
    Ok(is_idle.then(|| "`--train dropout=off` has no effect: the configuration drops nothing".to_owned()))
}

/// Fields that are to be ignored are there.
///
/// # Errors
/// `C00` for one that the description does not have.
pub fn ignored(fields: &[String], config: &Value) -> Result<()> {
    for field in fields {
        let nested = field.split('.').try_fold(config, |at, name| at.get(name));
        let is_there = nested.or_else(|| config.get(field)).is_some();
        let why = "names a field that the description does not have";
        refuse([(format!("--ignore-field {field}").as_str(), true, unless(!is_there, why, ""))])?;
    }
    Ok(())
}

/// Options of `run` that need another device, a training step, or something to compare.
///
/// # Errors
/// `C00`.
pub fn run(args: &RunArgs, job: &Job) -> Result<()> {
    let RunArgs { steps, collectives, tolerance, unchecked, device, .. } = args;
    self::steps(*steps, job)?;
    refuse([
        (
            "--collectives",
            collectives.is_some(),
            unless(*device == DeviceArg::Cpu, "goes with `--device cuda`", "threads meet in memory here"),
        ),
        (
            "--tolerance",
            tolerance.is_some(),
            unless(
                *unchecked,
                "says how far results may be from others, and `--unchecked` compares none",
                "",
            ),
        ),
    ])
}

/// More than one step, of a program that keeps something for the next.
///
/// # Errors
/// `C00`.
pub fn steps(n: u64, job: &Job) -> Result<()> {
    let why = "are steps of training, and the program keeps nothing from one to the next";
    refuse([(format!("--steps {n}").as_str(), n > 1, unless(!job.keeps(), why, "add `--mode train`"))])
}

/// What is to be said of options of `run` that change nothing of a schedule.
pub fn run_notes(args: &RunArgs, schedule: &Schedule) -> Vec<String> {
    let mut buffers = schedule.frames.values().flat_map(|frame| frame.buffers.values());
    let is_narrow = buffers.any(|buffer| matches!(buffer.dtype(), DType::BF16 | DType::F16));
    let is_idle = args.storage == Some(StorageArg::Typed) && args.device == DeviceArg::Cpu && !is_narrow;
    is_idle.then(|| "`--storage typed` has no effect: no value has 16 bits".to_owned()).into_iter().collect()
}

/// Options of `opt` that are of passes, where there are some.
///
/// # Errors
/// `C00`.
pub fn opt(args: &OptArgs, n_passes: usize) -> Result<()> {
    let meaning =
        |why: &str| unless(n_passes == 0, why, "name passes with `--pipeline`, or rules with `--rules`");
    refuse([
        (
            "--print-after",
            args.print_after.is_some(),
            meaning("prints what a pass makes, and no pass is named"),
        ),
        (
            "--verify-each",
            args.verify_each,
            meaning("says what is verified after a pass, and no pass is named"),
        ),
        (
            "--stop-after",
            args.stop_after.is_some(),
            meaning("counts rewrites of passes, and no pass is named"),
        ),
        (
            "--cluster",
            args.cluster.is_some(),
            meaning("has the prices by which passes choose, and no pass is named"),
        ),
    ])
}

/// A seed, where weights or inputs are random.
///
/// # Errors
/// `C00` where both are read from files.
pub fn seed(args: &SubjectArgs, is_random: bool) -> Result<u64> {
    let why = "is of random weights and inputs, and both are read from files";
    refuse([("--seed", args.seed.is_some(), unless(!is_random, why, ""))])?;
    Ok(args.seed.unwrap_or(0))
}

/// Options of `verify`.
///
/// # Errors
/// `C00`.
pub fn verify(args: &VerifyArgs) -> Result<()> {
    let subject = args.subject.subject.display();
    let why = format!("says what a schedule in text form is to compute, and `{subject}` is none");
    let help = "what is verified here has its program in itself";
    refuse([("--program", args.program.is_some(), Err(vain(why, help)))])?;
    let why = "says how far results may be from those of `--expect`, and nothing is expected";
    let help = "the whole program's own are compared in double precision, to 1e-9";
    refuse([("--tolerance", args.tolerance.is_some(), unless(args.expect.is_none(), why, help))])
}

/// That nothing is asked of a schedule in text form but that it be checked, against `program` where one is given. The
/// cluster is that by which a whole program is laid out.
///
/// # Errors
/// `C00`.
pub fn verify_schedule(args: &VerifyArgs, program: Option<Kind>) -> Result<()> {
    let VerifyArgs { subject, steps, expect, tolerance, program: _ } = args;
    let SubjectArgs { subject: _, workload: _, layout: _, inputs, weights, shrink, seed } = subject;
    let rows = [
        ("--inputs", inputs.is_some()),
        ("--weights", weights.is_some()),
        ("--shrink", *shrink),
        ("--seed", seed.is_some()),
        ("--steps", *steps > 1),
        ("--expect", expect.is_some()),
        ("--tolerance", tolerance.is_some()),
    ];
    let own = rows.into_iter().find(|(_, is_given)| *is_given).map(|(flag, _)| flag);
    let mut layout = subject.layout.clone();
    if program == Some(Kind::Program(Level::Program)) {
        layout.cluster = None;
    }
    let flag = of_workload(&subject.workload).or(of_layout(&layout)).or(own);
    let why = "has no meaning for a schedule, which is checked as it stands";
    refuse(flag.map(|flag| (flag, true, Err(vain(why, "")))))
}

/// A flag that describes a workload, if one is given.
pub fn of_workload(args: &WorkloadArgs) -> Option<&'static str> {
    let WorkloadArgs {
        seq,
        target_seq,
        batch,
        dtype,
        mode,
        ignore_fields,
        recompute,
        loss_chunks,
        micro_batches,
        pipeline,
        training,
        shift_labels,
        capacity,
    } = args;
    let given = [
        ("--seq", seq.is_some()),
        ("--target-seq", target_seq.is_some()),
        ("--batch", batch.is_some()),
        ("--dtype", dtype.is_some()),
        ("--mode", mode.is_some()),
        ("--ignore-field", !ignore_fields.is_empty()),
        ("--recompute", recompute.is_some()),
        ("--loss-chunks", loss_chunks.is_some()),
        ("--micro-batches", micro_batches.is_some()),
        ("--pipeline", pipeline.is_some()),
        ("--train", !training.is_empty()),
        ("--shift-labels", *shift_labels),
        ("--capacity", capacity.is_some()),
    ];
    given.into_iter().find(|(_, is_given)| *is_given).map(|(flag, _)| flag)
}

/// A flag that describes a layout, if one is given.
pub fn of_layout(args: &LayoutArgs) -> Option<&'static str> {
    let LayoutArgs {
        cluster,
        gpus,
        strategy,
        mesh,
        uneven_heads,
        pad_heads,
        pad_sequence,
        order,
        prune,
        zero,
        fuse,
        layer_strategies,
        movement,
        cross_movement,
        sequence_axes,
    } = args;
    let given = [
        ("--cluster", cluster.is_some()),
        ("--gpus", gpus.is_some()),
        ("--strategy", strategy.is_some()),
        ("--mesh", mesh.is_some()),
        ("--uneven-heads", *uneven_heads),
        ("--pad-heads", *pad_heads),
        ("--pad-sequence", *pad_sequence),
        ("--order", order.is_some()),
        ("--prune", *prune),
        ("--zero", zero.is_some()),
        ("--fuse", fuse.is_some()),
        ("--layer-strategy", !layer_strategies.is_empty()),
        ("--movement", movement.is_some()),
        ("--cross-movement", cross_movement.is_some()),
        ("--sequence-axes", !sequence_axes.is_empty()),
    ];
    given.into_iter().find(|(_, is_given)| *is_given).map(|(flag, _)| flag)
}
