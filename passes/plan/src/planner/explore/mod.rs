//! The search of training steps: strategy, mesh, micro-batches, ZeRO, recomputation and pipeline together.
//!
//! Ranks *inside* a data-parallel group and a stage split one micro-batch; how they do is compiled once, as a step of one
//! micro-batch of one sequence, and everything else follows from that in closed form ([`first_look`](Search::first_look)). Insides grow from the
//! smallest, and those of a size are reached from the best of the sizes that divide it. The best by the first look are compiled again with their
//! data-parallel ranks, ZeRO stage and micro-batch, still without stages ([`Block`]), and the best of these estimates exactly.

mod inside;
mod look;
mod refine;

use std::collections::BTreeMap;

use ithaca_differentiate::{Recompute, Training};
use ithaca_ir::{Diagnostic, Mesh};
use ithaca_layout::registry::Registry;
use ithaca_layout::shard::{ShardOptions, Zero};
use rayon::prelude::*;

use super::block::Block;
use super::candidates::candidates;
use super::compiler::Compiler;
use super::estimate::{Cut, Estimate, Shape};
use super::request::Request;
use super::tried::Tried;
use crate::cluster::Cluster;
use crate::plan::Choice;

/// Insides of one size from which larger ones are made.
const KEPT: usize = 4;

/// Insides of one size, at most; products of few strategies come first.
const OF_SIZE: usize = 24;

/// How much longer than the best step so far one may take by the first look whose inside is split further.
const WORTH: f64 = 1.1;

/// Steps that are compiled whole and simulated, where one of them fits.
const EXACT: usize = 12;

/// How much more than the memory of a device a first look may show, and a layout still be estimated: it knows no fusion.
const TOLERANCE: f64 = 1.15;

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
pub(super) fn explore(
    compiler: &dyn Compiler,
    cluster: &Cluster,
    request: &Request,
) -> Result<Tried, Diagnostic> {
    explored(compiler, cluster, request, EXACT)
}

/// Whether a step of the request fits.
pub(super) fn fits(compiler: &dyn Compiler, cluster: &Cluster, request: &Request) -> bool {
    explored(compiler, cluster, request, 1).is_ok_and(|tried| !tried.fits.is_empty())
}

fn explored(
    compiler: &dyn Compiler,
    cluster: &Cluster,
    request: &Request,
    exact: usize,
) -> Result<Tried, Diagnostic> {
    let search = Search::new(compiler, cluster, request);
    // Errors of the request itself are those of all candidates.
    candidates(&search.registry, cluster, request)?;
    let mut tried = Tried::default();
    let insides = search.insides(&mut tried);
    let looked = search.looked(&insides);
    let estimated = search.estimated(&insides, looked);
    search.exact(&insides, estimated, exact, &mut tried);
    Ok(tried)
}

impl<'a> Search<'a> {
    fn new(compiler: &'a dyn Compiler, cluster: &'a Cluster, request: &'a Request) -> Self {
        let steps = request.steps.as_ref().expect("a search of training steps");
        let mut cuts = BTreeMap::new();
        for n in (1..=request.gpus.min(MOST_CHUNKS))
            .filter(|n| n.is_power_of_two() || request.gpus.is_multiple_of(*n))
        {
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
        }
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
            let mut children: Vec<(ShardOptions, Option<u64>)> =
                self.of_size(size).into_iter().filter(is_made).collect();
            children.truncate(OF_SIZE);
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
            order.retain(|((rank, fit), ..)| {
                *rank > 0 && best.is_infinite() || *rank == 0 && *fit <= WORTH * best
            });
            kept.extend(order.into_iter().take(KEPT).map(|(_, i, floor)| (i, floor)));
        }
        found
    }

    fn usable(&self) -> f64 {
        TOLERANCE * self.cluster.usable_bytes() as f64
    }
}

/// The most chunks of layers of a pipeline that are tried.
const MOST_CHUNKS: u64 = 512;

/// Whether every axis of a mesh is one of another, with a size that divides the other's.
fn is_within(part: &Mesh, whole: &Mesh) -> bool {
    part.axes
        .values()
        .all(|axis| whole.axis(&axis.name).is_some_and(|other| whole.size(other).is_multiple_of(axis.size)))
}

fn divisors(n: u64) -> Vec<u64> {
    (1..=n).filter(|d| n.is_multiple_of(*d)).collect()
}

#[cfg(test)]
mod tests;
