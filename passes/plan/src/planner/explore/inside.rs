//! Insides: the layouts of one micro-batch, and their blocks.

use ithaca_differentiate::{Recompute, Training};
use ithaca_ir::{Diagnostic, Mesh};
use ithaca_layout::fuse::Fusion;
use ithaca_layout::shard::strategy::{DATA_AXIS, STAGE_AXIS, placement};
use ithaca_layout::shard::{ShardOptions, Zero};

use super::{Inside, Refused, Search, divisors};
use crate::plan::{Choice, Narrowing};
use crate::planner::block::Block;
use crate::planner::candidates::candidates;
use crate::planner::request::Request;

/// The most parts of a loss that are tried.
const MOST_LOSS_CHUNKS: u64 = 64;

impl Search<'_> {
    /// The layouts of so many ranks inside, with the data-parallel ranks where experts are split over them.
    pub(super) fn of_size(&self, size: u64) -> Vec<(ShardOptions, Option<u64>)> {
        let request = self.request;
        let outer = [DATA_AXIS, STAGE_AXIS];
        let is_outer = |name: &str| {
            self.registry
                .product(name)
                .is_ok_and(|s| s.iter().any(|s| s.axes().iter().any(|a| outer.contains(a))))
        };
        let strategy = request.strategy.as_ref().map(|name| {
            let inner: Vec<&str> = name.split('+').filter(|name| !is_outer(name)).collect();
            if inner.is_empty() { "single".to_owned() } else { inner.join("+") }
        });
        let mesh = request.mesh.as_ref().map(|mesh| {
            Mesh::new(
                mesh.axes
                    .values()
                    .filter(|a| !outer.contains(&a.name.as_str()))
                    .map(|a| (a.name.clone(), a.size)),
            )
        });
        if mesh.as_ref().is_some_and(|mesh| mesh.ranks() != size) {
            return Vec::new();
        }
        let mut narrowing = request.narrowing.clone();
        narrowing.without.extend(["data-parallel".to_owned(), "pipeline".to_owned()]);
        let narrowing = if strategy.is_some() { Narrowing::default() } else { narrowing };
        let inner = Request { gpus: size, strategy, mesh, narrowing, steps: None, ..request.clone() };
        let mut found = candidates(&self.registry, self.cluster, &inner).unwrap_or_default();
        // Data-parallel ranks and stages are around one device, whatever else is tried.
        if size == 1 && request.strategy.is_none() && found.is_empty() {
            found.push(ShardOptions { strategy: "single".to_owned(), ..request.options.clone() });
        }
        if size == 1 && request.strategy.is_none() && request.mesh.is_none() && request.experts > 0 {
            let shares =
                self.registry.strategies().filter(|s| s.shares_axes() && request.narrowing.allows(s.name()));
            found.extend(
                shares.map(|s| ShardOptions { strategy: s.name().to_owned(), ..request.options.clone() }),
            );
        }
        let mut seen: Vec<(String, Vec<(String, u64)>)> = Vec::new();
        let is_first = |options: &ShardOptions| {
            let mut axes: Vec<(String, u64)> =
                options.mesh.axes.values().map(|a| (a.name.clone(), a.size)).collect();
            axes.sort();
            let key = (options.strategy_text(), axes);
            let is_new = !seen.contains(&key);
            seen.push(key);
            is_new
        };
        let mut is_first = is_first;
        let found = found.into_iter().filter(|options| is_first(options));
        found.flat_map(|options| self.with_data(options, request.gpus / size)).collect()
    }

    /// The layout, or where its experts share the axes of tokens, the layout with every number of data-parallel ranks.
    fn with_data(&self, options: ShardOptions, outer: u64) -> Vec<(ShardOptions, Option<u64>)> {
        let strategies = self.registry.product(&options.strategy).unwrap_or_default();
        let shares = strategies
            .iter()
            .any(|s| s.shares_axes() && s.axes().iter().all(|axis| options.mesh.axis(axis).is_none()));
        if !shares {
            return vec![(options, None)];
        }
        let with = |data: u64| (data_parallel(&options, data), Some(data));
        divisors(outer)
            .into_iter()
            .filter(|&data| self.request.batch.is_multiple_of(data))
            // One device shares no axis.
            .filter(|&data| data > 1 || !options.mesh.axes.is_empty())
            .map(with)
            .collect()
    }

    /// Compiles one micro-batch of one sequence.
    pub(super) fn inside(&self, options: ShardOptions, data: Option<u64>) -> Result<Inside, Box<Refused>> {
        let options = ShardOptions { zero: Zero::Off, ..options };
        let mut training = Training { micro_batches: 1, stages: 1, ..self.training.clone() };
        if self.is_open(Choice::LossChunks) {
            training.loss_chunks = 1;
        }
        if self.is_open(Choice::Recompute) {
            training.recompute = Recompute::None;
        }
        let block =
            self.block(data.unwrap_or(1), &training, &options).map_err(|d| Box::new((options.clone(), d)))?;
        // In so many parts, the loss needs no more memory than a layer.
        let (head, others) = block.calls.split_last().expect("a block has calls");
        let layer = others.iter().map(|call| call.frame + call.saved).max().unwrap_or(head.frame).max(1);
        let parts = head.frame.div_ceil(layer).next_power_of_two().min(MOST_LOSS_CHUNKS);
        let mut loss_chunks = vec![training.loss_chunks];
        if self.is_open(Choice::LossChunks) && parts > 1 {
            loss_chunks.push(parts);
        }
        let policies =
            if self.is_open(Choice::Recompute) { Recompute::ALL.to_vec() } else { vec![training.recompute] };
        let blocks = policies
            .into_iter()
            .map(|policy| (policy, block.recomputing(training.recompute, policy)))
            .collect();
        Ok(Inside { options, data, blocks, loss_chunks, looks: Vec::new() })
    }

    /// A step without stages, with so many sequences in a micro-batch on all ranks.
    pub(super) fn block(
        &self,
        sequences: u64,
        training: &Training,
        options: &ShardOptions,
    ) -> Result<Block, Diagnostic> {
        let compiler = self
            .compiler
            .of_step(sequences * training.micro_batches, training)
            .map_err(ithaca_pass::first)?;
        let compiler = compiler.as_deref().unwrap_or(self.compiler);
        compiler.check(options)?;
        // Weights that are gathered ahead are arguments of layers, which then are no longer alike.
        let prefetched = match (options.zero, options.fusion.prefetch) {
            (Zero::Parameters, Some(_)) => self.replica_axes(options),
            _ => Vec::new(),
        };
        let fusion = Fusion { prefetch: None, ..options.fusion };
        let options = ShardOptions { fusion, ..options.clone() };
        let compiled = compiler.draft(&options).map_err(ithaca_pass::first)?;
        let stageless = || Diagnostic::new("P31", "the step has parts that no micro-batch repeats");
        Block::of(self.cluster, (&compiled, training.micro_batches), &prefetched).ok_or_else(stageless)
    }

    /// The axes along which ranks have the same weights and other tokens.
    pub(super) fn replica_axes(&self, options: &ShardOptions) -> Vec<String> {
        let mesh = &options.mesh;
        let placement = self.registry.product(&options.strategy).and_then(|s| placement(&s, mesh, &[]));
        let placement = placement.unwrap_or_default();
        let axes = mesh.axes.ids().filter(|axis| placement.holds_same_weights(*axis));
        axes.map(|axis| mesh.axes[axis].name.clone()).collect()
    }
}

/// A layout with so many data-parallel ranks around it.
pub(super) fn data_parallel(options: &ShardOptions, ranks: u64) -> ShardOptions {
    around(options, ("data-parallel", DATA_AXIS), ranks)
}

/// A layout with a strategy and its axis around it.
pub(super) fn around(options: &ShardOptions, (name, axis): (&str, &str), size: u64) -> ShardOptions {
    if size == 1 {
        return options.clone();
    }
    let strategy = match options.strategy.as_str() {
        "single" => name.to_owned(),
        inner => format!("{name}+{inner}"),
    };
    let inner = options.mesh.axes.values().map(|a| (a.name.clone(), a.size));
    let mesh = Mesh::new(std::iter::once((axis.to_owned(), size)).chain(inner));
    ShardOptions { strategy, mesh, ..options.clone() }
}
