//! Micro-batches of forward passes in stages, of the candidates that they may make the best.

use ithaca_differentiate::Training;
use ithaca_layout::shard::strategy::STAGE_AXIS;
use rayon::prelude::*;

use super::compiler::Compiler;
use super::outcomes::{Outcomes, Priced, price};
use super::request::Request;
use crate::cluster::Cluster;

/// Candidates that are tried with micro-batches.
const TRIED: usize = 6;

/// Micro-batches for each stage that are tried, in this order, as long as more are faster.
const PER_STAGE: [u64; 3] = [1, 2, 4];

/// Micro-batches, at most: each has its own functions.
const MOST: u64 = 64;

/// The part of its estimate that a step takes at least; 223 steps of decoding and prefill took 1.00 to 2.5 times theirs.
const ESTIMATED: f64 = 0.95;

/// Replaces candidates with stages by faster ones with micro-batches.
pub(super) fn refine(compiler: &dyn Compiler, cluster: &Cluster, request: &Request, tried: &mut Outcomes) {
    if !request.chooses_micro_batches {
        return;
    }
    // Stages that never wait take their share of the time of stages that do one after another.
    let least = |one: &Priced| one.simulation.seconds / stages(one) as f64;
    let best = tried.fits.iter().map(|one| one.simulation.seconds).min_by(f64::total_cmp);
    let too_large = tried.too_large.iter().map(|(one, _)| one);
    let mut staged: Vec<&Priced> = tried.fits.iter().chain(too_large).collect();
    staged.retain(|one| stages(one) > 1 && best.is_none_or(|best| least(one) < best));
    staged.sort_by(|a, b| least(a).total_cmp(&least(b)));
    staged.truncate(TRIED);
    let found: Vec<Priced> = staged
        .into_par_iter()
        .filter_map(|one| fastest(compiler, cluster, (request.batch, best), one))
        .collect();
    for other in found {
        let is_of = |one: &Priced| one.options == other.options;
        tried.too_large.retain(|(one, _)| !is_of(one));
        match tried.fits.iter_mut().find(|one| is_of(one)) {
            Some(one) => *one = Priced { also: std::mem::take(&mut one.also), ..other },
            None => tried.fits.push(other),
        }
    }
    tried.fits.sort_by(Priced::cmp_rank);
}

fn stages(one: &Priced) -> u64 {
    let mesh = &one.options.mesh;
    mesh.axis(STAGE_AXIS).map_or(1, |axis| mesh.size(axis))
}

/// The fastest with micro-batches that fits, if the candidate does not or is slower, and it may be the best.
fn fastest(
    compiler: &dyn Compiler,
    cluster: &Cluster,
    (batch, all): (u64, Option<f64>),
    one: &Priced,
) -> Option<Priced> {
    let stages = stages(one);
    let step_of = |batch: u64, micro_batches: u64| {
        let training = Training { stages, micro_batches, ..Training::default() };
        price(&*compiler.of_step(batch, &training).ok()??, cluster, &one.options).ok()
    };
    let mut limit = if one.memory.over().is_none() { one.simulation.seconds } else { f64::INFINITY };
    let mut best = None;
    for micro_batches in PER_STAGE.map(|n| n * stages) {
        if micro_batches > MOST || !batch.is_multiple_of(micro_batches) {
            break;
        }
        // One micro-batch passes through all stages in turn; the others follow it, a stage's time apart.
        let Some(alone) = step_of(batch / micro_batches, 1) else { break };
        let estimate = alone.simulation.seconds * (micro_batches + stages - 1) as f64 / stages as f64;
        if all.is_some_and(|best| estimate * ESTIMATED > best) {
            continue;
        }
        let Some(other) = step_of(batch, micro_batches) else { break };
        if other.memory.over().is_none() && other.simulation.seconds >= limit {
            break;
        }
        if other.memory.over().is_none() {
            limit = other.simulation.seconds;
            let flags = format!("--micro-batches {micro_batches}");
            let training = Training { stages, micro_batches, ..Training::default() };
            best = Some(Priced { training: Some(training), flags, ..other });
        }
    }
    best
}
