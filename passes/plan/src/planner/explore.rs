//! The search of training steps: strategy, mesh, micro-batches, ZeRO, recomputation and pipeline together.
//!
//! Ranks *inside* a data-parallel group and a stage split one micro-batch; how they do is compiled once, as a step of one
//! micro-batch of one sequence, and everything else follows from that in closed form ([`first_look`](Search::first_look)). Insides grow from the
//! smallest, and those of a size are reached from the best of the sizes that divide it. The best by the first look are compiled again with their
//! data-parallel ranks, ZeRO stage and micro-batch, still without stages ([`Block`]), and the best of these estimates exactly.

use std::collections::BTreeMap;

use ithaca_differentiate::{PipelineOrder, Recompute, Training};
use ithaca_ir::{Diagnostic, Mesh};
use ithaca_layout::registry::Registry;
use ithaca_layout::shard::strategy::{DATA_AXIS, STAGE_AXIS};
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
const KEPT: usize = 8;

/// Layouts that are estimated after the first look.
const ESTIMATED: usize = 48;

/// Steps that are compiled whole and simulated.
const EXACT: usize = 16;

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
    /// The data-parallel ranks, where experts are split over them too; else any number.
    data: Option<u64>,
    /// One micro-batch of one sequence, by recomputation.
    blocks: Vec<(Recompute, Block)>,
    /// Parts of the loss.
    loss_chunks: u64,
    looks: Vec<Looked>,
}

/// A step with a first look at it.
#[derive(Clone, Debug)]
struct Looked {
    inside: usize,
    estimate: Estimate,
    stages: u64,
    data: u64,
    zero: Zero,
    recompute: Recompute,
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
        // Insides of the sizes so far that others are made of.
        let mut kept: Vec<usize> = Vec::new();
        for size in divisors(self.request.gpus) {
            let children: Vec<(ShardOptions, Option<u64>)> = self
                .of_size(size)
                .into_iter()
                .filter(|(options, _)| {
                    let is_part = |&i: &usize| is_within(&found[i].options.mesh, &options.mesh);
                    self.request.mesh.is_some() || size == 1 || kept.iter().any(is_part)
                })
                .collect();
            let compiled: Vec<Result<Inside, (ShardOptions, Diagnostic)>> =
                children.into_par_iter().map(|(options, data)| self.inside(options, data)).collect();
            let first = found.len();
            for inside in compiled {
                match inside {
                    Ok(inside) => {
                        let looks = self.first_looks(found.len(), &inside);
                        found.push(Inside { looks, ..inside });
                    }
                    Err(refused) => tried.refused.push(refused),
                }
            }
            let mut best: Vec<(f64, usize)> = (first..found.len())
                .map(|i| {
                    let looks = &found[i].looks;
                    let fits = |l: &&Looked| l.estimate.memory as f64 <= self.usable();
                    let seconds = looks.iter().filter(fits).map(|l| l.estimate.seconds).fold(f64::INFINITY, f64::min);
                    let least = looks.iter().map(|l| l.estimate.memory).min().unwrap_or(u64::MAX);
                    // What fits nowhere is in order of its memory, behind all others.
                    (if seconds.is_finite() { seconds } else { 1e12 * least as f64 }, i)
                })
                .collect();
            best.sort_by(|a, b| a.0.total_cmp(&b.0));
            kept.extend(best.into_iter().take(KEPT).map(|(_, i)| i));
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
        found.into_iter().map(|options| (options, None)).collect()
    }

    /// Compiles one micro-batch of one sequence.
    fn inside(&self, options: ShardOptions, data: Option<u64>) -> Result<Inside, (ShardOptions, Diagnostic)> {
        let options = ShardOptions { zero: Zero::Off, ..options };
        let mut training = Training { micro_batches: 2, stages: 1, ..self.training.clone() };
        if self.is_open(Choice::LossChunks) {
            training.loss_chunks = 1;
        }
        let mut blocks: Vec<(Recompute, Block)> = Vec::new();
        for recompute in self.policies() {
            training.recompute = recompute;
            let block = self.block(1, &training, &options).map_err(|d| (options.clone(), d))?;
            blocks.push((recompute, block));
        }
        Ok(Inside { options, data, blocks, loss_chunks: training.loss_chunks, looks: Vec::new() })
    }

    /// The policies of recomputation.
    fn policies(&self) -> Vec<Recompute> {
        if self.is_open(Choice::Recompute) { vec![Recompute::None, Recompute::FULL] } else { vec![self.training.recompute] }
    }

    /// A step without stages, with so many sequences in a micro-batch on all ranks.
    fn block(&self, sequences: u64, training: &Training, options: &ShardOptions) -> Result<Block, Diagnostic> {
        let compiler = self.compiler.of_step(sequences * training.micro_batches, training).map_err(ithaca_pass::first)?;
        let compiler = compiler.as_deref().unwrap_or(self.compiler);
        compiler.check(options)?;
        let compiled = compiler.draft(options).map_err(ithaca_pass::first)?;
        let stageless = || Diagnostic::new("P31", "the step has parts that no micro-batch repeats");
        Block::of(self.cluster, &compiled).ok_or_else(stageless)
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
        let size = inside.options.mesh.ranks();
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
                    for (recompute, block) in &inside.blocks {
                        let block = self.replicated(block, (size, data), zero, sequences);
                        for (order, chunks) in self.orders(stages, micro_batches) {
                            let shape = Shape { stages, micro_batches, order, chunks };
                            let estimate = self.composed(&block, shape, size * data);
                            let Some(estimate) = estimate else { continue };
                            found.push(Looked { inside: number, estimate, stages, data, zero, recompute: *recompute, sequences, shape });
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
    fn replicated(&self, block: &Block, (size, data): (u64, u64), zero: Zero, sequences: u64) -> Block {
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
                let parts = match (held.kind, zero) {
                    (_, Zero::Off) | (Kind::States, _) => 1,
                    (Kind::Parameters | Kind::Sums, Zero::Optimizer) | (Kind::Parameters, Zero::Gradients) => 1,
                    // Sums are what is split.
                    (Kind::Sums, Zero::Gradients | Zero::Parameters) => u64::MAX,
                    (Kind::Gradients | Kind::Optimizer | Kind::Parameters, _) => data,
                };
                held.bytes /= parts;
            }
        }
        block
    }

    /// The best by the first look, with estimates of what is compiled without stages; the fastest that fits first.
    fn estimated(&self, insides: &[Inside], looked: Vec<Looked>) -> Vec<Looked> {
        let mut keys: Vec<Key> = Vec::new();
        let mut chosen: Vec<(usize, Looked)> = Vec::new();
        for look in looked {
            let known = keys.iter().position(|key| key.is_of(&look));
            if known.is_none() && keys.len() == ESTIMATED {
                continue;
            }
            let key = known.unwrap_or_else(|| {
                keys.push(Key::of(&look));
                keys.len() - 1
            });
            chosen.push((key, look));
        }
        let blocks: Vec<Option<Block>> = keys
            .par_iter()
            .map(|key| {
                let step = self.step(&insides[key.inside], key, 1);
                let training = Training { micro_batches: key.micro_batches, ..step.training };
                self.block(key.sequences * key.data, &training, &step.options).ok()
            })
            .collect();
        let mut estimated: Vec<Looked> = Vec::new();
        for (key, look) in chosen {
            let Some(block) = &blocks[key] else { continue };
            let ranks = look.data * insides[look.inside].options.mesh.ranks();
            let Some(estimate) = self.composed(block, look.shape, ranks) else { continue };
            estimated.push(Looked { estimate, ..look });
        }
        let usable = self.cluster.usable_bytes();
        estimated.sort_by(|a, b| {
            let fits = |l: &Looked| l.estimate.memory <= usable;
            let by_time = || a.estimate.seconds.total_cmp(&b.estimate.seconds).then(a.estimate.memory.cmp(&b.estimate.memory));
            match (fits(a), fits(b)) {
                (true, true) => by_time(),
                (false, false) => a.estimate.memory.cmp(&b.estimate.memory),
                (a, b) => b.cmp(&a),
            }
        });
        estimated
    }

    /// The step of a block, with so many stages.
    fn step(&self, inside: &Inside, key: &Key, stages: u64) -> Step {
        let mut strategy = inside.options.strategy.clone();
        let mut axes: Vec<(String, u64)> = inside.options.mesh.axes.values().map(|a| (a.name.clone(), a.size)).collect();
        for (name, axis, size) in [("data-parallel", DATA_AXIS, key.data), ("pipeline", STAGE_AXIS, stages)] {
            if size > 1 {
                strategy = if strategy == "single" { name.to_owned() } else { format!("{name}+{strategy}") };
                axes.insert(0, (axis.to_owned(), size));
            }
        }
        let fusion = if self.request.chooses_fusion { key.zero.usual_fusion() } else { self.request.options.fusion };
        let options = ShardOptions { strategy, mesh: Mesh::new(axes), zero: key.zero, fusion, ..inside.options.clone() };
        let training = Training {
            recompute: key.recompute,
            loss_chunks: inside.loss_chunks,
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
        Ok(Priced { training: Some(step.training.clone()), ..priced })
    }
}

/// The most chunks of layers of a pipeline that are tried.
const MOST_CHUNKS: u64 = 512;

/// A block that is compiled.
#[derive(Clone, Debug, PartialEq)]
struct Key {
    inside: usize,
    data: u64,
    zero: Zero,
    recompute: Recompute,
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
            sequences: look.sequences,
            micro_batches: look.shape.micro_batches.min(2),
        }
    }

    fn is_of(&self, look: &Looked) -> bool {
        *self == Self::of(look)
    }
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
