//! `run`: runs the schedule, a thread per rank or on GPUs, and compares the outputs.

use std::fmt::Write;
use std::path::Path;
use std::time::Duration;

use clap::ValueEnum;
use ithaca_codegen::trace;
use ithaca_ir::diagnostic::counted;
use ithaca_ir::entity::Entity;
use ithaca_ir::schedule::Schedule;
use ithaca_ir::timeline::Span;
use ithaca_ir::traffic::Traffic;
use ithaca_ir::{Diagnostic, Module, Op};
use ithaca_kernels::cpu::{Timings, Trace};
use ithaca_kernels::launch::{NextStep, Process, Step};
use ithaca_kernels::store::{
    self, Layered, MODEL_PREFIXES, RandomTensors, Renamed, TensorSource, Tensors, training,
};
use ithaca_kernels::tensor::{Tensor, index};
use ithaca_kernels::{Outputs, Real, RunError, Storage, cpu, oracle};
use ithaca_passes::import::OPTIONAL_INPUTS;

use super::device::{Device, look_for_nan};
use super::fault;
use super::printed::{in_width, noted};
use super::session::{CommandOutput, Session};
use super::verdict::{AgainstWhole, Report, against_file, tolerance};
use crate::cli::{DeviceArg, RunArgs, StorageArg, SubjectArgs};
use crate::error::Result;
use crate::files;
use crate::ineffective;
use crate::job::Job;
use crate::kind;
use crate::subject::{self, Lengths};

pub(super) fn run(args: &RunArgs, session: &mut Session<'_>) -> Result<CommandOutput> {
    run_job(&job(args, session)?, args, session, None)
}

/// The job of the arguments.
pub(super) fn job(args: &RunArgs, session: &Session<'_>) -> Result<Job> {
    let lengths = args.subject.inputs.as_deref().map(lengths_of).transpose()?.flatten();
    let job = subject::job(session.registry, &args.subject, lengths)?;
    ineffective::run(args, &job.program)?;
    refuse_long(&job, args)?;
    Ok(job)
}

/// Compiles the job of the arguments.
///
/// # Errors
/// Those of the arguments and of the job.
pub(super) fn replay(args: &RunArgs, session: &Session<'_>) -> Result<()> {
    let compiled = job(args, session)?.compile()?;
    if !args.launch && args.device == DeviceArg::Cpu {
        refuse_minutes(&compiled.per_rank)?;
    }
    Ok(())
}

/// The settings that processes must agree on, beside the schedule.
pub(super) fn settings(args: &RunArgs) -> [(&'static str, String); 6] {
    [
        ("`--device`", spelling(&args.device)),
        ("number of `--steps`", args.steps.to_string()),
        ("`--storage`", spelling(&args.storage())),
        ("`--seed`", args.subject.seed.unwrap_or(0).to_string()),
        ("choice of `--resume`", args.resume.is_some().to_string()),
        ("choice of `--trace`", args.trace.is_some().to_string()),
    ]
}

/// The value of an option as the command line spells it.
fn spelling(value: &impl ValueEnum) -> String {
    value.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
}

/// Runs all ranks in this process, or one rank in one of several processes; the first process also compares and writes.
pub(super) fn run_job(
    job: &Job,
    args: &RunArgs,
    session: &mut Session<'_>,
    process: Option<&Process>,
) -> Result<CommandOutput> {
    let width = session.width;
    let is_first = process.is_none_or(Process::is_first);
    let mut progress = |activity: &str| {
        if is_first {
            (session.progress)(activity);
        }
    };
    let fault = args.fault.as_deref().map(fault::parse).transpose()?;
    for path in [&args.output, &args.trace].into_iter().flatten().filter(|_| is_first) {
        // A run may be long, so paths are checked first.
        files::check_file(path)?;
        store::check_writable(path)?;
    }
    progress("compiling");
    let compiled = job.compile()?;
    if process.is_none() && args.device == DeviceArg::Cpu {
        refuse_minutes(&compiled.per_rank)?;
    }
    let device = Device::open(&compiled.schedule, args, process)?;
    if let Some(fault) = &fault {
        fault.check(&compiled.schedule).map_err(RunError::from)?;
    }
    let save = args.save.as_deref().filter(|_| is_first);
    let save = save.map(|path| training::target(path, &compiled.schedule)).transpose()?;
    let resumed = args.resume.as_deref().map(|path| resumed(path, &compiled.schedule)).transpose()?;
    // A resumed run has its own weights, to which expected outputs need no model weights.
    let expect = args.expect.as_deref().filter(|_| resumed.is_none());
    let data = Data::open(job, &args.subject, expect)?;
    let (model, inputs) = (data.weights(), data.inputs());
    let over_model = resumed.as_ref().map(|r| Layered::new(&r.tensors, &model));
    let weights: &dyn TensorSource = match &over_model {
        Some(over_model) => over_model,
        None => &model,
    };
    progress("running the schedule");
    let storage = match args.storage() {
        StorageArg::Wide => Storage::Wide,
        StorageArg::Typed => Storage::AsTyped,
    };
    let look_for_nan = look_for_nan(args);
    let trace = match &args.trace {
        Some(_) => Trace::Spans,
        None => Trace::None,
    };
    let timeout = Some(Duration::from_secs(args.timeout));
    let options = cpu::Options { timeout, storage, look_for_nan, fault, trace, ..cpu::Options::default() };
    let mut traffic = Vec::new();
    let mut timings = Timings::default();
    let mut ran: Vec<Vec<Span>> = Vec::new();
    let agreed = process.map(|process| process.agree(&compiled.schedule, 0, &options, &settings(args)));
    let agreed = agreed.transpose()?;
    let mut left = args.steps;
    let mut against_whole = (is_first && args.expect.is_none() && !args.unchecked)
        .then(|| AgainstWhole::new(&[(job, &compiled.per_rank)], storage));
    let found = steps(args.steps, weights, |weights| {
        left -= 1;
        let execution = match &agreed {
            None => device.execute(&compiled.schedule, weights, inputs.as_ref(), &options)?,
            Some(agreed) => {
                let next = if left > 0 { NextStep::Continues } else { NextStep::Last };
                match device.step(agreed, (weights, inputs.as_ref()), &options, next)? {
                    Step::Full(execution) => execution,
                    Step::Local(kept) => return Ok(oracle::Results { outputs: Outputs::new(), kept }),
                }
            }
        };
        traffic = execution.traffic;
        timings.merge(&execution.timings);
        ran.push(execution.spans);
        let results = oracle::Results { outputs: execution.outputs, kept: execution.kept };
        if let Some(against_whole) = &mut against_whole {
            progress("running the whole program");
            against_whole.step(0, (weights, inputs.as_ref()), &results)?;
        }
        Ok(results)
    })?;
    if !is_first {
        return Ok(CommandOutput::success(""));
    }
    if let Some(path) = &args.trace {
        files::write(path, trace::emit_steps("measured", &ran).as_bytes())?;
    }
    if let Some(path) = &save {
        training::save(path, &compiled.schedule, &found.kept, weights, storage)?;
    }
    let found = all(found);
    let notes = [compiled.notes.clone(), ineffective::run_notes(args, &compiled.schedule)].concat();
    let mut out = heading(job, &notes, (&data, width));
    if let (Some(resumed), Some(path)) = (&resumed, &args.resume) {
        let after = resumed.step.map(|n| format!(" after step {n}")).unwrap_or_default();
        // Writing to a string cannot fail.
        let _ = writeln!(out, "resumed from {}{after}", path.display());
    }
    out.push_str(&traffic_table(&traffic));
    if args.timings {
        out.push_str(&timings_table(&timings));
    }
    let report = match (&args.expect, against_whole) {
        (Some(path), _) => against_file(&found, &tensors(path)?, tolerance(&compiled.schedule, args), width)?,
        (None, Some(against_whole)) => against_whole.report(width),
        (None, None) => Report::none(),
    };
    out.push_str(&report.text);
    if let Some(path) = &args.output {
        let tensors: Vec<_> = found.iter().map(|(name, t)| (name.as_str(), t.map(f64::from))).collect();
        let stored: Vec<_> = tensors.iter().map(|(name, t)| (*name, store::Stored::F32, t)).collect();
        store::write(path, &stored)?;
    }
    for path in [&save, &args.trace].into_iter().flatten() {
        let _ = writeln!(out, "wrote {}", path.display());
    }
    Ok(CommandOutput { text: out, code: u8::from(!report.passed) })
}

/// The tasks of all ranks and steps by kind: seconds, count, share.
fn timings_table(timings: &Timings) -> String {
    let rows = timings.rows();
    let all: Duration = rows.iter().map(|(_, timing)| timing.total).sum();
    let mut table = format!("{:>10}  {:>10}  {:>8}  {:>5}  task\n", "seconds", "processor", "count", "share");
    for (work, timing) in rows {
        let seconds = timing.total.as_secs_f64();
        let share = 100.0 * seconds / all.as_secs_f64().max(f64::MIN_POSITIVE);
        let busy = timing.busy.as_secs_f64();
        let _ = writeln!(table, "{seconds:>10.6}  {busy:>10.6}  {:>8}  {share:>4.0}%  {work}", timing.count);
    }
    table
}

/// Runs `n` steps, each with the states of the step before, and returns the results of the last.
pub(super) fn steps<T: Real>(
    n: u64,
    weights: &dyn TensorSource,
    mut step: impl FnMut(&dyn TensorSource) -> Result<oracle::Results<T>>,
) -> Result<oracle::Results<T>> {
    let mut results = step(weights)?;
    for _ in 1..n {
        let kept = Tensors::from(&results.kept);
        results = step(&Layered::new(&kept, weights))?;
    }
    Ok(results)
}

/// The outputs, then the weights and states of the step.
pub(super) fn all<T: Real>(results: oracle::Results<T>) -> Outputs<T> {
    let oracle::Results { mut outputs, kept } = results;
    outputs.extend(kept);
    outputs
}

/// Refuses programs that take many minutes; the limits were measured on two cores.
fn refuse_long(job: &Job, args: &RunArgs) -> Result<()> {
    // The oracle runs the whole program at about 1e9 FLOPs a second, and the runtime the schedule ten times as fast.
    let limit: u128 = match (args.device, args.expect.is_some() || args.unchecked) {
        (DeviceArg::Cuda, true) => return Ok(()),
        (DeviceArg::Cpu, true) => 4_000_000_000_000,
        (DeviceArg::Cpu | DeviceArg::Cuda, false) => 200_000_000_000,
    };
    let flops = job.flops().saturating_mul(u128::from(args.steps.max(1)));
    if flops <= limit {
        return Ok(());
    }
    let message = format!(
        "the run takes {:.1e} FLOPs in {}, and is given at most {:.1e}, minutes on a processor",
        flops as f64,
        counted(args.steps.max(1), "step"),
        limit as f64
    );
    let refusal = Diagnostic::new("C14", message);
    let refusal = match (args.subject.shrink, args.steps > 1) {
        (false, true) => {
            refusal.help("run a small model of the same structure with `--shrink`, or fewer `--steps`")
        }
        (false, false) => refusal.help("run a small model of the same structure with `--shrink`"),
        (true, _) => refusal.help("use fewer `--steps`, or a shorter `--seq`"),
    };
    let is_compared = args.expect.is_none() && !args.unchecked;
    let refusal = if is_compared {
        refusal.help("or add `--expect FILE`, so that the whole program is not run for comparison")
    } else {
        refusal
    };
    Err(refusal.into())
}

/// The most operations of all ranks in a step on one machine: as many take half a minute on two cores, however small they are.
const OPERATIONS: u64 = 1_000_000;

/// Refuses steps of very many small operations, as rings of hundreds of ranks have.
fn refuse_minutes(per_rank: &Module) -> Result<()> {
    let runs = per_rank.run_counts();
    let each: u64 = per_rank.functions.iter().map(|(id, f)| runs[id.index()] * f.nodes.len() as u64).sum();
    let ranks = per_rank.space.mesh.ranks();
    let all = each.saturating_mul(ranks);
    if all <= OPERATIONS {
        return Ok(());
    }
    let message = format!(
        "{} run {each} operations each, {all} in all, and a run on one machine has at most {OPERATIONS}",
        counted(ranks, "rank")
    );
    Err(Diagnostic::new("C14", message)
        .help("name a smaller mesh: the steps of a ring are as many as its ranks")
        .help("or run one process for each rank, on several machines: `--launch`")
        .into())
}

/// Weights and inputs.
pub(super) struct Data {
    weights: Box<dyn TensorSource>,
    inputs: Box<dyn TensorSource>,
    /// Optional inputs that the file does not have.
    zeros: Tensors,
    random_weights: bool,
    /// What inputs are called, and where they are from.
    inputs_from: [&'static str; 2],
}

impl Data {
    /// Opens the given files, and makes random tensors for the rest.
    ///
    /// # Errors
    /// `C10` for unreadable files, `C00` for expected outputs of random weights and for a seed without random tensors.
    pub(super) fn open(job: &Job, args: &SubjectArgs, expect: Option<&Path>) -> Result<Data> {
        let inputs = args.inputs.as_deref();
        // Random inputs and weights of one seed are reproducible, so the outputs of an earlier run may be expected. Inputs
        // from a file belong to a real model, which needs its weights.
        if let (Some(expect), Some(_), None) = (expect, inputs, &job.weights) {
            let message = format!(
                "the outputs in `{}` need the weights of the model, and the weights are random",
                expect.display()
            );
            return Err(Diagnostic::new("C00", message).help("add `--weights PATH`").into());
        }
        let seed = ineffective::seed(args, job.weights.is_none() || inputs.is_none())?;
        let random =
            |module: &Module| Box::new(RandomTensors::of_module(module, seed)) as Box<dyn TensorSource>;
        let (inputs, zeros, from) = match inputs {
            None => (random(&job.program), Tensors::default(), "random"),
            Some(path) => {
                let inputs = tensors(path)?;
                let zeros = optional_inputs(&job.program, inputs.as_ref());
                (inputs, zeros, "from file")
            }
        };
        Ok(Data {
            weights: match &job.weights {
                Some(path) => tensors(path)?,
                None => random(&job.program),
            },
            inputs,
            zeros,
            random_weights: job.weights.is_none(),
            inputs_from: ["inputs", from],
        })
    }

    /// Weights alone; prompts are `from` elsewhere.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub(super) fn of_weights(
        [prompt, job]: &[Job; 2],
        args: &SubjectArgs,
        from: &'static str,
    ) -> Result<Data> {
        let without = SubjectArgs { inputs: None, ..args.clone() };
        let mut data = Data { inputs_from: ["prompts", from], ..Self::open(job, &without, None)? };
        if data.random_weights {
            // An encoder has weights that steps of tokens lack.
            let random = RandomTensors::of_module(&job.program, args.seed.unwrap_or(0));
            let random = random.and_of(&prompt.program);
            data.weights = Box::new(random.without_caches());
        }
        Ok(data)
    }

    /// The weights; names in checkpoints of a bare model lack the prefix of a model with a head.
    pub(super) fn weights(&self) -> Renamed<'_, &dyn TensorSource> {
        Renamed::new(self.weights.as_ref(), &MODEL_PREFIXES)
    }

    pub(super) fn inputs(&self) -> Box<dyn TensorSource + '_> {
        if self.zeros.names().is_empty() {
            Box::new(self.inputs.as_ref())
        } else {
            Box::new(Layered::new(self.inputs.as_ref(), &self.zeros))
        }
    }

    fn description(&self) -> String {
        let weights = if self.random_weights { "random" } else { "from file" };
        let [inputs, from] = self.inputs_from;
        let zeros = self.zeros.names().iter().map(|name| format!(", {name} zero")).collect::<String>();
        format!("weights {weights}, {inputs} {from}{zeros}")
    }
}

/// Zeros for the optional inputs of a program that `inputs` does not have.
fn optional_inputs(program: &Module, inputs: &dyn TensorSource) -> Tensors {
    let nodes = program.functions.values().flat_map(|f| f.nodes.iter().map(move |node| (f, node)));
    let missing = nodes.filter_map(|(function, node)| {
        let Op::Input(binding) = &node.op else { return None };
        let is_missing =
            OPTIONAL_INPUTS.contains(&binding.name.as_str()) && inputs.shape(&binding.name).is_none();
        let shape = is_missing.then(|| binding.stored_shape(&program.space, function.ty(node.result())))?;
        Some((binding.name.clone(), zero(&shape)))
    });
    missing.collect()
}

/// A tensor of zeros.
fn zero(shape: &[u64]) -> Tensor<f64> {
    let shape: Vec<usize> = shape.iter().map(|&n| index(n)).collect();
    let n = shape.iter().product();
    Tensor::new(shape, vec![0.0; n])
}

/// Opens the tensors at a path.
pub(super) fn tensors(path: &Path) -> Result<Box<dyn TensorSource>> {
    kind::expect_tensors(path)?;
    Ok(store::open(path)?)
}

/// The checkpoint from which training continues.
fn resumed(path: &Path, schedule: &Schedule) -> Result<training::Resumed> {
    kind::expect_tensors(path)?;
    Ok(training::resume(path, schedule)?)
}

/// Lengths of `input_ids`, and of `decoder_input_ids`, in a file of inputs, if it has them.
pub(super) fn lengths_of(path: &Path) -> Result<Option<Lengths>> {
    let inputs = tensors(path)?;
    let target = match inputs.shape("decoder_input_ids").as_deref() {
        Some(&[_, target]) => Some(target),
        _ => None,
    };
    Ok(match inputs.shape("input_ids").as_deref() {
        Some(&[batch, sequence]) => Some(Lengths { batch, sequence, target }),
        _ => None,
    })
}

/// The first lines of a report, in lines of a width: model, layout, data, notes.
pub(super) fn heading(job: &Job, notes: &[String], (data, width): (&Data, usize)) -> String {
    let mut out = in_width(&format!("{}; {}", job.heading(), data.description()), width);
    out.extend(job.notes.iter().chain(notes).map(|note| noted(note, width)));
    out
}

pub(super) fn traffic_table(rows: &[Traffic]) -> String {
    if rows.is_empty() {
        return "no communication\n".to_owned();
    }
    let mut out = format!(
        "{:<16} {:<10} {:<9} {:>7} {:>20}\n",
        "collective", "axis", "phase", "count", "bytes sent per rank"
    );
    for row in rows {
        let (phase, most) = (row.phase.name(), row.bytes_sent_per_rank);
        let bytes = match row.filled_bytes_per_rank {
            Some(filled) => format!("{filled} of {most}"),
            None => most.to_string(),
        };
        let _ = writeln!(out, "{:<16} {:<10} {phase:<9} {:>7} {:>20}", row.kind, row.axis, row.count, bytes);
    }
    out
}
