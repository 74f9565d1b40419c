//! Other forms of the best steps: what estimates do not know, or what is compiled for too long to be tried with all.

use std::collections::BTreeSet;

use ithaca_differentiate::{Offload, PipelineOrder, Training};
use ithaca_layout::fuse::prefetch::Prefetch;
use ithaca_layout::fuse::{Fusion, Messages};
use ithaca_layout::shard::{ShardOptions, WeightSize, Zero};
use rayon::prelude::*;

use super::chosen::{Chosen, n_calls};
use super::refine::FEW;
use super::replicas::Replicas;
use super::{CHUNKS, Search};
use crate::plan::Choice;
use crate::planner::estimate::Shape;
use crate::planner::fusion::{CHUNKS as PARTS, HIDDEN, WORTH};
use crate::planner::outcomes::{Outcomes, Priced};

/// The most steps that are tried in other forms.
const LATER: usize = 3;

/// Calls of `main` in such a step, at most: longer ones take as long to compile as the rest of a search.
const SHORT: u64 = 1024;

/// The part of a step that is exposed communication, above which it waits for weights.
const WAITS: f64 = 0.03;

/// Steps by their places among those that fit.
type Forms = Vec<(usize, Priced)>;

impl Search<'_> {
    /// Replaces the best steps by other forms of them that are faster.
    pub(super) fn in_other_forms(&self, tried: &mut Outcomes) {
        replace(tried, |tried| self.as_usual(tried));
        // The second may compile one long step, on one core.
        replace(tried, |tried| {
            let (mut forms, chunked) =
                rayon::join(|| self.with_persistent(tried), || self.in_more_chunks(tried));
            forms.extend(chunked);
            forms
        });
        replace(tried, |tried| self.in_chunks_beside_persistent(tried));
        replace(tried, |tried| self.in_buckets(tried));
        replace(tried, |tried| self.reduced_later(tried));
    }

    /// Other forms of the best steps, of those that do not wait only of the ones that compile fast; and of `n` others that
    /// would be the best if less were exposed.
    fn of_best(&self, tried: &Outcomes, n: usize, form: impl Fn(&Priced) -> Option<Priced> + Sync) -> Forms {
        let Some(best) = tried.fits.first().map(|best| best.simulation.seconds) else { return Forms::new() };
        let few = |one: &Priced| one.training.as_ref().is_none_or(|training| n_calls(shape(training)) <= FEW);
        let without = |part: f64, one: &Priced| one.simulation.seconds - part * one.simulation.exposed();
        let if_hidden = |one: &Priced| without(HIDDEN, one);
        let mut others: Vec<(usize, &Priced)> = tried.fits.iter().enumerate().collect();
        let mut steps: Vec<(usize, &Priced)> = others.drain(..others.len().min(self.limit(LATER))).collect();
        steps.retain(|(_, one)| few(one) || without(1.0, one) < best);
        others.retain(|(_, one)| if_hidden(one) < best);
        others.sort_by(|(_, a), (_, b)| if_hidden(a).total_cmp(&if_hidden(b)));
        steps.extend(others.into_iter().take(self.limit(n)));
        steps.into_par_iter().filter_map(|(i, one)| Some((i, form(one)?))).collect()
    }

    /// The same step with another fusion.
    fn fused_as(&self, one: &Priced, fusion: Fusion) -> Option<Priced> {
        let training = one.training.as_ref().filter(|t| is_short(t))?.clone();
        let options = ShardOptions { fusion, ..one.options.clone() };
        self.priced(&Chosen { options, training }).ok()
    }

    /// The best steps whose collectives are in chunks or levels with the usual ones: estimates do not know what chunks do to weights
    /// that are gathered meanwhile.
    fn as_usual(&self, tried: &Outcomes) -> Forms {
        self.of_best(tried, LATER, |one| {
            let ShardOptions { zero, fusion, .. } = one.options;
            let usual = Fusion { bucket: fusion.bucket, ..zero.usual_fusion() };
            let is_unusual = self.request.chooses_fusion && one.options.fusion != usual;
            is_unusual.then(|| self.fused_as(one, usual))?
        })
    }

    /// The best steps that wait for weights, with messages of weights in other buckets: estimates choose among buckets by how long
    /// messages take, not by what waits for them.
    fn in_buckets(&self, tried: &Outcomes) -> Forms {
        self.of_best(tried, 0, |one| {
            let (ShardOptions { zero, fusion, mesh, .. }, simulation) = (&one.options, &one.simulation);
            let stages = one.training.as_ref()?.stages.max(1);
            let axes = self.replica_axes(&one.options).into_iter().filter_map(|axis| mesh.axis(&axis));
            let all = axes.map(|axis| mesh.size(axis)).product::<u64>().max(1);
            let waits = simulation.exposed() > WAITS * simulation.seconds;
            let suited = self.bucket(*zero, Replicas { all, stride: mesh.ranks() / stages / all });
            let suited = suited.filter(|_| waits)?;
            // What waits for a bucket waits less for a half.
            let others = match fusion.bucket {
                None => vec![Some(suited)],
                Some(_) => vec![Some(suited / 2), None],
            };
            let other = |bucket| self.fused_as(one, Fusion { bucket, ..*fusion });
            let forms = others.into_par_iter().filter_map(other);
            let fitting = forms.filter(|form| form.memory.over().is_none());
            fitting.min_by(|a, b| a.simulation.seconds.total_cmp(&b.simulation.seconds))
        })
    }

    /// The best steps of ZeRO 1 and 2 in which layers reduce the gradients of the layer above: a layer hides more, but the first and
    /// the last of each call are functions of their own. The same for steps whose updates copy states from host memory.
    fn reduced_later(&self, tried: &Outcomes) -> Forms {
        self.of_best(tried, 0, |one| {
            let ShardOptions { zero, fusion, .. } = one.options;
            let is_tried = match zero {
                Zero::Off => self.training.offload == Offload::Optimizer,
                Zero::Optimizer | Zero::Gradients => true,
                Zero::Parameters | Zero::ParametersAbove(_) => false,
            };
            let is_tried = is_tried && self.request.chooses_fusion;
            is_tried.then(|| self.fused_as(one, fusion.ahead(Prefetch::default())))?
        })
    }

    /// The best steps of ZeRO 2 and 3, and others that wait longer, with persistent weights of ZeRO 3, where these fit and save
    /// [`WORTH`]: they take memory.
    fn with_persistent(&self, tried: &Outcomes) -> Forms {
        // No framework has them as they are here.
        let chooses_stage = self.is_open(Choice::Zero);
        if !(chooses_stage || self.is_open(Choice::Persistent)) || self.request.target.is_some() {
            return Forms::new();
        }
        self.of_best(tried, LATER, |one| {
            let ShardOptions { zero, fusion, .. } = one.options;
            let base = match zero {
                Zero::Parameters => fusion,
                Zero::Gradients if chooses_stage && self.request.chooses_fusion => {
                    Fusion { messages: fusion.messages, ..Zero::Parameters.usual_fusion() }
                }
                _ => return None,
            };
            let training = one.training.as_ref().filter(|t| is_short(t))?;
            if !chooses_stage && training.micro_batches == 1 {
                return None;
            }
            let sizes = WeightSize::all(one.per_rank()?);
            let mut most: BTreeSet<u64> =
                sizes.values().filter(|size| size.is_per_layer).map(|size| size.elements).collect();
            // With all of them whole it is stage 2, which a search tries by itself.
            if chooses_stage {
                most.pop_last();
            }
            most.insert(0);
            let most: Vec<u64> = most.into_iter().collect();
            let mut best: Option<Priced> = None;
            // Memory grows with them, so the most that fit are found by halves.
            let (mut low, mut high) = (0, most.len());
            while low < high {
                let middle = usize::midpoint(low, high);
                let zero = Zero::ParametersAbove(most[middle]);
                let options = ShardOptions { zero, fusion: base, ..one.options.clone() };
                let other = self.priced(&Chosen { options, training: training.clone() }).ok()?;
                if other.memory.over().is_some() {
                    high = middle;
                    continue;
                }
                low = middle + 1;
                if other.simulation.seconds < best.as_ref().unwrap_or(one).simulation.seconds {
                    best = Some(other);
                }
            }
            best.filter(|best| best.simulation.seconds < one.simulation.seconds * (1.0 - WORTH))
        })
    }

    /// The best steps with persistent weights, with collectives in other numbers of chunks: these were chosen while more weights
    /// travelled.
    fn in_chunks_beside_persistent(&self, tried: &Outcomes) -> Forms {
        self.of_best(tried, 0, |one| {
            let ShardOptions { zero, fusion, .. } = one.options;
            let waits = one.simulation.exposed() > WAITS * one.simulation.seconds;
            let is_tried = self.request.chooses_fusion
                && matches!(zero, Zero::ParametersAbove(_))
                && (waits || matches!(fusion.messages, Messages::Chunked(_)));
            let others = PARTS.map(Messages::Chunked).into_iter().chain([Messages::Packed]);
            let others: Vec<Messages> =
                others.filter(|messages| is_tried && *messages != fusion.messages).collect();
            let forms = others
                .into_par_iter()
                .filter_map(|messages| self.fused_as(one, Fusion { messages, ..fusion }));
            let fitting = forms.filter(|form| form.memory.over().is_none());
            fitting.min_by(|a, b| a.simulation.seconds.total_cmp(&b.simulation.seconds))
        })
    }

    /// The interleaved steps that may become the best with twice as many chunks, which are compiled for twice as long: of long ones
    /// one.
    fn in_more_chunks(&self, tried: &Outcomes) -> Forms {
        let best = tried.fits.first().map(|best| best.simulation.seconds);
        let Some(best) = best.filter(|_| self.is_open(Choice::Pipeline)) else { return Forms::new() };
        let more = |one: &Priced| -> Option<(f64, Training)> {
            let training = one.training.clone()?;
            let is_most = CHUNKS.last() == Some(&training.chunks);
            if training.pipeline != PipelineOrder::Interleaved || !is_most {
                return None;
            }
            // The part of its work for which a stage waits for the first micro-batch and after the last is halved.
            let passes = (training.micro_batches * training.chunks) as f64;
            let waits = (training.stages - 1) as f64 / passes;
            let if_hidden = one.simulation.seconds * (1.0 - waits / 2.0 / (1.0 + waits));
            let more = Training { chunks: 2 * training.chunks, ..training };
            (if_hidden < best && n_calls(shape(&more)) <= self.calls() / 2).then_some((if_hidden, more))
        };
        let tries = tried.fits.iter().enumerate().filter_map(|(i, one)| Some((i, more(one)?)));
        let mut tries: Vec<(usize, (f64, Training))> = tries.collect();
        tries.sort_by(|(_, (a, _)), (_, (b, _))| a.total_cmp(b));
        let is_tried = |n: usize, more: &Training| {
            n == 0 || n < self.limit(LATER) && is_short(more) || n_calls(shape(more)) <= FEW
        };
        let tries = tries.into_iter().enumerate().filter(|(n, (_, (_, more)))| is_tried(*n, more));
        let tries: Vec<(usize, Training)> = tries.map(|(_, (i, (_, training)))| (i, training)).collect();
        let form = |(i, training): (usize, Training)| {
            let options = tried.fits[i].options.clone();
            if let Some(target) = &self.request.target {
                let layout = target.layout(&self.registry, &options, Some(&training)).ok()?;
                if !target.refusals(&layout).is_empty() {
                    return None;
                }
            }
            Some((i, self.priced(&Chosen { options, training }).ok()?))
        };
        tries.into_par_iter().filter_map(form).collect()
    }
}

/// Replaces steps by their forms that fit and are faster; the best steps come first.
fn replace(tried: &mut Outcomes, forms: impl Fn(&Outcomes) -> Forms) {
    tried.fits.sort_by(Priced::cmp_rank);
    for (i, form) in forms(tried) {
        let one = &mut tried.fits[i];
        if form.memory.over().is_none() && form.simulation.seconds < one.simulation.seconds {
            *one = Priced { also: std::mem::take(&mut one.also), ..form };
        }
    }
}

/// Whether a step is compiled quickly.
fn is_short(training: &Training) -> bool {
    n_calls(shape(training)) <= SHORT
}

fn shape(training: &Training) -> Shape {
    let &Training { stages, micro_batches, pipeline: order, .. } = training;
    Shape { stages, micro_batches, order, chunks: training.n_chunks() / stages.max(1) }
}
