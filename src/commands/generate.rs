//! `run --mode decode`: continues prompts by the largest logit, a schedule for prompts and one for single tokens.

use std::path::Path;
use std::time::Duration;

use ithaca_ir::Diagnostic;
use ithaca_ir::diagnostic::counted;
use ithaca_kernels::launch::Process;
use ithaca_kernels::store::{self, Layered, RandomTensors, Renamed, TensorSource, Tensors};
use ithaca_kernels::tensor::{Tensor, index};
use ithaca_kernels::{Outputs, Real, Storage, cpu, oracle};

use super::device::{Device, look_for_nan};
use super::run::{self, Data, Expected, judge};
use super::session::{Done, Session};
use crate::cli::{Mode, RunArgs, StorageArg};
use crate::error::{Failure, Result};
use crate::subject;

/// Whether arguments ask to continue prompts.
pub(super) fn is_asked(args: &RunArgs) -> bool {
    args.subject.workload.mode == Some(Mode::Decode)
}

/// Token ids of each sequence.
struct Prompts {
    sequences: Vec<Vec<f64>>,
}

impl Prompts {
    /// Those of the arguments; `None` if they are to be random.
    fn of(args: &RunArgs) -> Result<Option<Self>> {
        let sequences = match (&args.prompt, &args.subject.inputs) {
            (Some(text), _) => text.split(';').map(parsed).collect::<Result<Vec<_>>>()?,
            (None, Some(path)) => stored(path)?,
            (None, None) => return Ok(None),
        };
        Ok(Some(Self { sequences }))
    }

    fn longest(&self) -> usize {
        self.sequences.iter().map(Vec::len).max().unwrap_or(0)
    }

    /// The inputs of a step that takes `chunk` tokens of each prompt from `start` on.
    fn part(&self, start: usize, chunk: usize) -> Tensors {
        let rows = self.sequences.iter().map(|ids| ids.get(start..).unwrap_or_default());
        let rows: Vec<&[f64]> = rows.map(|ids| &ids[..ids.len().min(chunk)]).collect();
        let padded =
            |row: &&[f64]| row.iter().copied().chain(std::iter::repeat(0.0)).take(chunk).collect::<Vec<_>>();
        let ids = rows.iter().flat_map(padded).collect();
        let new = rows.iter().map(|row| row.len() as f64).collect();
        let inputs = [
            ("input_ids", Tensor::new(vec![rows.len(), chunk], ids)),
            ("new_tokens", Tensor::new(vec![rows.len()], new)),
        ];
        inputs.into_iter().collect()
    }
}

fn parsed(text: &str) -> Result<Vec<f64>> {
    let ids = text.split([',', ' ']).map(str::trim).filter(|id| !id.is_empty());
    let id = |id: &str| {
        id.parse::<u32>().map(f64::from).map_err(|_| {
            let refusal = Diagnostic::new("C00", format!("`--prompt` has `{id}`, which is no token id"));
            Failure::from(refusal.help("give whole numbers, as in `--prompt 1,5,7`"))
        })
    };
    ids.map(id).collect()
}

/// The prompts in a file: `prompt_ids`, each as long as `prompt_lengths` says.
fn stored(path: &Path) -> Result<Vec<Vec<f64>>> {
    let file = store::open(path)?;
    let ids = file.read("prompt_ids")?;
    let lengths = file.read("prompt_lengths")?;
    let (rows, width) = (ids.shape.first().copied().unwrap_or(0), ids.shape.get(1).copied().unwrap_or(0));
    let fits = |length: &f64| *length >= 0.0 && length.fract() == 0.0 && *length <= width as f64;
    if ids.shape.len() != 2 || lengths.shape != [rows] || !lengths.data.iter().all(fits) {
        let message = format!(
            "`{}` has `prompt_ids` {:?} and `prompt_lengths` {:?}, not a length up to the number of ids for each sequence",
            path.display(),
            ids.shape,
            lengths.shape
        );
        return Err(Diagnostic::new("C10", message).into());
    }
    let sequences = ids.data.chunks(width.max(1)).zip(&lengths.data);
    Ok(sequences.map(|(ids, &length)| ids[..index(length as u64)].to_vec()).collect())
}

/// The tokens and logits of every step, and what it leaves.
struct Generated<T> {
    /// By sequence.
    tokens: Vec<Vec<T>>,
    /// By sequence.
    logits: Vec<Vec<T>>,
}

impl<T: Real> Generated<T> {
    fn new(batch: usize) -> Self {
        Self { tokens: vec![Vec::new(); batch], logits: vec![Vec::new(); batch] }
    }

    /// Adds what a step gave the sequences that it continued to their next token.
    fn add(&mut self, outputs: &Outputs<T>, ended: &[bool]) {
        let (Some(tokens), Some(logits)) = (outputs.get("token"), outputs.get("logits")) else { return };
        let width = logits.data.len() / ended.len().max(1);
        for (i, _) in ended.iter().enumerate().filter(|(_, ended)| **ended) {
            self.tokens[i].push(tokens.data[i]);
            self.logits[i].extend_from_slice(&logits.data[i * width..(i + 1) * width]);
        }
    }

    /// As outputs of a run: `tokens [sequence step]` and `step_logits [sequence step vocabulary]`.
    fn outputs(self) -> Outputs<T> {
        let batch = self.tokens.len();
        let steps = self.tokens.first().map_or(0, Vec::len);
        let logits: Vec<T> = self.logits.into_iter().flatten().collect();
        let width = logits.len() / (batch * steps).max(1);
        let tokens = Tensor::new(vec![batch, steps], self.tokens.into_iter().flatten().collect());
        let logits = Tensor::new(vec![batch, steps, width], logits);
        [("tokens".to_owned(), tokens), ("step_logits".to_owned(), logits)].into_iter().collect()
    }
}

/// A step of a kind: of prompts, or of a token.
#[derive(Clone, Copy)]
enum Kind {
    Prompt,
    Token,
}

/// The prompts, then `steps` tokens more; `step` computes a step of a kind from states and inputs.
fn generate<T: Real>(
    prompts: &Prompts,
    (chunk, steps): (usize, u64),
    weights: &dyn TensorSource,
    mut step: impl FnMut(Kind, &dyn TensorSource, &Tensors) -> Result<oracle::Results<T>>,
) -> Result<(Outputs<T>, Outputs<T>)> {
    let batch = prompts.sequences.len();
    let mut generated = Generated::new(batch);
    let mut kept = Outputs::new();
    let mut run = |kind, inputs: &Tensors, ended: &[bool]| -> Result<()> {
        let states = Tensors::from(&kept);
        let results = step(kind, &Layered::new(&states, weights), inputs)?;
        generated.add(&results.outputs, ended);
        kept = results.kept;
        Ok(())
    };
    for start in (0..prompts.longest()).step_by(chunk) {
        let ends = |ids: &Vec<f64>| (start + 1..=start + chunk).contains(&ids.len());
        let ended: Vec<bool> = prompts.sequences.iter().map(ends).collect();
        run(Kind::Prompt, &prompts.part(start, chunk), &ended)?;
    }
    let one = Tensors::from_iter([("new_tokens", Tensor::new(vec![batch], vec![1.0; batch]))]);
    for _ in 0..steps {
        run(Kind::Token, &one, &vec![true; batch])?;
    }
    Ok((generated.outputs(), kept))
}

/// Runs the ranks of this process.
pub(super) fn run(args: &RunArgs, session: &mut Session<'_>, process: Option<&Process>) -> Result<Done> {
    let is_first = process.is_none_or(Process::is_first);
    let given = Prompts::of(args)?;
    let workload = &args.subject.workload;
    let [batch, longest] = match &given {
        Some(prompts) => [prompts.sequences.len() as u64, prompts.longest() as u64],
        None => [workload.batch.unwrap_or(1), workload.seq.unwrap_or(RANDOM_TOKENS)],
    };
    if batch == 0 || given.as_ref().is_some_and(|prompts| prompts.sequences.iter().any(Vec::is_empty)) {
        return Err(Failure::usage("a prompt has no token"));
    }
    let needed = longest + args.steps;
    let ranks = subject::mesh(&args.subject.layout)?.1.unwrap_or(1);
    let context = workload.context.unwrap_or_else(|| needed.next_multiple_of(ranks * BLOCK));
    if context < needed {
        let message = format!(
            "a prompt of {} and {} need a cache of {needed} tokens, and `--context` is {context}",
            counted(longest, "token"),
            counted(args.steps, "step")
        );
        return Err(Diagnostic::new("C19", message)
            .help(format!("use `--context {needed}`, or fewer `--steps`"))
            .into());
    }
    let chunk = args.chunk.map_or(longest, |chunk| chunk.min(longest));
    let jobs = subject::continuing(session.registry, &args.subject, [batch, chunk, context]);
    let jobs = jobs.map_err(|mut refusal| {
        // A smaller cache would have no room for these prompts and steps.
        let repairs = refusal.diagnostics.iter_mut().map(|d| &mut d.repairs);
        repairs.for_each(|repairs| repairs.retain(|repair| !repair.starts_with("--context")));
        refusal
    })?;
    let [prompt, token] = &jobs;
    (session.progress)("compiling");
    let compiled = [prompt.compile()?, token.compile()?];
    let device = Device::open(&compiled[1].schedule, args, process)?;
    let data = Data::of_weights(token, &args.subject)?;
    let weights = data.weights();
    let prompts = match given {
        Some(prompts) => prompts,
        None => {
            let random = RandomTensors::of_module(&prompt.program, args.subject.seed.unwrap_or(0));
            let ids = RandomTensors::read(&random, "input_ids")?;
            Prompts { sequences: ids.data.chunks(index(longest)).map(<[f64]>::to_vec).collect() }
        }
    };
    let storage = match args.storage() {
        StorageArg::Wide => Storage::Wide,
        StorageArg::Typed => Storage::AsTyped,
    };
    let timeout = Some(Duration::from_secs(args.timeout));
    let options =
        cpu::Options { timeout, storage, look_for_nan: look_for_nan(args), ..cpu::Options::default() };
    let lengths = (index(chunk), args.steps);
    (session.progress)("running the schedules");
    let mut traffic = [Vec::new(), Vec::new()];
    let (found, _) = generate(&prompts, lengths, &weights, |kind, states, inputs| {
        let schedule = &compiled[kind as usize].schedule;
        let execution = device.execute(schedule, states, inputs, &options)?;
        traffic[kind as usize] = execution.traffic;
        Ok(oracle::Results { outputs: execution.outputs, kept: execution.kept })
    })?;
    if !is_first {
        return Ok(Done::success(""));
    }
    let mut out = run::heading(token, &compiled[1].notes, &data);
    for (name, traffic) in ["prompts", "a token"].into_iter().zip(&traffic) {
        out.push_str(&format!("step of {name}:\n{}", run::traffic_table(traffic)));
    }
    let tolerance = run::tolerance(&compiled[1].schedule, args);
    let judgement = match &args.expect {
        None if args.unchecked => run::Judgement { text: "compared with nothing\n".to_owned(), passed: true },
        Some(path) => {
            let expected = expected(path, &found)?;
            judge(&found, &Expected::Whole(&expected), run::rounding(), tolerance)?
        }
        None => {
            (session.progress)("running the whole program");
            let (whole, _) = generate(&prompts, lengths, &weights, |kind, states, inputs| {
                Ok(oracle::step::<f32>(jobs[kind as usize].reference(), states, inputs, Storage::Wide)?)
            })?;
            judge(&found, &Expected::Whole(&whole), run::rounding(), tolerance)?
                .of_layout(&compiled[1].per_rank)
        }
    };
    out.push_str(&continuations(&found));
    out.push_str(&judgement.text);
    if let Some(path) = &args.output {
        let tensors: Vec<_> = found.iter().map(|(name, t)| (name.as_str(), t.map(f64::from))).collect();
        let stored: Vec<_> = tensors.iter().map(|(name, t)| (*name, store::Stored::F32, t)).collect();
        store::write(path, &stored)?;
    }
    Ok(Done { text: out, code: u8::from(!judgement.passed) })
}

/// A cache has a multiple of this many tokens on each rank, so that any layout divides it.
const BLOCK: u64 = 16;

/// Tokens of random prompts.
const RANDOM_TOKENS: u64 = 16;

/// The expected outputs of a file, of as many steps as were run; all of them if it has fewer.
fn expected(path: &Path, found: &Outputs<f32>) -> Result<Outputs<f64>> {
    let file = store::open(path)?;
    let file = Renamed::new(file, &[]);
    let mut expected = Outputs::new();
    for (name, run) in found {
        if file.shape(name).is_none() {
            continue;
        }
        let all = file.read(name)?;
        let cut = |all: Tensor<f64>| -> Option<Tensor<f64>> {
            let (steps, wanted) = (*all.shape.get(1)?, *run.shape.get(1)?);
            if steps <= wanted || all.shape.len() != run.shape.len() {
                return Some(all);
            }
            let row: usize = all.shape[2..].iter().product();
            let data =
                all.data.chunks(steps * row).flat_map(|rows| rows[..wanted * row].iter().copied()).collect();
            let mut shape = all.shape.clone();
            shape[1] = wanted;
            Some(Tensor::new(shape, data))
        };
        if let Some(tensor) = cut(all) {
            expected.insert(name.clone(), tensor);
        }
    }
    Ok(expected)
}

/// The tokens of each sequence.
fn continuations(found: &Outputs<f32>) -> String {
    let Some(tokens) = found.get("tokens") else { return String::new() };
    let width = tokens.shape.get(1).copied().unwrap_or(1).max(1);
    let line = |(i, row): (usize, &[f32])| {
        let ids: Vec<String> = row.iter().map(|id| id.to_string()).collect();
        format!("sequence {i}: {}\n", ids.join(" "))
    };
    tokens.data.chunks(width).enumerate().map(line).collect()
}
