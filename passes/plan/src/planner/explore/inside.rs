//! Insides: the layouts of one micro-batch, and their blocks.

use std::sync::Arc;

use ithaca_differentiate::{Recompute, Training};
use ithaca_ir::{Diagnostic, Mesh};
use ithaca_layout::fuse::Fusion;
use ithaca_layout::shard::strategy::{DATA_AXIS, EXPERT_AXIS, EXPERT_COPIES, STAGE_AXIS, placement};
use ithaca_layout::shard::{Placement, ShardOptions, Strategy, Zero};

use super::{Inside, Refused, Search, divisors};
use crate::plan::{Choice, Narrowing};
use crate::planner::block::{Axes, Block, Copies};
use crate::planner::candidates::candidates;
use crate::planner::request::Request;

/// The most parts of a loss that are tried.
const MOST_LOSS_CHUNKS: u64 = 64;

/// Whether a block has the sums of gradients over ranks with the same weights and other tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Sums {
    Taken,
    /// Their price follows from all such ranks, of which a block has some.
    Left,
}

impl Search<'_> {
    /// The layouts of so many ranks inside, with the data-parallel ranks where experts are split over them.
    pub(super) fn of_size(&self, size: u64) -> Vec<(ShardOptions, Option<u64>)> {
        let outer = self.request.gpus / size;
        let names_copies =
            self.request.strategy.as_ref().map(|names| names.split('+').any(|name| name == EXPERT_COPIES));
        let mut found = Vec::new();
        if names_copies != Some(true) {
            let inside = self.inner(size, &[DATA_AXIS, STAGE_AXIS]).into_iter();
            found.extend(inside.flat_map(|options| self.with_data(options, outer)));
        }
        let tries_copies = names_copies.unwrap_or_else(|| self.request.narrowing.allows(EXPERT_COPIES));
        if self.request.experts > 0 && tries_copies {
            let inside = self.inner(size, &[DATA_AXIS, STAGE_AXIS, EXPERT_AXIS]).into_iter();
            found.extend(inside.flat_map(|options| self.with_copies(&options, outer)));
        }
        found
    }

    /// The layouts of so many ranks, of strategies and mesh axes but the outer ones.
    fn inner(&self, size: u64, outer: &[&str]) -> Vec<ShardOptions> {
        let request = self.request;
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
        let without = self.registry.strategies().map(Strategy::name).filter(|name| is_outer(name));
        narrowing.without.extend(without.map(str::to_owned));
        let narrowing = if strategy.is_some() { Narrowing::default() } else { narrowing };
        let inner = Request { gpus: size, strategy, mesh, narrowing, steps: None, ..request.clone() };
        let mut found = candidates(&self.registry, self.cluster, &inner).unwrap_or_default();
        // Data-parallel ranks and stages are around one device, whatever else is tried.
        if size == 1 && request.strategy.is_none() && found.is_empty() {
            found.push(ShardOptions { strategy: "single".to_owned(), ..request.options.clone() });
        }
        if size == 1 && request.strategy.is_none() && request.mesh.is_none() && request.experts > 0 {
            let shares = self
                .registry
                .strategies()
                .filter(|s| s.shares_axes() && !is_outer(s.name()) && request.narrowing.allows(s.name()));
            found.extend(
                shares.map(|s| ShardOptions { strategy: s.name().to_owned(), ..request.options.clone() }),
            );
        }
        let mut seen: Vec<(String, Vec<(String, u64)>)> = Vec::new();
        found.retain(|options| {
            let mut axes: Vec<(String, u64)> =
                options.mesh.axes.values().map(|a| (a.name.clone(), a.size)).collect();
            axes.sort();
            let key = (options.strategy_text(), axes);
            let is_first = !seen.contains(&key);
            seen.push(key);
            is_first
        });
        found
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
        let is_given = |data: &u64| self.fixed(DATA_AXIS).is_none_or(|size| size == *data);
        // One device shares no axis.
        let is_one = options.mesh.axes.is_empty();
        self.numbers_of_data(outer)
            .filter(|&data| (data > 1 || !is_one) && self.is_tried("data-parallel", data))
            .filter(is_given)
            .map(|data| (data_parallel(&options, data), Some(data)))
            .collect()
    }

    /// The layout with every number of data-parallel ranks, of which so many have an expert once.
    ///
    /// Experts over fewer ranks than a node has would need more memory, and gain nothing.
    fn with_copies(&self, options: &ShardOptions, outer: u64) -> Vec<(ShardOptions, Option<u64>)> {
        let node = self.cluster.devices_per_node.value;
        let is_given = |axis: &str, n: u64| self.fixed(axis).is_none_or(|size| size == n);
        let size = options.mesh.ranks();
        let mut found = Vec::new();
        for data in self.numbers_of_data(outer) {
            let ranks = |over: &u64| self.request.experts.is_multiple_of(*over);
            let mut over: Vec<u64> =
                divisors(data).into_iter().filter(|over| *over > 1 && ranks(over)).collect();
            if self.request.mesh.is_none() {
                // Ranks that do not divide a node are on two of them.
                let inside = over.iter().rposition(|over| node.is_multiple_of(over * size)).unwrap_or(0);
                over.drain(..inside);
                over.retain(|&over| over < data);
            }
            over.retain(|&over| is_given(EXPERT_AXIS, over) && is_given(DATA_AXIS, data / over));
            let with = |over: u64| {
                let axes = [(DATA_AXIS, data / over), (EXPERT_AXIS, over)];
                (around(options, EXPERT_COPIES, &axes), Some(data))
            };
            found.extend(over.into_iter().map(with));
        }
        found
    }

    /// Data-parallel ranks among which a batch is divided.
    fn numbers_of_data(&self, outer: u64) -> impl Iterator<Item = u64> {
        divisors(outer).into_iter().filter(|&data| self.request.batch.is_multiple_of(data))
    }

    /// The size of an axis of the mesh that the request names; without a mesh, of stages whose layers it states.
    pub(super) fn fixed(&self, axis: &str) -> Option<u64> {
        match &self.request.mesh {
            Some(mesh) => Some(mesh.axis(axis).map_or(1, |axis| mesh.size(axis))),
            None => self.training.stated_stages().filter(|_| axis == STAGE_AXIS),
        }
    }

    /// Whether a strategy is tried with so many ranks. One that is named has several, unless the mesh gives it one.
    pub(super) fn is_tried(&self, strategy: &str, ranks: u64) -> bool {
        match &self.request.strategy {
            None => ranks == 1 || self.request.narrowing.allows(strategy),
            Some(names) => {
                let is_named = names.split('+').any(|name| name == strategy);
                if is_named { ranks > 1 || self.request.mesh.is_some() } else { ranks == 1 }
            }
        }
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
        let block = self
            .block(data.unwrap_or(1), &training, &options, Sums::Left)
            .map_err(|d| Box::new((options.clone(), d)))?;
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
        let replicas = self.replica_axes(&options).into_iter().filter_map(|axis| options.mesh.axis(&axis));
        let ranks: u64 = replicas.map(|axis| options.mesh.size(axis)).product();
        let copies = (ranks / data.unwrap_or(1)).max(1);
        Ok(Inside { options, data, copies, blocks, loss_chunks })
    }

    /// A step without stages, with so many sequences in a micro-batch on all ranks.
    pub(super) fn block(
        &self,
        sequences: u64,
        training: &Training,
        options: &ShardOptions,
        sums: Sums,
    ) -> Result<Arc<Block>, Diagnostic> {
        let key = format!("{sequences} {training:?} {options:?} {sums:?}");
        self.blocks.of(key, || self.compiled_block(sequences, training, options, sums))
    }

    fn compiled_block(
        &self,
        sequences: u64,
        training: &Training,
        options: &ShardOptions,
        sums: Sums,
    ) -> Result<Block, Diagnostic> {
        let compiler = self
            .compiler
            .of_step(sequences * training.micro_batches, training)
            .map_err(ithaca_pass::first)?;
        let compiler = compiler.as_deref().unwrap_or(self.compiler);
        compiler.check(options)?;
        let replicas = self.replica_axes(options);
        // Weights that are gathered ahead are arguments of layers, which then are no longer alike.
        let prefetched = match (options.zero, options.fusion.prefetch) {
            (Zero::Parameters | Zero::ParametersAbove(_), Some(_)) => replicas.clone(),
            _ => Vec::new(),
        };
        let copies = if options.fusion.prefetch.is_some() { Copies::Ahead } else { Copies::InLayer };
        let fusion = Fusion { prefetch: None, ..options.fusion };
        let options = ShardOptions { fusion, ..options.clone() };
        let compiled = compiler.draft(&options).map_err(ithaca_pass::first)?;
        let stageless = || Diagnostic::new("P31", "the step has parts that no micro-batch repeats");
        let batch = self.placement(&options).batch;
        let data: Vec<String> = batch.iter().map(|&axis| options.mesh.axes[axis].name.clone()).collect();
        let leaves_sums = sums == Sums::Left;
        let axes = Axes { replicas: &replicas, data: &data, leaves_sums, prefetched: &prefetched, copies };
        Block::of(self.cluster, (&compiled, training.micro_batches), axes).ok_or_else(stageless)
    }

    fn placement(&self, options: &ShardOptions) -> Placement {
        let strategies = self.registry.product(&options.strategy);
        strategies.and_then(|s| placement(&s, &options.mesh, &[])).unwrap_or_default()
    }

    /// The axes along which ranks have the same weights and other tokens.
    pub(super) fn replica_axes(&self, options: &ShardOptions) -> Vec<String> {
        let (mesh, placement) = (&options.mesh, self.placement(options));
        let axes = mesh.axes.ids().filter(|axis| placement.holds_same_weights(*axis));
        axes.map(|axis| mesh.axes[axis].name.clone()).collect()
    }
}

/// A layout with so many data-parallel ranks around it.
pub(super) fn data_parallel(options: &ShardOptions, ranks: u64) -> ShardOptions {
    around(options, "data-parallel", &[(DATA_AXIS, ranks)])
}

/// A layout with a strategy and its axes around it.
pub(super) fn around(options: &ShardOptions, name: &str, axes: &[(&str, u64)]) -> ShardOptions {
    if axes.iter().all(|(_, size)| *size == 1) {
        return options.clone();
    }
    let strategy = match options.strategy.as_str() {
        "single" => name.to_owned(),
        inner => format!("{name}+{inner}"),
    };
    let outer = axes.iter().map(|(axis, size)| ((*axis).to_owned(), *size));
    let inner = options.mesh.axes.values().map(|a| (a.name.clone(), a.size));
    ShardOptions { strategy, mesh: Mesh::new(outer.chain(inner)), ..options.clone() }
}
