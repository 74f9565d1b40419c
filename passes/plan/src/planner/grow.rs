//! Large sets of candidates: products of strategies grow from those that are near the best.
//!
//! A product of several strategies is compiled only if the product without one of them, on some mesh, is near the best of all
//! that are smaller: by time among those that fit, by memory where none does. Small sets, and those of high effort, are
//! compiled whole. Rings of thousands of ranks, a step each, are not compiled where they cannot fit.

use std::collections::BTreeMap;

use ithaca_layout::shard::ShardOptions;
use rayon::prelude::*;

use super::compiler::Compiler;
use super::floor::Floor;
use super::request::Request;
use super::tried::{Priced, Tried};
use crate::cluster::Cluster;
use crate::plan::Effort;

/// Legal candidates that are all compiled.
const FEW: usize = 1536;

/// Products of so many strategies are all compiled.
const BASE: usize = 2;

/// Ranks along one axis, at most, of a layout that is compiled although it cannot fit.
const LONG: u64 = 512;

/// How much longer than the best step that of a product may take which grows, or how much more memory it may need.
const NEAR: f64 = 2.0;

/// Prices candidates in their order, and counts those that are passed over.
pub(super) fn add(
    tried: &mut Tried,
    compiler: &dyn Compiler,
    cluster: &Cluster,
    (candidates, request): (Vec<ShardOptions>, &Request),
) {
    let effort = request.narrowing.effort;
    if effort == Effort::High {
        return tried.add(compiler, cluster, candidates);
    }
    let (hopeless, candidates) = hopeless(compiler, cluster, candidates);
    grow(tried, compiler, cluster, (candidates, effort.of(FEW)));
    // Where no other is legal, they say what is missing.
    if tried.fits.is_empty() && tried.too_large.is_empty() {
        tried.add(compiler, cluster, hopeless);
    } else {
        tried.n_passed_over += hopeless.len();
    }
}

/// Prices candidates, of more than a few legal ones those that grow from the best.
fn grow(
    tried: &mut Tried,
    compiler: &dyn Compiler,
    cluster: &Cluster,
    (candidates, few): (Vec<ShardOptions>, usize),
) {
    if candidates.len() <= few {
        return tried.add(compiler, cluster, candidates);
    }
    let is_legal: Vec<bool> = candidates.par_iter().map(|options| compiler.check(options).is_ok()).collect();
    let n_legal = is_legal.iter().filter(|&&legal| legal).count();
    if n_legal <= few {
        return tried.add(compiler, cluster, candidates);
    }
    let mut rounds: BTreeMap<usize, Vec<(ShardOptions, bool)>> = BTreeMap::new();
    for (options, is_legal) in candidates.into_iter().zip(is_legal) {
        let n = strategies(&options).len().max(BASE);
        rounds.entry(n).or_default().push((options, is_legal));
    }
    for (n, round) in rounds {
        let near = if n > BASE { near(tried) } else { Vec::new() };
        let grows = |options: &ShardOptions| {
            let names = strategies(options);
            let without =
                |i: usize| names.iter().enumerate().filter(move |(j, _)| *j != i).map(|(_, name)| *name);
            n == BASE || (0..names.len()).any(|i| near.contains(&sorted(without(i))))
        };
        let (kept, passed): (Vec<_>, Vec<_>) =
            round.into_iter().partition(|(options, is_legal)| !is_legal || grows(options));
        tried.n_passed_over += passed.len();
        tried.add(compiler, cluster, kept.into_iter().map(|(options, _)| options).collect());
    }
}

/// Long candidates that cannot fit, and the others.
fn hopeless(
    compiler: &dyn Compiler,
    cluster: &Cluster,
    candidates: Vec<ShardOptions>,
) -> (Vec<ShardOptions>, Vec<ShardOptions>) {
    let is_long = |options: &ShardOptions| options.mesh.axes.values().any(|axis| axis.size > LONG);
    if !candidates.iter().any(is_long) {
        return (Vec::new(), candidates);
    }
    let floor = Floor::of(compiler, cluster);
    let cannot_fit = |options: &ShardOptions| floor.of_layout(options).at_least > cluster.usable_bytes();
    candidates.into_iter().partition(|options| is_long(options) && cannot_fit(options))
}

/// The strategies of a product.
fn strategies(options: &ShardOptions) -> Vec<&str> {
    options.strategy.split('+').collect()
}

fn sorted<'a>(names: impl Iterator<Item = &'a str>) -> Vec<String> {
    let mut names: Vec<String> = names.map(str::to_owned).collect();
    names.sort_unstable();
    names
}

/// The products that are near the best of all so far.
fn near(tried: &Tried) -> Vec<Vec<String>> {
    let too_large = tried.too_large.iter().map(|(one, _)| one);
    // One that is too large fits when another strategy takes its share.
    let costs: Vec<(&Priced, f64)> = if tried.fits.is_empty() {
        too_large.map(|one| (one, one.memory.total as f64)).collect()
    } else {
        tried.fits.iter().chain(too_large).map(|one| (one, one.simulation.seconds)).collect()
    };
    let of_best = if tried.fits.is_empty() { &costs[..] } else { &costs[..tried.fits.len()] };
    let best = of_best.iter().map(|(_, cost)| *cost).min_by(f64::total_cmp).unwrap_or(f64::INFINITY);
    let near = costs.into_iter().filter(|(_, cost)| *cost <= NEAR * best).map(|(one, _)| one);
    let mut near: Vec<Vec<String>> = near.map(|one| sorted(strategies(&one.options).into_iter())).collect();
    near.sort();
    near.dedup();
    near
}
