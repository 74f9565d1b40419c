//! The priced steps of a deployment: layouts of replicas of several sizes, with batches and chunks.

use std::collections::{BTreeMap, BTreeSet};

use ithaca_ir::diagnostic::counted;
use ithaca_ir::{DType, Diagnostic};
use ithaca_passes::cluster::{Cluster, Runtime};
use ithaca_passes::compile::draft_with;
use ithaca_passes::import::{self, Mode, STEP, Workload};
use ithaca_passes::memory::{self, Memory};
use ithaca_passes::plan::{self, Narrowing, layout_text, mesh_axes};
use ithaca_passes::planner::{self, Request};
use ithaca_passes::registry::Registry;
use ithaca_passes::serve::{Decoding, Demand, Prompts, Replica};
use ithaca_passes::shard::ShardOptions;
use ithaca_passes::shard::strategy::STAGE_AXIS;
use ithaca_passes::simulate::simulate;
use rayon::prelude::*;

use super::sizes::Sizes;
use crate::cli::{self, LayoutArgs, NarrowingArgs, PlanArgs};
use crate::error::Result;
use crate::job;
use crate::request::PlanRequest;
use crate::shrink;
use crate::subject::{self, Lengths, Model};

/// The most GPUs of a replica.
pub(super) const LARGEST_REPLICA: u64 = 128;

/// The layouts that are kept of each size, of each of two batches.
const KEPT: usize = 5;

/// Tokens of a prompt that are computed at once beside decoding.
const CHUNKS: [u64; 3] = [512, 2048, 8192];

/// Strategies that are tried for steps of a token, unless `--only` names others: those that split nothing along its sequence.
const DECODING: [&str; 7] =
    ["single", "megatron-tp", "decode-context", "data-parallel", "data-parallel-ep", "ep", "pipeline"];

/// Strategies that are tried for prompts, unless `--only` names others.
const PROMPTS: [&str; 9] = [
    "single",
    "megatron-tp",
    "ulysses",
    "ring",
    "megatron-cp-allgather",
    "data-parallel",
    "data-parallel-ep",
    "ep",
    "pipeline",
];

/// How strategies are called that give ranks sequences of their own.
const DATA_PARALLEL: &str = "data-parallel";

/// The part of the target for the first token below which no faster replicas of prompts are tried.
const SHORT: f64 = 0.25;

/// By this factor a step of a token is longer than the target, and none of more sequences is tried.
const TOO_SLOW: f64 = 1.1;

/// Micro-batches for each stage of a pipeline that are tried.
const PER_STAGE: [u64; 2] = [1, 2];

/// Sequences of a group of ranks beyond which no more are tried.
const MOST_SEQUENCES: u64 = 1024;

/// The code of a refusal of sizes for which the strategies that are tried have no mesh.
const NO_MESH: &str = "P30";

/// Prices steps.
pub(super) struct Pricer<'a> {
    registry: &'a Registry,
    pub(super) model: plan::Model,
    /// The element type and what else of the workload is the same in all steps.
    base: Workload,
    /// As steps of tokens run.
    pub(super) decoding: Cluster,
    /// As steps of prompts run.
    pub(super) prompts: Cluster,
    /// As steps of prompts run where no runtime is given.
    pub(super) usual: Runtime,
    options: ShardOptions,
    narrowing: Narrowing,
    has_experts: bool,
    /// Whether prompts are read whole.
    pub(super) encodes_prompts: bool,
    /// Whether caches of sliding windows have room for steps of [`STEP`] tokens only.
    pub(super) has_rings: bool,
}

impl<'a> Pricer<'a> {
    pub(super) fn new(
        registry: &'a Registry,
        model: Model,
        args: &PlanArgs,
        demand: &Demand,
    ) -> Result<Self> {
        let decoding = subject::cluster_of(&args.layout, Some(cli::Mode::Decode))?;
        let prompts = if args.layout.runtime.is_some() {
            decoding.clone()
        } else {
            // Kernels of prompts are long, and their lengths differ: they are not recorded.
            let runtime = decoding.runtime.changed("stream")?;
            decoding.clone().with_runtime(runtime)?
        };
        let as_decode = cli::WorkloadArgs { mode: Some(cli::Mode::Decode), ..args.workload.clone() };
        let lengths = Lengths { batch: 1, sequence: 1, target: None };
        let base = subject::workload(&as_decode, Some(lengths))?;
        let NarrowingArgs { only, without, max_tp, framework, effort } = args.narrowing.clone();
        let name = import::described_name(&model.config, &base.ignore)?;
        check_length(demand, import::facts(&model.config, &base.ignore)?.learned_positions)?;
        let encodes_prompts = import::encodes_prompts(&model.config, &base.ignore)?;
        let model = plan::Model::new(name, model.config);
        let pricer = Self {
            registry,
            options: subject::layout_options(registry, &args.layout, None)?,
            base,
            model,
            decoding,
            prompts,
            usual: subject::cluster_of(&LayoutArgs { runtime: None, ..args.layout.clone() }, None)?.runtime,
            narrowing: Narrowing { only, without, max_tp, framework, effort: effort.unwrap_or_default() },
            has_experts: false,
            encodes_prompts,
            has_rings: false,
        };
        // A model or a length that is refused is refused before the search.
        let longest = Some(demand.input + demand.output);
        let workload = Workload { cache: longest, ..pricer.decode(1, demand) };
        let module = import::program(&pricer.model.config, &pricer.model.name, &workload)?;
        Ok(Self {
            has_experts: planner::experts(&module) > 0,
            has_rings: shrink::has_rings(&module),
            ..pricer
        })
    }

    /// The element type of caches, where it is stated.
    pub(super) fn cache_type(&self) -> Option<DType> {
        self.base.cache_type
    }

    /// The GPUs of the cluster.
    pub(super) fn devices(&self) -> u64 {
        self.decoding.devices()
    }

    /// The element type of weights and activations.
    pub(super) fn dtype(&self, demand: &Demand) -> Result<String> {
        let workload = self.decode(1, demand);
        let module = import::program(&self.model.config, &self.model.name, &workload)?;
        Ok(plan::Workload::of(&workload, &module).dtype)
    }

    /// Replicas of all sizes that fit, with steps of tokens up to a little above the target, if there is one. Larger ones are not tried
    /// once they no longer decode a sequence faster, or with experts do more on a GPU where one replica does not do all; nor for
    /// prompts, once these take a short part of the target for the first token as well.
    pub(super) fn replicas(&self, demand: &Demand) -> Result<Vec<Replica>> {
        let mut replicas: Vec<Replica> = Vec::new();
        let (mut of_tokens, mut of_prompts) = (Sizes::default(), Sizes::default());
        for (gpus, is_usual) in self.sizes(demand) {
            // Other sizes are for models that fit on no smaller one.
            let decodes = |replica: &Replica| !replica.decoding.is_empty();
            let may_decode = is_usual || !replicas.iter().any(decodes);
            let may_read = is_usual || replicas.iter().all(decodes);
            if of_tokens.is_open && may_decode {
                let layouts =
                    self.layouts(gpus, |batch| self.decode(batch, demand), (&self.decoding, &DECODING))?;
                let layouts = self.worthwhile(layouts, demand)?;
                let found = layouts.par_iter().map(|options| self.decoding_replica(options, demand));
                let found: Vec<Replica> = found.collect::<Result<Vec<_>>>()?.into_iter().flatten().collect();
                let first = found.iter().filter_map(|replica| replica.decoding.first());
                let each = found.iter().flat_map(|replica| &replica.decoding);
                let busy = each.map(|step| demand.output as f64 * step.seconds / step.batch as f64);
                of_tokens.add(
                    first.map(|step| step.seconds),
                    busy.map(|seconds| demand.rate * seconds),
                    gpus,
                );
                of_tokens.is_open &= self.has_experts || of_tokens.is_faster;
                replicas.extend(found);
            }
            if of_prompts.is_open && may_read {
                let tokens = if self.has_rings { STEP.min(demand.input) } else { demand.input };
                let step = |batch| self.part_of_prompts(batch, tokens, demand);
                let layouts = self.layouts(gpus, step, (&self.prompts, &PROMPTS))?;
                let found = layouts.par_iter().map(|options| self.prompt_replica(options, tokens, demand));
                let found: Vec<Replica> = found.collect::<Result<Vec<_>>>()?.into_iter().flatten().collect();
                let steps = demand.input.div_ceil(tokens) as f64;
                let each = found.iter().flat_map(|replica| &replica.prefills);
                let busy = each.clone().map(|step| demand.rate * steps * step.seconds / step.batch as f64);
                of_prompts.add(each.map(|step| steps * step.seconds), busy, gpus);
                let most = demand.first_token_seconds;
                let matters = most.is_some_and(|most| of_prompts.fastest > SHORT * most);
                of_prompts.is_open &= of_tokens.is_open || matters;
                replicas.extend(found);
            }
        }
        Ok(replicas)
    }

    /// The numbers of tokens of a prompt that are computed at once beside decoding.
    fn sizes_of_chunks(&self, demand: &Demand) -> BTreeSet<u64> {
        match (self.encodes_prompts, self.has_rings) {
            (true, _) => BTreeSet::from([demand.input]),
            (false, true) => BTreeSet::from([STEP.min(demand.input)]),
            (false, false) => BTreeSet::from(CHUNKS.map(|tokens| tokens.min(demand.input))),
        }
    }

    /// A step of so many tokens of prompts, beside caches that have half of a prompt on average.
    fn part_of_prompts(&self, batch: u64, tokens: u64, demand: &Demand) -> Workload {
        self.prefill(batch, tokens, (demand.input / 2 + tokens / 2).max(tokens))
    }

    /// The GPUs of the replicas that are tried, and whether that many are usual: powers of two, and the levels of the cluster.
    fn sizes(&self, demand: &Demand) -> BTreeMap<u64, bool> {
        let most = demand.gpus.min(LARGEST_REPLICA);
        let doubled =
            |from: u64| std::iter::successors(Some(from), |n| Some(2 * n)).take_while(|&n| n <= most);
        let levels = self.decoding.levels.iter().map(|level| level.devices.value).filter(|&n| n <= most);
        let others = doubled(3).chain([most]).map(|n| (n, false));
        others.chain(levels.chain(doubled(1)).map(|n| (n, true))).collect()
    }

    /// Why no replica decodes a sequence, whatever its memory: the first rule that a layout breaks; nothing where one breaks none.
    pub(super) fn illegal(&self, demand: &Demand) -> Result<Option<Diagnostic>> {
        let (mut first, mut no_mesh) = (None, None);
        for (gpus, _) in self.sizes(demand) {
            let request = self.request(gpus, self.decode(1, demand), (&self.decoding, &DECODING));
            match request.illegal(self.registry)? {
                Some(refusal) if refusal.code == NO_MESH => no_mesh = Some(refusal),
                Some(refusal) => first = first.or(Some(refusal)),
                None => return Ok(None),
            }
        }
        Ok(first.or(no_mesh))
    }

    /// A step that decodes, beside caches that are full on average.
    fn decode(&self, batch: u64, demand: &Demand) -> Workload {
        let context = demand.input + demand.output.div_ceil(2);
        Workload { batch, cache: Some(context), ..self.base.clone() }
    }

    /// A step of prompts.
    fn prefill(&self, batch: u64, tokens: u64, context: u64) -> Workload {
        Workload { batch, sequence: tokens, mode: Mode::Prefill, cache: Some(context), ..self.base.clone() }
    }

    /// The fastest layouts of some GPUs that fit: of one sequence, and of one for each GPU.
    fn layouts(
        &self,
        gpus: u64,
        workload: impl Fn(u64) -> Workload,
        of: (&Cluster, &[&str]),
    ) -> Result<Vec<ShardOptions>> {
        let mut found: Vec<ShardOptions> = Vec::new();
        // Replicas are data-parallel; within one only experts gain by it.
        let batches = if self.has_experts { BTreeSet::from([1, gpus]) } else { BTreeSet::from([1]) };
        for batch in batches {
            let fitting = match self.request(gpus, workload(batch), of).fitting(self.registry) {
                Err(failure) if failure.diagnostics.iter().all(|d| d.code == NO_MESH) => continue,
                fitting => fitting?,
            };
            for priced in fitting.into_iter().take(KEPT) {
                if !found.contains(&priced.options) {
                    found.push(priced.options);
                }
            }
        }
        Ok(found)
    }

    /// The search of layouts of a step.
    fn request(&self, gpus: u64, workload: Workload, (cluster, tried): (&Cluster, &[&str])) -> PlanRequest {
        let mut narrowing = self.narrowing.clone();
        if narrowing.only.is_empty() {
            let is_tried = |name: &str| self.has_experts || !name.starts_with(DATA_PARALLEL);
            narrowing.only =
                tried.iter().filter(|name| is_tried(name)).map(|&name| name.to_owned()).collect();
        }
        let search = Request { narrowing, options: self.options.clone(), ..Request::new(gpus) };
        PlanRequest {
            model: self.model.clone(),
            cluster: cluster.clone(),
            workload,
            gpus,
            search: search.search(),
        }
    }

    /// The numbers of micro-batches that are tried for steps of a layout.
    fn micro_batches(options: &ShardOptions) -> Vec<u64> {
        let stages = options.mesh.axis(STAGE_AXIS).map_or(1, |axis| options.mesh.size(axis));
        let several = PER_STAGE.map(|n| n * stages);
        [1].into_iter().chain(several.into_iter().filter(|_| stages > 1)).collect()
    }

    /// Bytes by which caches of so many tokens are larger where they have room for sequences at their longest.
    fn growth(memory: &Memory, context: Option<u64>, demand: &Demand) -> u64 {
        let longest = (demand.input + demand.output) as f64 / context.unwrap_or(1) as f64;
        (memory.states as f64 * (longest - 1.0)) as u64
    }

    /// The time and the memory of a step; nothing where the layout does not take it.
    fn price(&self, options: &ShardOptions, workload: Workload, cluster: &Cluster) -> Option<(f64, Memory)> {
        if !workload.batch.is_multiple_of(workload.training.micro_batches) {
            return None;
        }
        let workload = subject::staged(workload, &options.mesh);
        let module = import::program(&self.model.config, &self.model.name, &workload).ok()?;
        let module = ithaca_ir::verify::verify(&module).ok()?;
        let cluster = cluster.clone().spread(options.mesh.ranks());
        let compiled = draft_with(self.registry, module, options, &cluster).ok()?;
        let seconds = simulate(&cluster, &compiled.schedule).seconds;
        Some((seconds, memory::of_schedule(&cluster, &compiled.schedule)))
    }

    /// Of layouts those that may be the best for some number of sequences, as a few numbers of them tell: by steps alone, or with
    /// the chunks of prompts between them.
    fn worthwhile(&self, layouts: Vec<ShardOptions>, demand: &Demand) -> Result<Vec<ShardOptions>> {
        /// The numbers of sequences of each group of ranks.
        const FEW: [u64; 4] = [1, 8, 64, 512];
        /// By this factor another layout must be faster.
        const BEATEN: f64 = 1.05;
        let largest = self.sizes_of_chunks(demand).last().copied();
        let steps = |options: &ShardOptions| -> Result<Vec<(u64, [f64; 2])>> {
            let (steps, parameters) = self.steps(options, demand, FEW)?;
            let chunks = self.chunks(options, largest, parameters, demand)?;
            let each = chunks
                .iter()
                .map(|chunk| demand.input.div_ceil(chunk.tokens) as f64 * chunk.seconds / chunk.batch as f64);
            let of_prompt = each.fold(f64::INFINITY, f64::min);
            let share = |step: &Decoding| step.batch as f64 * of_prompt / demand.output as f64;
            Ok(steps.iter().map(|step| (step.batch, [step.seconds, step.seconds + share(step)])).collect())
        };
        let steps: Vec<_> = layouts.par_iter().map(steps).collect::<Result<_>>()?;
        let is_best = |(batch, seconds): &(u64, [f64; 2])| {
            (0..2).any(|i| {
                let is_beaten =
                    |other: &(u64, [f64; 2])| other.0 >= *batch && other.1[i] * BEATEN < seconds[i];
                seconds[i].is_finite() && !steps.iter().flatten().any(is_beaten)
            })
        };
        let kept = steps.iter().map(|of_layout| of_layout.iter().any(is_best));
        Ok(layouts
            .iter()
            .zip(kept)
            .filter(|(_, is_kept)| *is_kept)
            .map(|(options, _)| options.clone())
            .collect())
    }

    /// Steps that decode, of so many sequences for each group of ranks as long as they fit and are not too slow; and the bytes of
    /// the parameters.
    fn steps(
        &self,
        options: &ShardOptions,
        demand: &Demand,
        batches: impl IntoIterator<Item = u64>,
    ) -> Result<(Vec<Decoding>, u64)> {
        let groups = job::sequence_groups(self.registry, options)?;
        let context = self.decode(1, demand).cache;
        let of_prompt = demand.input as f64 / context.unwrap_or(1) as f64;
        let micro_batches = Self::micro_batches(options);
        let mut decoding = Vec::new();
        let mut parameters = 0;
        for batch in batches.into_iter().map(|n| n * groups) {
            let step = |&micro_batches: &u64| {
                let workload = in_parts(self.decode(batch, demand), micro_batches);
                let (seconds, memory) = self.price(options, workload, &self.decoding)?;
                parameters = memory.parameters;
                let left =
                    memory.usable.checked_sub(memory.total + Self::growth(&memory, context, demand))?;
                // Ranks are sent what they hold, copies of heads among it.
                let gpus = options.mesh.ranks();
                let held = memory.states as f64 * gpus as f64 / batch as f64 * of_prompt;
                let transfer_seconds = held / self.bandwidth(gpus);
                Some(Decoding { batch, micro_batches, seconds, room: memory.arena + left, transfer_seconds })
            };
            let steps = micro_batches.iter().filter_map(step);
            let Some(fastest) = steps.min_by(|a, b| a.seconds.total_cmp(&b.seconds)) else { break };
            // More sequences take longer, but for small differences of how steps are overlapped.
            let is_too_slow = demand.token_seconds.is_some_and(|most| fastest.seconds > TOO_SLOW * most);
            decoding.push(fastest);
            if is_too_slow {
                break;
            }
        }
        Ok((decoding, parameters))
    }

    /// A replica that decodes, and computes prompts in chunks if it must; nothing where one sequence for each group is too many.
    fn decoding_replica(&self, options: &ShardOptions, demand: &Demand) -> Result<Option<Replica>> {
        let batches =
            [2, 3].into_iter().flat_map(|from| std::iter::successors(Some(from), |n| Some(2 * n)).take(11));
        let batches: BTreeSet<u64> = batches.chain([1]).filter(|&n| n <= MOST_SEQUENCES).collect();
        let (decoding, parameters) = self.steps(options, demand, batches)?;
        if decoding.is_empty() {
            return Ok(None);
        }
        let chunks = self.chunks(options, self.sizes_of_chunks(demand), parameters, demand)?;
        Ok(Some(Replica { chunks, decoding, ..self.replica(options) }))
    }

    /// Steps of chunks of prompts, of so many tokens each, where steps of tokens have so many bytes of parameters.
    fn chunks(
        &self,
        options: &ShardOptions,
        sizes: impl IntoIterator<Item = u64>,
        parameters: u64,
        demand: &Demand,
    ) -> Result<Vec<Prompts>> {
        let groups = job::sequence_groups(self.registry, options)?;
        let micro_batches = Self::micro_batches(options);
        let sizes = sizes.into_iter().flat_map(|tokens| micro_batches.iter().map(move |&n| (tokens, n)));
        let chunks = sizes.filter_map(|(tokens, micro_batches)| {
            let batch = groups * micro_batches;
            let workload = in_parts(self.part_of_prompts(batch, tokens, demand), micro_batches);
            let (seconds, memory) = self.price(options, workload, &self.prompts)?;
            // An encoder has weights that steps of tokens lack.
            let room = memory.arena + memory.parameters.saturating_sub(parameters);
            Some(Prompts { batch, micro_batches, tokens, seconds, room })
        });
        Ok(chunks.collect())
    }

    /// A replica that computes prompts only, so many tokens of each at once.
    fn prompt_replica(
        &self,
        options: &ShardOptions,
        tokens: u64,
        demand: &Demand,
    ) -> Result<Option<Replica>> {
        let groups = job::sequence_groups(self.registry, options)?;
        let step = |micro_batches: u64| {
            let workload =
                in_parts(self.part_of_prompts(groups * micro_batches, tokens, demand), micro_batches);
            let (batch, context) = (workload.batch, workload.cache);
            let (seconds, memory) = self.price(options, workload, &self.prompts)?;
            let fits = memory.usable >= memory.total + Self::growth(&memory, context, demand);
            fits.then_some(Prompts { batch, micro_batches, tokens, seconds, room: memory.arena })
        };
        let prefills: Vec<Prompts> = Self::micro_batches(options).into_iter().filter_map(step).collect();
        Ok((!prefills.is_empty()).then(|| Replica { prefills, ..self.replica(options) }))
    }

    fn replica(&self, options: &ShardOptions) -> Replica {
        let layout = layout_text(&options.strategy, &mesh_axes(&options.mesh));
        let gpus = options.mesh.ranks();
        Replica { layout, gpus, decoding: Vec::new(), chunks: Vec::new(), prefills: Vec::new() }
    }

    /// Bytes a second that a GPU sends to another replica of so many.
    fn bandwidth(&self, gpus: u64) -> f64 {
        let levels = &self.decoding.levels;
        let level = levels.iter().find(|level| level.devices.value > gpus).or(levels.last());
        level.map_or(f64::INFINITY, |level| level.bandwidth.value * level.exchange_efficiency.value)
    }
}

/// Refuses prompts whose answers end behind the last learned position.
fn check_length(Demand { input, output, .. }: &Demand, positions: Option<u64>) -> Result<()> {
    let Some(most) = positions.filter(|&most| input + output > most) else { return Ok(()) };
    let message = format!(
        "prompts of {input} tokens, `--input`, and answers of {output}, `--output-tokens`, are sequences of {}, and the model has \
         {most} learned positions",
        counted(input + output, "token")
    );
    let output = (*output).min(most / 2);
    let help =
        format!("ask for at most {most} in all, as in `--input {} --output-tokens {output}`", most - output);
    Err(Diagnostic::new("M08", message).help(help).into())
}

/// A workload in micro-batches.
fn in_parts(mut workload: Workload, micro_batches: u64) -> Workload {
    workload.training.micro_batches = micro_batches;
    workload
}
