//! What a command is about: finds models, clusters and plans, and makes programs of them.

use std::path::{Path, PathBuf};

use ithaca_ir::diagnostic::counted;
use ithaca_ir::ops::{Op, Optimizer};
use ithaca_ir::{DType, Diagnostic, Mesh, Module, text};
use ithaca_passes::cluster::{self, Cluster};
use ithaca_passes::compile::{Compiled, compile_with};
use ithaca_passes::differentiate::{Recompute, Training};
use ithaca_passes::fuse::Fusion;
use ithaca_passes::import::{self, Capacity, Labels, Mode, Shrink, Workload};
use ithaca_passes::plan::Plan;
use ithaca_passes::planner::{self, Extended, Program};
use ithaca_passes::registry::Registry;
use ithaca_passes::shard::strategy::{DATA_AXIS, STAGE_AXIS};
use ithaca_passes::shard::{
    HeadSplit, OrderChoice, Prune, SequenceFit, ShardOptions, Zero, parse_axes, parse_mesh, parse_movement,
};
use serde_json::Value;

use crate::cli::{self, DEFAULT_CLUSTER, LayoutArgs, SubjectArgs, WorkloadArgs};
use crate::error::{Failure, Result};
use crate::kind::{self, Kind, Wanted};
use crate::meaning::{self, Setting};

/// A model description.
#[derive(Clone, Debug)]
pub struct Model {
    /// The name of its folder.
    pub name: String,
    /// The path as it was given.
    pub path: String,
    /// The configuration.
    pub config: Value,
    /// The folder, where weights may lie.
    pub folder: PathBuf,
}

/// Reads a model description: a folder with `config.json`, or the file.
///
/// # Errors
/// `C01` when there is none, `C02` when it is not JSON, `C05` when it is something else.
pub fn model(path: &Path) -> Result<Model> {
    let file = if path.is_dir() { path.join("config.json") } else { path.to_owned() };
    let text = kind::read(&file, Wanted::Model)?;
    let config = parse_json(&file, &text)?;
    let folder = file.parent().map(Path::to_owned).unwrap_or_default();
    let named =
        folder.canonicalize().ok().and_then(|f| f.file_name().map(|n| n.to_string_lossy().into_owned()));
    let name = named.unwrap_or_else(|| "model".to_owned());
    Ok(Model { name, path: path.display().to_string(), config, folder })
}

/// Reads a plan.
///
/// # Errors
/// `C01` when the file is missing, `C05` when it is something else, and what [`Plan::from_json`] refuses.
pub fn plan(registry: &Registry, path: &Path) -> Result<Plan> {
    let text = kind::read(path, Wanted::Plan)?;
    Plan::from_json_with(registry, &path.display().to_string(), &text).map_err(Failure::from)
}

/// A cluster: a built-in profile's name, or the path of a file.
///
/// # Errors
/// `C01` when the file is missing, `C05` when it is something else, `M20`–`M22` when it is no cluster or no profile has
/// the name.
pub fn cluster(name: &str) -> Result<Cluster> {
    let path = Path::new(name);
    let is_path = name.contains(['/', '\\']) || path.extension().is_some_and(|e| e == "toml");
    let is_other = || path.exists() && !cluster::names().contains(&name);
    match is_path || is_other() {
        true => Ok(Cluster::parse(name, &kind::read(path, Wanted::Cluster)?)?),
        false => Ok(Cluster::named(name)?),
    }
}

/// The cluster that arguments name, or the default.
///
/// # Errors
/// As [`cluster()`].
pub fn cluster_of(args: &LayoutArgs) -> Result<Cluster> {
    cluster(args.cluster.as_deref().unwrap_or(DEFAULT_CLUSTER))
}

/// Lengths of inputs at hand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lengths {
    /// Sequences.
    pub batch: u64,
    /// Tokens of each.
    pub sequence: u64,
    /// Tokens of each of the decoder, where there are such inputs.
    pub target: Option<u64>,
}

/// The workload that arguments describe; lengths that they leave open come from `fallback`.
///
/// # Errors
/// `C00` when there is no length or the element type is unknown.
pub fn workload(args: &WorkloadArgs, fallback: Option<Lengths>) -> Result<Workload> {
    let dtype =
        match &args.dtype {
            None => None,
            Some(name) => Some(DType::parse(name).filter(|d| d.is_float()).ok_or_else(|| {
                Failure::usage(format!("`--dtype {name}` is not one of f64, f32, f16, bf16"))
            })?),
        };
    let batch = args.batch.or(fallback.map(|f| f.batch));
    let sequence = args.seq.or(fallback.map(|f| f.sequence));
    let target_sequence = args.target_seq.or(fallback.and_then(|f| f.target));
    let sequence = sequence.ok_or_else(|| {
        Failure::from(
            Diagnostic::new("C00", "the length of the sequence is missing").help("as in `--seq 8192`"),
        )
    })?;
    let mode = match args.mode {
        None | Some(cli::Mode::Prefill) => Mode::Prefill,
        Some(cli::Mode::Train) => Mode::Train,
        Some(cli::Mode::Decode) => Mode::Decode,
    };
    let settings = meaning::settings(args, mode)?.into_iter();
    let settings: Vec<(String, String)> = settings.map(|Setting { key, value, .. }| (key, value)).collect();
    let training = Training::from_pipeline(&settings)?;
    let labels = Labels { ahead: u64::from(args.shift_labels), ..Labels::default() };
    Ok(Workload {
        capacity: args.capacity.as_deref().map(Capacity::parse).transpose()?,
        labels,
        training,
        batch: batch.unwrap_or(1),
        sequence,
        target_sequence,
        dtype,
        mode,
        ignore: args.ignore_fields.clone(),
    })
}

/// The workload with as many stages as the mesh has along its axis of stages.
pub fn staged(mut workload: Workload, mesh: &Mesh) -> Workload {
    if let (Mode::Train, Some(axis)) = (workload.mode, mesh.axis(STAGE_AXIS)) {
        workload.training.stages = mesh.size(axis);
    }
    workload
}

/// The mesh that arguments name, and the number of GPUs; they must agree.
///
/// # Errors
/// `C00` for a mesh without axes, `P12` for a malformed one, `C04` when its axes do not multiply to the GPUs.
pub fn mesh(args: &LayoutArgs) -> Result<(Option<Mesh>, Option<u64>)> {
    if args.mesh.as_deref().is_some_and(|mesh| mesh.trim().is_empty()) {
        let refusal = Diagnostic::new("C00", "`--mesh` names no axis");
        return Err(refusal.help("as in `--mesh ulysses=4,tp=2`; leave it out for one device").into());
    }
    let mesh = args.mesh.as_deref().map(parse_mesh).transpose()?;
    if let (Some(mesh), Some(gpus)) = (&mesh, args.gpus)
        && mesh.ranks() != gpus
    {
        let message = format!("mesh `{mesh}` has {}, but --gpus says {gpus}", counted(mesh.ranks(), "rank"));
        let help = format!("use --gpus {}, or a mesh whose sizes multiply to {gpus}", mesh.ranks());
        return Err(Diagnostic::new("C04", message).help(help).into());
    }
    let gpus = args.gpus.or(mesh.as_ref().map(Mesh::ranks));
    Ok((mesh, gpus))
}

/// A program and how it is to be laid out.
#[derive(Clone, Debug)]
pub struct Job {
    /// What it is called in reports.
    pub title: String,
    /// The whole program.
    pub program: Module,
    /// The same in one stage, with nothing computed again or in parts, where that is another program.
    pub plain: Option<Module>,
    /// Its layout.
    pub options: ShardOptions,
    /// The cluster by whose prices collectives are chosen.
    pub cluster: Cluster,
    /// Where weights lie, if that is known.
    pub weights: Option<PathBuf>,
    /// The strategies and movements that there are.
    pub registry: Registry,
    /// The plan whose program this is, and which must be kept.
    pub plan: Option<Box<Plan>>,
    /// What is to be said of options that change nothing.
    pub notes: Vec<String>,
}

impl Job {
    /// The job's per-rank program and schedule.
    ///
    /// # Errors
    /// Why the layout is not legal, with repairs that were checked; `M33` for a plan that states what is not so.
    pub fn compile(&self) -> Result<Compiled> {
        let compiled = self.lay_out()?;
        if let Some(plan) = &self.plan {
            plan.check_stated(&compiled)?;
        }
        Ok(compiled)
    }

    fn lay_out(&self) -> Result<Compiled> {
        compile_with(&self.registry, &self.program, &self.options, &self.cluster).map_err(|mut refusal| {
            let program = Program { module: &self.program, cluster: &self.cluster };
            let compiler = Extended { program, registry: &self.registry };
            if let [only] = refusal.as_mut_slice()
                && only.code.starts_with("P2")
            {
                only.repairs = planner::repairs(&compiler, &self.cluster, &self.options);
                if !only.repairs.is_empty() {
                    // Degrees that one rule allows may break another; what was tried is legal by all.
                    only.helps.clear();
                }
            }
            Failure::from(refusal)
        })
    }

    /// The program that results are compared with.
    pub fn reference(&self) -> &Module {
        self.plain.as_ref().unwrap_or(&self.program)
    }

    /// How far an optimizer may move an element of a weight in so many steps.
    pub fn reach(&self, steps: u64) -> f64 {
        let nodes = self.program.functions.values().flat_map(|f| &f.nodes);
        let farthest = nodes.filter_map(|node| match &node.op {
            Op::Optimizer(Optimizer::AdamW(adamw)) => Some(adamw.reach()),
            _ => None,
        });
        farthest.fold(0.0, f64::max) * steps as f64
    }

    /// Whether the program keeps something that a further step begins with.
    pub fn keeps(&self) -> bool {
        let mut nodes = self.program.functions.values().flat_map(|f| &f.nodes);
        nodes.any(|node| matches!(node.op, Op::Assign { .. }))
    }

    /// FLOPs of the whole program.
    pub fn flops(&self) -> u128 {
        let Module { space, functions, .. } = &self.program;
        let runs = self.program.run_counts();
        let mut flops: u128 = 0;
        for (function, &runs) in functions.values().zip(&runs) {
            for node in &function.nodes {
                let cost = node.op.cost(space, &function.operand_types(node), &function.result_types(node));
                flops = flops.saturating_add(u128::from(runs).saturating_mul(cost.flops));
            }
        }
        flops
    }
}

/// The program and the layout that arguments describe.
///
/// `lengths` are those of the inputs at hand, for a model whose lengths are not given.
///
/// # Errors
/// Whatever the plan, the model, the program or the layout is refused for.
pub fn job(registry: &Registry, args: &SubjectArgs, lengths: Option<Lengths>) -> Result<Job> {
    let path = &args.subject;
    let is_config = path.file_name().is_some_and(|name| name == "config.json");
    let mut job = match kind::expect(path, Wanted::Subject)? {
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

fn text_job(registry: &Registry, path: &Path, args: &SubjectArgs) -> Result<Job> {
    let source = kind::read(path, Wanted::Subject)?;
    let name = path.display().to_string();
    let in_file = |diagnostics| Failure::in_source(diagnostics, &name, &source);
    let program = text::parse(&source).map_err(in_file)?;
    ithaca_ir::verify::verify(&program).map_err(in_file)?;
    if args.shrink {
        return Err(Failure::usage(
            "`--shrink` needs a model's configuration; a program in text form has its sizes",
        ));
    }
    if let Some(flag) = meaning::of_workload(&args.workload) {
        return Err(Failure::usage(format!(
            "`{flag}` describes a model's workload; a program in text form has its own"
        )));
    }
    let (options, cluster) = layout(registry, &args.layout)?;
    let notes = Vec::from_iter(meaning::layout_notes(&args.layout, &options.mesh));
    Ok(Job {
        title: program.name.clone(),
        program,
        plain: None,
        options,
        cluster,
        weights: None,
        registry: registry.clone(),
        plan: None,
        notes,
    })
}

fn model_job(registry: &Registry, path: &Path, args: &SubjectArgs, lengths: Option<Lengths>) -> Result<Job> {
    let model = model(path)?;
    let (options, cluster) = layout(registry, &args.layout)?;
    let fallback = match args.shrink {
        true => Some(Lengths { batch: 1, sequence: SHRUNK_TOKENS, target: None }),
        false => lengths,
    };
    meaning::ignored(&args.workload.ignore_fields, &model.config)?;
    let workload = workload(&args.workload, fallback)?;
    if workload.mode == Mode::Train {
        let stages = options.mesh.axis(STAGE_AXIS).map_or(1, |axis| options.mesh.size(axis));
        meaning::pipeline(&args.workload, &workload.training, Some(stages))?;
    }
    let workload = staged(workload, &options.mesh);
    let config = match args.shrink {
        true => shrunk(&model.config, &workload, &options)?,
        false => (model.config.clone(), workload),
    };
    let program = import::program(&config.0, &model.name, &config.1)?;
    let plain = plain(&config.0, &model.name, &config.1)?;
    let mut notes = Vec::from_iter(meaning::layout_notes(&args.layout, &options.mesh));
    let as_configured = |workload: &Workload| import::program(&config.0, &model.name, workload);
    notes.extend(meaning::training_notes(&config.1, &program, as_configured)?);
    let weights = model.folder.clone();
    let weights = (!args.shrink && has_weights(&weights)).then_some(weights);
    Ok(Job {
        title: model.name,
        program,
        plain,
        options,
        cluster,
        weights,
        registry: registry.clone(),
        plan: None,
        notes,
    })
}

fn plan_job(registry: &Registry, path: &Path, args: &SubjectArgs) -> Result<Job> {
    let plan = plan(registry, path)?;
    if let Some(flag) = meaning::of_workload(&args.workload).or(meaning::of_layout(&args.layout)) {
        let message = format!("`{flag}` is settled by the plan `{}`", path.display());
        return Err(Diagnostic::new("C00", message).help("make another plan with `ithaca plan`").into());
    }
    let options = plan.shard_options()?;
    let workload = plan.workload.to_import()?;
    let (config, workload) = match args.shrink {
        true => shrunk(&plan.model.config, &workload, &options)?,
        false => (plan.model.config.clone(), workload),
    };
    let program = import::program(&config, &plan.model.name, &workload)?;
    let plain = plain(&config, &plan.model.name, &workload)?;
    if args.shrink {
        // The small program is not the one that the plan speaks of.
        plan.compile(registry)?;
    }
    let weights = if args.shrink { None } else { weights_of(&plan, path) };
    Ok(Job {
        title: plan.model.name.clone(),
        program,
        plain,
        options,
        cluster: plan.cluster.clone(),
        weights,
        registry: registry.clone(),
        plan: (!args.shrink).then(|| Box::new(plan)),
        notes: Vec::new(),
    })
}

/// The program of a workload in one stage, with nothing computed again or in parts; none where it is that already.
fn plain(config: &Value, name: &str, workload: &Workload) -> Result<Option<Module>> {
    let training =
        Training { recompute: Recompute::None, loss_chunks: 1, stages: 1, ..workload.training.clone() };
    if workload.mode != Mode::Train || training == workload.training {
        return Ok(None);
    }
    Ok(Some(import::program(config, name, &Workload { training, ..workload.clone() })?))
}

/// Weights beside the configuration that a plan was made from, if they are still there and it is still the same.
fn weights_of(plan: &Plan, plan_path: &Path) -> Option<PathBuf> {
    let given = Path::new(&plan.model.source);
    let beside = plan_path.parent().map(|p| p.join(given));
    let candidates = [Some(given.to_owned()), beside];
    candidates.into_iter().flatten().find_map(|path| {
        let model = model(&path).ok()?;
        (model.config == plan.model.config && has_weights(&model.folder)).then_some(model.folder)
    })
}

/// Whether a folder holds weights.
fn has_weights(folder: &Path) -> bool {
    ["model.safetensors", "model.safetensors.index.json"].iter().any(|name| folder.join(name).exists())
}

/// Tokens per sequence of a shrunken run, at least; more where the mesh needs them.
const SHRUNK_TOKENS: u64 = 64;

/// A small model and workload that divide, or do not divide, as the real ones do.
fn shrunk(config: &Value, workload: &Workload, options: &ShardOptions) -> Result<(Value, Workload)> {
    let ranks = options.mesh.ranks();
    let parts = ranks.saturating_mul(workload.training.loss_chunks);
    let tokens = SHRUNK_TOKENS.max(4 * ranks).next_multiple_of(parts);
    // A length that does not divide stays one that does not, by as many tokens.
    let small = |n: u64| (tokens + n % parts).min(n);
    let small_sequence = small(workload.sequence);
    let target_sequence = workload.target_sequence.map(small);
    let layers = workload.training.n_chunks();
    let shrink = Shrink { sequence: workload.sequence, small_sequence, multiple: ranks, layers };
    let config = import::shrink(config, &workload.ignore, &shrink)?;
    let micro_batches = workload.training.micro_batches;
    let batch = match workload.batch.is_multiple_of(micro_batches) {
        true => micro_batches * shrunk_batch(workload.batch / micro_batches, options),
        false => workload.batch,
    };
    Ok((config, Workload { batch, sequence: small_sequence, target_sequence, ..workload.clone() }))
}

/// Two sequences at most for each rank of an axis that splits the batch; a batch that does not divide stays as it is.
fn shrunk_batch(batch: u64, options: &ShardOptions) -> u64 {
    let mesh = &options.mesh;
    let degree =
        mesh.axes.iter().find(|(_, axis)| axis.name == DATA_AXIS).map_or(1, |(_, axis)| axis.size.max(1));
    if batch.is_multiple_of(degree) { degree * (batch / degree).min(2) } else { batch }
}

/// The layout that arguments name: strategy and mesh, or one device.
fn layout(registry: &Registry, args: &LayoutArgs) -> Result<(ShardOptions, Cluster)> {
    let cluster = cluster_of(args)?;
    let (mesh, gpus) = mesh(args)?;
    let strategy = args.strategy.clone();
    let (strategy, mesh) = match (strategy, mesh, gpus) {
        (None, None, None | Some(1)) => ("single".to_owned(), Mesh::single()),
        (Some(strategy), Some(mesh), _) => (strategy, mesh),
        (Some(strategy), None, gpus) => {
            let mesh = only_mesh(registry, &strategy, gpus)?;
            (strategy, mesh)
        }
        (None, Some(_), _) => return Err(Failure::usage("`--mesh` needs `--strategy`")),
        (None, None, Some(gpus)) => {
            let message = format!("{gpus} GPUs need a layout");
            return Err(Diagnostic::new("C00", message)
                .help("name one with --strategy, or make a plan first with `ithaca plan`")
                .into());
        }
    };
    meaning::layout(args, &mesh)?;
    let mut options = ShardOptions::new(strategy, mesh);
    set_flags(&mut options, args)?;
    Ok((options, cluster))
}

/// Sets the options that flags stand for.
///
/// # Errors
/// `P02` for a token order or movement that is none, usage for a layer's strategy without a layer and for axes without a
/// sequence.
pub fn set_flags(options: &mut ShardOptions, args: &LayoutArgs) -> Result<()> {
    if args.uneven_heads {
        options.heads = HeadSplit::Uneven;
    }
    if args.pad_heads {
        options.heads = HeadSplit::Pad;
    }
    if args.pad_sequence {
        options.sequence = SequenceFit::Pad;
    }
    if let Some(order) = args.order.as_deref().filter(|&order| order != "auto") {
        options.order = Some(OrderChoice::parse(order)?);
    }
    if args.prune {
        options.prune = Prune::Required;
    }
    if let Some(stage) = args.zero {
        options.zero = Zero::of_stage(stage)?;
    }
    options.fusion = args.fuse.as_deref().map_or(Ok(Fusion::usual(options.zero)), Fusion::parse)?;
    for item in &args.layer_strategies {
        let parts =
            item.split_once('=').filter(|(layer, name)| !layer.trim().is_empty() && !name.trim().is_empty());
        let Some((layer, strategy)) = parts else {
            return Err(Failure::usage(format!("`--layer-strategy {item}` is not FUNCTION=NAME")));
        };
        options.layers.push((layer.trim().to_owned(), strategy.trim().to_owned()));
    }
    let choice = &mut options.attention;
    choice.movement = args.movement.as_deref().map(parse_movement).transpose()?;
    choice.cross_movement = args.cross_movement.as_deref().map(parse_movement).transpose()?;
    for item in args.sequence_axes.iter().flat_map(|list| list.split(',')) {
        let parts =
            item.split_once('=').filter(|(dim, axes)| !dim.trim().is_empty() && !axes.trim().is_empty());
        let Some((dim, axes)) = parts else {
            return Err(Failure::usage(format!("`--sequence-axes {item}` is not DIM=AXIS[+AXIS]")));
        };
        choice.sequences.push((dim.trim().to_owned(), parse_axes(axes)));
    }
    Ok(())
}

/// The mesh of a strategy with one axis.
fn only_mesh(registry: &Registry, strategy: &str, gpus: Option<u64>) -> Result<Mesh> {
    let strategies = ithaca_passes::shard::strategy::product(registry, strategy)?;
    let axes: Vec<&str> = strategies.iter().flat_map(|s| s.axes()).copied().collect();
    match (axes.as_slice(), gpus) {
        ([], None | Some(1)) => Ok(Mesh::single()),
        ([], Some(n)) => {
            let message = format!("strategy `{strategy}` is for 1 GPU, but --gpus says {n}");
            Err(Diagnostic::new("C04", message).help("leave `--gpus` out, or name another strategy").into())
        }
        ([axis], Some(gpus)) => Ok(Mesh::new([(*axis, gpus)])),
        _ => Err(Failure::usage(format!("strategy `{strategy}` needs `--mesh {}=N`", axes.join("=N,")))),
    }
}

fn parse_json(path: &Path, text: &str) -> Result<Value> {
    serde_json::from_str(text).map_err(|e| {
        let message = format!("`{}` is not JSON: {e}", path.display());
        Failure::from(Diagnostic::new("C02", message))
    })
}
