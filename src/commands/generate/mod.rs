//! `run --mode decode`: continues prompts by the largest logit, a schedule for prompts and one for single tokens.

mod pages;
mod prompts;
mod results;
mod saved;
mod stops;

use std::time::Duration;

use ithaca_ir::diagnostic::counted;
use ithaca_ir::entity::Entity;
use ithaca_ir::ops::Binding;
use ithaca_ir::ops::cache::CACHE;
use ithaca_ir::{Diagnostic, Module, Op};
use ithaca_kernels::launch::{NextStep, Process, Step};
use ithaca_kernels::store::{self, Layered, RandomTensors, TensorSource, Tensors};
use ithaca_kernels::tensor::{Tensor, index};
use ithaca_kernels::{Outputs, Real, Storage, cpu, handover, oracle};
use ithaca_passes::import::{self, Pages};
use ithaca_passes::shard::parse_mesh;

use self::pages::PageTable;
use self::prompts::Prompts;
use self::results::{Generated, continuations, expected};
use self::saved::Prefix;
use self::stops::Stops;
use super::device::{Device, look_for_nan};
use super::run::{self, Data};
use super::session::{CommandOutput, Session};
use super::verdict::{AgainstWhole, Report, TOKENS, against, tolerance};
use crate::cli::{DecodingArgs, Mode, RunArgs, StorageArg};
use crate::error::{Failure, Result};
use crate::job::Job;
use crate::subject::Offload;
use crate::{files, ineffective, subject};

/// Whether arguments ask to continue prompts.
pub(super) fn is_asked(args: &RunArgs) -> bool {
    args.subject.workload.mode == Some(Mode::Decode)
}

/// A step of a kind: of prompts, or of a token.
#[derive(Clone, Copy)]
enum Kind {
    Prompt,
    Token,
}

/// The prompts, then `steps` tokens more, unless all sequences are finished before; `step` computes a step of a kind from states
/// and inputs, and is told whether it is the last. `stops` says when sequences are finished, and whether this process knows.
fn generate<T: Real>(
    request: &Request,
    prompts: &Prompts,
    before: &dyn TensorSource,
    mut table: Option<PageTable>,
    (stops, process): (&Stops, Option<&Process>),
    mut step: impl FnMut(Kind, &dyn TensorSource, &Tensors, NextStep) -> Result<oracle::Results<T>>,
) -> Result<(Generated<T>, Kept<T>)> {
    let Request { batch, chunk, steps, .. } = *request;
    let (batch, chunk) = (index(batch), index(chunk));
    let mut lengths = request.had.clone();
    let mut generated = Generated::new(batch);
    let mut kept = Outputs::new();
    let parts = Vec::from_iter((0..prompts.longest()).step_by(chunk));
    let mut left = parts.len() as u64 + steps;
    let mut finished = vec![false; batch];
    let mut run = |kind, mut inputs: Tensors, ended: &[bool], finished: &mut Vec<bool>| -> Result<()> {
        left -= 1;
        for (length, new) in lengths.iter_mut().zip(inputs.read(NEW_TOKENS)?.data) {
            *length += new as u64;
        }
        if let Some(table) = &mut table {
            table.grow(&lengths);
            inputs.insert(PAGES, table.tensor());
        }
        let next = if left > 0 { NextStep::Continues } else { NextStep::Last };
        let states = Tensors::from(&kept);
        let results = step(kind, &Layered::new(&states, before), &inputs, next)?;
        generated.add(&results.outputs, ended);
        // A step may read states that only the step of prompts writes.
        kept.extend(results.kept);
        if !stops.is_empty() && left > 0 {
            let last = |(i, ended): (usize, &bool)| *ended && generated.last(i).is_some_and(|t| stops.has(t));
            let mut now: Vec<u8> = ended.iter().enumerate().map(|ended| u8::from(last(ended))).collect();
            if let Some(process) = process {
                // Rank 0 knows the tokens.
                now = process.shared(|| Ok(now))?;
            }
            finished.iter_mut().zip(now).for_each(|(finished, now)| *finished |= now > 0);
        }
        Ok(())
    };
    for start in parts {
        let ends = |ids: &Vec<f64>| (start + 1..=start + chunk).contains(&ids.len());
        let ended: Vec<bool> = prompts.sequences.iter().map(ends).collect();
        run(Kind::Prompt, prompts.part(start, chunk), &ended, &mut finished)?;
    }
    for _ in 0..steps {
        let grow = Vec::from_iter(finished.iter().map(|finished| !finished));
        if !grow.contains(&true) {
            break;
        }
        let new = grow.iter().map(|&grows| f64::from(u8::from(grows))).collect();
        let inputs = Tensors::from_iter([(NEW_TOKENS, Tensor::new(vec![batch], new))]);
        run(Kind::Token, inputs, &grow, &mut finished)?;
    }
    Ok((generated, Kept { states: kept, table }))
}

/// What the last step leaves.
struct Kept<T> {
    states: Outputs<T>,
    /// Where it is, of caches in pages.
    table: Option<PageTable>,
}

/// What is to be continued, and by how much.
struct Request {
    /// Random ones if nothing is given.
    prompts: Option<Prompts>,
    prefix: Option<Prefix>,
    /// Tokens that each sequence has before.
    had: Vec<u64>,
    /// Tokens of each sequence after the last step.
    lengths: Vec<u64>,
    /// Sequences.
    batch: u64,
    /// Tokens of the longest prompt.
    longest: u64,
    /// Tokens of a prompt that are computed at once.
    chunk: u64,
    /// Steps of one token.
    steps: u64,
    /// Tokens of each cache.
    context: u64,
}

impl Request {
    /// The request of the arguments.
    ///
    /// # Errors
    /// `C00` for sequences without a token, `C10` for files, `C19` for a cache that is too small.
    fn of(args: &RunArgs) -> Result<Self> {
        let prefix = args.decoding.prefix.as_deref().map(Prefix::open).transpose()?;
        let prompts = match (Prompts::of(args)?, &prefix) {
            (None, Some(prefix)) => Some(Prompts { sequences: vec![Vec::new(); prefix.lengths.len()] }),
            (prompts, _) => prompts,
        };
        let workload = &args.subject.workload;
        let lengths = prompts.as_ref().map(Prompts::lengths);
        let batch = lengths.as_ref().map_or(workload.batch.unwrap_or(1), |lengths| lengths.len() as u64);
        if let Some(asked) = workload.batch.filter(|&asked| asked != batch) {
            let message =
                format!("there are prompts of {}, and `--batch` is {asked}", counted(batch, "sequence"));
            return Err(Diagnostic::new("C00", message).help("leave `--batch` out").into());
        }
        let lengths = lengths.unwrap_or_else(|| vec![workload.seq.unwrap_or(RANDOM_TOKENS); index(batch)]);
        let longest = lengths.iter().copied().max().unwrap_or(0);
        let had = prefix.as_ref().map_or_else(|| vec![0; index(batch)], |prefix| prefix.lengths.clone());
        if had.len() != lengths.len() {
            let message = format!(
                "there are prompts of {}, and the file of `--prefix` has caches of {}",
                counted(batch, "sequence"),
                had.len()
            );
            return Err(Diagnostic::new("C00", message)
                .help("give a prompt for each of them, or none at all")
                .into());
        }
        let continues = lengths.iter().all(|&prompt| prompt == 0) && !had.contains(&0);
        if let Some(empty) = lengths.iter().position(|&tokens| tokens == 0).filter(|_| !continues) {
            let message = format!("the prompt of sequence {empty} has no token");
            return Err(Diagnostic::new("C00", message).help("give each sequence a token at least").into());
        }
        let after = had.iter().zip(&lengths).map(|(had, prompt)| had + prompt + args.steps);
        let after = Vec::from_iter(after);
        let needed = after.iter().copied().max().unwrap_or(0);
        let [of_prompts, ranks] = ranks_of_steps(args)?;
        let mut multiples = (1..=of_prompts).map(|i| i * ranks);
        let both = multiples.find(|n| n.is_multiple_of(of_prompts)).unwrap_or(ranks);
        let model = subject::model(&args.subject.subject)?;
        let is_described = import::program_text(&model.config).is_none();
        let facts =
            is_described.then(|| import::facts(&model.config, &workload.ignore_fields)).transpose()?;
        if let (Some(prompts), Some(facts)) = (&prompts, &facts) {
            prompts.check(facts.vocab)?;
        }
        let positions = facts.and_then(|facts| facts.learned_positions);
        let usual = needed.next_multiple_of(both * BLOCK);
        // As long as learned positions allow, and divisible by the ranks if that is long enough.
        let longest_of = |n: u64| if n - n % both >= needed { n - n % both } else { n };
        let usual = positions.filter(|&n| n < usual).map_or(usual, longest_of);
        let context = workload.context.unwrap_or(usual);
        if context < needed {
            let (prompt, steps) = (counted(longest, "token"), counted(args.steps, "step"));
            let parts = match had.iter().max() {
                None | Some(0) => format!("a prompt of {prompt} and {steps}"),
                Some(&had) if longest == 0 => format!("{} before and {steps}", counted(had, "token")),
                Some(&had) => format!("{} before, a prompt of {prompt} and {steps}", counted(had, "token")),
            };
            let (limit, help) = match positions.filter(|&n| n < needed) {
                Some(n) => (
                    format!("the model has learned {}", counted(n, "position")),
                    "use fewer `--steps`, or a shorter prompt".to_owned(),
                ),
                None => (
                    format!("`--context` is {context}"),
                    format!("use `--context {needed}`, or fewer `--steps`"),
                ),
            };
            let message = format!("{parts} need a cache of {needed} tokens, and {limit}");
            return Err(Diagnostic::new("C19", message).help(help).into());
        }
        let chunk = args.decoding.chunk.unwrap_or(longest).min(longest).max(1);
        Ok(Self { prompts, prefix, had, lengths: after, batch, longest, chunk, steps: args.steps, context })
    }
}

/// The pages of caches, and the groups of sequences that have some of their own.
type InPages = Option<(Pages, u64)>;

/// The jobs of prompts and of tokens, and the pages of their caches.
fn jobs(args: &RunArgs, request: &Request, session: &Session<'_>) -> Result<([Job; 2], InPages)> {
    let lengths = [request.batch, request.chunk, request.context];
    let workload = &args.subject.workload;
    subject::check_page(workload.page, Some(request.context))?;
    let model = subject::model(&args.subject.subject)?;
    if import::encodes_prompts(&model.config, &workload.ignore_fields)? {
        if request.chunk < request.longest {
            return Err(whole_prompts().into());
        }
        if request.prefix.is_some() && request.longest > 0 {
            let message = "caches of prompts that an encoder has read, and further prompts";
            return Err(Diagnostic::new("C00", message).help("omit the prompts, or `--prefix`").into());
        }
    }
    let mut in_pages = None;
    let of_prompts = [&args.decoding.prompt_strategy, &args.decoding.prompt_mesh];
    let jobs = subject::continuing(session.registry, &args.subject, of_prompts, lengths, |groups| {
        let Some(tokens) = workload.page else { return Ok(None) };
        let host = match subject::offload(workload)? {
            Offload::AsNeeded => {
                let message = "nothing says how many pages fit on the devices of a run";
                let help = "state how many are in host memory, as in `--offload cache=8`";
                return Err(Diagnostic::new("C00", message).help(help).into());
            }
            offload => offload.pages(),
        };
        let pages = pages::pages((tokens, workload.pages, host), &request.lengths, groups)?;
        in_pages = Some((pages, groups));
        Ok(Some(pages))
    })?;
    Ok((jobs, in_pages))
}

/// The refusal of prompts in parts.
pub(super) fn whole_prompts() -> Diagnostic {
    let message = "the encoder of the model reads a prompt at once, and `--chunk` divides it";
    Diagnostic::new("C00", message).help("omit `--chunk`")
}

/// Compiles the jobs of the arguments.
///
/// # Errors
/// Those of the arguments and of the jobs.
pub(super) fn replay(args: &RunArgs, session: &Session<'_>) -> Result<()> {
    ineffective::decoding(args)?;
    Stops::of(args)?;
    let (jobs, _) = jobs(args, &Request::of(args)?, session)?;
    jobs.iter().try_for_each(|job| job.compile().map(drop))
}

/// The failure of a step. Where caches take most of the memory that is missing, it says how to make them smaller.
fn too_large(mut failure: Failure, program: &Module) -> Failure {
    let runs = program.run_counts();
    let elements = |is_counted: fn(&Op) -> Option<&Binding>| {
        let nodes =
            program.functions.iter().flat_map(|(id, f)| f.nodes.iter().map(move |node| (id, f, node)));
        let sizes = nodes.filter_map(|(id, f, node)| {
            let shape = is_counted(&node.op)?.stored_shape(&program.space, f.ty(*node.results.first()?));
            Some(shape.into_iter().map(u128::from).product::<u128>() * u128::from(runs[id.index()]))
        });
        sizes.sum::<u128>()
    };
    let caches = elements(|op| match op {
        Op::State(binding) if binding.name.starts_with(CACHE) => Some(binding),
        _ => None,
    });
    let weights = elements(|op| if let Op::Param(binding) = op { Some(binding) } else { None });
    for diagnostic in failure.diagnostics.iter_mut().filter(|d| d.code == "C11" && caches > weights) {
        diagnostic
            .helps
            .push("caches need most of them: use fewer `--steps`, or a smaller `--context`".to_owned());
    }
    failure
}

/// The ranks of the steps of prompts, and of those of tokens.
fn ranks_of_steps(args: &RunArgs) -> Result<[u64; 2]> {
    let tokens = subject::mesh(&args.subject.layout)?.1.unwrap_or(1);
    let mesh = args.decoding.prompt_mesh.as_deref().map(parse_mesh).transpose()?;
    Ok([mesh.map_or(tokens, |mesh| mesh.ranks()), tokens])
}

/// The ranks of all steps: those of two pools together.
///
/// # Errors
/// As [`subject::mesh`].
pub(super) fn ranks(args: &RunArgs) -> Result<u64> {
    let [prompts, tokens] = ranks_of_steps(args)?;
    Ok(if args.decoding.two_pools || prompts != tokens { prompts + tokens } else { tokens })
}

/// Runs the ranks of this process.
pub(super) fn run(
    args: &RunArgs,
    session: &mut Session<'_>,
    process: Option<&Process>,
) -> Result<CommandOutput> {
    ineffective::decoding(args)?;
    let stops = Stops::of(args)?;
    let is_first = process.is_none_or(Process::is_first);
    for path in [&args.output, &args.decoding.save_cache].into_iter().flatten().filter(|_| is_first) {
        files::check_file(path)?;
        store::check_writable(path)?;
    }
    let mut request = Request::of(args)?;
    let (jobs, in_pages) = jobs(args, &request, session)?;
    let [prompt, token] = &jobs;
    let mut progress = |activity: &str| {
        if is_first {
            (session.progress)(activity);
        }
    };
    progress("compiling");
    let compiled = [prompt.compile()?, token.compile()?];
    let DecodingArgs { prompt_strategy, prompt_mesh, two_pools, .. } = &args.decoding;
    let have_own_layout = *two_pools || prompt_strategy.is_some() || prompt_mesh.is_some();
    let schedules = [0, 1].map(|i| &compiled[i].schedule);
    let handover = have_own_layout
        .then(|| super::handover::between(schedules, *two_pools, super::handover::SAME_CACHES));
    let handover = handover.transpose()?;
    let open = |i: usize| Device::open(&compiled[i].schedule, args, process);
    let devices = [open(0)?, open(1)?];
    let from = match (&args.decoding.prompt, &args.subject.inputs, &request.prefix) {
        (Some(_), _, _) => "as given",
        (None, Some(_), _) => "from file",
        (None, None, Some(_)) => "none",
        (None, None, None) => "random",
    };
    let data = Data::of_weights(&jobs, &args.subject, from)?;
    let weights = data.weights();
    let prompts = request.prompts.take().map_or_else(
        || {
            let random = RandomTensors::of_module(&prompt.program, args.subject.seed.unwrap_or(0));
            let ids = RandomTensors::read(&random, "input_ids")?;
            Ok(Prompts { sequences: ids.data.chunks(index(request.longest)).map(<[f64]>::to_vec).collect() })
        },
        Ok::<_, Failure>,
    )?;
    let table = || {
        let (pages, groups) = in_pages?;
        let mut table = PageTable::new(pages, request.context, index(request.batch), groups);
        table.grow(&request.had);
        Some(table)
    };
    let continued = (request.prefix.is_some() && request.longest == 0).then(|| request.had.clone());
    let prefix = match (request.prefix.take(), &args.decoding.prefix) {
        (Some(prefix), Some(path)) => prefix.states(path, &compiled[1].schedule, table().as_ref())?,
        _ => Tensors::new(),
    };
    let before = Layered::new(&prefix, &weights);
    let storage = match args.storage() {
        StorageArg::Wide => Storage::Wide,
        StorageArg::Typed => Storage::AsTyped,
    };
    let timeout = Some(Duration::from_secs(args.timeout));
    let options =
        cpu::Options { timeout, storage, look_for_nan: look_for_nan(args), ..cpu::Options::default() };
    let mut settings = run::settings(args).to_vec();
    settings.push(("`--stop`", format!("{stops:?}")));
    let agreed = process.map(|process| {
        let first = handover.as_ref().and_then(|handover| handover.processes[1].first().copied());
        let [prompt, token] = [(0, 0), (1, first.unwrap_or(0))]
            .map(|(i, first)| process.agree(&compiled[i].schedule, first, &options, &settings));
        Ok::<_, Failure>([prompt?, token?])
    });
    let agreed = agreed.transpose()?;
    progress("running the schedules");
    let mut traffic = [Vec::new(), Vec::new()];
    let kinds = [0, 1].map(|i| (&jobs[i], &*compiled[i].per_rank));
    let mut against_whole =
        (is_first && args.expect.is_none() && !args.unchecked).then(|| AgainstWhole::new(&kinds, storage));
    let stopping = (&stops, process);
    let has_prompts = prompts.longest() > 0;
    let mut to_move = handover.as_ref().filter(|_| process.is_none() && has_prompts);
    let (generated, kept) =
        generate(&request, &prompts, &before, table(), stopping, |kind, states, inputs, next| {
            let device = &devices[kind as usize];
            let mut moved = Tensors::new();
            if let (Kind::Token, Some(handover)) = (kind, to_move) {
                let schedules = [0, 1].map(|i| &compiled[i].schedule);
                moved = Tensors::from(&handover::execute(handover, schedules, states)?);
                to_move = None;
            }
            let states: &dyn TensorSource = &Layered::new(&moved, states);
            let execution = match &agreed {
                None => device
                    .execute(&compiled[kind as usize].schedule, states, inputs, &options)
                    .map_err(|failure| too_large(failure, &token.program))?,
                Some(agreed) => {
                    match device.step(&agreed[kind as usize], (states, inputs), &options, next)? {
                        Step::Full(execution) => execution,
                        Step::Local(kept) => return Ok(oracle::Results { outputs: Outputs::new(), kept }),
                    }
                }
            };
            traffic[kind as usize] = execution.traffic;
            let results = oracle::Results { outputs: execution.outputs, kept: execution.kept };
            if let Some(against_whole) = &mut against_whole {
                against_whole.step(kind as usize, (states, inputs), &results)?;
            }
            Ok(results)
        })?;
    if !is_first {
        return Ok(CommandOutput::success(""));
    }
    let ends = generated.ends();
    let found = generated.outputs();
    let mut out = run::heading(token, &compiled[1].notes, (&data, session.width));
    if let Some(handover) = handover.as_ref().filter(|_| has_prompts) {
        let layouts = [0, 1]
            .map(|i| format!("{} {}", jobs[i].options.strategy, jobs[i].options.mesh).trim_end().to_owned());
        out.push_str(&super::handover::text(handover, [&layouts[0], &layouts[1]]));
    }
    for (name, traffic) in ["prompts", "a token"].into_iter().zip(&traffic) {
        out.push_str(&format!("step of {name}:\n{}", run::traffic_table(traffic)));
    }
    let report = match (&args.expect, against_whole) {
        (Some(path), _) => {
            let expected = expected(path, &found, (continued.as_deref(), &ends))?;
            against(&found, &expected, tolerance(&compiled[1].schedule, args), session.width)
        }
        (None, Some(against_whole)) => against_whole.report(session.width),
        (None, None) => Report::none(),
    };
    out.push_str(&continuations(&found, &ends, &stops));
    out.push_str(&report.text);
    if let Some(path) = &args.output {
        let tensors: Vec<_> = found.iter().map(|(name, t)| (name.as_str(), t.map(f64::from))).collect();
        let kind = |name: &str| if name == TOKENS { store::Stored::I64 } else { store::Stored::F32 };
        let stored: Vec<_> = tensors.iter().map(|(name, t)| (*name, kind(name), t)).collect();
        store::write(path, &stored)?;
    }
    if let Some(path) = &args.decoding.save_cache {
        saved::save(path, &kept.states, kept.table.as_ref())?;
        out.push_str(&format!("wrote {}\n", path.display()));
    }
    Ok(CommandOutput { text: out, code: u8::from(!report.passed) })
}

/// The input that has the number of new tokens of each sequence.
const NEW_TOKENS: &str = "new_tokens";

/// The input that has the pages of each sequence.
const PAGES: &str = "pages";

/// A cache has a multiple of this many tokens on each rank, so that any layout divides it.
const BLOCK: u64 = 16;

/// Tokens of random prompts.
const RANDOM_TOKENS: u64 = 16;
