//! Large sets of candidates: products of strategies grow from those that are near the best.
//!
//! Products of two strategies, or on two axes, are compiled on every mesh. One of more is compiled on a mesh only if a product without one of
//! its strategies is near the best on a mesh that has that strategy's ranks on other axes. A layout that cannot fit is not
//! compiled: some layout that its ranks fold to needs no more memory. Small sets, and those of high effort, are compiled whole,
//! but for rings of thousands of ranks, a step each, that cannot fit.

use std::collections::{BTreeMap, BTreeSet};

use ithaca_ir::Mesh;
use ithaca_layout::shard::ShardOptions;
use rayon::iter::Either;
use rayon::prelude::*;

use super::compiler::Compiler;
use super::floor::Floor;
use super::outcomes::{Outcomes, Priced};
use super::request::Request;
use crate::cluster::Cluster;
use crate::plan::Effort;

/// Legal candidates that are all compiled.
const FEW: usize = 512;

/// Products of so many strategies, or on so many axes, are compiled on every mesh.
const BASE: usize = 2;

/// Ranks along one axis, at most, of a layout of a small set that is compiled although it cannot fit.
const LONG: u64 = 512;

/// How much longer than the best step that of a layout may take from which others grow, or how much more memory it may need.
const NEAR: f64 = 2.0;

/// The same of a layout whose axes are tried in other orders.
const ORDERS: f64 = 3.0;

/// The number of layouts, best first, that others grow from.
const BEAM: usize = 48;

/// Prices candidates in their order, and counts those that are passed over.
pub(super) fn add(
    tried: &mut Outcomes,
    compiler: &dyn Compiler,
    cluster: &Cluster,
    (candidates, request): (Vec<ShardOptions>, &Request),
) {
    let effort = request.narrowing.effort;
    if effort == Effort::High {
        return tried.add(compiler, cluster, candidates);
    }
    let few = effort.of(FEW);
    let is_long = |options: &ShardOptions| options.mesh.axes.values().any(|axis| axis.size > LONG);
    if candidates.len() <= few && !candidates.iter().any(is_long) {
        return tried.add(compiler, cluster, candidates);
    }
    let checked = |options: ShardOptions| match compiler.check(&options) {
        Ok(()) => Either::Left(options),
        Err(diagnostic) => Either::Right((options, diagnostic)),
    };
    let (legal, refused): (Vec<_>, Vec<_>) = candidates.into_par_iter().partition_map(checked);
    let is_large = legal.len() > few;
    let floor = Floor::of(compiler, cluster);
    let needs = |options: &ShardOptions| floor.of_layout(options).at_least;
    let (mut hopeless, hopeful): (Vec<_>, Vec<_>) = legal
        .into_iter()
        .partition(|options| (is_large || is_long(options)) && needs(options) > cluster.usable_bytes());
    if is_large {
        grow(tried, compiler, cluster, hopeful);
    } else {
        tried.add(compiler, cluster, hopeful);
    }
    // One order of axes says why.
    let mut seen = BTreeSet::new();
    tried.refused.extend(refused.into_iter().filter(|(options, _)| seen.insert(Shape::of(options))));
    // Where no other is legal, those that need least say what is missing.
    if tried.fits.is_empty() && tried.too_large.is_empty() {
        hopeless.sort_by_key(needs);
        let rest = hopeless.split_off(hopeless.len().min(few));
        tried.add(compiler, cluster, std::mem::replace(&mut hopeless, rest));
    }
    tried.n_passed_over += hopeless.len();
}

/// Prices legal candidates that grow from the best.
fn grow(tried: &mut Outcomes, compiler: &dyn Compiler, cluster: &Cluster, candidates: Vec<ShardOptions>) {
    let mut rounds: BTreeMap<usize, Vec<ShardOptions>> = BTreeMap::new();
    for options in candidates {
        // Strategies that share an axis are one factor.
        let n = strategies(&options).len().min(options.mesh.axes.len());
        rounds.entry(n.max(BASE)).or_default().push(options);
    }
    for (n, round) in rounds {
        let near = if n > BASE { near(tried) } else { BTreeMap::new() };
        let grows = |options: &ShardOptions| {
            let names = strategies(options);
            let without =
                |i: usize| names.iter().enumerate().filter(move |(j, _)| *j != i).map(|(_, name)| *name);
            let folded = |i: usize| near.get(&sorted(without(i))).into_iter().flatten();
            (0..names.len()).any(|i| folded(i).any(|mesh| folds(&options.mesh, mesh)))
        };
        let (kept, passed): (Vec<_>, Vec<_>) =
            round.into_iter().partition(|options| n == BASE || grows(options));
        let mut seen = BTreeSet::new();
        let (first, others): (Vec<_>, Vec<_>) =
            kept.into_iter().partition(|options| seen.insert(Shape::of(options)));
        tried.add(compiler, cluster, first);
        // Of the best other orders of axes are tried.
        let near: BTreeSet<Shape> =
            costs(tried, ORDERS).into_iter().map(|(one, _)| Shape::of(&one.options)).collect();
        let (kept, far): (Vec<_>, Vec<_>) =
            others.into_iter().partition(|options| near.contains(&Shape::of(options)));
        tried.add(compiler, cluster, kept);
        tried.n_passed_over += passed.len() + far.len();
    }
}

/// A layout but for the order of its axes.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Shape {
    strategy: String,
    layers: Vec<(String, String)>,
    sizes: Vec<(String, u64)>,
}

impl Shape {
    fn of(options: &ShardOptions) -> Self {
        let axes = options.mesh.axes.values();
        let mut sizes: Vec<(String, u64)> = axes.map(|axis| (axis.name.clone(), axis.size)).collect();
        sizes.sort_unstable();
        Self { strategy: options.strategy.clone(), layers: options.layers.clone(), sizes }
    }
}

/// Whether `other` is a mesh with the ranks of one of its axes on other axes.
fn folds(mesh: &Mesh, other: &Mesh) -> bool {
    other.axes.values().all(|axis| {
        let here = mesh.axis(&axis.name).map_or(1, |here| mesh.size(here));
        axis.size.is_multiple_of(here)
    })
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

/// The meshes of layouts that are near the best of all so far, by their strategies.
fn near(tried: &Outcomes) -> BTreeMap<Vec<String>, Vec<Mesh>> {
    let mut near: BTreeMap<Vec<String>, Vec<Mesh>> = BTreeMap::new();
    for (one, _) in costs(tried, NEAR).into_iter().take(BEAM) {
        let names = sorted(strategies(&one.options).into_iter());
        near.entry(names).or_default().push(one.options.mesh.clone());
    }
    near
}

/// Layouts whose cost is at most so many times that of the best of all so far, the cheapest first.
fn costs(tried: &Outcomes, times: f64) -> Vec<(&Priced, f64)> {
    let too_large = tried.too_large.iter().map(|(one, _)| one);
    // One that is too large fits when another strategy takes its share.
    let mut costs: Vec<(&Priced, f64)> = if tried.fits.is_empty() {
        too_large.map(|one| (one, one.memory.total as f64)).collect()
    } else {
        tried.fits.iter().chain(too_large).map(|one| (one, one.simulation.seconds)).collect()
    };
    let of_best = if tried.fits.is_empty() { &costs[..] } else { &costs[..tried.fits.len()] };
    let best = of_best.iter().map(|(_, cost)| *cost).min_by(f64::total_cmp).unwrap_or(f64::INFINITY);
    costs.retain(|(_, cost)| *cost <= times * best);
    costs.sort_by(|(_, a), (_, b)| a.total_cmp(b));
    costs
}
