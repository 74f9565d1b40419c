//! The coarse estimate of a step, in closed form from one micro-batch of one sequence.

use ithaca_differentiate::{MAX_CALLS, PipelineOrder, Training};
use ithaca_frameworks::Layout;
use ithaca_layout::shard::Zero;
use ithaca_layout::shard::strategy::{DATA_AXIS, STAGE_AXIS};

use super::chosen::n_calls;
use super::inside::{around, data_parallel};
use super::refine::FEW;
use super::replicas::{Replicas, Replication};
use super::{CHUNKS, Candidate, Inside, Search, divisors};
use crate::plan::Choice;
use crate::planner::block::Block;
use crate::planner::estimate::{Cut, Estimate, Shape, Stage};
use crate::planner::target::Target;

impl Search<'_> {
    /// A coarse estimate of all steps of an inside, which is to be numbered.
    pub(super) fn coarse_estimates(&self, inside: &Inside) -> Vec<Candidate> {
        let (gpus, batch) = (self.request.gpus, self.request.batch);
        let size = inside.size();
        let outer = gpus / size;
        let mut found = Vec::new();
        for data in divisors(outer) {
            let stages = outer / data;
            let is_tried = |strategy: &str, axis: &str, n: u64| {
                self.fixed(axis).is_none_or(|size| size == n) && self.is_tried(strategy, n)
            };
            let is_of_data = match inside.data {
                Some(fixed) => fixed == data,
                None => is_tried("data-parallel", DATA_AXIS, data),
            };
            let is_legal = batch.is_multiple_of(data)
                && is_of_data
                && is_tried("pipeline", STAGE_AXIS, stages)
                && self.cuts.range(stages..).any(|(chunks, _)| chunks.is_multiple_of(stages));
            if !is_legal {
                continue;
            }
            let share = batch / data;
            let for_target = self
                .request
                .target
                .as_ref()
                .map(|target| (target, self.for_target(target, inside, data, stages)));
            let has_replicas = data * inside.copies > 1;
            let replicas = Replicas { all: data * inside.copies, stride: size / inside.copies };
            let splits_experts = inside.shape()[1] > 1;
            let held = &inside.blocks.first().expect("an inside has a block").1;
            let zeros = self.zeros(has_replicas).iter();
            let zeros: Vec<(Zero, Vec<Replication>)> = zeros
                .map(|&zero| (zero, self.replications(held, (replicas, splits_experts), zero)))
                .collect();
            for micro_batches in divisors(share) {
                let is_given =
                    self.is_open(Choice::MicroBatches) || micro_batches == self.training.micro_batches;
                // Fewer micro-batches than stages leave stages idle, and more of them than 4 a stage fill it.
                let is_worth_it =
                    !self.is_open(Choice::MicroBatches) || stages == 1 || micro_batches >= stages.min(share);
                if !is_given || !is_worth_it {
                    continue;
                }
                let sequences = share / micro_batches;
                for (zero, replications) in &zeros {
                    let policies = inside.blocks.iter();
                    let policies = policies
                        .flat_map(|block| inside.loss_chunks.iter().map(move |&parts| (block, parts)));
                    for ((recompute, block), loss_chunks) in policies {
                        let replicated = replications
                            .iter()
                            .map(|one| (one.of(block, (sequences, micro_batches)), one.bucket));
                        let (mut block, bucket) = replicated
                            .reduce(|a, b| if b.0.pass() < a.0.pass() { b } else { a })
                            .expect("there are messages without buckets");
                        if loss_chunks > self.training.loss_chunks {
                            block.chunk_loss(loss_chunks);
                        }
                        let (hop, hideable) = (self.hop(&block, size * data), block.exposed_of_pass());
                        let mut cut: Option<(u64, Option<Vec<Stage>>)> = None;
                        for (order, chunks) in self.orders(stages, micro_batches) {
                            if stages > 1 && stages * micro_batches * chunks > MAX_CALLS {
                                continue;
                            }
                            let shape = Shape { stages, micro_batches, order, chunks };
                            let is_admitted = for_target.as_ref().is_none_or(|(target, layout)| {
                                let Some(layout) = layout else { return true };
                                let training = Training {
                                    recompute: *recompute,
                                    loss_chunks,
                                    micro_batches,
                                    pipeline: order,
                                    chunks,
                                    ..layout.training.clone()
                                };
                                target
                                    .refusals(&Layout { zero: *zero, training, ..layout.clone() })
                                    .is_empty()
                            });
                            if !is_admitted {
                                continue;
                            }
                            // Orders with as many chunks have the same stages.
                            if cut.as_ref().is_none_or(|(n, _)| *n != chunks) {
                                cut = Some((chunks, self.stages(&block, stages, chunks)));
                            }
                            let Some((_, Some(stages))) = &cut else { continue };
                            let estimate = block.compose(stages, shape, hop);
                            found.push(Candidate {
                                inside: 0,
                                estimate,
                                data,
                                zero: *zero,
                                recompute: *recompute,
                                loss_chunks,
                                sequences,
                                shape,
                                hideable,
                                bucket,
                                fusion: None,
                                is_speculative: false,
                            });
                        }
                    }
                }
            }
        }
        found
    }

    /// The layout of an inside with so many data-parallel ranks and stages, in the terms of frameworks.
    fn for_target(&self, target: &Target, inside: &Inside, data: u64, stages: u64) -> Option<Layout> {
        let options =
            if inside.data.is_some() { inside.options.clone() } else { data_parallel(&inside.options, data) };
        let options = around(&options, "pipeline", &[(STAGE_AXIS, stages)]);
        target.layout(&self.registry, &options, Some(self.training)).ok()
    }

    /// The estimate of a shape; `None` where the calls of the block cannot be told apart by chunks of layers.
    pub(super) fn composed(&self, block: &Block, shape: Shape, ranks_of_stage: u64) -> Option<Estimate> {
        let stages = self.stages(block, shape.stages, shape.chunks)?;
        Some(block.compose(&stages, shape, self.hop(block, ranks_of_stage)))
    }

    /// The stages of a block, of so many chunks of layers each.
    fn stages(&self, block: &Block, stages: u64, chunks: u64) -> Option<Vec<Stage>> {
        let cut = match stages * chunks {
            1 => vec![block.calls.iter().map(|call| call.layers).enumerate().collect()],
            n => self.cut_of(block, n)?,
        };
        Some(block.stages(&cut, stages))
    }

    /// Seconds of a transfer between stages.
    fn hop(&self, block: &Block, ranks_of_stage: u64) -> f64 {
        let handed = block.calls.iter().map(|call| call.handed).max().unwrap_or(0);
        self.cluster.hop_seconds(ranks_of_stage, handed as f64)
    }

    /// The calls of a block in each of `n` chunks of layers. A call may run several layers, which are computed again together.
    fn cut_of(&self, block: &Block, n: u64) -> Option<Cut> {
        let whole = self.cuts.get(&1)?.first()?;
        let layers =
            |number: usize| whole.iter().find(|(call, _)| *call == number).map(|(_, layers)| *layers);
        let each: Vec<u64> = (0..block.calls.len())
            .map(|number| Some((layers(number)? / block.calls[number].layers.max(1)).max(1)))
            .collect::<Option<_>>()?;
        if each.len() != whole.len() {
            return None;
        }
        let calls = |(call, layers): &(usize, u64)| (*call, layers.div_ceil(each[*call]));
        Some(self.cuts.get(&n)?.iter().map(|chunk| chunk.iter().map(calls).collect()).collect())
    }

    /// The orders of a pipeline with their chunks of layers.
    fn orders(&self, stages: u64, micro_batches: u64) -> Vec<(PipelineOrder, u64)> {
        let given = self.training.pipeline;
        let is_interleaved = micro_batches.is_multiple_of(stages);
        match (self.is_open(Choice::Pipeline), given) {
            _ if stages == 1 => vec![(given, 1)],
            (false, PipelineOrder::Interleaved) if is_interleaved => vec![(given, self.training.chunks)],
            (false, PipelineOrder::Interleaved) => Vec::new(),
            (false, _) => vec![(given, 1)],
            (true, _) => {
                let mut orders = vec![(PipelineOrder::OneForwardOneBackward, 1), (PipelineOrder::ZbH1, 1)];
                if is_interleaved {
                    let order = PipelineOrder::Interleaved;
                    orders.extend(CHUNKS.map(|n| (order, n)));
                    // Others are tried with more chunks at last.
                    let chunks = 2 * CHUNKS[CHUNKS.len() - 1];
                    let is_short = n_calls(Shape { stages, micro_batches, order, chunks }) <= FEW;
                    orders.extend(is_short.then_some((order, chunks)));
                }
                orders
            }
        }
    }

    fn zeros(&self, has_replicas: bool) -> &[Zero] {
        match (self.is_open(Choice::Zero), has_replicas) {
            (false, _) => std::slice::from_ref(&self.request.options.zero),
            (true, false) => &[Zero::Off],
            (true, true) => &Zero::ALL,
        }
    }
}
