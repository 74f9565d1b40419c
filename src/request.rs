//! A request to the planner: of the command line, or of a plan that is made again.

use std::collections::BTreeMap;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, PoisonError};

use ithaca_ir::diagnostic::counted;
use ithaca_ir::text::parse;
use ithaca_ir::verify::{VerifiedModule, verify};
use ithaca_ir::{Diagnostic, Mesh, Module};
use ithaca_passes::cluster::Cluster;
use ithaca_passes::differentiate::{self, PipelineOrder, Training};
use ithaca_passes::frameworks::Framework;
use ithaca_passes::fuse::prefetch::Prefetch;
use ithaca_passes::import::{self, Logits, Mode, Workload};
use ithaca_passes::plan::{self, Choice, Narrowing, Plan, Rates, Search};
use ithaca_passes::planner::{self, Compiler, Priced, Program, Refusal, Request, Steps, Subject, Target};
use ithaca_passes::registry::Registry;
use ithaca_passes::shard::check_names;
use ithaca_passes::shard::strategy::{DATA_AXIS, STAGE_AXIS};

use crate::cli::{LayoutArgs, NarrowingArgs, WorkloadArgs};
use crate::error::{Failure, Result};
use crate::ineffective;
use crate::subject::{self, Model, Offload};

/// A request to the planner.
#[derive(Clone, Debug)]
pub struct PlanRequest {
    /// The model.
    pub model: plan::Model,
    /// The cluster.
    pub cluster: Cluster,
    /// The workload, without stages: the mesh of a layout has them.
    pub workload: Workload,
    /// Number of GPUs.
    pub gpus: u64,
    /// The layouts to try.
    pub search: Search,
}

/// The answer to a request.
#[derive(Debug)]
pub enum Answer {
    /// The plan.
    Plan(Box<Plan>),
    /// No layout satisfies the request, whose rates are these.
    Refused(Box<Refusal>, Rates),
}

impl PlanRequest {
    /// The request of arguments.
    ///
    /// # Errors
    /// `C00` for missing arguments and those that do not go together, and the errors of the model, the workload and the mesh.
    pub fn of_args(
        registry: &Registry,
        model: Model,
        workload_args: &WorkloadArgs,
        layout: &LayoutArgs,
        narrowing: &NarrowingArgs,
    ) -> Result<Self> {
        let cluster = subject::cluster_of(layout, workload_args.mode)?;
        let NarrowingArgs { only, without, max_tp, framework, effort } = narrowing.clone();
        for name in only.iter().chain(&without) {
            let product = registry.product(name)?;
            if product.len() > 1 {
                let message = format!("`{name}` joins strategies, and a search is narrowed by one at a time");
                let names: Vec<&str> = product.iter().map(|strategy| strategy.name()).collect();
                let help = format!("list them, as in `--only {}`", names.join(","));
                return Err(Diagnostic::new("C00", message).help(help).into());
            }
        }
        let (mesh, gpus) = subject::mesh(layout)?;
        let gpus = gpus.ok_or_else(|| {
            Diagnostic::new("C00", "the number of GPUs is missing").help("add it, as in `--gpus 8`")
        })?;
        let cluster = cluster.spread(gpus);
        let mut workload = if let Some(text) = import::program_text(&model.config) {
            subject::own_workload(workload_args)?;
            import::workload_of(&parse(text)?)
        } else {
            subject::grouped(subject::workload(workload_args, None)?, gpus)
        };
        ineffective::length(workload_args)?;
        subject::check_pages(&workload)?;
        if workload.training.stages > 1 {
            let n = workload.training.stages;
            let message =
                format!("`--train stages={n}` sets the number of stages, and the mesh of a plan sets it");
            return Err(Diagnostic::new("C00", message)
                .help(format!("use the mesh, as in `--strategy pipeline --mesh pp={n}`"))
                .into());
        }
        check_micro_batches(&workload, mesh.as_ref())?;
        ineffective::ignored(&workload_args.ignore_fields, &model.config)?;
        if workload_args.logits.is_none()
            && workload.mode == Mode::Prefill
            && import::predicts_next(&model.config, &workload.ignore)?
        {
            workload.logits = Logits::Last;
        }
        let stages = ineffective::stages_of(registry, layout, mesh.as_ref());
        ineffective::pipeline(workload_args, (&workload, stages))?;
        let mut options = subject::layout_options(registry, layout, mesh.as_ref())?;
        let offload = subject::offload(workload_args)?;
        if offload != Offload::None {
            has_host_link(&cluster)?;
            if offload != Offload::Optimizer && layout.fuse.is_none() {
                options.fusion = options.fusion.ahead(Prefetch::default());
            }
        }
        let steps = match workload.mode {
            Mode::Train => {
                Some(Steps { training: workload.training.clone(), open: open(workload_args, layout)? })
            }
            Mode::Prefill | Mode::Decode => None,
        };
        let request = Request {
            strategy: subject::requested_strategy(registry, layout, mesh.as_ref())?,
            options,
            mesh,
            narrowing: Narrowing { only, without, max_tp, framework, effort: effort.unwrap_or_default() },
            chooses_fusion: layout.fuse.is_none(),
            steps,
            // A framework has its own way to keep stages busy.
            chooses_micro_batches: workload.mode != Mode::Train
                && workload_args.micro_batches.is_none()
                && workload.batch > 1
                && stages != Some(1)
                && framework.is_none(),
            ..Request::new(gpus)
        };
        let name = import::described_name(&model.config, &workload.ignore)?;
        let model = plan::Model::new(name, model.config);
        let request = Self { model, cluster, workload, gpus, search: request.search() };
        if offload == Offload::AsNeeded { request.with_host_pages(registry) } else { Ok(request) }
    }

    /// The request that a plan records.
    ///
    /// # Errors
    /// `M33` and `P02` for a workload that cannot be imported.
    pub fn of_plan(plan: &Plan) -> Result<Self> {
        let mut workload = plan.workload.to_import()?;
        workload.training.stages = 1;
        for choice in &plan.search.open {
            let (training, default) = (&mut workload.training, Training::default());
            match choice {
                Choice::Zero | Choice::Persistent => {}
                Choice::Recompute => training.recompute = default.recompute,
                Choice::MicroBatches => training.micro_batches = default.micro_batches,
                Choice::LossChunks => training.loss_chunks = default.loss_chunks,
                Choice::Pipeline => {
                    training.pipeline = default.pipeline;
                    training.chunks = default.chunks;
                }
            }
        }
        Ok(Self {
            model: plan.model.clone(),
            cluster: plan.cluster.clone().spread(plan.gpus),
            workload,
            gpus: plan.gpus,
            search: plan.search.clone(),
        })
    }

    /// The program of the workload, without stages.
    ///
    /// # Errors
    /// Those of the model's configuration and the workload.
    pub fn program(&self) -> Result<Module> {
        Ok(import::program(&self.model.config, &self.model.name, &self.workload)?)
    }

    /// The layouts that fit, the fastest first; none where the program has no legal layout.
    ///
    /// # Errors
    /// Those of the model's configuration and the search.
    pub fn fitting(&self, registry: &Registry) -> Result<Vec<Priced>> {
        self.ask(registry, &self.program()?, None, |program, request| {
            Ok(planner::fitting(program, &self.cluster, request)?)
        })
    }

    /// The rule that the first layout breaks, if every layout breaks one; memory is not looked at.
    ///
    /// # Errors
    /// Those of the model's configuration.
    pub fn illegal(&self, registry: &Registry) -> Result<Option<Diagnostic>> {
        self.ask(registry, &self.program()?, None, |program, request| {
            let candidates = match planner::candidates(registry, &self.cluster, request) {
                Ok(candidates) => candidates,
                Err(refusal) => return Ok(Some(refusal)),
            };
            let mut first = None;
            for candidate in &candidates {
                match program.check(candidate) {
                    Ok(()) => return Ok(None),
                    Err(rule) => first = first.or(Some(rule)),
                }
            }
            Ok(first)
        })
    }

    /// Asks the planner; `module` is the program.
    ///
    /// # Errors
    /// Those of the model's configuration. That nothing satisfies the request is an answer.
    pub fn answer(&self, registry: &Registry, module: &Module) -> Result<Answer> {
        self.answer_until(registry, module, None)
    }

    /// As [`answer`](Self::answer); the search ends soon after `stop` is set, and its answer means nothing then.
    ///
    /// # Errors
    /// As [`answer`](Self::answer).
    pub fn answer_until(
        &self,
        registry: &Registry,
        module: &Module,
        stop: Option<&AtomicBool>,
    ) -> Result<Answer> {
        self.ask(registry, module, stop, |program, request| self.ranked(module, program, request))
    }

    /// The best plan.
    ///
    /// # Errors
    /// Those of the model's configuration, and why nothing satisfies the request.
    pub fn plan(&self, registry: &Registry) -> Result<Plan> {
        self.answer(registry, &self.program()?)?.plan()
    }

    /// What `f` makes of the compiler of candidates and the request; `module` is the program.
    fn ask<T>(
        &self,
        registry: &Registry,
        module: &Module,
        stop: Option<&AtomicBool>,
        f: impl FnOnce(&Program<'_>, &Request) -> Result<T>,
    ) -> Result<T> {
        let Self { model, cluster, workload, gpus, search } = self;
        let target = |framework: Framework| -> Result<Target> {
            let facts = import::facts(&model.config, &workload.ignore)?;
            Ok(Target { framework, facts, workload: workload.clone() })
        };
        let target = search.narrowing.framework.map(target).transpose()?;
        let request = Request { target, ..Request::of_search(search, module, workload, *gpus)? };
        check_names(module, &request.options)?;
        let forward = import::import(&model.config, &model.name, workload)?;
        check_stage_layers(&forward, &workload.training, &request)?;
        if workload.mode == Mode::Train {
            check_chunks(&forward, &workload.training, least_stages(&request))?;
        }
        // Many candidates have the same number of stages.
        let programs = Mutex::new(BTreeMap::new());
        let of_step = |batch: u64, training: &Training| {
            let key = (batch, training.to_pipeline());
            let known = programs.lock().unwrap_or_else(PoisonError::into_inner).get(&key).map(Arc::clone);
            if let Some(module) = known {
                return Ok(module);
            }
            let step = Workload { batch, training: training.clone(), ..workload.clone() };
            let module = import::program(&model.config, &model.name, &step)?;
            let module = Arc::new(VerifiedModule::new(module)?);
            programs.lock().unwrap_or_else(PoisonError::into_inner).insert(key, Arc::clone(&module));
            Ok(module)
        };
        let in_stages =
            |stages: u64| of_step(workload.batch, &Training { stages, ..workload.training.clone() });
        let is_step = workload.mode == Mode::Train;
        let program = Program {
            registry: registry.clone(),
            of_stages: Some(&in_stages),
            of_step: Some(&of_step),
            training: is_step.then_some((workload.batch, &workload.training)),
            forward: is_step.then_some(&forward),
            stop,
            ..Program::new(verify(module)?, cluster)
        };
        f(&program, &request)
    }

    /// The best of the candidates.
    fn ranked(&self, module: &Module, program: &Program<'_>, request: &Request) -> Result<Answer> {
        let Self { model, cluster, workload, gpus, .. } = self;
        let forward = import::import(&model.config, &model.name, workload)?;
        let model_flops = plan::model_flops(&forward, workload.mode);
        let described = |mesh: &Mesh, training: Option<&Training>| {
            let training = training.unwrap_or(&workload.training).clone();
            let workload = Workload { training, ..workload.clone() };
            plan::Workload::of(&subject::staged(workload, mesh), module)
        };
        Ok(match planner::rank(program, cluster, request) {
            Ok(ranked) => {
                let workload = described(&ranked.chosen.options.mesh, ranked.chosen.training.as_ref());
                let subject = Subject { model: model.clone(), workload, model_flops };
                Answer::Plan(Box::new(ranked.into_plan(cluster, request, subject)))
            }
            Err(refusal) => {
                let rates = Rates::new(&described(&Mesh::single(), None), model_flops, cluster, *gpus);
                Answer::Refused(refusal, rates)
            }
        })
    }
}

/// The stated number of micro-batches divides the batch, of which data-parallel ranks have parts; without them the program says so.
fn check_micro_batches(Workload { batch, training, .. }: &Workload, mesh: Option<&Mesh>) -> Result<()> {
    let data = mesh.and_then(|mesh| mesh.axis(DATA_AXIS).map(|axis| mesh.size(axis))).unwrap_or(1);
    let n = training.micro_batches;
    if data > 1 && batch.is_multiple_of(data) && !batch.is_multiple_of(n) {
        return Err(Diagnostic::from(differentiate::undivided(*batch, n, data)).into());
    }
    Ok(())
}

/// The stated layers of stages are those of the model, in as many stages as the mesh has or GPUs can be.
fn check_stage_layers(forward: &Module, training: &Training, request: &Request) -> Result<()> {
    let Some(stated) = training.stated_stages() else { return Ok(()) };
    let of_mesh = request.mesh.as_ref().and_then(|mesh| mesh.axis(STAGE_AXIS).map(|axis| mesh.size(axis)));
    let staged = Training { stages: of_mesh.unwrap_or(stated), ..training.clone() };
    differentiate::chunk_layers(forward, &staged).map_err(Diagnostic::from)?;
    if request.mesh.is_none() && !request.gpus.is_multiple_of(stated) {
        let message = format!(
            "`stage_layers` states the layers of {}, by which {} GPUs are not divisible",
            counted(stated, "stage"),
            request.gpus
        );
        let help = format!(
            "use `--gpus {}`, or state another number of stages",
            request.gpus.next_multiple_of(stated)
        );
        return Err(Diagnostic::new("P53", message).help(help).into());
    }
    Ok(())
}

/// The fewest stages that a layout of the request may have, if more than one.
fn least_stages(request: &Request) -> u64 {
    match &request.mesh {
        Some(mesh) => mesh.axis(STAGE_AXIS).map_or(1, |axis| mesh.size(axis)),
        None => (2..=request.gpus).find(|n| request.gpus.is_multiple_of(*n)).unwrap_or(1),
    }
}

/// The model has as many layers as interleaved stages have chunks.
fn check_chunks(forward: &Module, training: &Training, stages: u64) -> Result<()> {
    let check = |chunks: u64| {
        let staged = Training { stages, chunks, stage_layers: Vec::new(), ..training.clone() };
        differentiate::chunk_layers(forward, &staged).map_err(Diagnostic::from)
    };
    if training.pipeline != PipelineOrder::Interleaved || stages == 1 {
        return Ok(());
    }
    check(training.chunks).map(drop).map_err(|refusal| {
        let help = match (1..training.chunks).rev().find(|&chunks| check(chunks).is_ok()) {
            Some(most) => format!(
                "{stages} stages have at most {} each, as in `--train chunks={most}`",
                counted(most, "chunk")
            ),
            None => "use fewer stages".to_owned(),
        };
        refusal.help(help).into()
    })
}

/// Checks that the cluster says how fast host memory is read.
///
/// # Errors
/// `C00` where it does not.
fn has_host_link(cluster: &Cluster) -> Result<()> {
    if cluster.accelerator.host_bandwidth.is_some() {
        return Ok(());
    }
    let message = format!("cluster `{}` has no `host_bandwidth`, which `--offload` needs", cluster.name);
    Err(Diagnostic::new("C00", message).help("copy its file, and add the figure to `[accelerator]`").into())
}

/// The options of a training step that arguments leave to the search.
fn open(workload: &WorkloadArgs, layout: &LayoutArgs) -> Result<Vec<Choice>> {
    let settings = ineffective::settings(workload, Mode::Train)?;
    let is_open = |key: &str| settings.iter().all(|setting| setting.key != key);
    let choices = [
        (Choice::Zero, layout.zero.is_none()),
        (Choice::Persistent, layout.zero.as_deref() == Some("3")),
        (Choice::Recompute, is_open("recompute")),
        (Choice::MicroBatches, is_open("micro_batches")),
        (Choice::Pipeline, is_open("pipeline")),
        (Choice::LossChunks, is_open("loss_chunks")),
    ];
    Ok(choices.into_iter().filter_map(|(choice, is_open)| is_open.then_some(choice)).collect())
}

impl Answer {
    /// The plan.
    ///
    /// # Errors
    /// Why nothing satisfies the request.
    pub fn plan(self) -> Result<Plan> {
        match self {
            Answer::Plan(plan) => Ok(*plan),
            Answer::Refused(refusal, _) => Err(Failure::from(refusal.diagnostic)),
        }
    }
}
