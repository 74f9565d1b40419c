//! Chunks, two-level collectives and prefetching of the best candidates, by price.
//!
//! Candidates are ranked with whole collectives. Those that could still win, because they expose communication, are tried
//! with more chunks and with collectives in levels. Whole collectives stay where their best step is within [`WORTH`]: each
//! chunk costs launches that a profile prices only roughly.

use ithaca_layout::fuse::levels::Choose;
use ithaca_layout::fuse::{Fusion, Messages};

use super::compiler::Compiler;
use super::tried::Priced;
use crate::cluster::Cluster;

/// The part of a step by which a plan in chunks or levels must be faster.
const WORTH: f64 = 0.01;

/// Candidates that are tried with other choices.
const TRIED: usize = 3;

/// Numbers of chunks that are tried, in this order, as long as more are faster.
const CHUNKS: [u64; 3] = [2, 4, 8];

/// Replaces the best candidates by faster ones with other fusion passes, if that makes the best step faster.
pub(super) fn refine(compiler: &dyn Compiler, cluster: &Cluster, batch: u64, fits: &mut [Priced]) {
    let Some(plain) = fits.first().map(|first| first.simulation.seconds) else { return };
    // Seconds that a step must stay below.
    let mut limit = plain * (1.0 - WORTH);
    let mut faster: Vec<(usize, Priced)> = Vec::new();
    for (i, candidate) in fits.iter().enumerate().take(TRIED) {
        if let Some(other) = fastest((compiler, cluster, batch), candidate, limit) {
            limit = other.simulation.seconds;
            faster.push((i, other));
        }
    }
    if !faster.is_empty() {
        for (i, other) in faster {
            let also = std::mem::take(&mut fits[i].also);
            fits[i] = Priced { also, ..other };
        }
        fits.sort_by(Priced::cmp_rank);
    }
}

/// The fastest of the tried choices that fit, if its step stays below `limit` seconds.
fn fastest(
    (compiler, cluster, batch): (&dyn Compiler, &Cluster, u64),
    candidate: &Priced,
    limit: f64,
) -> Option<Priced> {
    let mut found: Option<Priced> = None;
    // `hidden` is the part of the exposed communication that a choice may hide.
    let mut attempt = |hidden: f64, change: &dyn Fn(Fusion) -> Fusion| {
        let current = found.as_ref().unwrap_or(candidate);
        let limit = limit.min(current.simulation.seconds);
        if current.simulation.seconds - hidden * current.simulation.exposed() >= limit {
            return true;
        }
        let other = current.fused(compiler, cluster, batch, change(current.options.fusion)).ok();
        let is_faster = |other: &Priced| {
            other.memory.over().is_none() && other.simulation.seconds < current.simulation.seconds
        };
        let other = other.filter(is_faster);
        let is_better = other.is_some();
        found = other.or(found.take());
        is_better
    };
    if candidate.options.mesh.ranks() > cluster.devices_per_node.value {
        attempt(1.0, &|fusion| fusion.in_levels(Choose::Cheaper));
    }
    if candidate.options.fusion.prefetch.is_some() {
        attempt(1.0, &|fusion| Fusion { prefetch: None, ..fusion });
    }
    for chunks in CHUNKS {
        // One chunk of each message stays exposed.
        let hidden = 1.0 - 1.0 / chunks as f64;
        let is_better = attempt(hidden, &|fusion| Fusion { messages: Messages::Chunked(chunks), ..fusion });
        if !is_better && chunks > CHUNKS[0] {
            break;
        }
    }
    found.filter(|other| other.simulation.seconds < limit)
}
