//! The subject of a command: finds models, clusters and plans, and makes programs of them.

mod layout;
mod workload;

use std::path::{Path, PathBuf};

use ithaca_ir::Diagnostic;
use ithaca_passes::fuse::prefetch::Prefetch;
use ithaca_passes::import::{self, Pages, Workload};
use ithaca_passes::plan::Plan;
use ithaca_passes::registry::Registry;
use ithaca_passes::shard::ShardOptions;
use ithaca_passes::shard::strategy::STAGE_AXIS;
use serde_json::Value;

use crate::cli::{self, LayoutArgs, SubjectArgs, WorkloadArgs};
use crate::error::{Failure, Result};
use crate::ineffective;
use crate::job::{self, Job, Large};
use crate::kind::{self, ExpectedKind, Kind};
use crate::shrink;

use layout::layout;
pub use layout::{cluster, cluster_of, layout_options, mesh, requested_strategy};
pub(crate) use workload::documents_file;
pub use workload::{Lengths, Offload, check_page, check_pages, grouped, offload, staged, workload};

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
