//! The first look at a step: what follows in closed form from one micro-batch of one sequence.

use std::collections::BTreeSet;

use ithaca_differentiate::{MAX_CALLS, PipelineOrder, Training};
use ithaca_frameworks::Layout;
use ithaca_layout::fuse::{MAX_BUCKET, Pack};
use ithaca_layout::shard::Zero;
use ithaca_layout::shard::strategy::{DATA_AXIS, STAGE_AXIS};

use super::inside::{around, data_parallel};
use super::{CHUNKS, Inside, Looked, Search, divisors};
use crate::plan::Choice;
use crate::planner::block::{Block, Held, Kind};
use crate::planner::estimate::{Cut, Estimate, Shape};
use crate::planner::target::Target;

/// Ranks that have the same weights and other tokens: how many, and how far apart.
#[derive(Clone, Copy)]
pub(super) struct Replicas {
    pub(super) all: u64,
    pub(super) stride: u64,
}

impl Search<'_> {
    /// A first look at all steps, the fastest that may fit first.
    pub(super) fn looked(&self, insides: &[Inside]) -> Vec<Looked> {
        let mut all: Vec<Looked> = insides.iter().flat_map(|inside| inside.looks.iter().cloned()).collect();
        let usable = self.usable();
        all.sort_by(|a, b| {
            let key = |l: &Looked| {
                let needed = self.needed(&l.estimate);
                if needed <= usable { (0, l.estimate.seconds) } else { (1, needed) }
            };
            key(a).0.cmp(&key(b).0).then(key(a).1.total_cmp(&key(b).1))
        });
        all
    }

    pub(super) fn first_looks(&self, number: usize, inside: &Inside) -> Vec<Looked> {
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
                let has_replicas = data * inside.copies > 1;
                for &zero in self.zeros(has_replicas) {
                    let policies = inside.blocks.iter();
                    let policies = policies
                        .flat_map(|block| inside.loss_chunks.iter().map(move |&parts| (block, parts)));
                    for ((recompute, block), loss_chunks) in policies {
                        let replicas = Replicas { all: data * inside.copies, stride: size / inside.copies };
                        let (mut block, bucket) =
                            self.replicated(block, replicas, zero, (sequences, micro_batches));
                        if loss_chunks > self.training.loss_chunks {
                            block.chunk_loss(loss_chunks);
                        }
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
                                target.refusals(&Layout { zero, training, ..layout.clone() }).is_empty()
                            });
                            if !is_admitted {
                                continue;
                            }
                            let estimate = self.composed(&block, shape, size * data);
                            let Some(estimate) = estimate else { continue };
                            found.push(Looked {
                                inside: number,
                                estimate,
                                data,
                                zero,
                                recompute: *recompute,
                                loss_chunks,
                                sequences,
                                shape,
                                exposed: 1.0,
                                bucket,
                                fusion: None,
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
        let cut = match shape.stages * shape.chunks {
            1 => vec![block.calls.iter().map(|call| call.layers).enumerate().collect()],
            n => self.cut_of(block, n)?,
        };
        let handed = block.calls.iter().map(|call| call.handed).max().unwrap_or(0);
        let hop = self.cluster.hop_seconds(ranks_of_stage, handed as f64);
        Some(block.compose(&cut, shape, hop))
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
                    orders.extend(CHUNKS.map(|n| (PipelineOrder::Interleaved, n)));
                }
                orders
            }
        }
    }

    /// The bucket, in MiB, in which the transfer of weights takes twice as long as the rest of the message, where that is more than
    /// buckets usually have.
    pub(super) fn bucket(&self, zero: Zero, Replicas { all, stride }: Replicas) -> Option<u64> {
        let splits_weights = matches!(zero, Zero::Parameters | Zero::ParametersAbove(_));
        if !splits_weights || !self.request.chooses_fusion {
            return None;
        }
        let seconds = |bytes| self.cluster.gather_seconds(all, stride, bytes);
        let start = seconds(0.0);
        let mib = |n: u64| (n << 20) as f64;
        let rate = mib(MAX_BUCKET) / (seconds(mib(MAX_BUCKET)) - start);
        let least = (2.0 * start * rate / mib(1)).ceil() as u64;
        let usual = Pack::default().bytes >> 20;
        (least > usual).then(|| least.next_power_of_two().min(MAX_BUCKET))
    }

    fn zeros(&self, has_replicas: bool) -> &[Zero] {
        match (self.is_open(Choice::Zero), has_replicas) {
            (false, _) => std::slice::from_ref(&self.request.options.zero),
            (true, false) => &[Zero::Off],
            (true, true) => &Zero::ALL,
        }
    }

    /// A block of one sequence with data-parallel ranks, ZeRO and a larger micro-batch, roughly, in the buckets that suit it.
    fn replicated(
        &self,
        block: &Block,
        replicas: Replicas,
        zero: Zero,
        (sequences, micro_batches): (u64, u64),
    ) -> (Block, Option<u64>) {
        let in_buckets = |bucket| self.bucketed(block, replicas, (zero, bucket), (sequences, micro_batches));
        let usual = (in_buckets(None), None);
        match self.bucket(zero, replicas) {
            Some(bucket) => {
                let other = (in_buckets(Some(bucket)), Some(bucket));
                if other.0.pass() < usual.0.pass() { other } else { usual }
            }
            None => usual,
        }
    }

    /// A block as it is with buckets of so many MiB.
    fn bucketed(
        &self,
        block: &Block,
        Replicas { all, stride }: Replicas,
        (zero, bucket): (Zero, Option<u64>),
        (sequences, micro_batches): (u64, u64),
    ) -> Block {
        let mut block = block.scaled(sequences);
        let is_split = |held: &Held| match zero {
            Zero::Off | Zero::Optimizer | Zero::Gradients => false,
            Zero::Parameters => true,
            Zero::ParametersAbove(_) => held.is_per_layer,
        };
        let is_whole = |held: &Held| !is_split(held);
        for call in &mut block.calls {
            // Seconds to gather such tensors of a kind of which ranks have copies, each a message where there are no buckets.
            let gather = |kind: Kind, such: &dyn Fn(&Held) -> bool| -> f64 {
                let is_such = |held: &&Held| held.kind == kind && held.parts < all && such(held);
                let held = || call.held.iter().filter(is_such);
                let numbers: BTreeSet<u64> = held().map(|held| held.parts).collect();
                let of = |parts: u64| {
                    let bytes: Vec<u64> =
                        held().filter(|held| held.parts == parts).map(|held| held.bytes).collect();
                    let (n, bytes) = (bytes.len() as u64, bytes.iter().sum::<u64>());
                    let messages = bucket.map_or(n, |mib| bytes.div_ceil(mib << 20).clamp(1, n));
                    let seconds = |bytes| self.cluster.gather_seconds(all / parts, stride * parts, bytes);
                    seconds(bytes as f64) + (messages - 1) as f64 * seconds(0.0)
                };
                numbers.into_iter().map(of).sum()
            };
            // Gradients that every micro-batch adds to a part travel in the type of their weights.
            let reduced = match zero {
                Zero::Off | Zero::Optimizer => gather(Kind::Gradients, &|_| true),
                Zero::Gradients | Zero::Parameters | Zero::ParametersAbove(_) => {
                    gather(Kind::Parameters, &|_| true)
                }
            };
            // Of weights, where they are used, and once a step.
            let [gathered, once] = [gather(Kind::Parameters, &is_split), gather(Kind::Parameters, &is_whole)];
            let is_copied =
                |held: &&Held| held.kind == Kind::Parameters && held.parts < all && is_split(held);
            let copied: u64 = call.held.iter().filter(is_copied).map(|held| held.bytes).sum();
            // From buckets and to them.
            let unpacked = match bucket {
                Some(_) => self.cluster.copy_seconds("unpack", 2.0 * copied as f64),
                None => 0.0,
            };
            let seconds = &mut call.seconds;
            let whole = if zero == Zero::Off { 2.0 * reduced } else { reduced };
            seconds.complete = seconds.complete.max(whole);
            match zero {
                Zero::Off => {}
                Zero::Optimizer => seconds.update = seconds.update / all as f64 + once,
                Zero::Gradients => {
                    seconds.update = seconds.update / all as f64 + once;
                    seconds.backward = seconds.backward.max(whole);
                }
                Zero::Parameters | Zero::ParametersAbove(_) => {
                    seconds.update = seconds.update / all as f64 + once;
                    seconds.forward = (seconds.forward + unpacked).max(gathered);
                    seconds.backward = (seconds.backward + 2.0 * unpacked).max(gathered + whole);
                    seconds.complete = (seconds.complete + 2.0 * unpacked).max(gathered + whole);
                    call.frame += 2 * copied;
                }
            }
            if zero != Zero::Off {
                call.update_frame /= all;
            }
            for held in &mut call.held {
                // Gradients of several micro-batches are summed beside those of one.
                let sums = match zero {
                    Zero::Off | Zero::Optimizer if held.kind == Kind::Gradients && micro_batches > 1 => {
                        held.bytes
                    }
                    _ => 0,
                };
                let parts = match (held.kind, zero) {
                    (_, Zero::Off) | (Kind::States, _) => 1,
                    (Kind::Parameters, _) if !is_split(held) => 1,
                    (Kind::Gradients | Kind::Optimizer | Kind::Parameters, _) => all / held.parts,
                };
                held.bytes = held.bytes.div_ceil(parts) + sums;
            }
        }
        block
    }
}
