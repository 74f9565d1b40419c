//! Chunks, two-level collectives and prefetching of the best candidates, by price.
//!
//! Candidates are ranked with whole collectives. The first, and those that expose more, are tried with more chunks and with
//! collectives in levels, each beside its own whole step, so that the rows of a table compare what each can reach. Whole collectives stay where their step
//! is within [`WORTH`]: each chunk costs launches that a profile prices only roughly.

use ithaca_layout::fuse::levels::Choose;
use ithaca_layout::fuse::{Fusion, Messages};
use ithaca_layout::shard::ShardOptions;
use rayon::prelude::*;

use super::compiler::Compiler;
use super::outcomes::{Priced, price};
use crate::cluster::Cluster;

/// The part of a step by which a plan in chunks or levels must be faster.
pub(super) const WORTH: f64 = 0.01;

/// Candidates that are tried with other choices: the best without.
const TRIED: usize = 3;

/// Others that are tried, those that may gain the most.
const FURTHER: usize = 6;

/// The most tasks of a candidate that is: a ring of thousands of ranks takes seconds to price, and waits for latencies, which
/// chunks repeat.
const TASKS: usize = 1 << 14;

/// Numbers of chunks that are tried, in this order, as long as more are faster.
pub(super) const CHUNKS: [u64; 3] = [2, 4, 8];

/// The part of their exposed communication that chunks may hide.
pub(super) const HIDDEN: f64 = 0.75;

/// Replaces the best candidates by faster ones with other fusion passes.
pub(super) fn refine(compiler: &dyn Compiler, cluster: &Cluster, fits: &mut [Priced]) {
    let Some(whole) = fits.first().map(|first| first.simulation.seconds) else { return };
    let below = |seconds: f64| seconds * (1.0 - WORTH);
    let expected =
        |candidate: &Priced| candidate.simulation.seconds - HIDDEN * candidate.simulation.exposed();
    let mut further: Vec<&mut Priced> =
        fits.iter_mut().filter(|candidate| candidate.tasks <= TASKS).collect();
    let mut tried: Vec<&mut Priced> = further.drain(..TRIED.min(further.len())).collect();
    further.retain(|candidate| expected(candidate) < whole);
    further.sort_by(|a, b| expected(a).total_cmp(&expected(b)));
    tried.extend(further.into_iter().take(FURTHER));
    let faster =
        |candidate: &&mut Priced| fastest(compiler, cluster, candidate, below(candidate.simulation.seconds));
    let found: Vec<Option<Priced>> = tried.par_iter().map(faster).collect();
    for (candidate, other) in tried.into_iter().zip(found) {
        let Some(other) = other else { continue };
        // The best whole step is not overtaken by less than it is worth.
        let seconds = other.simulation.seconds;
        if seconds >= whole || seconds < below(whole) {
            let also = std::mem::take(&mut candidate.also);
            *candidate = Priced { also, ..other };
        }
    }
    fits.sort_by(Priced::cmp_rank);
}

/// The fastest of the tried choices that fit, if its step stays below `limit` seconds.
fn fastest(compiler: &dyn Compiler, cluster: &Cluster, candidate: &Priced, limit: f64) -> Option<Priced> {
    let mut found: Option<Priced> = None;
    let ranks = candidate.options.mesh.ranks();
    let start = (candidate.options.fusion, candidate.simulation.seconds, candidate.simulation.exposed());
    choose(cluster, ranks, start, limit, |fusion| {
        let options = ShardOptions { fusion, ..candidate.options.clone() };
        let other = price(compiler, cluster, &options).ok();
        let other = other.filter(|other| other.memory.over().is_none())?;
        let (seconds, exposed) = (other.simulation.seconds, other.simulation.exposed());
        if seconds < found.as_ref().unwrap_or(candidate).simulation.seconds {
            found = Some(other);
        }
        Some((seconds, exposed))
    });
    found.filter(|other| other.simulation.seconds < limit)
}

/// Looks for a faster choice than `first`, of so many seconds with so much exposed communication, that stays below `limit`;
/// `attempt` gives the seconds of another, unless it does not fit.
pub(super) fn choose(
    cluster: &Cluster,
    ranks: u64,
    first: (Fusion, f64, f64),
    limit: f64,
    mut attempt: impl FnMut(Fusion) -> Option<(f64, f64)>,
) -> Fusion {
    let mut best = first;
    // `hidden` is the part of the exposed communication that a choice may hide.
    let mut is_better = |hidden: f64, change: &dyn Fn(Fusion) -> Fusion| {
        let (fusion, seconds, exposed) = best;
        if seconds - hidden * exposed >= limit.min(seconds) {
            return true;
        }
        let fusion = change(fusion);
        let other = attempt(fusion).filter(|other| other.0 < seconds);
        best = other.map_or(best, |(seconds, exposed)| (fusion, seconds, exposed));
        other.is_some()
    };
    if ranks > cluster.devices_per_node.value {
        is_better(1.0, &|fusion| fusion.in_levels(Choose::Cheaper));
    }
    if first.0.prefetch.is_some() {
        is_better(1.0, &|fusion| Fusion { prefetch: None, ..fusion });
    }
    for chunks in CHUNKS {
        // One chunk of each message stays exposed.
        let hidden = 1.0 - 1.0 / chunks as f64;
        let is_better = is_better(hidden, &|fusion| Fusion { messages: Messages::Chunked(chunks), ..fusion });
        if !is_better && chunks > CHUNKS[0] {
            break;
        }
    }
    best.0
}
