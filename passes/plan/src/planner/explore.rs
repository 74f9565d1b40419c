//! The search of training steps: strategy, mesh, micro-batches, ZeRO, recomputation and pipeline together.
//!
//! Ranks *inside* a data-parallel group and a stage split one micro-batch; how they do is compiled once, as a step of one
//! micro-batch of one sequence, and everything else follows from that in closed form ([`first_look`](Search::first_look)). Insides grow from the
//! smallest, and those of a size are reached from the best of the sizes that divide it. The best by the first look are compiled again with their
//! data-parallel ranks, ZeRO stage and micro-batch, still without stages ([`Block`]), and the best of these estimates exactly.

use std::collections::BTreeMap;

use ithaca_differentiate::{PipelineOrder, Recompute, Training};
use ithaca_ir::{AxisId, Diagnostic, Mesh};
use ithaca_layout::fuse::Fusion;
use ithaca_layout::registry::Registry;
use ithaca_layout::shard::strategy::{DATA_AXIS, STAGE_AXIS, placement};
use ithaca_layout::shard::{ShardOptions, Zero};
use rayon::prelude::*;

use super::block::{Block, Kind};
use super::candidates::candidates;
use super::compiler::Compiler;
use super::estimate::{Cut, Estimate, Shape};
use super::request::Request;
use super::tried::{Priced, Tried, price};
use crate::cluster::Cluster;
use crate::plan::{Choice, Narrowing};

/// Insides of one size from which larger ones are made.
const KEPT: usize = 4;

/// How much longer than the best step so far one may take by the first look whose inside is split further.
const WORTH: f64 = 1.2;

/// Layouts that are estimated after the first look.
const ESTIMATED: usize = 48;

/// Blocks that are compiled at once; not a number of threads, on which no result depends.
const AT_ONCE: usize = 8;

/// Steps that are compiled whole and simulated.
const EXACT: usize = 12;

/// Calls of `main` in all of those, at most, but for the first: each micro-batch calls each chunk of layers twice.
const EXACT_CALLS: u64 = 4096;

/// How much more than the memory of a device a first look may show, and a layout still be estimated: it knows no fusion.
const TOLERANCE: f64 = 1.15;

/// A step that the search may choose.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Step {
    pub(super) options: ShardOptions,
    pub(super) training: Training,
}

/// Ranks that compute a micro-batch of a stage together.
#[derive(Clone, Debug)]
struct Inside {
    options: ShardOptions,
    /// The data-parallel ranks where experts are split over them too, and `options` has them; else there may be any number
    /// of them around the inside.
    data: Option<u64>,
    /// One micro-batch of one sequence, by recomputation.
    blocks: Vec<(Recompute, Block)>,
    /// Parts of the loss that are worth a try.
    loss_chunks: Vec<u64>,
    looks: Vec<Looked>,
}

impl Inside {
    /// Ranks without those that are data-parallel.
    fn size(&self) -> u64 {
        self.options.mesh.ranks() / self.data.unwrap_or(1)
    }
}

/// A step with a first look at it.
#[derive(Clone, Debug)]
struct Looked {
    inside: usize,
    estimate: Estimate,
    data: u64,
    zero: Zero,
    recompute: Recompute,
    loss_chunks: u64,
    /// Sequences of a micro-batch on a data-parallel rank.
    sequences: u64,
    shape: Shape,
}

struct Search<'a> {
    compiler: &'a dyn Compiler,
    cluster: &'a Cluster,
    request: &'a Request,
    registry: Registry,
    training: &'a Training,
    open: &'a [Choice],
    cuts: BTreeMap<u64, Cut>,
}

/// Every step of a request that is worth to be compiled, compiled.
///
/// # Errors
/// As [`candidates`], and the rule that the only candidate breaks.
pub(super) fn explore(compiler: &dyn Compiler, cluster: &Cluster, request: &Request) -> Result<Tried, Diagnostic> {
    let search = Search::new(compiler, cluster, request);
    // Errors of the request itself are those of all candidates.
    candidates(&search.registry, cluster, request)?;
    let mut tried = Tried::default();
    let insides = search.insides(&mut tried);
    let looked = search.looked(&insides);
    let estimated = search.estimated(&insides, looked);
    search.exact(&insides, estimated, &mut tried);
    Ok(tried)
}

/// Whether a step of the request fits.
pub(super) fn fits(compiler: &dyn Compiler, cluster: &Cluster, request: &Request) -> bool {
    explore(compiler, cluster, request).is_ok_and(|tried| !tried.fits.is_empty())
}

impl<'a> Search<'a> {
    fn new(compiler: &'a dyn Compiler, cluster: &'a Cluster, request: &'a Request) -> Self {
        let steps = request.steps.as_ref().expect("a search of training steps");
        let mut cuts = BTreeMap::new();
        for n in (1..=request.gpus.min(MOST_CHUNKS)).filter(|n| n.is_power_of_two() || request.gpus.is_multiple_of(*n)) {
            cuts.extend(compiler.cut(n).map(|cut| (n, cut)));
        }
        Self { compiler, cluster, request, registry: compiler.registry(), training: &steps.training, open: &steps.open, cuts }
    }

    fn is_open(&self, choice: Choice) -> bool {
        self.open.contains(&choice)
    }

    /// The insides of every size, smallest first.
    fn insides(&self, tried: &mut Tried) -> Vec<Inside> {
        let mut found: Vec<Inside> = Vec::new();
        // Insides of the sizes so far that others are made of, with the seconds that no larger one stays below.
        let mut kept: Vec<(usize, f64)> = Vec::new();
        // Seconds of the best step that fits.
        let mut best = f64::INFINITY;
        for size in divisors(self.request.gpus) {
            let is_made = |(options, _): &(ShardOptions, Option<u64>)| {
                let is_part = |&(i, floor): &(usize, f64)| {
                    floor <= best && is_within(&found[i].options.mesh, &options.mesh)
                };
                self.request.mesh.is_some() || size == 1 || kept.iter().any(is_part)
            };
            let children: Vec<(ShardOptions, Option<u64>)> = self.of_size(size).into_iter().filter(is_made).collect();
            let compiled: Vec<Result<Inside, (ShardOptions, Diagnostic)>> =
                children.into_par_iter().map(|(options, data)| self.inside(options, data)).collect();
            // In order of the time of what fits; what fits nowhere behind, in order of its memory.
            let mut order: Vec<((u32, f64), usize, f64)> = Vec::new();
            for inside in compiled {
                let inside = match inside {
                    Ok(inside) => inside,
                    Err(refused) => {
                        tried.refused.push(refused);
                        continue;
                    }
                };
                let looks = self.first_looks(found.len(), &inside);
                let (mut floor, mut fit, mut least) = (f64::INFINITY, f64::INFINITY, f64::INFINITY);
                for Estimate { seconds, memory } in looks.iter().map(|look| look.estimate) {
                    (floor, least) = (floor.min(seconds), least.min(memory as f64));
                    if memory as f64 <= self.usable() {
                        fit = fit.min(seconds);
                    }
                }
                best = best.min(fit);
                order.push((if fit.is_finite() { (0, fit) } else { (1, least) }, found.len(), floor));
                found.push(Inside { looks, ..inside });
            }
            order.sort_by(|a, b| a.0.0.cmp(&b.0.0).then(a.0.1.total_cmp(&b.0.1)));
            order.retain(|((rank, fit), ..)| *rank > 0 && best.is_infinite() || *rank == 0 && *fit <= WORTH * best);
            kept.extend(order.into_iter().take(KEPT).map(|(_, i, floor)| (i, floor)));
        }
        found
    }

    fn usable(&self) -> f64 {
        TOLERANCE * self.cluster.usable_bytes() as f64
    }

    /// The layouts of so many ranks inside, with the data-parallel ranks where experts are split over them.
    fn of_size(&self, size: u64) -> Vec<(ShardOptions, Option<u64>)> {
        let request = self.request;
        let outer = [DATA_AXIS, STAGE_AXIS];
        let is_outer = |name: &str| self.registry.product(name).is_ok_and(|s| s.iter().any(|s| s.axes().iter().any(|a| outer.contains(a))));
        let strategy = request.strategy.as_ref().map(|name| {
            let inner: Vec<&str> = name.split('+').filter(|name| !is_outer(name)).collect();
            if inner.is_empty() { "single".to_owned() } else { inner.join("+") }
        });
        let mesh = request.mesh.as_ref().map(|mesh| {
            Mesh::new(mesh.axes.values().filter(|a| !outer.contains(&a.name.as_str())).map(|a| (a.name.clone(), a.size)))
        });
        if mesh.as_ref().is_some_and(|mesh| mesh.ranks() != size) {
            return Vec::new();
        }
        let mut narrowing = request.narrowing.clone();
        narrowing.without.extend(["data-parallel".to_owned(), "pipeline".to_owned()]);
        let narrowing = if strategy.is_some() { Narrowing::default() } else { narrowing };
        let mesh = mesh.filter(|_| size > 1);
        let inner = Request { gpus: size, strategy, mesh, narrowing, steps: None, ..request.clone() };
        let found = candidates(&self.registry, self.cluster, &inner).unwrap_or_default();
        let mut seen: Vec<(String, Vec<(String, u64)>)> = Vec::new();
        let is_first = |options: &ShardOptions| {
            let mut axes: Vec<(String, u64)> = options.mesh.axes.values().map(|a| (a.name.clone(), a.size)).collect();
            axes.sort();
            let key = (options.strategy_text(), axes);
            let is_new = !seen.contains(&key);
            seen.push(key);
            is_new
        };
        let mut is_first = is_first;
        let found = found.into_iter().filter(|options| is_first(options));
        found.flat_map(|options| self.with_data(options, request.gpus / size)).collect()
    }

    /// The layout, or where its experts share the axes of tokens, the layout with every number of data-parallel ranks.
    fn with_data(&self, options: ShardOptions, outer: u64) -> Vec<(ShardOptions, Option<u64>)> {
        let strategies = self.registry.product(&options.strategy).unwrap_or_default();
        let shares = strategies.iter().any(|s| s.shares_axes() && s.axes().iter().all(|axis| options.mesh.axis(axis).is_none()));
        if !shares {
            return vec![(options, None)];
        }
        let with = |data: u64| (data_parallel(&options, data), Some(data));
        divisors(outer).into_iter().filter(|data| self.request.batch.is_multiple_of(*data)).map(with).collect()
    }

    /// Compiles one micro-batch of one sequence.
    fn inside(&self, options: ShardOptions, data: Option<u64>) -> Result<Inside, (ShardOptions, Diagnostic)> {
        let options = ShardOptions { zero: Zero::Off, ..options };
        let mut training = Training { micro_batches: 1, stages: 1, ..self.training.clone() };
        if self.is_open(Choice::LossChunks) {
            training.loss_chunks = 1;
        }
        if self.is_open(Choice::Recompute) {
            training.recompute = Recompute::None;
        }
        let block = self.block(data.unwrap_or(1), &training, &options).map_err(|d| (options.clone(), d))?;
        // In so many parts, the loss needs no more memory than a layer.
        let (head, others) = block.calls.split_last().expect("a block has calls");
        let layer = others.iter().map(|call| call.frame + call.saved).max().unwrap_or(head.frame).max(1);
        let parts = head.frame.div_ceil(layer).next_power_of_two().min(MOST_LOSS_CHUNKS);
        let mut loss_chunks = vec![training.loss_chunks];
        if self.is_open(Choice::LossChunks) && parts > 1 {
            loss_chunks.push(parts);
        }
        let policies = if self.is_open(Choice::Recompute) { Recompute::ALL.to_vec() } else { vec![training.recompute] };
        let blocks = policies.into_iter().map(|policy| (policy, block.recomputing(training.recompute, policy))).collect();
        Ok(Inside { options, data, blocks, loss_chunks, looks: Vec::new() })
    }

    /// A step without stages, with so many sequences in a micro-batch on all ranks.
    fn block(&self, sequences: u64, training: &Training, options: &ShardOptions) -> Result<Block, Diagnostic> {
        let compiler = self.compiler.of_step(sequences * training.micro_batches, training).map_err(ithaca_pass::first)?;
        let compiler = compiler.as_deref().unwrap_or(self.compiler);
        compiler.check(options)?;
        // Weights that are gathered ahead are arguments of layers, which then are no longer alike.
        let prefetched = match (options.zero, options.fusion.prefetch) {
            (Zero::Parameters, Some(_)) => self.replica_axes(options),
            _ => Vec::new(),
        };
        let fusion = Fusion { prefetch: None, ..options.fusion };
        let options = ShardOptions { fusion, ..options.clone() };
        let compiled = compiler.draft(&options).map_err(ithaca_pass::first)?;
        let stageless = || Diagnostic::new("P31", "the step has parts that no micro-batch repeats");
        let mut block = Block::of(self.cluster, &compiled, &prefetched).ok_or_else(stageless)?;
        if !prefetched.is_empty() {
            block.hold_ahead(options.mesh.axis(DATA_AXIS).map_or(1, |axis| options.mesh.size(axis)));
        }
        Ok(block)
    }

    /// The axes along which ranks have the same weights.
    fn replica_axes(&self, options: &ShardOptions) -> Vec<String> {
        let mesh = &options.mesh;
        let placement = self.registry.product(&options.strategy).and_then(|s| placement(&s, mesh, &[]));
        let placement = placement.unwrap_or_default();
        let splits = |axis: &AxisId| [&placement.weights, &placement.experts, &placement.stages].iter().any(|s| s.contains(axis));
        let axes = mesh.axes.ids().filter(|axis| !splits(axis));
        axes.map(|axis| mesh.axes[axis].name.clone()).collect()
    }

    /// A first look at all steps, the fastest that may fit first.
    fn looked(&self, insides: &[Inside]) -> Vec<Looked> {
        let mut all: Vec<Looked> = insides.iter().flat_map(|inside| inside.looks.iter().cloned()).collect();
        let usable = self.usable();
        let fits = |l: &Looked| l.estimate.memory as f64 <= usable;
        all.sort_by(|a, b| {
            let key = |l: &Looked| if fits(l) { (0, l.estimate.seconds) } else { (1, l.estimate.memory as f64) };
            key(a).0.cmp(&key(b).0).then(key(a).1.total_cmp(&key(b).1))
        });
        all
    }

    fn first_looks(&self, number: usize, inside: &Inside) -> Vec<Looked> {
        let (gpus, batch) = (self.request.gpus, self.request.batch);
        let size = inside.size();
        let outer = gpus / size;
        let fixed = |axis: &str| self.request.mesh.as_ref().map(|mesh| mesh.axis(axis).map_or(1, |a| mesh.size(a)));
        let named = |strategy: &str| self.request.strategy.as_ref().is_none_or(|n| n.split('+').any(|n| n == strategy));
        let allowed = |strategy: &str| named(strategy) && (self.request.strategy.is_some() || self.request.narrowing.allows(strategy));
        let mut found = Vec::new();
        for data in divisors(outer) {
            let stages = outer / data;
            let is_given = |axis: &str, n: u64| fixed(axis).is_none_or(|size| size == n);
            let is_tried = |strategy: &str, n: u64| n == 1 || allowed(strategy);
            let is_legal = batch.is_multiple_of(data)
                && is_given(DATA_AXIS, data)
                && is_given(STAGE_AXIS, stages)
                && is_tried("data-parallel", data)
                && is_tried("pipeline", stages)
                && inside.data.is_none_or(|fixed| fixed == data)
                && self.cuts.contains_key(&stages);
            if !is_legal {
                continue;
            }
            let share = batch / data;
            for micro_batches in divisors(share) {
                let is_given = self.is_open(Choice::MicroBatches) || micro_batches == self.training.micro_batches;
                // Fewer micro-batches than stages leave stages idle, and more of them than 4 a stage fill it.
                let is_worth_it = !self.is_open(Choice::MicroBatches) || stages == 1 || micro_batches >= stages.min(share);
                if !is_given || !is_worth_it {
                    continue;
                }
                let sequences = share / micro_batches;
                for zero in self.zeros(data * size) {
                    let policies = inside.blocks.iter();
                    let policies = policies.flat_map(|block| inside.loss_chunks.iter().map(move |&parts| (block, parts)));
                    for ((recompute, block), loss_chunks) in policies {
                        let mut block = self.replicated(block, (size, data), zero, sequences, micro_batches);
                        if loss_chunks > self.training.loss_chunks {
                            block.chunk_loss(loss_chunks);
                        }
                        for (order, chunks) in self.orders(stages, micro_batches) {
                            let shape = Shape { stages, micro_batches, order, chunks };
                            let estimate = self.composed(&block, shape, size * data);
                            let Some(estimate) = estimate else { continue };
                            found.push(Looked { inside: number, estimate, data, zero, recompute: *recompute, loss_chunks, sequences, shape });
                        }
                    }
                }
            }
        }
        found
    }

    /// The estimate of a shape.
    fn composed(&self, block: &Block, shape: Shape, ranks_of_stage: u64) -> Option<Estimate> {
        let cut = self.cuts.get(&(shape.stages * shape.chunks))?;
        let handed = block.calls.iter().map(|call| call.handed).max().unwrap_or(0);
        let hop = self.cluster.hop_seconds(ranks_of_stage, handed as f64);
        Some(block.compose(cut, shape, hop))
    }

    /// The orders of a pipeline with their chunks of layers.
    fn orders(&self, stages: u64, micro_batches: u64) -> Vec<(PipelineOrder, u64)> {
        let chunks = |order: PipelineOrder, n: u64| if order == PipelineOrder::Interleaved { n } else { 1 };
        if !self.is_open(Choice::Pipeline) || stages == 1 {
            return vec![(self.training.pipeline, if stages == 1 { 1 } else { chunks(self.training.pipeline, self.training.chunks) })];
        }
        let mut orders = vec![(PipelineOrder::OneForwardOneBackward, 1), (PipelineOrder::ZbH1, 1)];
        if micro_batches.is_multiple_of(stages) {
            orders.extend([2, 4].map(|n| (PipelineOrder::Interleaved, n)));
        }
        orders
    }

    fn zeros(&self, replicas: u64) -> Vec<Zero> {
        if !self.is_open(Choice::Zero) {
            return vec![self.request.options.zero];
        }
        if replicas == 1 { vec![Zero::Off] } else { vec![Zero::Off, Zero::Optimizer, Zero::Gradients, Zero::Parameters] }
    }

    /// A block of one sequence with data-parallel ranks, ZeRO and a larger micro-batch, roughly.
    fn replicated(&self, block: &Block, (size, data): (u64, u64), zero: Zero, sequences: u64, micro_batches: u64) -> Block {
        let mut block = block.scaled(sequences);
        for i in 0..block.calls.len() {
            let gradients = block.layer_bytes(i, Kind::Gradients) as f64;
            let parameters = block.layer_bytes(i, Kind::Parameters);
            let gather = |bytes: f64| self.cluster.gather_seconds(data, size, bytes);
            let reduce = gather(gradients);
            let call = &mut block.calls[i];
            let seconds = &mut call.seconds;
            let whole = if zero == Zero::Off { 2.0 * reduce } else { reduce };
            seconds.complete = seconds.complete.max(whole);
            match zero {
                Zero::Off => {}
                Zero::Optimizer => seconds.update = seconds.update / data as f64 + gather(parameters as f64),
                Zero::Gradients => {
                    seconds.update = seconds.update / data as f64 + gather(parameters as f64);
                    seconds.backward = seconds.backward.max(whole);
                }
                Zero::Parameters => {
                    let gathered = gather(parameters as f64);
                    seconds.update /= data as f64;
                    seconds.forward = seconds.forward.max(gathered);
                    seconds.backward = seconds.backward.max(gathered + whole);
                    seconds.complete = seconds.complete.max(gathered + whole);
                    call.frame += 2 * parameters;
                }
            }
            for held in &mut call.held {
                // Gradients of several micro-batches are summed beside those of one.
                let sums = match zero {
                    Zero::Off | Zero::Optimizer if held.kind == Kind::Gradients && micro_batches > 1 => held.bytes,
                    _ => 0,
                };
                let parts = match (held.kind, zero) {
                    (_, Zero::Off) | (Kind::Parameters, Zero::Optimizer | Zero::Gradients) | (Kind::States, _) => 1,
                    (Kind::Gradients | Kind::Optimizer | Kind::Parameters, _) => data,
                };
                held.bytes = held.bytes.div_ceil(parts) + sums;
            }
        }
        block
    }

    /// The best by the first look, with estimates of what is compiled without stages; the fastest that fits first.
    ///
    /// As long as one of the best was only looked at, it is estimated.
    fn estimated(&self, insides: &[Inside], looked: Vec<Looked>) -> Vec<Looked> {
        let mut numbers: BTreeMap<Key, usize> = BTreeMap::new();
        let mut steps: Vec<(usize, Looked)> = Vec::with_capacity(looked.len());
        for look in looked {
            let n = numbers.len();
            steps.push((*numbers.entry(Key::of(&look)).or_insert(n), look));
        }
        let mut keys: Vec<Option<Key>> = vec![None; numbers.len()];
        for (key, number) in numbers {
            keys[number] = Some(key);
        }
        // Whether the steps of a key were estimated.
        let mut done = vec![false; keys.len()];
        let mut left = ESTIMATED;
        let usable = self.cluster.usable_bytes() as f64;
        loop {
            let order = |(key, look): &(usize, Looked)| {
                let usable = if done[*key] { usable } else { TOLERANCE * usable };
                let Estimate { seconds, memory } = look.estimate;
                if memory as f64 <= usable { (0, seconds) } else { (1, memory as f64) }
            };
            steps.sort_by(|a, b| {
                let (a, b) = (order(a), order(b));
                a.0.cmp(&b.0).then(a.1.total_cmp(&b.1))
            });
            let mut next: Vec<usize> = Vec::new();
            for (key, _) in steps.iter().take(EXACT) {
                if !done[*key] && !next.contains(key) {
                    next.push(*key);
                }
            }
            next.truncate(AT_ONCE.min(left));
            if next.is_empty() {
                break;
            }
            left -= next.len();
            let blocks: Vec<Option<Block>> = next
                .par_iter()
                .map(|&number| {
                    let key = keys[number].as_ref()?;
                    let step = self.step(&insides[key.inside], key, 1);
                    let training = Training { micro_batches: key.micro_batches, ..step.training };
                    self.block(key.sequences * key.data, &training, &step.options).ok()
                })
                .collect();
            for (&number, block) in next.iter().zip(&blocks) {
                done[number] = true;
                for (_, look) in steps.iter_mut().filter(|(key, _)| *key == number) {
                    let ranks = look.data * insides[look.inside].size();
                    let estimate = block.as_ref().and_then(|block| self.composed(block, look.shape, ranks));
                    look.estimate = estimate.unwrap_or(Estimate { seconds: f64::INFINITY, memory: u64::MAX });
                }
            }
        }
        let estimated = steps.into_iter().filter(|(key, look)| done[*key] && look.estimate.seconds.is_finite());
        estimated.map(|(_, look)| look).collect()
    }

    /// The step of a block, with so many stages.
    fn step(&self, inside: &Inside, key: &Key, stages: u64) -> Step {
        let options = if inside.data.is_some() { inside.options.clone() } else { data_parallel(&inside.options, key.data) };
        let options = around(&options, ("pipeline", STAGE_AXIS), stages);
        let fusion = if self.request.chooses_fusion { key.zero.usual_fusion() } else { self.request.options.fusion };
        let options = ShardOptions { zero: key.zero, fusion, ..options };
        let training = Training {
            recompute: key.recompute,
            loss_chunks: key.loss_chunks,
            stages,
            ..self.training.clone()
        };
        Step { options, training }
    }

    /// Compiles the best.
    fn exact(&self, insides: &[Inside], estimated: Vec<Looked>, tried: &mut Tried) {
        let mut calls = 0;
        let mut chosen: Vec<Step> = Vec::new();
        for look in &estimated {
            let Shape { stages, micro_batches, order, chunks } = look.shape;
            let more = stages * micro_batches * chunks;
            if chosen.len() == EXACT || !chosen.is_empty() && calls + more > EXACT_CALLS {
                break;
            }
            calls += more;
            let step = self.step(&insides[look.inside], &Key::of(look), stages);
            let training = Training { micro_batches, pipeline: order, chunks: if order == PipelineOrder::Interleaved { chunks } else { self.training.chunks }, ..step.training };
            chosen.push(Step { training, ..step });
        }
        let priced: Vec<(Step, Result<Priced, Diagnostic>)> = chosen
            .into_par_iter()
            .map(|step| {
                let priced = self.priced(&step);
                (step, priced)
            })
            .collect();
        for (step, priced) in priced {
            match priced {
                Ok(priced) => match priced.memory.over() {
                    None => tried.fits.push(priced),
                    Some(over) => tried.too_large.push((priced, over)),
                },
                Err(diagnostic) => tried.refused.push((step.options, diagnostic)),
            }
        }
    }

    fn priced(&self, step: &Step) -> Result<Priced, Diagnostic> {
        let compiler = self.compiler.of_step(self.request.batch, &step.training).map_err(ithaca_pass::first)?;
        let compiler = compiler.as_deref().unwrap_or(self.compiler);
        let priced = price(compiler, self.cluster, &step.options)?;
        let flags = flags(self.open, step);
        Ok(Priced { training: Some(step.training.clone()), flags, ..priced })
    }
}

/// The most parts of a loss that are tried.
const MOST_LOSS_CHUNKS: u64 = 64;

/// The most chunks of layers of a pipeline that are tried.
const MOST_CHUNKS: u64 = 512;

/// A block that is compiled.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Key {
    inside: usize,
    data: u64,
    zero: Zero,
    recompute: Recompute,
    loss_chunks: u64,
    sequences: u64,
    /// One, or two for any number of them.
    micro_batches: u64,
}

impl Key {
    fn of(look: &Looked) -> Self {
        Self {
            inside: look.inside,
            data: look.data,
            zero: look.zero,
            recompute: look.recompute,
            loss_chunks: look.loss_chunks,
            sequences: look.sequences,
            micro_batches: look.shape.micro_batches.min(2),
        }
    }
}

/// A layout with so many data-parallel ranks around it.
fn data_parallel(options: &ShardOptions, ranks: u64) -> ShardOptions {
    around(options, ("data-parallel", DATA_AXIS), ranks)
}

/// A layout with a strategy and its axis around it.
fn around(options: &ShardOptions, (name, axis): (&str, &str), size: u64) -> ShardOptions {
    if size == 1 {
        return options.clone();
    }
    let strategy = match options.strategy.as_str() {
        "single" => name.to_owned(),
        inner => format!("{name}+{inner}"),
    };
    let inner = options.mesh.axes.values().map(|a| (a.name.clone(), a.size));
    let mesh = Mesh::new(std::iter::once((axis.to_owned(), size)).chain(inner));
    ShardOptions { strategy, mesh, ..options.clone() }
}

/// What a search chose of a step beside its layout, as flags.
fn flags(open: &[Choice], Step { options, training }: &Step) -> String {
    let is_staged = training.stages > 1;
    let flag = |choice: &Choice| match choice {
        Choice::Zero => (options.zero != Zero::Off).then(|| format!("--zero {}", options.zero)),
        Choice::Recompute => {
            (training.recompute != Recompute::None).then(|| format!("--recompute {}", training.recompute))
        }
        Choice::MicroBatches => (training.micro_batches > 1).then(|| format!("--micro-batches {}", training.micro_batches)),
        Choice::LossChunks => (training.loss_chunks > 1).then(|| format!("--loss-chunks {}", training.loss_chunks)),
        Choice::Pipeline if is_staged && training.pipeline == PipelineOrder::Interleaved => {
            Some(format!("--pipeline {} --train chunks={}", training.pipeline.name(), training.chunks))
        }
        Choice::Pipeline => is_staged.then(|| format!("--pipeline {}", training.pipeline.name())),
    };
    open.iter().filter_map(flag).collect::<Vec<_>>().join(" ")
}

/// Whether every axis of a mesh is one of another, with a size that divides the other's.
fn is_within(part: &Mesh, whole: &Mesh) -> bool {
    part.axes.values().all(|axis| {
        whole.axis(&axis.name).is_some_and(|other| whole.size(other).is_multiple_of(axis.size))
    })
}

fn divisors(n: u64) -> Vec<u64> {
    (1..=n).filter(|d| n.is_multiple_of(*d)).collect()
}
