//! A training step in pipeline stages: every stage runs the forward and backward passes of its layers for one
//! micro-batch after another, in the order of the schedule.
//!
//! ```text
//! %x  = call %t {callee=@embed, stage=0}
//! %x1, … = call %x {callee=@block, layers=0..16, …, stage=0}
//! %x2, … = call %x1 {callee=@block, layers=16..32, …, stage=1}
//! ```
//!
//! `main` is unrolled: all stages follow one list of calls, and each skips the calls of other stages. A value that a
//! call takes from another stage crosses stages; `shard` inserts the transfer. Inputs are known on every stage.

use std::collections::BTreeMap;

use ithaca_ir::entity::Entity;
use ithaca_ir::module::{FuncId, Function, Layers, Output, ValueId};
use ithaca_ir::ops::{OpError, Random, Stage};
use ithaca_ir::{DType, Diagnostic, FunctionBuilder, Module, Op, TensorType};
use ithaca_pass::rebuild::ValueMap;

use super::micro::{Split, is_key, is_whole_batch, only_loss, part_inputs, whole_batch};
use super::order::{self, Half, Shape, Step};
use super::stages::Staged;
use super::step::{Cx, Run, StepParts};
use super::update::Place;

/// The stages that run the layers of each function.
pub(super) struct Stages {
    /// By function.
    places: Vec<Vec<Place>>,
}

impl Stages {
    /// The stages of a program cut into chunks for `n` stages.
    pub(super) fn of(staged: &Staged, main: FuncId, n: usize) -> Self {
        let Staged { module, chunks } = staged;
        let mut places: Vec<Vec<Place>> = vec![Vec::new(); module.functions.len()];
        for (node, chunk) in module.functions[main].nodes.iter().zip(chunks) {
            if let (Op::Call { callee, layers, .. }, Some(chunk)) = (&node.op, chunk) {
                let place = (layers.clone(), Some(stage_of(*chunk, n)));
                if !places[callee.index()].contains(&place) {
                    places[callee.index()].push(place);
                }
            }
        }
        Self { places }
    }

    /// The places of `function`: one per range of layers for weights per layer, one for weights that all layers share.
    ///
    /// # Errors
    /// `P54` when two stages run the same layer, or share a weight of all layers.
    pub(super) fn of_weights(
        &self,
        function: FuncId,
        is_per_layer: bool,
        name: &str,
    ) -> Result<Vec<Place>, OpError> {
        let mut places = self.places[function.index()].clone();
        places.sort_by_key(|(layers, _)| (layers.start, layers.end));
        let meet = |a: &Layers, b: &Layers| a.start < b.end && b.start < a.end;
        let clash = places.iter().enumerate().any(|(i, (layers, stage))| {
            places[..i].iter().any(|(other, there)| stage != there && (!is_per_layer || meet(layers, other)))
        });
        if clash {
            let message = format!("`@{name}` runs on two stages of the pipeline with one weight");
            return Err(OpError::new("P54", message));
        }
        if is_per_layer {
            return Ok(places);
        }
        Ok(places.first().map(|(_, stage)| (0..1, *stage)).into_iter().collect())
    }
}

/// The stage that runs a chunk.
pub(super) fn stage_of(chunk: usize, n: usize) -> Stage {
    Stage::new((chunk % n) as u64)
}

/// `main`, unrolled over micro-batches and stages.
///
/// # Errors
/// `P52` as for micro-batches, and for operations of `main` without an adjoint.
pub(super) fn main(
    cx: &Cx<'_>,
    module: &Module,
    (loss, split): (ValueId, Split),
    (chunks, order): (&[Option<usize>], &[Step]),
    shape: Shape,
    parts: &StepParts<'_>,
) -> Result<Function, OpError> {
    let source = cx.function();
    only_loss(source)?;
    let mut b = FunctionBuilder::like(source, &module.space, &module.functions);
    // Each micro-batch runs forward and backward.
    b.reserve(2 * shape.micros * source.values.len(), 2 * shape.micros * source.nodes.len());
    let known = whole_batch(cx, &mut b, split)?;
    parts.zero.run(&mut b, &[])?;

    let mut runs = Vec::with_capacity(shape.micros);
    for micro in 0..shape.micros {
        let number = micro as u64;
        let mut own = part_inputs(cx, &mut b, &known, split, (number..number + 1, None))?;
        if shape.micros > 1 {
            micro_batch_keys(source, &mut b, &mut own, micro)?;
        }
        let mut run = Run::new(cx, own);
        run.is_last = micro + 1 == shape.micros;
        runs.push(run);
    }
    let last = shape.stages * shape.chunks - 1;
    // Nodes that depend on no call run with the first chunk.
    let of_chunk: Vec<Vec<usize>> = (0..=last)
        .map(|chunk| {
            let inside = |&i: &usize| !is_whole_batch(cx, &source.nodes[i]);
            (0..source.nodes.len()).filter(inside).filter(|&i| chunks[i].unwrap_or(0) == chunk).collect()
        })
        .collect();
    let mut deferred = BTreeMap::new();
    let mut sum: Option<ValueId> = None;
    for &Step { half, micro, chunk } in order {
        let stage = Some(stage_of(chunk, shape.stages));
        let run = &mut runs[micro];
        match half {
            Half::Forward => {
                for &i in &of_chunk[chunk] {
                    cx.forward(&mut b, run, i, stage)?;
                }
                if chunk == last {
                    let part = run.map[loss];
                    sum = Some(match sum {
                        None => part,
                        Some(sum) => b.add(sum, part)?,
                    });
                }
            }
            Half::Backward => {
                if chunk == last {
                    cx.seed(&mut b, run, loss)?;
                }
                for &i in of_chunk[chunk].iter().rev() {
                    cx.backward(&mut b, run, i, stage)?;
                }
                deferred.insert((micro, chunk), std::mem::take(&mut run.deferred));
            }
            Half::Weights => {
                Cx::store_deferred(&mut b, deferred.remove(&(micro, chunk)).unwrap_or_default())?;
            }
        }
    }
    parts.finish(&mut b)?;
    let value = sum.expect("there is at least one micro-batch");
    b.name(value, source.values[loss].name.as_deref());
    Ok(b.finish([Output { name: source.outputs[0].name.clone(), value }]))
}

/// Derives the keys of one micro-batch: the step's keys with its number folded in, as in a loop over micro-batches.
fn micro_batch_keys(
    source: &Function,
    b: &mut FunctionBuilder<'_>,
    own: &mut ValueMap<'_>,
    micro: usize,
) -> Result<(), OpError> {
    for v in source.values.ids().filter(|&v| is_key(source, v)) {
        if let Some(key) = own.get(v) {
            let number = Op::Fill { value: micro as f64 };
            let number = b.push_as(number, &[], TensorType::new(DType::F32, []))?;
            own.insert(v, b.push(Op::Random(Random::FoldIn), &[key, number])?);
        }
    }
    Ok(())
}

/// The most chunks of layers that all micro-batches pass through: each is two calls of `main`, and a step of so many takes
/// seconds to compile.
pub const MAX_CALLS: u64 = 8192;

/// The shape of the pipeline, and the order of its passes.
///
/// # Errors
/// As [`check_calls`]; `P53` when the number of stages does not divide the number of interleaved micro-batches.
pub(super) fn schedule(training: &super::Training) -> Result<(Shape, Vec<Step>), Box<Diagnostic>> {
    let small = |n: u64| usize::try_from(n).unwrap_or(usize::MAX);
    let interleaved = training.pipeline == super::PipelineOrder::Interleaved;
    if interleaved && !training.micro_batches.is_multiple_of(training.stages) {
        let number = match training.micro_batches {
            1 => "1 micro-batch is".to_owned(),
            n => format!("{n} micro-batches are"),
        };
        let message = format!(
            "{number} not divisible by {} stages, as the interleaved order requires",
            training.stages
        );
        let help = format!(
            "use a multiple, as in `--micro-batches {n}`, or `micro_batches={n}` of `differentiate`",
            n = training.micro_batches.next_multiple_of(training.stages)
        );
        return Err(OpError::new("P53", message).help(help).into());
    }
    check_calls(training)?;
    let chunks = if interleaved { small(training.chunks) } else { 1 };
    let shape = Shape { stages: small(training.stages), chunks, micros: small(training.micro_batches) };
    Ok((shape, order::all(training.pipeline, shape)))
}

/// Checks that a step has few enough calls to be compiled.
///
/// # Errors
/// `P58` for a step of more than [`MAX_CALLS`].
pub fn check_calls(training: &super::Training) -> Result<(), Box<Diagnostic>> {
    let interleaved = training.pipeline == super::PipelineOrder::Interleaved;
    let each = training.n_chunks().max(1);
    let passes = training.micro_batches.saturating_mul(each);
    if training.stages <= 1 || passes <= MAX_CALLS {
        return Ok(());
    }
    let message = format!(
        "{} micro-batches through {each} chunks of layers are {passes} passes, and a pipeline has at most {MAX_CALLS}",
        training.micro_batches,
    );
    // A divisor divides the sequences too.
    let fits = |n: &u64| {
        training.micro_batches.is_multiple_of(*n) && (!interleaved || n.is_multiple_of(training.stages))
    };
    let fewer = (1..=MAX_CALLS / each).rev().find(fits);
    let help = fewer.map_or_else(
        || "use fewer stages, or fewer chunks of layers".to_owned(),
        |n| format!("use fewer and larger micro-batches, as in `--micro-batches {n}`"),
    );
    Err(Box::new(Diagnostic::new("P58", message).help(help)))
}
