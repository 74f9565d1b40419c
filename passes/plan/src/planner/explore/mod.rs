//! The search of training steps: strategy, mesh, micro-batches, ZeRO, recomputation and pipeline together.
//!
//! Ranks *inside* a data-parallel group and a stage split one micro-batch; how they do is compiled once, as a step of one
//! micro-batch of one sequence, and everything else follows from that in closed form ([`first_look`](Search::first_look)). Insides grow from the
//! smallest, and those of a size are reached from the best of the sizes that divide it. The best by the coarse estimate are compiled again with their
//! data-parallel ranks, ZeRO stage and micro-batch, still without stages ([`Block`]), and the best of these estimates exactly.

mod chosen;
mod coarse;
mod inside;
mod pool;
mod refine;
mod replicas;
mod variants;

use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError};

use ithaca_differentiate::{PipelineOrder, Recompute, Training};
use ithaca_ir::{Diagnostic, Mesh};
use ithaca_layout::fuse::Fusion;
use ithaca_layout::registry::Registry;
use ithaca_layout::shard::strategy::{DATA_AXIS, EXPERT_AXIS, STAGE_AXIS, TENSOR_AXIS};
use ithaca_layout::shard::{ShardOptions, Zero};
use rayon::prelude::*;

use super::block::Block;
use super::candidates::{OF_FRAMEWORK, candidates};
use super::compiler::Compiler;
use super::estimate::{Cut, Estimate, Shape};
use super::outcomes::Outcomes;
use super::request::{Request, Steps};
use crate::cluster::Cluster;
use crate::plan::{Choice, Effort, Narrowing};

/// Shapes of insides of one size from which larger ones are made.
const KEPT: usize = 3;

/// Insides of one size, at most.
const OF_SIZE: usize = 24;

/// The part of the memory of a device by which insides that do not fit differ.
const ALIKE: f64 = 0.1;

/// How much longer than the best step so far one may take by the coarse estimate whose inside is split further.
const WORTH: f64 = 1.1;

/// Steps that are compiled whole and simulated, where one of them fits.
const EXACT: usize = 12;

/// How much more than the memory of a device a coarse estimate may show, and a layout still be estimated: it knows no fusion.
const TOLERANCE: f64 = 1.15;

/// Ranks that compute a micro-batch of a stage together.
#[derive(Clone, Debug)]
struct Inside {
    options: ShardOptions,
    /// The data-parallel ranks where experts are split over them, or over a part of them, and `options` has them; else there
    /// may be any number of them around the inside.
    data: Option<u64>,
    /// Ranks of a sequence that have the same weights and other tokens.
    copies: u64,
    /// One micro-batch of one sequence, by recomputation.
    blocks: Vec<(Recompute, Block)>,
    /// Parts of the loss that are worth a try.
    loss_chunks: Vec<u64>,
}

impl Inside {
    /// Ranks that split heads, over which experts are split, and that are data-parallel; the others split sequences.
    fn shape(&self) -> [u64; 3] {
        [TENSOR_AXIS, EXPERT_AXIS, DATA_AXIS].map(|axis| {
            let mesh = &self.options.mesh;
            mesh.axis(axis).map_or(1, |axis| mesh.size(axis))
        })
    }

    /// Ranks without those that are data-parallel.
    fn size(&self) -> u64 {
        self.options.mesh.ranks() / self.data.unwrap_or(1)
    }
}

/// A layout that breaks a rule.
type Refused = (ShardOptions, Diagnostic);

/// A step with a coarse estimate of it.
#[derive(Clone, Debug)]
struct Candidate {
    inside: usize,
    estimate: Estimate,
    data: u64,
    zero: Zero,
    recompute: Recompute,
    loss_chunks: u64,
    /// Sequences of a micro-batch on a data-parallel rank.
    sequences: u64,
    shape: Shape,
    /// The part of it that chunks of collectives may hide: of a coarse estimate, all in which nothing but collectives runs.
    hideable: f64,
    /// The bucket of its messages of weights, in MiB, where it is not that of `pack`.
    bucket: Option<u64>,
    /// The fusion of its collectives, where another than the usual one is faster.
    fusion: Option<Fusion>,
    /// Whether it is estimated only because another fusion may be much faster.
    is_speculative: bool,
}

struct Search<'a> {
    compiler: &'a dyn Compiler,
    cluster: &'a Cluster,
    request: &'a Request,
    registry: Registry,
    training: &'a Training,
    open: &'a [Choice],
    cuts: BTreeMap<u64, Cut>,
    blocks: &'a Blocks,
}

/// Steps without stages that were compiled: searches for repairs compile many of them again.
#[derive(Debug, Default)]
pub(super) struct Blocks {
    known: Mutex<BTreeMap<String, Result<Arc<Block>, Diagnostic>>>,
}

impl Blocks {
    /// The block of a key, which says all that it depends on.
    fn of(
        &self,
        key: String,
        block: impl FnOnce() -> Result<Block, Diagnostic>,
    ) -> Result<Arc<Block>, Diagnostic> {
        let known = self.known.lock().unwrap_or_else(PoisonError::into_inner).get(&key).cloned();
        known.unwrap_or_else(|| {
            let block = block().map(Arc::new);
            self.known.lock().unwrap_or_else(PoisonError::into_inner).insert(key, block.clone());
            block
        })
    }
}

/// Every step of a request that is worth to be compiled, compiled.
///
/// # Errors
/// As [`candidates`], and the rule that the only candidate breaks.
pub(super) fn explore(
    compiler: &dyn Compiler,
    cluster: &Cluster,
    request: &Request,
    blocks: &Blocks,
) -> Result<Outcomes, Diagnostic> {
    let with = |request: &Request| {
        let search = Search::new(compiler, cluster, request, blocks);
        explored(&search, search.limit(EXACT), Answer::Ranked)
    };
    let tried = with(request)?;
    if request.narrowing.effort == Effort::High || !tried.nearly_fits(cluster.usable_bytes()) {
        return Ok(tried);
    }
    let narrowing = Narrowing { effort: Effort::High, ..request.narrowing.clone() };
    with(&Request { narrowing, ..request.clone() })
}

/// Whether a step of the request fits.
pub(super) fn fits(compiler: &dyn Compiler, cluster: &Cluster, request: &Request, blocks: &Blocks) -> bool {
    let search = Search::new(compiler, cluster, request, blocks);
    explored(&search, 1, Answer::WhetherOneFits).is_ok_and(|tried| !tried.fits.is_empty())
}

/// Why a search finds no micro-batches for the interleaved order of a request, on a mesh where it finds none.
pub(super) fn no_micro_batches(request: &Request, mesh: &Mesh) -> Option<Diagnostic> {
    let Steps { training, open } = request.steps.as_ref()?;
    let is_searched = open.contains(&Choice::MicroBatches) && !open.contains(&Choice::Pipeline);
    let size = |axis: &str| mesh.axis(axis).map_or(1, |axis| mesh.size(axis));
    let (stages, data) = (size(STAGE_AXIS), size(DATA_AXIS));
    let share = request.batch / data;
    let is_undivided = request.batch.is_multiple_of(data) && !share.is_multiple_of(stages);
    if !is_searched || training.pipeline != PipelineOrder::Interleaved || !is_undivided {
        return None;
    }
    let sequences = match share {
        1 => "1 sequence of each pipeline is".to_owned(),
        n => format!("{n} sequences of each pipeline are"),
    };
    let message = format!(
        "{sequences} not divisible by {stages} stages, as the interleaved order requires of micro-batches"
    );
    let help = format!("use a `--batch` that is a multiple of {}, or `--pipeline 1f1b`", data * stages);
    Some(Diagnostic::new("P53", message).help(help))
}

/// What is asked of a search.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Answer {
    /// The best steps, or those that are nearest to fit.
    Ranked,
    /// Whether a step fits.
    WhetherOneFits,
}

fn explored(search: &Search<'_>, exact: usize, answer: Answer) -> Result<Outcomes, Diagnostic> {
    // Errors of the request itself are those of all candidates. Stages are around them, and may be all that a framework can run.
    let refused = candidates(&search.registry, search.cluster, search.request).err();
    if let Some(error) = refused.as_ref().filter(|error| error.code != OF_FRAMEWORK) {
        return Err(error.clone());
    }
    let mut tried = Outcomes::default();
    let (insides, candidates) = search.candidates(&mut tried);
    if let Some(error) = refused.filter(|_| candidates.is_empty()) {
        return Err(error);
    }
    if answer == Answer::WhetherOneFits
        && candidates.first().is_none_or(|l| search.needed(&l.estimate) > search.usable())
    {
        return Ok(tried);
    }
    let mut left = candidates;
    let mut before = f64::INFINITY;
    for round in 1..=ROUNDS {
        let mut estimated = search.estimated(&insides, &left, &mut tried);
        if answer == Answer::Ranked {
            search.fused(&insides, &mut estimated);
            estimated.retain(|candidate| !candidate.is_speculative || candidate.fusion.is_some());
        }
        let usable = search.cluster.usable_bytes() as f64;
        let fitting = estimated.iter().filter(|candidate| search.needed(&candidate.estimate) <= usable);
        let least = fitting.map(|candidate| candidate.estimate.seconds).fold(f64::INFINITY, f64::min);
        let families = search.exact(&insides, estimated, exact, &mut tried);
        let best = tried.fits.iter().map(|one| one.simulation.seconds).fold(f64::INFINITY, f64::min);
        // Other families were passed over for estimates that did not hold.
        let is_misled = if round == 1 { best > MISLED * least } else { best < GAINED * before };
        if answer == Answer::WhetherOneFits || !is_misled || best.is_infinite() || round == ROUNDS {
            break;
        }
        before = best;
        left.retain(|candidate| {
            candidate.estimate.seconds <= NEAR * best && !families.has(&insides, candidate)
        });
        if left.is_empty() {
            break;
        }
    }
    if answer == Answer::Ranked {
        search.in_other_forms(&mut tried);
    }
    Ok(tried)
}

impl<'a> Search<'a> {
    fn new(
        compiler: &'a dyn Compiler,
        cluster: &'a Cluster,
        request: &'a Request,
        blocks: &'a Blocks,
    ) -> Self {
        let steps = request.steps.as_ref().expect("a search of training steps");
        let mut cuts = BTreeMap::new();
        // Two stages may share what no stage can own.
        let (stages, micro_batches) = (2, 2);
        let staged = Training { stages, micro_batches, stage_layers: Vec::new(), ..steps.training.clone() };
        let is_legal = request.strategy.is_some() || compiler.of_step(micro_batches, &staged).is_ok();
        let most = if is_legal { MOST_CHUNKS } else { 1 };
        let chunks = CHUNKS.into_iter().chain([1, steps.training.chunks]);
        let stages = divisors(request.gpus);
        let numbers: BTreeSet<u64> =
            chunks.flat_map(|chunks| stages.iter().map(move |stages| stages * chunks)).collect();
        for n in numbers.into_iter().filter(|&n| n <= most) {
            cuts.extend(compiler.cut(n).map(|cut| (n, cut)));
        }
        Self {
            compiler,
            cluster,
            request,
            registry: compiler.registry(),
            training: &steps.training,
            open: &steps.open,
            cuts,
            blocks,
        }
    }

    fn is_open(&self, choice: Choice) -> bool {
        self.open.contains(&choice)
    }

    /// The insides of every size, smallest first, and a coarse estimate of all their steps: the fastest that may fit first.
    fn candidates(&self, tried: &mut Outcomes) -> (Vec<Inside>, Vec<Candidate>) {
        let mut found: Vec<Inside> = Vec::new();
        let mut candidates: Vec<Candidate> = Vec::new();
        let mut kept: Vec<Seed> = Vec::new();
        // Seconds of the best step that fits.
        let mut best = f64::INFINITY;
        for size in divisors(self.request.gpus) {
            let children = self.made_of(size, &found, &kept, best);
            let compile = |(options, data)| {
                let inside = self.inside(options, data)?;
                let coarse = self.coarse_estimates(&inside);
                Ok::<_, Box<Refused>>((inside, coarse))
            };
            let compiled: Vec<_> = children.into_par_iter().map(compile).collect();
            let mut of_size: Vec<Seed> = Vec::new();
            for inside in compiled {
                let (inside, coarse) = match inside {
                    Ok(inside) => inside,
                    Err(refused) => {
                        tried.refused.push(*refused);
                        continue;
                    }
                };
                let (mut floor, mut fit, mut least) = (f64::INFINITY, f64::INFINITY, f64::INFINITY);
                for candidate in &coarse {
                    let (seconds, memory) = (candidate.estimate.seconds, self.needed(&candidate.estimate));
                    (floor, least) = (floor.min(seconds), least.min(memory));
                    if memory <= self.usable() {
                        fit = fit.min(seconds);
                    }
                }
                best = best.min(fit);
                // Insides that need nearly as much memory are in order of time.
                let missing = (least / (ALIKE * self.usable())).ceil();
                let order = if fit.is_finite() { Order(0.0, fit) } else { Order(missing, floor) };
                of_size.push(Seed { number: found.len(), order, floor });
                candidates.extend(
                    coarse.into_iter().map(|candidate| Candidate { inside: found.len(), ..candidate }),
                );
                found.push(inside);
            }
            of_size.sort_by_key(|one| one.order);
            let is_worth = |Order(missing, seconds): Order| missing == 0.0 && seconds <= WORTH * best;
            // Insides that differ only in how they split sequences are made larger together: which one fits may change.
            let shape = |one: &Seed| found[one.number].shape();
            let worth = of_size.iter().filter(|one| best.is_infinite() || is_worth(one.order)).map(shape);
            let mut shapes: Vec<[u64; 3]> = Vec::new();
            worth.for_each(|shape| {
                if !shapes.contains(&shape) {
                    shapes.push(shape)
                }
            });
            let most = self.limit(KEPT).min(shapes.len());
            let is_kept = |one: &&Seed| {
                let options = &found[one.number].options;
                shapes[..most].contains(&shape(one)) || self.is_pure(options)
            };
            kept.extend(of_size.iter().filter(is_kept).copied());
        }
        let usable = self.usable();
        candidates.sort_by_cached_key(|candidate| self.order(&candidate.estimate, usable));
        (found, candidates)
    }

    /// The order of estimates: those that need no more than `usable` by time, and behind them the others by memory.
    fn order(&self, estimate: &Estimate, usable: f64) -> Order {
        let needed = self.needed(estimate);
        if needed <= usable { Order(0.0, estimate.seconds) } else { Order(1.0, needed) }
    }

    /// The insides of a size that split one that was kept once more, those of the best first; the only one of a request that
    /// names it.
    fn made_of(
        &self,
        size: u64,
        found: &[Inside],
        kept: &[Seed],
        best: f64,
    ) -> Vec<(ShardOptions, Option<u64>)> {
        if size == 1 || self.request.mesh.is_some() {
            return self.of_size(size);
        }
        // No size between may have a legal layout.
        let sizes = found.iter().map(Inside::size).filter(|&n| n < size && size.is_multiple_of(n));
        let nearest = sizes.max();
        let is_next = |one: &&Seed| {
            let parent = found[one.number].size();
            let is_split = size.is_multiple_of(parent) && is_prime(size / parent.max(1));
            let may_be_pure = size <= self.cluster.devices_per_node.value;
            parent < size
                && (is_split || Some(parent) == nearest)
                && (one.floor <= WORTH * best || may_be_pure)
        };
        let next: Vec<&Seed> = kept.iter().filter(is_next).collect();
        if next.is_empty() {
            return Vec::new();
        }
        let is_parent = |one: &Seed, options: &ShardOptions| {
            (one.floor <= WORTH * best || self.is_pure(options))
                && is_within(&found[one.number].options.mesh, &options.mesh)
        };
        let mut made: Vec<(Order, _)> = Vec::new();
        for (options, data) in self.of_size(size) {
            let parents = next.iter().filter(|one| is_parent(one, &options)).map(|one| one.order);
            let first = parents.min();
            made.extend(first.map(|order| (order, (options, data))));
        }
        made.sort_by_key(|(order, _)| *order);
        let most = self.limit(OF_SIZE);
        let is_made = |(i, (_, (options, _))): &(usize, (Order, (ShardOptions, Option<u64>)))| {
            *i < most || self.is_pure(options)
        };
        made.into_iter().enumerate().filter(is_made).map(|(_, (_, one))| one).collect()
    }

    /// Whether one axis splits everything, in a node: larger ones are made of it, however it compares with layouts of several.
    fn is_pure(&self, options: &ShardOptions) -> bool {
        let mesh = &options.mesh;
        mesh.axes.len() == 1 && mesh.ranks() <= self.cluster.devices_per_node.value
    }

    /// A limit of the search, `n` at normal effort.
    fn limit(&self, n: usize) -> usize {
        self.request.narrowing.effort.of(n)
    }

    fn usable(&self) -> f64 {
        TOLERANCE * self.cluster.usable_bytes() as f64
    }

    /// The bytes that a device needs; more than it has, in proportion, where it is host memory that is missing.
    fn needed(&self, estimate: &Estimate) -> f64 {
        let host = self.cluster.host_bytes(self.request.gpus);
        let host = host.map_or(0.0, |host| estimate.host as f64 / host.max(1) as f64);
        let on_device = estimate.memory as f64;
        if host > 1.0 { on_device.max(host * self.cluster.usable_bytes() as f64) } else { on_device }
    }
}

/// How much longer than the best estimate a coarse estimate may be.
const NEAR: f64 = 1.09;

/// The same of a few that expose much of their communication: coarse estimates do not know how much of it chunks hide.
const NEAR_IF_HIDDEN: f64 = 1.2;

/// The same where the request names a layout: coarse estimates do not know by how much larger micro-batches are faster.
const NEAR_NAMED: f64 = 1.2;

/// Rounds of estimates and compilations, at most, and how far above the best estimate the best step is where another follows.
const ROUNDS: usize = 4;
const MISLED: f64 = 1.04;

/// The part of the best step's time that a better one takes, if yet others are estimated.
const GAINED: f64 = 0.99;

/// Chunks of layers of a stage that are tried, where stages are interleaved.
const CHUNKS: [u64; 2] = [2, 4];

/// The most chunks of layers of all stages of a pipeline that are tried.
const MOST_CHUNKS: u64 = 512;

/// An inside from which larger ones are made.
#[derive(Clone, Copy, Debug)]
struct Seed {
    number: usize,
    order: Order,
    /// Seconds that no larger one is expected to stay below.
    floor: f64,
}

/// The order of steps: first by what they lack, nothing if they fit.
#[derive(Clone, Copy, Debug)]
struct Order(f64, f64);

impl Ord for Order {
    fn cmp(&self, other: &Self) -> Ordering {
        self.0.total_cmp(&other.0).then(self.1.total_cmp(&other.1))
    }
}

impl PartialOrd for Order {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Order {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Order {}

/// Whether every axis of a mesh but data-parallel ones is one of another, with a size that divides the other's.
fn is_within(part: &Mesh, whole: &Mesh) -> bool {
    part.axes
        .values()
        .filter(|axis| axis.name != DATA_AXIS)
        .all(|axis| whole.axis(&axis.name).is_some_and(|other| whole.size(other).is_multiple_of(axis.size)))
}

fn is_prime(n: u64) -> bool {
    divisors(n).len() == 2
}

fn divisors(n: u64) -> Vec<u64> {
    (1..=n).filter(|d| n.is_multiple_of(*d)).collect()
}

#[cfg(test)]
mod tests;
