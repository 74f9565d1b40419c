//! From coarse estimates to figures: the best are compiled without stages, and the best of these whole.

use std::collections::BTreeMap;
use std::sync::Arc;

use ithaca_differentiate::{Offload, PipelineOrder, Training};
use ithaca_ir::Diagnostic;
use ithaca_layout::fuse::Fusion;
use ithaca_layout::shard::strategy::STAGE_AXIS;
use ithaca_layout::shard::{ShardOptions, Zero};
use rayon::prelude::*;

use super::chosen::{Chosen, flags, n_calls};
use super::inside::{Sums, around, data_parallel};
use super::pool::{Families, Key, Pool};
use super::{Candidate, EXACT, Inside, NEAR, NEAR_NAMED, Refused, Search, TOLERANCE};
use crate::planner::block::Block;
use crate::planner::compiler::training_step;
use crate::planner::estimate::{Estimate, Shape};
use crate::planner::fusion::{HIDDEN, WORTH, choose};
use crate::planner::outcomes::{Outcomes, Priced};

/// Layouts that are estimated after the coarse estimate.
const ESTIMATED: usize = 40;

/// Coarse estimates that are sorted with estimates, where those before them are not enough.
const AT_A_TIME: usize = 4096;

/// Blocks of a family that are compiled before others are.
const OF_A_FAMILY: usize = 2;

/// Blocks that are not near, and are estimated because chunks may hide what they expose.
const SPECULATIVE: usize = 4;

/// Blocks that are tried with other fusions of collectives, and those of one family.
const FUSED: usize = 5;
const FUSED_OF_A_FAMILY: usize = 1;

/// Others that are, those that may gain the most.
const FURTHER: usize = 3;

/// Blocks and steps that are compiled at once; not a number of threads, on which no result depends.
const AT_ONCE: usize = 8;

/// Calls of `main` in all steps that are compiled, at most, half of them for the first one whatever it has: each micro-batch calls each chunk of layers twice.
const CALLS: usize = 8192;

/// Calls of a step that is compiled all the same.
pub(super) const FEW: u64 = 256;

/// How much longer than a step that takes long to compile a short one may be and is still compiled first.
const LONG: f64 = 1.02;

/// How much longer than a compiled step an estimate must be to be slower for certain.
const SURE: f64 = 1.06;

/// How much longer than the least estimate another is that is not compiled with it.
const FAR: f64 = 1.25;

/// How much more than the memory of a device an estimate may show, and a step still be compiled that is faster than the best.
const NEARLY: f64 = 1.06;

impl Search<'_> {
    /// The best by the coarse estimate, with estimates from steps that are compiled without stages; the fastest that fits first.
    ///
    /// As long as one of the best has only a coarse estimate, it is estimated. `candidates` are in order.
    pub(super) fn estimated(
        &self,
        insides: &[Inside],
        candidates: &[Candidate],
        tried: &mut Outcomes,
    ) -> Vec<Candidate> {
        let (mut steps, mut rest) = (Pool::default(), candidates.iter().collect::<Vec<&Candidate>>());
        let estimate = |candidate: &mut Candidate, block: Option<&Block>| {
            let ranks = candidate.data * insides[candidate.inside].size();
            let estimate = block.and_then(|block| self.composed(block, candidate.shape, ranks));
            candidate.hideable = block.map_or(0.0, Block::hideable);
            candidate.estimate =
                estimate.unwrap_or(Estimate { seconds: f64::INFINITY, memory: u64::MAX, host: 0 });
        };
        let usable = self.cluster.usable_bytes() as f64;
        // Estimates of steps that copy states from host memory are up to an eighth too low, so none is a bound for coarse estimates.
        let (near, most) = match self.training.offload {
            Offload::None if self.names_layout() => (NEAR_NAMED, usize::MAX),
            Offload::None => (NEAR, self.limit(OF_A_FAMILY)),
            Offload::Optimizer => (f64::INFINITY, usize::MAX),
        };
        let mut left = self.limit(ESTIMATED);
        let mut has_siblings = false;
        loop {
            let fits = |candidate: &Candidate| TOLERANCE * self.needed(&candidate.estimate) <= usable;
            let best = steps.all.iter().filter(|(key, candidate)| steps.done[*key] && fits(candidate));
            let best = best.map(|(_, candidate)| candidate.estimate.seconds).fold(f64::INFINITY, f64::min);
            let is_near = |candidate: &Candidate| candidate.estimate.seconds <= near * best;
            let mut nearest: Vec<usize> = Vec::new();
            loop {
                let Pool { all, done, .. } = &mut steps;
                let order = |(key, candidate): &(usize, Candidate)| {
                    self.order(&candidate.estimate, if done[*key] { usable } else { TOLERANCE * usable })
                };
                all.sort_by_cached_key(order);
                let other = rest.first().filter(|candidate| is_near(candidate));
                let other = other.map(|candidate| self.order(&candidate.estimate, TOLERANCE * usable));
                let is_before = |step: &(usize, Candidate)| other.is_none_or(|other| order(step) < other);
                let mut families = Families::default();
                let among = all.iter().take_while(|step| is_near(&step.1) && is_before(step));
                let among = among.filter(|(_, candidate)| families.admits(insides, candidate, most));
                nearest.clear();
                nearest.extend(among.take(self.limit(EXACT)).map(|(key, _)| *key));
                if nearest.len() == self.limit(EXACT) || other.is_none() {
                    break;
                }
                let more = rest.drain(..rest.len().min(AT_A_TIME)).collect();
                steps.add(more, &estimate);
            }
            let mut next: Vec<usize> = Vec::new();
            for key in nearest {
                if !steps.done[key] && !next.contains(&key) {
                    next.push(key);
                }
            }
            // The first two say how near others must be.
            let at_once = if best.is_finite() || most == usize::MAX { AT_ONCE } else { 2 };
            next.truncate(at_once.min(left));
            if next.is_empty() && !has_siblings {
                has_siblings = true;
                next = steps.siblings(insides, &mut rest, &estimate);
                next.truncate(AT_ONCE.min(left));
                if self.request.chooses_fusion {
                    let fits = |candidate: &Candidate| self.needed(&candidate.estimate) <= usable;
                    next.extend(steps.speculative(insides, (best, self.limit(SPECULATIVE)), fits));
                }
            }
            if next.is_empty() {
                break;
            }
            let blocks: Vec<Result<Arc<Block>, Box<Refused>>> = next
                .par_iter()
                .map(|&number| {
                    let key = &steps.keys[number];
                    let step = self.step(&insides[key.inside], key, None, 1);
                    let training = Training { micro_batches: key.micro_batches, ..step.training };
                    let block = self.block(key.sequences * key.data, &training, &step.options, Sums::Taken);
                    block.map_err(|diagnostic| Box::new((step.options, diagnostic)))
                })
                .collect();
            left = left.saturating_sub(blocks.iter().flatten().count());
            for (&number, block) in next.iter().zip(blocks) {
                let block = block.map_err(|refused| tried.refused.push(*refused)).ok();
                steps.finish(number, block, &estimate);
            }
        }
        let is_estimated = |(key, candidate): &(usize, Candidate)| {
            steps.done[*key] && candidate.estimate.seconds.is_finite()
        };
        let Pool { all, .. } = &steps;
        all.iter().filter(|step| is_estimated(step)).map(|(_, candidate)| candidate.clone()).collect()
    }

    /// Calls of `main` in all steps that are compiled, at most.
    pub(super) fn calls(&self) -> u64 {
        self.limit(CALLS) as u64
    }

    /// Whether the request names a mesh or a strategy, so that there are few families.
    fn names_layout(&self) -> bool {
        self.request.mesh.is_some() || self.request.strategy.is_some()
    }

    /// How many of a family are tried before others, `n` at normal effort; all where there are few families.
    fn of_a_family(&self, n: usize) -> usize {
        if self.names_layout() { usize::MAX } else { self.limit(n) }
    }

    /// Looks for other fusions of collectives that make the best estimates faster.
    ///
    /// Estimates know nothing of weights that are gathered ahead, so prefetching stays as it is.
    pub(super) fn fused(&self, insides: &[Inside], estimated: &mut [Candidate]) {
        if !self.request.chooses_fusion {
            return;
        }
        let usable = self.cluster.usable_bytes() as f64;
        let fits = |estimate: &Estimate| self.needed(estimate) <= usable;
        let fitting = || estimated.iter().filter(|candidate| fits(&candidate.estimate));
        let mut keys: Vec<(Key, Candidate, f64)> = Vec::new();
        let mut families = Families::default();
        let of_a_family = self.of_a_family(FUSED_OF_A_FAMILY);
        let below = |seconds: f64| seconds * (1.0 - WORTH);
        for candidate in fitting() {
            let key = Key::of(candidate);
            let is_of_best =
                keys.len() < self.limit(FUSED) && families.admits(insides, candidate, of_a_family);
            if is_of_best && keys.iter().all(|(known, ..)| *known != key) {
                keys.push((key, candidate.clone(), below(candidate.estimate.seconds)));
            }
        }
        // Others may gain more than the best do.
        let best = fitting().map(|candidate| candidate.estimate.seconds).fold(f64::INFINITY, f64::min);
        let expected =
            |candidate: &Candidate| candidate.estimate.seconds * (1.0 - HIDDEN * candidate.hideable);
        let mut further: Vec<&Candidate> = fitting().filter(|candidate| expected(candidate) < best).collect();
        further.sort_by(|a, b| expected(a).total_cmp(&expected(b)));
        let most = keys.len() + self.limit(FURTHER);
        for candidate in further {
            let key = Key::of(candidate);
            if keys.len() < most && keys.iter().all(|(known, ..)| *known != key) {
                keys.push((key, candidate.clone(), below(candidate.estimate.seconds)));
            }
        }
        let better = |(key, candidate, limit): (Key, Candidate, f64)| {
            let inside = &insides[key.inside];
            let ranks = candidate.data * inside.size();
            let step = self.step(inside, &key, None, 1);
            let training = Training { micro_batches: key.micro_batches, ..step.training };
            let mut best: Option<(Estimate, Arc<Block>)> = None;
            let seconds = candidate.estimate.seconds;
            let first =
                (Fusion { prefetch: None, ..step.options.fusion }, seconds, candidate.hideable * seconds);
            let fusion = choose(self.cluster, ranks, first, limit, |fusion| {
                let fusion = Fusion { prefetch: step.options.fusion.prefetch, ..fusion };
                let options = ShardOptions { fusion, ..step.options.clone() };
                let block = self.block(key.sequences * key.data, &training, &options, Sums::Taken).ok()?;
                let estimate = self.composed(&block, candidate.shape, ranks).filter(fits)?;
                let hideable = block.hideable() * estimate.seconds;
                if best.as_ref().is_none_or(|(best, _)| estimate.seconds < best.seconds) {
                    best = Some((estimate, block));
                }
                Some((estimate.seconds, hideable))
            });
            let (_, block) = best.filter(|(best, _)| best.seconds < limit)?;
            Some((key, Fusion { prefetch: step.options.fusion.prefetch, ..fusion }, block))
        };
        let found: Vec<(Key, Fusion, Arc<Block>)> = keys.into_par_iter().filter_map(better).collect();
        for (key, fusion, block) in found {
            for candidate in estimated.iter_mut().filter(|candidate| Key::of(candidate) == key) {
                let ranks = candidate.data * insides[candidate.inside].size();
                let estimate = self.composed(&block, candidate.shape, ranks);
                if let Some(estimate) = estimate.filter(|e| e.seconds < candidate.estimate.seconds) {
                    (candidate.estimate, candidate.fusion) = (estimate, Some(fusion));
                }
            }
        }
    }

    /// The step of a block, with so many stages.
    fn step(&self, inside: &Inside, key: &Key, fusion: Option<Fusion>, stages: u64) -> Chosen {
        let options = if inside.data.is_some() {
            inside.options.clone()
        } else {
            data_parallel(&inside.options, key.data)
        };
        let options = around(&options, "pipeline", &[(STAGE_AXIS, stages)]);
        let usual = || match self.request.chooses_fusion {
            true => Fusion { bucket: key.bucket, ..key.zero.usual_fusion() },
            false => self.request.options.fusion,
        };
        let fusion = fusion.unwrap_or_else(usual);
        let options = ShardOptions { zero: key.zero, fusion, ..options };
        let training = Training {
            recompute: key.recompute,
            loss_chunks: key.loss_chunks,
            stages,
            ..self.training.clone()
        };
        Chosen { options, training }
    }

    /// Compiles the best, at most `most` of them where one fits, and three times as many where none does but one may.
    ///
    /// The memory that a compiled step needs beyond its estimate is expected of all in the same order with the same stage of ZeRO,
    /// and what it needs less of those of the same inside. A step takes longer than its estimate by the least ratio of those steps
    /// of the same inside that were compiled. Returns the
    /// families of those that were compiled.
    pub(super) fn exact(
        &self,
        insides: &[Inside],
        mut estimated: Vec<Candidate>,
        most: usize,
        tried: &mut Outcomes,
    ) -> Families {
        let usable = self.cluster.usable_bytes() as f64;
        let mut more: BTreeMap<(PipelineOrder, Zero, Option<usize>), f64> = BTreeMap::new();
        let mut slower: BTreeMap<(PipelineOrder, Zero, usize), f64> = BTreeMap::new();
        let (mut compiled, mut calls, mut is_spent) = (0, 0, false);
        let mut best = tried.fits.iter().map(|one| one.simulation.seconds).fold(f64::INFINITY, f64::min);
        let mut families_compiled = Families::default();
        while compiled < if tried.fits.is_empty() { 3 * most } else { most } && !estimated.is_empty() {
            let kind = |candidate: &Candidate| (candidate.shape.order, candidate.zero, None);
            let of_known =
                |candidate: &Candidate| (candidate.shape.order, candidate.zero, Some(candidate.inside));
            let of_inside = |candidate: &Candidate| (candidate.shape.order, candidate.zero, candidate.inside);
            let key = |candidate: &Candidate| {
                let ratio = more.get(&of_known(candidate)).or_else(|| more.get(&kind(candidate)));
                let memory = self.needed(&candidate.estimate) * ratio.copied().unwrap_or(1.0);
                let slower = slower.get(&of_inside(candidate)).map_or(1.0, |&ratio| ratio.max(1.0));
                // An estimate of memory may be too high, where the time is worth a try.
                let may_fit =
                    memory <= NEARLY * usable && best.is_finite() && candidate.estimate.seconds < best;
                if memory <= usable || may_fit {
                    (0, slower * candidate.estimate.seconds)
                } else {
                    (1, memory)
                }
            };
            estimated.sort_by(|a, b| key(a).0.cmp(&key(b).0).then(key(a).1.total_cmp(&key(b).1)));
            let fitting = estimated.iter().map(key).filter(|(class, _)| *class == 0);
            let least = fitting.map(|(_, seconds)| seconds).fold(f64::INFINITY, f64::min);
            let is_hopeless = |candidate: &Candidate| match key(candidate) {
                (0, seconds) => seconds > SURE * best || seconds > FAR * least,
                _ => best.is_finite(),
            };
            // One of so many calls is as long as all others together.
            let is_long = |candidate: &Candidate| n_calls(candidate.shape) > self.calls() / 2;
            let short = estimated.iter().filter(|candidate| !is_long(candidate) && key(candidate).0 == 0);
            let short = short.map(|candidate| key(candidate).1).fold(f64::INFINITY, f64::min);
            let mut families = families_compiled.clone();
            estimated.sort_by_cached_key(|candidate| {
                let is_of_family = families.admits(insides, candidate, self.of_a_family(OF_A_FAMILY));
                (
                    is_hopeless(candidate),
                    is_long(candidate) && short <= LONG * key(candidate).1,
                    !is_of_family,
                )
            });
            // Where nothing is expected to fit by far, a few are enough to say what is missing.
            let is_far =
                compiled >= most && key(&estimated[0]).0 > 0 && key(&estimated[0]).1 > TOLERANCE * usable;
            if is_hopeless(&estimated[0]) || is_far {
                break;
            }
            let mut chosen: Vec<Candidate> = Vec::new();
            while let Some(candidate) = estimated
                .first()
                .filter(|candidate| chosen.len() < AT_ONCE.min(most) && !is_hopeless(candidate))
            {
                let is_first = compiled + chosen.len() == 0;
                // A long one leaves half of them to others, and what is left to shorter ones.
                let n = if is_first {
                    n_calls(candidate.shape).min(self.calls() / 2)
                } else {
                    n_calls(candidate.shape)
                };
                is_spent |= calls + n > self.calls();
                if is_spent && n > FEW {
                    estimated.remove(0);
                    continue;
                }
                calls += n;
                families_compiled.admits(insides, candidate, usize::MAX);
                chosen.push(estimated.remove(0));
            }
            if chosen.is_empty() {
                break;
            }
            compiled += chosen.len();
            let priced: Vec<(Chosen, Result<Priced, Diagnostic>)> = chosen
                .par_iter()
                .map(|candidate| {
                    let step = self.whole(&insides[candidate.inside], candidate);
                    let priced = self.priced(&step);
                    (step, priced)
                })
                .collect();
            for (candidate, (step, priced)) in chosen.iter().zip(priced) {
                match priced {
                    Ok(priced) => {
                        let ratio = priced.memory.total as f64 / candidate.estimate.memory.max(1) as f64;
                        for (kind, floor) in [(kind(candidate), 1.0), (of_known(candidate), 0.0)] {
                            let known = more.entry(kind).or_insert(floor);
                            *known = known.max(ratio);
                        }
                        let ratio = priced.simulation.seconds / candidate.estimate.seconds;
                        let known = slower.entry(of_inside(candidate)).or_insert(f64::INFINITY);
                        *known = known.min(ratio);
                        match priced.memory.over() {
                            None => {
                                best = best.min(priced.simulation.seconds);
                                tried.fits.push(priced);
                                // More parts of a loss save memory, and hardly any time.
                                let whole = |candidate: &Candidate| {
                                    (Key { loss_chunks: 0, ..Key::of(candidate) }, candidate.shape)
                                };
                                let is_same = |other: &Candidate| whole(other) == whole(candidate);
                                estimated.retain(|other| {
                                    other.loss_chunks <= candidate.loss_chunks || !is_same(other)
                                });
                            }
                            Some(over) => tried.too_large.push((priced, over)),
                        }
                    }
                    Err(diagnostic) => tried.refused.push((step.options, diagnostic)),
                }
            }
        }
        families_compiled
    }

    /// The step as it is compiled.
    pub(super) fn whole(&self, inside: &Inside, candidate: &Candidate) -> Chosen {
        let Shape { stages, micro_batches, order, chunks } = candidate.shape;
        let step = self.step(inside, &Key::of(candidate), candidate.fusion, stages);
        let chunks = if order == PipelineOrder::Interleaved { chunks } else { self.training.chunks };
        Chosen { training: Training { micro_batches, pipeline: order, chunks, ..step.training }, ..step }
    }

    pub(super) fn priced(&self, step: &Chosen) -> Result<Priced, Diagnostic> {
        let Chosen { options, training } = step;
        let compilers = (self.compiler, self.cluster);
        let compiled = training_step(compilers, (self.request.batch, training), options);
        let priced = Priced::of(options, compiled.map_err(ithaca_pass::first)?);
        Ok(Priced { training: Some(training.clone()), flags: flags(self.open, step), ..priced })
    }
}
