//! Small jobs that prove large ones: a small model of the same structure, laid out by the same choices.
//!
//! The small program replays what was chosen for the large one, and must have the same collectives. The least sizes are
//! tried first; where they lose a collective, more layers and wider heads are.

use ithaca_ir::{Diagnostic, Module, Op};
use ithaca_passes::differentiate::Recompute;
use ithaca_passes::fuse::Messages;
use ithaca_passes::import::{self, Capacity, Detail, Documents, Pages, Shrink, SmallTokens, Workload};
use ithaca_passes::pass::choices::Choices;
use ithaca_passes::proof;
use ithaca_passes::shard::{OrderChoice, ShardOptions};
use num_integer::lcm;
use serde_json::Value;

use crate::error::{Failure, Result};
use crate::job::{self, Job, Large};

/// The fewest tokens per sequence of a small model; a large mesh needs more.
pub const TOKENS: u64 = 64;

/// The most chunks of experts that small models keep; 720 720 has all numbers up to it.
const MOST_CHUNKS: u64 = 16;

/// FLOPs of a model that is small as it is: it takes seconds.
const SMALL: u128 = 4_000_000_000;

/// Widths of heads and groups of layers that are tried, those that run fastest first.
const DETAILS: [(u64, u64); 10] =
    [(8, 1), (16, 1), (8, 3), (32, 1), (16, 3), (64, 1), (32, 3), (128, 1), (64, 3), (128, 3)];

/// The job of a small model in place of `job`, the job of `large`, whose choices and per-rank program are given.
///
/// # Errors
/// Those of the small model, and `P06` if no small model has every collective of `per_rank` and the large one takes long.
pub fn job(large: &Large<'_>, job: &Job, choices: &Choices, per_rank: &Module) -> Result<Job> {
    let mut refused: Option<Failure> = None;
    for (head_dim, groups) in DETAILS {
        let detail = Detail { head_dim, groups };
        let (config, workload, options) = small(large, job, choices, detail)?;
        let small = Large { config: &config, name: large.name, workload: &workload };
        let small = small.job(&job.registry, (options, job.cluster.clone()))?;
        let mut small = Job { choices: Some(choices.clone()), ..small };
        let compiled = small.compile().and_then(|compiled| {
            proof::same_collectives(per_rank, &compiled.per_rank)?;
            Ok(compiled)
        });
        match compiled {
            Ok(compiled) => {
                small.compiled = Some(Box::new(compiled));
                return Ok(small);
            }
            Err(failure) => refused = refused.or(Some(failure)),
        }
    }
    if job.flops() <= SMALL {
        return Ok(Job { weights: None, choices: Some(choices.clone()), ..job.clone() });
    }
    let help = "report this plan: every plan is to have a small model that proves it";
    Err(refused
        .unwrap_or_else(|| Diagnostic::new("P06", "no size of a small model was tried").help(help).into()))
}

/// The configuration of a small model for sequences of `tokens` as they are, on so many ranks in so many stages.
///
/// # Errors
/// Those of the model's configuration.
pub fn config(config: &Value, ignore: &[String], (tokens, ranks, stages): (u64, u64, u64)) -> Result<Value> {
    let shrink = Shrink { chunks: stages, ..Shrink::to(tokens, tokens, ranks) };
    Ok(import::shrink(config, ignore, &shrink)?)
}

/// A small model and workload whose sizes divide, or do not divide, in the same way as the large ones, and the layout with
/// blocks of the small size.
fn small(
    large: &Large<'_>,
    job: &Job,
    choices: &Choices,
    detail: Detail,
) -> Result<(Value, Workload, ShardOptions)> {
    let Large { config, workload, .. } = *large;
    let ranks = job.options.mesh.ranks();
    let training = &workload.training;
    let stripes = stripes(&job.options, choices);
    let (block, small_block) = (stripes.unwrap_or(1), stripes.unwrap_or(1).min(2));
    let chunks = match job.options.fusion.messages {
        Messages::Chunked(chunks) => chunks,
        Messages::Alone | Messages::Packed => 1,
    };
    // Blocks divide among ranks, in two halves for a zigzag, and among parts that run one after another.
    let groups = workload.capacity.map_or(1, Capacity::groups);
    let parts = [2, training.loss_chunks, chunks].map(|n| ranks.saturating_mul(n));
    let parts = parts.into_iter().fold(groups, lcm);
    let blocks = TOKENS.max(4 * ranks).next_multiple_of(parts);
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
    let mut nodes = job.program.functions.values().flat_map(|f| &f.nodes);
    let has_rings = nodes.any(|node| matches!(&node.op, Op::Attention(a) if a.wraps));
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
    let experts = ranks.saturating_mul((2..=chunks.min(MOST_CHUNKS)).fold(1, lcm));
    let shrink = Shrink { tokens, multiple: ranks, experts, chunks: training.n_chunks(), every, detail };
    let config = import::shrink(config, &workload.ignore, &shrink)?;
    let micro_batches = training.micro_batches;
    let batch = if workload.batch.is_multiple_of(micro_batches) {
        micro_batches * small_batch(workload.batch / micro_batches, chunks, job)?
    } else {
        workload.batch
    };
    let small = Workload {
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
        ..workload.clone()
    };
    let order = job.options.order.map(|order| match order {
        OrderChoice::Striped(_) if small_sequence < sequence => OrderChoice::Striped(small_block),
        order => order,
    });
    Ok((config, small, ShardOptions { order, ..job.options.clone() }))
}

/// Tokens of a block that is dealt round, where an order does that.
fn stripes(options: &ShardOptions, choices: &Choices) -> Option<u64> {
    let chosen = choices.orders.values().filter_map(|order| order.parse().ok());
    options.order.into_iter().chain(chosen).find_map(|order| match order {
        OrderChoice::Striped(block) => Some(block),
        OrderChoice::Contiguous | OrderChoice::Zigzag | OrderChoice::Balanced => None,
    })
}

/// The fewest sequences, two or more, for each rank that has its own, that are cut into as many chunks; a batch that does not divide
/// is unchanged.
fn small_batch(batch: u64, chunks: u64, job: &Job) -> Result<u64> {
    let degree = job::sequence_groups(&job.registry, &job.options)?;
    if !batch.is_multiple_of(degree) {
        return Ok(batch);
    }
    let each = batch / degree;
    let cut = |n: u64| (1..=chunks).rev().find(|&chunks| n.is_multiple_of(chunks));
    Ok(degree * (2..each).find(|&n| cut(n) == cut(each)).unwrap_or(each))
}
