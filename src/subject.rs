//! The subject of a command: finds models, clusters and plans, and makes programs of them.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use ithaca_ir::diagnostic::counted;
use ithaca_ir::ops::Movement;
use ithaca_ir::{DType, Diagnostic, Mesh};
use ithaca_passes::cluster::{self, Cluster};
use ithaca_passes::fuse::Fusion;
use ithaca_passes::fuse::prefetch::Prefetch;
use ithaca_passes::import::{self, Capacity, Documents, ExpertBound, Labels, Logits, Mode, Pages, Workload};
use ithaca_passes::movement::Partials;
use ithaca_passes::plan::Plan;
use ithaca_passes::registry::Registry;
use ithaca_passes::shard::strategy::STAGE_AXIS;
use ithaca_passes::shard::{
    AttentionChoice, HeadSplit, OrderChoice, Prune, SequenceFit, ShardOptions, Zero, parse_axes, parse_mesh,
    parse_movement,
};
use serde_json::Value;

use crate::cli::{self, DEFAULT_CLUSTER, LayoutArgs, SubjectArgs, WorkloadArgs};
use crate::error::{Failure, Result};
use crate::ineffective;
use crate::job::{self, Job, Large};
use crate::kind::{self, ExpectedKind, Kind};
use crate::{files, shrink};

/// A model description.
#[derive(Clone, Debug)]
pub struct Model {
    /// The name of its folder.
    pub name: String,
    /// The configuration.
    pub config: Value,
    /// The folder, which may hold weights.
    pub folder: PathBuf,
}

/// Reads a model description: a folder with `config.json`, or the file.
///
/// # Errors
/// `C01` for a missing file, `C02` for text that is not JSON, `C05` for another kind of file.
pub fn model(path: &Path) -> Result<Model> {
    let file = if path.is_dir() { path.join("config.json") } else { path.to_owned() };
    let config: Value = serde_json::from_str(&kind::read(&file, ExpectedKind::Model)?.text)
        .map_err(|e| Diagnostic::new("C02", format!("`{}` is not JSON: {e}", file.display())))?;
    let folder = file.parent().map(Path::to_owned).unwrap_or_default();
    let named =
        folder.canonicalize().ok().and_then(|f| f.file_name().map(|n| n.to_string_lossy().into_owned()));
    let name = named.unwrap_or_else(|| "model".to_owned());
    let config = import::text_part(&config).into_owned();
    Ok(Model { name, config, folder })
}

/// Reads a model description, or a program in text form, whose weights are inputs of runs.
///
/// # Errors
/// As [`model()`], and the mistakes of a program.
pub fn described(path: &Path) -> Result<Model> {
    if !matches!(kind::expect(path, ExpectedKind::Described)?, Kind::Program(_)) {
        return model(path);
    }
    let file = kind::read(path, ExpectedKind::Described)?;
    file.program()?;
    let name =
        path.file_stem().map_or_else(|| "program".to_owned(), |stem| stem.to_string_lossy().into_owned());
    let folder = path.parent().map(Path::to_owned).unwrap_or_default();
    Ok(Model { name, config: import::of_program(&file.text), folder })
}

/// Reads a plan.
///
/// # Errors
/// `C01` for a missing file, `C05` for another kind of file, and the errors of [`Plan::from_json`].
pub fn plan(registry: &Registry, path: &Path) -> Result<Plan> {
    let file = kind::read(path, ExpectedKind::Plan)?;
    Plan::from_json(registry, &path.display().to_string(), &file.text).map_err(Failure::from)
}

/// A cluster: a built-in profile's name, or the path of a file.
///
/// # Errors
/// `C01` for a missing file, `C05` for another kind of file, `M20` and `M21` for a file that does not describe a cluster,
/// `M22` for an unknown name.
pub fn cluster(name: &str) -> Result<Cluster> {
    let path = Path::new(name);
    let is_path = name.contains(['/', '\\']) || path.extension().is_some_and(|e| e == "toml");
    let is_other = || path.exists() && !cluster::names().contains(&name);
    if !is_path && !is_other() {
        return Ok(Cluster::named(name)?);
    }
    let file = kind::read(path, ExpectedKind::Cluster)?;
    Cluster::parse(name, &file.text).map_err(|refusal| file.refuse(vec![refusal]))
}

/// The cluster that arguments name, or the default, with the attention kernel that they name and the runtime of the mode.
///
/// # Errors
/// As [`cluster()`], and `M22` for a kernel that the cluster does not list and a runtime whose figures it lacks.
pub fn cluster_of(args: &LayoutArgs, mode: Option<cli::Mode>) -> Result<Cluster> {
    let mut cluster = cluster(args.cluster.as_deref().unwrap_or(DEFAULT_CLUSTER))?;
    if let Some(name) = &args.attention_kernel {
        cluster = cluster.with_attention_kernel(name)?;
    }
    let usual = if mode == Some(cli::Mode::Decode) { cluster.decoding_runtime() } else { cluster.runtime };
    let runtime = args.runtime.as_deref().map_or(Ok(usual), |text| usual.changed(text))?;
    Ok(cluster.with_runtime(runtime)?)
}

/// The lengths of given inputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lengths {
    /// Sequences.
    pub batch: u64,
    /// Tokens of each sequence.
    pub sequence: u64,
    /// Tokens of each sequence of the decoder, where the model has one.
    pub target: Option<u64>,
}

/// The workload of arguments; missing lengths are those of `fallback`.
///
/// # Errors
/// `C00` for a missing length and an unknown element type, `P02` for an option of the training step.
pub fn workload(args: &WorkloadArgs, fallback: Option<Lengths>) -> Result<Workload> {
    let dtype =
        match &args.dtype {
            None => None,
            Some(name) => Some(DType::parse(name).filter(|d| d.is_arithmetic()).ok_or_else(|| {
                Failure::usage(format!("`--dtype {name}` is not one of f64, f32, f16, bf16"))
            })?),
        };
    let mode = match args.mode {
        None | Some(cli::Mode::Prefill) => Mode::Prefill,
        Some(cli::Mode::Train) => Mode::Train,
        Some(cli::Mode::Decode) => Mode::Decode,
        Some(cli::Mode::Serve) => {
            let refusal =
                Diagnostic::new("C00", "`--mode serve` is a mode of `plan`, which makes no program of it");
            return Err(refusal.help("use `--mode decode` for the steps that serve").into());
        }
    };
    let batch = args.batch.or(fallback.map(|f| f.batch));
    let documents = args.documents.as_deref().map(documents).transpose()?;
    let of_documents = documents.as_ref().map(Documents::tokens);
    let of_step = (args.mode == Some(cli::Mode::Decode)).then_some(1);
    let sequence = of_step.or(args.seq).or(of_documents).or(fallback.map(|f| f.sequence));
    let target_sequence = args.target_seq.or(fallback.and_then(|f| f.target));
    let sequence = sequence.ok_or_else(|| {
        Failure::from(
            Diagnostic::new("C00", "the length of the sequence is missing")
                .help("add it, as in `--seq 8192`"),
        )
    })?;
    let logits = match args.logits {
        Some(cli::Logits::Last) => Logits::Last,
        None if mode == Mode::Decode => Logits::Last,
        Some(cli::Logits::All) | None => Logits::All,
    };
    let training = ineffective::training(&ineffective::settings(args, mode)?)?;
    let labels = Labels { ahead: u64::from(args.shift_labels), ..Labels::default() };
    let host = offload(args)?.pages();
    check_page(args.page, args.context)?;
    Ok(Workload {
        capacity: args.capacity.as_deref().map(Capacity::parse).transpose()?,
        expert_bound: Some(match &args.expert_bound {
            Some(text) => ExpertBound::parse(text)?,
            None => ExpertBound::default(),
        }),
        documents,
        logits,
        labels,
        training,
        batch: batch.unwrap_or(1),
        sequence,
        target_sequence,
        dtype,
        mode,
        cache: args.context,
        step: None,
        cache_type: args.cache_type.as_deref().map(cache_type).transpose()?,
        pages: args.page.map(|tokens| Pages { tokens, count: args.pages, host }),
        ignore: args.ignore_fields.clone(),
    })
}

/// Refuses pages longer than a cache: all that is behind its end is never used.
///
/// # Errors
/// `M09`.
pub fn check_page(page: Option<u64>, context: Option<u64>) -> Result<()> {
    let (Some(page), Some(context)) = (page, context) else { return Ok(()) };
    if page <= context {
        return Ok(());
    }
    let message = format!("a page of {} in caches of {context}", counted(page, "token"));
    Err(Diagnostic::new("M09", message).repairs([format!("--page {context}")]).into())
}

/// Refuses fewer pages than full caches of all sequences need.
///
/// # Errors
/// `C19`.
pub fn check_pages(workload: &Workload) -> Result<()> {
    let Some((needed, all)) = workload.pages_needed(workload.batch).filter(|(needed, all)| all < needed)
    else {
        return Ok(());
    };
    let (tokens, context) = (workload.pages.map_or(1, |pages| pages.tokens), workload.cache.unwrap_or(0));
    let message = format!(
        "{} of {context} tokens in caches need {} of {}, and `--pages` is {all}",
        counted(workload.batch, "sequence"),
        counted(needed, "page"),
        counted(tokens, "token"),
    );
    Err(Diagnostic::new("C19", message).repairs([format!("--pages {needed}")]).into())
}

/// Which states are in host memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Offload {
    /// None.
    None,
    /// Those of the optimizer.
    Optimizer,
    /// The pages of caches that do not fit on the GPUs.
    AsNeeded,
    /// So many pages of caches.
    Pages(u64),
}

impl Offload {
    /// The number of pages, where it is known.
    pub fn pages(self) -> Option<u64> {
        match self {
            Offload::None | Offload::Optimizer | Offload::AsNeeded => None,
            Offload::Pages(n) => Some(n),
        }
    }
}

/// The states that `--offload` asks to keep in host memory.
///
/// # Errors
/// `C00` for another value than `optimizer`, `cache` or `cache=N`, for caches without pages, and for as many pages as there
/// are, or more.
pub fn offload(args: &WorkloadArgs) -> Result<Offload> {
    let Some(text) = args.offload.as_deref() else { return Ok(Offload::None) };
    if text == "optimizer" {
        return Ok(Offload::Optimizer);
    }
    let number = match text.split_once('=') {
        None if text == "cache" => Some(0),
        Some(("cache", n)) => n.parse::<u64>().ok().filter(|&n| n > 0),
        None | Some(_) => None,
    };
    let refused = |message: String| {
        Diagnostic::new("C00", message)
            .help("write `--offload optimizer`, `--offload cache`, or `--offload cache=8` for 8 pages")
    };
    let n = number.ok_or_else(|| refused(format!("`--offload {text}` names no caches and no optimizer")))?;
    if args.page.is_none() {
        let message = format!("`--offload {text}` keeps pages of caches, and the caches have no pages");
        return Err(Diagnostic::new("C00", message).help("add their size, as in `--page 16`").into());
    }
    if n == 0 {
        return Ok(Offload::AsNeeded);
    }
    if args.pages.is_some_and(|all| n >= all) {
        return Err(refused(format!(
            "`--offload {text}` leaves no page of `--pages {}` on the GPUs",
            args.pages.unwrap_or(0)
        ))
        .into());
    }
    Ok(Offload::Pages(n))
}

/// The element type of caches of this name.
fn cache_type(name: &str) -> Result<DType> {
    let known = DType::parse(name).filter(|dtype| dtype.is_float() && *dtype != DType::F64);
    known.ok_or_else(|| Failure::usage(format!("`--cache-type {name}` is not one of f32, f16, bf16, f8e4m3")))
}

/// The file of lengths of documents that the value of `--documents` names, where it lists none.
pub(crate) fn documents_file(text: &str) -> Option<&Path> {
    let is_list = text.chars().all(|c| c.is_ascii_digit() || "kKmM*, ".contains(c));
    (!is_list).then(|| Path::new(text))
}

/// The lengths of documents that a text lists, or the file that it names.
fn documents(text: &str) -> Result<Documents> {
    let Some(file) = documents_file(text) else { return Ok(Documents::parse(text)?) };
    let lengths = files::read_text(file).map_err(|mut failure| {
        let help = "`--documents` takes lengths, as in `8k,512*30`, or a file of them";
        failure.diagnostics = failure.diagnostics.into_iter().map(|d| d.help(help)).collect();
        failure
    })?;
    Ok(Documents::parse(&lengths)?)
}

/// The workload with as many pipeline stages as the mesh has.
pub fn staged(mut workload: Workload, mesh: &Mesh) -> Workload {
    if let Some(axis) = mesh.axis(STAGE_AXIS) {
        workload.training.stages = mesh.size(axis);
    }
    workload
}

/// The workload with groups of tokens for so many GPUs, where a capacity was requested without groups.
pub fn grouped(workload: Workload, gpus: u64) -> Workload {
    let capacity = workload.capacity.map(|capacity| capacity.for_ranks(gpus, workload.sequence));
    Workload { capacity, ..workload }
}

/// The mesh that arguments name, and the number of GPUs; they must agree.
///
/// # Errors
/// `C00` for a mesh without axes, `P12` for a malformed one, `C04` when it has another number of ranks than GPUs.
pub fn mesh(args: &LayoutArgs) -> Result<(Option<Mesh>, Option<u64>)> {
    if args.mesh.as_deref().is_some_and(|mesh| mesh.trim().is_empty()) {
        let refusal = Diagnostic::new("C00", "`--mesh` is empty");
        return Err(refusal
            .help("name axes, as in `--mesh ulysses=4,tp=2`, or omit it for one device")
            .into());
    }
    let mesh = args.mesh.as_deref().map(parse_mesh).transpose()?;
    if let (Some(mesh), Some(gpus)) = (&mesh, args.gpus)
        && mesh.ranks() != gpus
    {
        let message = format!("mesh `{mesh}` has {}, but `--gpus` is {gpus}", counted(mesh.ranks(), "rank"));
        let help = format!("use `--gpus {}`, or a mesh of {}", mesh.ranks(), counted(gpus, "rank"));
        return Err(Diagnostic::new("C04", message).help(help).into());
    }
    let gpus = args.gpus.or(mesh.as_ref().map(Mesh::ranks));
    Ok((mesh, gpus))
}

/// The program and the layout that arguments describe.
///
/// `lengths` are those of the given inputs, for a model whose lengths are not given.
///
/// # Errors
/// The errors of the plan, the model, the program or the layout.
pub fn job(registry: &Registry, args: &SubjectArgs, lengths: Option<Lengths>) -> Result<Job> {
    let path = &args.subject;
    let is_config = path.file_name().is_some_and(|name| name == "config.json");
    let mut job = match kind::expect(path, ExpectedKind::Subject)? {
        Kind::Program(_) => text_job(registry, path, args)?,
        Kind::Plan => plan_job(registry, path, args)?,
        Kind::Json if !is_config => plan_job(registry, path, args)?,
        _ => model_job(registry, path, args, lengths)?,
    };
    if let Some(weights) = &args.weights {
        job.weights = Some(weights.clone());
    }
    Ok(job)
}

/// The jobs of a model that continues prompts: for the tokens of a prompt, `chunk` at once, and for one token of each sequence.
/// `pages` says which pages caches are in, from the number of ranks that have sequences of their own. Prompts may have a strategy and
/// a mesh of their own.
///
/// # Errors
/// As [`job`](fn@job); those of `pages`; `C04` for pages of sequences that prompts and tokens split otherwise.
pub fn continuing(
    registry: &Registry,
    args: &SubjectArgs,
    [prompt_strategy, prompt_mesh]: [&Option<String>; 2],
    [batch, chunk, context]: [u64; 3],
    pages: impl FnOnce(u64) -> Result<Option<Pages>>,
) -> Result<[Job; 2]> {
    let model = model(&args.subject)?;
    let (mut options, cluster) = layout(registry, &args.layout, Some(cli::Mode::Decode))?;
    let mut groups = job::sequence_groups(registry, &options)?;
    let mut of_prompts = options.clone();
    if prompt_strategy.is_some() || prompt_mesh.is_some() {
        let strategy = prompt_strategy.clone().or_else(|| args.layout.strategy.clone());
        let own = LayoutArgs {
            strategy: if prompt_mesh.is_some() { prompt_strategy.clone() } else { strategy },
            mesh: prompt_mesh.clone().or_else(|| args.layout.mesh.clone()),
            gpus: None,
            ..args.layout.clone()
        };
        (of_prompts, _) = layout(registry, &own, Some(cli::Mode::Decode))?;
        // Pages of the smaller groups are those of the larger ones, too.
        let other = job::sequence_groups(registry, &of_prompts)?;
        let (few, many) = (groups.min(other), groups.max(other));
        if args.workload.page.is_some() && !many.is_multiple_of(few) {
            let message = format!(
                "pages of {few} and of {many} groups of sequences, those of ranks of prompts and of tokens"
            );
            return Err(Diagnostic::new("C04", message)
                .help(
                    "split sequences into numbers of groups of which one divides the other, or omit `--page`",
                )
                .into());
        }
        groups = many;
    }
    let pages = pages(groups)?;
    ineffective::ignored(&args.workload.ignore_fields, &model.config)?;
    let lengths = Lengths { batch, sequence: chunk, target: None };
    let mut given = workload(&args.workload, Some(lengths))?;
    if args.workload.expert_bound.is_none() {
        // Tokens are few, and those behind the ends of prompts are all alike: the even share says little.
        given.expert_bound = None;
    }
    let steps = [Workload::cached(batch, chunk, context), Workload::decode(batch, context)];
    let notes = Vec::from_iter(ineffective::layout_notes(&args.layout, &options.mesh));
    let config = if args.shrink {
        let stages = staged(given.clone(), &options.mesh).training.stages;
        shrink::config(&model.config, &given.ignore, (context, options.mesh.ranks(), stages))?
    } else {
        model.config.clone()
    };
    let of_model = || (!args.shrink && has_weights(&model.folder)).then(|| model.folder.clone());
    let weights = args.weights.clone().or_else(of_model);
    if args.workload.offload.is_some() && args.layout.fuse.is_none() {
        for options in [&mut of_prompts, &mut options] {
            options.fusion = options.fusion.ahead(Prefetch::default());
        }
    }
    let job = |step: Workload, options: &ShardOptions| -> Result<Job> {
        let Workload { mode, sequence, logits, .. } = step;
        let workload = Workload {
            mode,
            batch,
            sequence,
            logits,
            cache: step.cache,
            step: Some(chunk),
            pages,
            ..given.clone()
        };
        let workload = grouped(staged(workload, &options.mesh), options.mesh.ranks());
        let large = Large { config: &config, name: &model.name, workload: &workload };
        let job = large.job(registry, (options.clone(), cluster.clone()))?;
        Ok(Job { weights: weights.clone(), notes: notes.clone(), ..job })
    };
    let [prompt, token] = steps;
    Ok([job(prompt, &of_prompts)?, job(token, &options)?])
}

/// Refuses to shrink a program in text form.
fn no_shrink() -> Failure {
    Failure::usage("`--shrink` needs the configuration of a model; a program in text form has fixed sizes")
}

/// Refuses the workload of arguments for a program in text form.
///
/// # Errors
/// `C00` where one is given.
pub fn own_workload(args: &WorkloadArgs) -> Result<()> {
    let Some(flag) = cli::first_given(args) else { return Ok(()) };
    Err(Failure::usage(format!(
        "`{flag}` describes the workload of a model; a program in text form has its own workload"
    )))
}

fn text_job(registry: &Registry, path: &Path, args: &SubjectArgs) -> Result<Job> {
    let program = kind::read(path, ExpectedKind::Subject)?.program()?;
    if args.shrink {
        return Err(no_shrink());
    }
    own_workload(&args.workload)?;
    let (options, cluster) = layout(registry, &args.layout, None)?;
    let notes = Vec::from_iter(ineffective::layout_notes(&args.layout, &options.mesh));
    Ok(Job { notes, ..Job::new(registry, program, (options, cluster)) })
}

fn model_job(registry: &Registry, path: &Path, args: &SubjectArgs, lengths: Option<Lengths>) -> Result<Job> {
    let model = model(path)?;
    let (options, cluster) = layout(registry, &args.layout, args.workload.mode)?;
    let fallback = if args.shrink {
        Some(Lengths { batch: 1, sequence: shrink::TOKENS, target: None })
    } else {
        lengths
    };
    ineffective::ignored(&args.workload.ignore_fields, &model.config)?;
    let workload = workload(&args.workload, fallback)?;
    let stages = options.mesh.axis(STAGE_AXIS).map_or(1, |axis| options.mesh.size(axis));
    ineffective::pipeline(&args.workload, (&workload, Some(stages)))?;
    let workload = grouped(staged(workload, &options.mesh), options.mesh.ranks());
    let mut notes = Vec::from_iter(ineffective::layout_notes(&args.layout, &options.mesh));
    let large = Large { config: &model.config, name: &model.name, workload: &workload };
    let job = large.job(registry, (options, cluster))?;
    let as_configured = |workload: &Workload| import::program(&model.config, &model.name, workload);
    notes.extend(ineffective::training_notes(&workload, &job.program, as_configured)?);
    if args.shrink {
        let compiled = job.draft()?;
        let mut small = shrink::job(&large, &job, &compiled.choices, &compiled.per_rank)?;
        notes.append(&mut small.notes);
        return Ok(Job { notes, ..small });
    }
    let weights = has_weights(&model.folder).then(|| model.folder.clone());
    Ok(Job { weights, notes, ..job })
}

fn plan_job(registry: &Registry, path: &Path, args: &SubjectArgs) -> Result<Job> {
    let plan = plan(registry, path)?;
    let weights = if args.shrink { None } else { weights_of(&plan, path) };
    let job = job_of_plan(registry, plan, args)?;
    Ok(Job { weights, ..job })
}

/// The job of a plan; the path of the subject names it in messages.
///
/// # Errors
/// The errors of the plan, and `C00` for options that the plan fixes.
pub fn job_of_plan(registry: &Registry, plan: Plan, args: &SubjectArgs) -> Result<Job> {
    if let Some(flag) = cli::first_given(&args.workload).or(cli::first_given(&args.layout)) {
        let message = format!("`{flag}` is fixed by the plan `{}`", args.subject.display());
        return Err(Diagnostic::new("C00", message).help("make another plan with `ithaca plan`").into());
    }
    let options = plan.shard_options()?;
    let workload = plan.workload_in_stages()?;
    let large = Large { config: &plan.model.config, name: &plan.model.name, workload: &workload };
    let job = large.job(registry, (options, plan.cluster.clone()))?;
    if args.shrink && import::program_text(&plan.model.config).is_some() {
        return Err(no_shrink());
    }
    if args.shrink {
        // The figures that the plan states are those of the real program, not of the small one.
        let compiled = plan.compile(registry)?;
        return shrink::job(&large, &job, &plan.choices, &compiled.per_rank);
    }
    let choices = Some(plan.choices.clone());
    Ok(Job { choices, plan: Some(Box::new(plan)), ..job })
}

/// The weights of a plan, which has no path: beside the configuration that it has, in the folder of the plan, in the current
/// folder, or in a folder of these; the first by name.
fn weights_of(plan: &Plan, plan_path: &Path) -> Option<PathBuf> {
    let of_plan = plan_path.parent().filter(|folder| !folder.as_os_str().is_empty());
    let here = Path::new(".");
    let candidates = [of_plan.unwrap_or(here), here].into_iter().flat_map(|folder| {
        let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
        let mut inside: Vec<PathBuf> =
            entries.map(|entry| entry.path()).filter(|path| path.is_dir()).collect();
        inside.sort();
        std::iter::once(folder.to_owned()).chain(inside)
    });
    let mut with_weights = candidates.filter(|folder| has_weights(folder));
    with_weights.find(|folder| model(folder).is_ok_and(|model| model.config == plan.model.config))
}

/// Whether a folder holds weights.
fn has_weights(folder: &Path) -> bool {
    ["model.safetensors", "model.safetensors.index.json"].iter().any(|name| folder.join(name).exists())
}

/// The layout of arguments: strategy and mesh, or one device.
fn layout(
    registry: &Registry,
    args: &LayoutArgs,
    mode: Option<cli::Mode>,
) -> Result<(ShardOptions, Cluster)> {
    let cluster = cluster_of(args, mode)?;
    let (mesh, gpus) = mesh(args)?;
    let strategy = args.strategy.clone();
    let (strategy, mesh) = match (strategy, mesh, gpus) {
        (None, None, None | Some(1)) => ("single".to_owned(), Mesh::single()),
        (named, Some(mesh), _) => (strategy_for(registry, named, &mesh, args)?, mesh),
        (Some(strategy), None, gpus) => {
            let mesh = only_mesh(registry, &strategy, gpus)?;
            (strategy, mesh)
        }
        (None, None, Some(gpus)) => {
            let message = format!("{gpus} GPUs need a layout, and no option names one");
            return Err(Diagnostic::new("C00", message)
                .help("name one with `--strategy` and `--mesh`, or make a plan with `ithaca plan`")
                .into());
        }
    };
    ineffective::layout(args, &mesh)?;
    let mut options = ShardOptions { strategy, ..layout_options(registry, args, Some(&mesh))? };
    let cluster = cluster.spread(mesh.ranks());
    options.mesh = mesh;
    Ok((options, cluster))
}

/// The strategy on a mesh, completed by what axes of the mesh imply.
fn strategy_for(
    registry: &Registry,
    named: Option<String>,
    mesh: &Mesh,
    args: &LayoutArgs,
) -> Result<String> {
    let implied = registry.with_implied(named.as_deref(), mesh, &own_axes(args)?);
    let is_complete = |name: &String| {
        let strategies = registry.product(name).unwrap_or_default();
        mesh.axes.values().all(|axis| strategies.iter().any(|s| s.axes().contains(&axis.name.as_str())))
    };
    let strategy = match (named, implied) {
        (None, implied) => implied.filter(is_complete),
        (Some(_), implied) => implied,
    };
    strategy.ok_or_else(|| {
        let known: BTreeSet<&str> = registry.strategies().flat_map(|s| s.axes().iter().copied()).collect();
        if let Some(axis) = mesh.axes.values().find(|axis| !known.contains(axis.name.as_str())) {
            let refusal =
                Diagnostic::new("C00", format!("no strategy has the axis `{}` of mesh `{mesh}`", axis.name));
            return refusal.names("axes", &axis.name, known).into();
        }
        let refusal = Diagnostic::new("C00", format!("mesh `{mesh}` has axes that several strategies use"));
        refusal
            .help("choose a strategy with `--strategy`; `ithaca list strategies` shows the axes of each")
            .into()
    })
}

/// The strategy of a request to the planner, completed by what axes of its mesh imply; `None` asks for all.
///
/// # Errors
/// As [`layout_options`].
pub fn requested_strategy(
    registry: &Registry,
    args: &LayoutArgs,
    mesh: Option<&Mesh>,
) -> Result<Option<String>> {
    match (&args.strategy, mesh) {
        (Some(named), Some(mesh)) => Ok(registry.with_implied(Some(named.as_str()), mesh, &own_axes(args)?)),
        (named, _) => Ok(named.clone()),
    }
}

/// The mesh axes that sequences have of their own.
fn own_axes(args: &LayoutArgs) -> Result<Vec<String>> {
    Ok(sequence_axes(args)?.into_iter().flat_map(|(_, axes)| axes).collect())
}

fn sequence_axes(args: &LayoutArgs) -> Result<Vec<(String, Vec<String>)>> {
    let items = args.sequence_axes.iter().flat_map(|list| list.split(','));
    let pairs = items.map(|item| {
        let (dim, axes) = pair("sequence-axes", item, "DIM=AXIS[+AXIS]")?;
        Ok((dim, parse_axes(&axes)))
    });
    pairs.collect()
}

/// The axes of sequences, if they are axes of the mesh, or of strategies where the mesh is searched.
///
/// # Errors
/// `P11` for another axis.
fn known_axes(
    registry: &Registry,
    sequences: Vec<(String, Vec<String>)>,
    mesh: Option<&Mesh>,
) -> Result<Vec<(String, Vec<String>)>> {
    let known: BTreeSet<&str> = match mesh {
        Some(mesh) => mesh.axes.values().map(|axis| axis.name.as_str()).collect(),
        None => registry.strategies().flat_map(|s| s.axes().iter().copied()).collect(),
    };
    for (dim, axes) in &sequences {
        if let Some(axis) = axes.iter().find(|axis| !known.contains(axis.as_str())) {
            let of = mesh.map_or_else(|| "no strategy has".to_owned(), |mesh| format!("mesh `{mesh}` lacks"));
            let message = format!("sequence `{dim}` is to be split by axis `{axis}`, which {of}");
            return Err(Diagnostic::new("P11", message)
                .names("axes", axis, known)
                .help(format!("or name the axis in the mesh too: `--mesh` with `{axis}=2`"))
                .into());
        }
    }
    Ok(sequences)
}

/// The two sides of `KEY=VALUE`.
fn pair(flag: &str, item: &str, form: &str) -> Result<(String, String)> {
    let sides = item.split_once('=').map(|(key, value)| (key.trim(), value.trim()));
    let (key, value) = sides
        .filter(|(key, value)| !key.is_empty() && !value.is_empty())
        .ok_or_else(|| Failure::usage(format!("`--{flag} {item}` is not {form}")))?;
    Ok((key.to_owned(), value.to_owned()))
}

/// The options of a layout on `mesh`, without strategy and mesh.
///
/// # Errors
/// `P02` for an unknown token order, fusion or ZeRO stage, and for text that is no movement; `P10` for an unknown strategy of a
/// layer, `P47` for an unknown movement, `P11` for an unknown axis of a sequence; `C00` for a malformed pair.
pub fn layout_options(registry: &Registry, args: &LayoutArgs, mesh: Option<&Mesh>) -> Result<ShardOptions> {
    let zero = args.zero.as_deref().map(Zero::parse).transpose()?.unwrap_or_default();
    let order = args.order.as_deref().filter(|&order| order != "auto");
    let own_axes = own_axes(args)?;
    let movement = |text: &String| -> Result<Movement> {
        let movement = parse_movement(text)?;
        registry.check_movement(&movement)?;
        Ok(movement)
    };
    let layers = args.layer_strategies.iter().map(|item| {
        let (layer, named) = pair("layer-strategy", item, "FUNCTION=NAME")?;
        registry.product(&named)?;
        let completed = mesh.and_then(|mesh| registry.with_implied(Some(named.as_str()), mesh, &own_axes));
        Ok((layer, completed.unwrap_or(named)))
    });
    Ok(ShardOptions {
        heads: match (args.uneven_heads, args.pad_heads) {
            (true, _) => HeadSplit::Uneven,
            (false, true) => HeadSplit::Pad,
            (false, false) => HeadSplit::Even,
        },
        sequence: match (args.uneven_sequence, args.pad_sequence) {
            (true, _) => SequenceFit::Uneven,
            (false, true) => SequenceFit::Pad,
            (false, false) => SequenceFit::Auto,
        },
        order: order.map(OrderChoice::parse).transpose()?,
        prune: if args.prune { Prune::Required } else { Prune::Allowed },
        zero,
        layers: layers.collect::<Result<_>>()?,
        attention: AttentionChoice {
            movement: args.movement.as_ref().map(movement).transpose()?,
            cross_movement: args.cross_movement.as_ref().map(movement).transpose()?,
            sequences: known_axes(registry, sequence_axes(args)?, mesh)?,
        },
        partials: args.partials.as_deref().map_or(Ok(Partials::default()), Partials::parse)?,
        fusion: args.fuse.as_deref().map_or(Ok(zero.usual_fusion()), Fusion::parse)?,
        ..ShardOptions::default()
    })
}

/// The mesh of a strategy with one axis.
fn only_mesh(registry: &Registry, strategy: &str, gpus: Option<u64>) -> Result<Mesh> {
    let strategies = registry.product(strategy)?;
    let axes: Vec<&str> = strategies.iter().flat_map(|s| s.axes()).copied().collect();
    match (axes.as_slice(), gpus) {
        ([], None | Some(1)) => Ok(Mesh::single()),
        ([], Some(n)) => {
            let message = format!("strategy `{strategy}` is for 1 GPU, but `--gpus` is {n}");
            Err(Diagnostic::new("C04", message).help("omit `--gpus`, or name another strategy").into())
        }
        ([axis], Some(gpus)) => Ok(Mesh::new([(*axis, gpus)])),
        _ => Err(Failure::usage(format!("strategy `{strategy}` needs `--mesh {}=N`", axes.join("=N,")))),
    }
}
