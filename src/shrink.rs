//! Small jobs that prove large ones: a small model of the same structure, laid out by the same choices.
//!
//! The small program replays what was chosen for the large one, and must have the same collectives. The least sizes are
//! tried first; where they lose a collective, more layers and wider heads are. Where micro-batches and ranks are so many that it
//! takes long all the same, they are fewer, as far as ranks have the same operations and layouts.

mod degrees;

use ithaca_ir::{Diagnostic, Module, Op};
use ithaca_passes::compile::Compiled;
use ithaca_passes::differentiate::{self, Recompute, Training};
use ithaca_passes::fuse::Messages;
use ithaca_passes::import::{
    self, Capacity, Cuts, Degrees, Detail, Documents, Pages, Shrink, SmallTokens, Workload,
};
use ithaca_passes::pass::choices::{Choices, Topic};
use ithaca_passes::proof;
use ithaca_passes::shard::strategy::Placement;
use ithaca_passes::shard::{OrderChoice, ShardOptions};
use num_integer::lcm;
use serde_json::Value;

use crate::error::{Failure, Result};
use crate::job::{self, Job, Large};

/// The fewest tokens per sequence of a small model; a large mesh needs more.
pub const TOKENS: u64 = 64;

/// The fewest tokens per sequence of a small model on fewer ranks.
const FEWEST_TOKENS: u64 = 16;

/// The most chunks of experts that small models keep; 720 720 has all numbers up to it.
const MOST_CHUNKS: u64 = 16;

/// The seconds that a comparison may take before it has fewer micro-batches and ranks.
const SECONDS: f64 = 5.0;

/// FLOPs of a model that is small as it is: it takes seconds.
const SMALL: u128 = 4_000_000_000;

/// The most elements of weights and states of a program that is compared whole: half a GiB in double precision.
pub const MOST_ELEMENTS: u64 = 1 << 26;

/// Widths of heads and groups of layers that are tried, those that run fastest first.
const DETAILS: [(u64, u64); 10] =
    [(8, 1), (16, 1), (8, 3), (32, 1), (16, 3), (64, 1), (32, 3), (128, 1), (64, 3), (128, 3)];

/// Whether caches of sliding windows are rings, with room for a window and a step.
pub fn has_rings(program: &Module) -> bool {
    let mut nodes = program.functions.values().flat_map(|f| &f.nodes);
    nodes.any(|node| matches!(&node.op, Op::Attention(a) if a.wraps))
}

/// The job of a small model in place of `job`, the job of `large`, whose choices and per-rank program are given.
///
/// # Errors
/// Those of the small model, and `P06` if no small model has every collective of `per_rank` and the large one takes long.
pub fn job(large: &Large<'_>, job: &Job, choices: &Choices, per_rank: &Module) -> Result<Job> {
    let mut refused: Option<Failure> = None;
    let placement = job::placement(&job.registry, &job.options)?;
    let chunks = chunks(large)?;
    let shrinking =
        Shrinking { large: *large, job, choices, per_rank, placement: &placement, chunks: &chunks };
    for (head_dim, groups) in DETAILS {
        let found = shrinking.whole(Detail { head_dim, groups }).and_then(|found| {
            proof::same_collectives(per_rank, &found.compiled.per_rank)?;
            Ok(found)
        });
        match found {
            Ok(found) => return Ok(shrinking.in_seconds(found)),
            Err(failure) => refused = refused.or(Some(failure)),
        }
    }
    if job.flops() <= SMALL && import::held(&job.program) <= MOST_ELEMENTS {
        return Ok(Job { weights: None, choices: Some(choices.clone()), ..job.clone() });
    }
    let help = "report this plan: every plan is to have a small model that proves it";
    Err(refused
        .unwrap_or_else(|| Diagnostic::new("P06", "no size of a small model was tried").help(help).into()))
}

/// The layers of each chunk of the large job's pipeline.
fn chunks(large: &Large<'_>) -> Result<Vec<u64>> {
    let training = &large.workload.training;
    if training.stages <= 1 {
        return Ok(Vec::new());
    }
    let forward = import::import(large.config, large.name, large.workload)?;
    Ok(differentiate::chunk_layers(&forward, training).map_err(Diagnostic::from)?)
}

/// A large job that becomes small.
#[derive(Clone, Copy)]
struct Shrinking<'a> {
    large: Large<'a>,
    job: &'a Job,
    choices: &'a Choices,
    per_rank: &'a Module,
    placement: &'a Placement,
    /// The layers of each chunk of the pipeline.
    chunks: &'a [u64],
}

/// A small job and what it compiles to.
struct Found {
    job: Job,
    compiled: Compiled,
    detail: Detail,
}

impl Found {
    /// Seconds that the comparison takes, roughly: measured on two cores.
    fn seconds(&self) -> f64 {
        job::operations(&self.compiled.per_rank) as f64 / 4e4 + self.job.flops() as f64 / 1.5e9
    }
}

impl Shrinking<'_> {
    /// The small job on as many ranks.
    fn whole(&self, detail: Detail) -> Result<Found> {
        let degrees = Degrees::same(self.job.options.mesh.ranks());
        self.small(&Layout { options: &self.job.options, degrees: &degrees }, detail)
    }

    fn small(&self, layout: &Layout<'_>, detail: Detail) -> Result<Found> {
        let (config, workload, options) = self.described(layout, detail)?;
        let small = Large { config: &config, name: self.large.name, workload: &workload };
        let small = small.job(&self.job.registry, (options, self.job.cluster.clone()))?;
        let job = Job { choices: Some(self.choices.clone()), ..small };
        let compiled = job.compile()?;
        Ok(Found { job, compiled, detail })
    }

    /// The job with fewer micro-batches and on a smaller mesh, as far as it would take longer than [`SECONDS`].
    fn in_seconds(&self, found: Found) -> Job {
        let mut notes = Vec::new();
        let training = &self.large.workload.training;
        let fewer = if found.seconds() > SECONDS { self.fewer_micro_batches(&found) } else { None };
        let (fewer, found) = match fewer {
            Some((workload, fewer)) => {
                let (n, all) = (workload.training.micro_batches, training.micro_batches);
                notes.push(format!(
                    "{n} micro-batches in place of {all}: with each of them the same is added"
                ));
                (Some(workload), fewer)
            }
            None => (None, found),
        };
        let large = Large { workload: fewer.as_ref().unwrap_or(self.large.workload), ..self.large };
        let found = Shrinking { large, ..*self }.fewer_ranks(found);
        let (small, all) = (&found.job.options.mesh, &self.job.options.mesh);
        if small != all {
            notes.push(format!(
                "ranks are those of `{small}` in place of `{all}`: they have the same operations and layouts"
            ));
        }
        Job { notes, compiled: Some(Box::new(found.compiled)), ..found.job }
    }

    /// The job with the fewest micro-batches whose functions are the same, if each one more adds the same collectives.
    fn fewer_micro_batches(&self, found: &Found) -> Option<(Workload, Found)> {
        let training = &self.large.workload.training;
        let all = training.micro_batches;
        // Chunks of a pipeline take turns in rounds of as many micro-batches as there are stages.
        let round = if training.n_chunks() > training.stages { training.stages } else { 1 };
        let with = |micro_batches: u64| -> Option<(Workload, Found)> {
            let workload = self.large.workload;
            if !workload.batch.is_multiple_of(all) {
                return None;
            }
            let training = Training { micro_batches, ..training.clone() };
            let batch = workload.batch / all * micro_batches;
            let workload = Workload { batch, training, ..workload.clone() };
            let large = Large { workload: &workload, ..self.large };
            let found = Shrinking { large, ..*self }.whole(found.detail).ok()?;
            Some((workload, found))
        };
        let is_proven = |fewest: &(Workload, Found), more: &(Workload, Found)| {
            let small = [fewest, more]
                .map(|(workload, found)| (&*found.compiled.per_rank, workload.training.micro_batches));
            proof::same_growth(&found.compiled.per_rank, all, small).is_ok()
        };
        // Gradients are sums over micro-batches, of which there are two or more.
        (if round > 1 { 1 } else { 2 }..=3).map(|n| n * round).filter(|&n| n < all).find_map(|n| {
            // A third number of micro-batches says whether each one adds the same.
            let more = if n + round == all { all + round } else { n + round };
            let (fewest, more) = (with(n)?, with(more)?);
            is_proven(&fewest, &more).then_some(fewest)
        })
    }

    /// The job on the mesh that is left when one axis after another becomes shorter, the longest first.
    fn fewer_ranks(&self, whole: Found) -> Found {
        // Layouts that are not legal, or that make another program, are skipped.
        let tried = |options: &ShardOptions| -> Option<Found> {
            let degrees = degrees::of((&self.job.options.mesh, self.placement), &options.mesh, self.per_rank);
            let layout = Layout { options, degrees: &degrees };
            // Heads that all ranks split are wide, and fewer ranks need less.
            let details = DETAILS.iter().map(|&(head_dim, groups)| Detail { head_dim, groups });
            let mut details = Vec::from_iter(details.filter(|detail| {
                detail.groups == whole.detail.groups && detail.head_dim <= whole.detail.head_dim
            }));
            if let Some(width) = degrees::head_width(self.per_rank) {
                details.sort_by_key(|detail| degrees.n_unlike(width, detail.head_dim));
            }
            details.into_iter().find_map(|detail| {
                let found = self.small(&layout, detail).ok()?;
                let programs = [&whole, &found].map(|found| &*found.compiled.per_rank);
                proof::same_operations(programs[0], programs[1]).is_ok().then_some(found)
            })
        };
        let mut options = self.job.options.clone();
        let mut smallest: Option<Found> = None;
        for axis in degrees::shortened(self.job, self.placement) {
            for size in degrees::divisors(options.mesh.size(axis)) {
                if smallest.as_ref().unwrap_or(&whole).seconds() <= SECONDS {
                    break;
                }
                let mut shorter = options.clone();
                shorter.mesh.axes[axis].size = size;
                if let Some(smaller) = tried(&shorter) {
                    (smallest, options) = (Some(smaller), shorter);
                    break;
                }
            }
        }
        smallest.unwrap_or(whole)
    }
}

/// The configuration of a small model for sequences of `tokens` as they are, on so many ranks in so many stages.
///
/// # Errors
/// Those of the model's configuration.
pub fn config(config: &Value, ignore: &[String], (tokens, ranks, stages): (u64, u64, u64)) -> Result<Value> {
    let layers = import::facts(config, ignore)?.layers;
    let chunks = (0..stages).map(|i| layers * (i + 1) / stages - layers * i / stages).collect();
    let shrink = Shrink { chunks, ..Shrink::to(tokens, tokens, ranks) };
    Ok(import::shrink(config, ignore, &shrink)?)
}

/// The layout of a small job.
#[derive(Clone, Copy)]
struct Layout<'a> {
    options: &'a ShardOptions,
    degrees: &'a Degrees,
}

impl Shrinking<'_> {
    /// A small model and workload whose sizes divide, or do not divide, in the same way as the large ones, and the layout with
    /// blocks of the small size.
    fn described(&self, layout: &Layout<'_>, detail: Detail) -> Result<(Value, Workload, ShardOptions)> {
        let Layout { options, degrees } = *layout;
        let Self { job, choices, placement, .. } = self;
        let Large { config, workload, .. } = self.large;
        let mesh = &options.mesh;
        // The ranks that may split a sequence.
        let ranks = mesh.ranks() / mesh.degree(&placement.batch) / mesh.degree(&placement.stages);
        let training = &workload.training;
        let stripes = stripes(options, choices);
        let (block, small_block) = (stripes.unwrap_or(1), stripes.unwrap_or(1).min(2));
        let chunks = match options.fusion.messages {
            Messages::Chunked(chunks) => chunks,
            Messages::Alone | Messages::Packed => 1,
        };
        // Blocks divide among ranks, in two halves for a zigzag, and among parts that run one after another.
        let all_ranks = job.options.mesh.ranks();
        let capacity = workload.capacity.map(|capacity| match capacity.groups {
            Some(groups) if groups.is_multiple_of(all_ranks) => {
                Capacity { groups: Some(groups / all_ranks * mesh.ranks()), ..capacity }
            }
            _ => capacity,
        });
        let groups = capacity.map_or(1, Capacity::groups);
        let parts = [2, training.loss_chunks, chunks].map(|n| ranks.saturating_mul(n));
        let parts = parts.into_iter().fold(groups, lcm);
        let tokens = if degrees.are_same() { TOKENS } else { FEWEST_TOKENS };
        let blocks = tokens.max(4 * ranks).next_multiple_of(parts);
        // What is left of the length when it is divided stays the same.
        let small = |n: u64| {
            let rest = (n % block).min(small_block - 1);
            ((blocks + n / block % parts) * small_block + rest).min(n)
        };
        let small_documents = workload.documents.as_ref().map(|documents| {
            let small = documents.shrunk(small(workload.sequence), 2 * ranks);
            let small = small.filled(parts, workload.sequence % parts);
            if small.tokens() < workload.sequence { small } else { documents.clone() }
        });
        let small_step = small_documents.as_ref().map_or_else(|| small(workload.sequence), Documents::tokens);
        // What a step of tokens sees is in caches.
        let [sequence, small_sequence] = match workload.cache {
            Some(cache) => [cache, small(cache)],
            None => [workload.sequence, small_step],
        };
        let has_rings = has_rings(&job.program);
        let tokens = match stripes {
            None => SmallTokens::halves(sequence, small_sequence, ranks),
            Some(_) if small_sequence == sequence => SmallTokens::halves(sequence, small_sequence, ranks),
            Some(_) => SmallTokens { sequence, small_sequence, block, small_block, round: Some(ranks) },
        };
        let every = match training.recompute {
            Recompute::Full { every } => every,
            Recompute::None | Recompute::Selective | Recompute::KeepAttention => 1,
        };
        // A rank's experts are cut into as many chunks, up to so many, as divide them.
        let experts = Cuts {
            degrees: [&job.options.mesh, mesh].map(|mesh| mesh.degree(&placement.experts)),
            cuts: (2..=chunks.min(MOST_CHUNKS)).fold(1, lcm),
        };
        let of_pipeline = self.chunks.to_vec();
        let shrink = Shrink { tokens, degrees: degrees.clone(), experts, chunks: of_pipeline, every, detail };
        let stage_layers = shrink.small_chunks(config, &workload.ignore)?;
        let config = import::shrink(config, &workload.ignore, &shrink)?;
        let micro_batches = training.micro_batches;
        let batch = if workload.batch.is_multiple_of(micro_batches) {
            micro_batches * self.small_batch(workload.batch / micro_batches, chunks, options)?
        } else {
            workload.batch
        };
        let small = Workload {
            training: Training { stage_layers, ..training.clone() },
            batch,
            sequence: small_step,
            target_sequence: workload.target_sequence.map(small),
            cache: workload.cache.map(small),
            step: workload.cache.map(|cache| if has_rings { small_step } else { cache }),
            pages: workload.pages.map(|pages| {
                // Those in host memory hold the first tokens, so as many are there as on the devices.
                let entries = workload.cache.map_or(1, small).div_ceil(pages.tokens);
                let host = pages.host.map(|_| entries * batch);
                Pages { count: host.map(|host| 2 * host), host, ..pages }
            }),
            // The even share of few tokens is a matter of chance, so experts have slots for all.
            expert_bound: None,
            documents: small_documents,
            capacity,
            ..workload.clone()
        };
        let order = options.order.map(|order| match order {
            OrderChoice::Striped(_) if small_sequence < sequence => OrderChoice::Striped(small_block),
            order => order,
        });
        Ok((config, small, ShardOptions { order, ..options.clone() }))
    }
}

/// Tokens of a block that is dealt round, where an order does that.
fn stripes(options: &ShardOptions, choices: &Choices) -> Option<u64> {
    let chosen = choices.of(Topic::Orders).values().filter_map(|order| order.parse().ok());
    options.order.into_iter().chain(chosen).find_map(|order| match order {
        OrderChoice::Striped(block) => Some(block),
        OrderChoice::Contiguous | OrderChoice::Zigzag | OrderChoice::Balanced => None,
    })
}

impl Shrinking<'_> {
    /// The fewest sequences, two or more, for each rank that has its own, that are cut into as many chunks and divide as the large
    /// batch does; a batch that does not divide is unchanged.
    fn small_batch(&self, batch: u64, chunks: u64, options: &ShardOptions) -> Result<u64> {
        let Job { registry, options: all, .. } = self.job;
        let degree = job::sequence_groups(registry, all)?;
        if !batch.is_multiple_of(degree) {
            return Ok(batch);
        }
        let (each, groups) = (batch / degree, job::sequence_groups(registry, options)?);
        let cut = |n: u64| (1..=chunks).rev().find(|&chunks| n.is_multiple_of(chunks));
        let splits = degrees::of_batch([&all.mesh, &options.mesh], self.per_rank);
        let divides = |n: u64| {
            splits.iter().all(|[of_all, of_small]| {
                batch.is_multiple_of(*of_all) == (groups * n).is_multiple_of(*of_small)
            })
        };
        let small = (2..each).find(|&n| cut(n) == cut(each) && divides(n)).unwrap_or(each);
        Ok(groups * small)
    }
}
