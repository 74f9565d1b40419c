//! A training step in stages: every stage runs the forward and the backward pass of its layers for one micro-batch after
//! another, as the order of the pipeline says.
//!
//! ```text
//! %x  = call %t {callee=@embed, stage=0}
//! %x1, … = call %x {callee=@block, layers=0..16, …, stage=0}
//! %x2, … = call %x1 {callee=@block, layers=16..32, …, stage=1}
//! ```
//!
//! `main` is unrolled: one list of calls that all stages follow, each leaving out those of others. What passes between
//! stages is what calls take that other stages gave; `shard` sends it. Inputs are known everywhere.
//!
//! A weight that two stages use, as a tied embedding is, is updated by the first of them: the other keeps its gradient by
//! itself, gives the sum away before the update, and is given the new weight.

use ithaca_ir::entity::Entity;
use ithaca_ir::module::{FuncId, Function, Layers, Node, Output, ValueId};
use ithaca_ir::ops::{Binary, Binding, OpError, Random, Stage, Target, source, state};
use ithaca_ir::phase::Phase;
use ithaca_ir::{Arena, DType, FunctionBuilder, Module, Op, Space, TensorType};

use super::joint::{Kept, assign, copy_node, renamed};
use super::micro::{Cut, is_key, is_outside, only_loss};
use super::order::{self, Half, Shape, Step};
use super::stages::Staged;
use super::step::{Cx, Optimize, Run, Sweep};
use super::update::{Owned, Place, gradient_type};

/// Which stage runs which layers of each function.
pub(super) struct Stages {
    /// By function.
    places: Vec<Vec<Place>>,
}

impl Stages {
    /// Of a program cut into chunks for `n` stages.
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

    /// The places of `function` for what each layer has, or for what all of its layers share.
    ///
    /// # Errors
    /// `P54` when two stages run one layer, or share what all layers have.
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
        match is_per_layer {
            true => Ok(places),
            false => Ok(places.first().map(|(_, stage)| (0..1, *stage)).into_iter().collect()),
        }
    }
}

fn stage_of(chunk: usize, n: usize) -> Stage {
    Stage::new((chunk % n) as u64)
}

/// A weight that a function of one stage owns, and a function of another uses.
#[derive(Clone, Debug)]
pub(super) struct Tied {
    pub(super) binding: Binding,
    pub(super) ty: TensorType,
    /// The function that owns it.
    pub(super) owner: (String, Stage),
    /// The function that uses it too.
    pub(super) user: (String, Stage),
}

impl Tied {
    fn kept(&self) -> Kept {
        Kept::AddedOn(self.user.1.number)
    }
}

/// Each weight once for each stage that uses it, however many functions there do.
fn distinct(tied: &[Tied]) -> Vec<&Tied> {
    let mut distinct: Vec<&Tied> = Vec::new();
    for one in tied {
        if !distinct.iter().any(|t| t.binding == one.binding && t.user.1 == one.user.1) {
            distinct.push(one);
        }
    }
    distinct
}

/// What clears gradients that are kept apart, as weights that are owned are cleared.
pub(super) fn apart(tied: &[Tied]) -> Vec<Owned> {
    let mut apart: Vec<Owned> = Vec::new();
    for one in distinct(tied) {
        let name = format!("{}.tied", one.user.0);
        let weight = (one.binding.clone(), one.ty.clone(), one.kept());
        match apart.iter_mut().find(|owned| owned.name == name) {
            Some(owned) => owned.weights.push(weight),
            None => apart.push(Owned { name, weights: vec![weight], layers: vec![(0..1, Some(one.user.1))] }),
        }
    }
    apart
}

/// What passes between two stages about one weight, before and after the update.
pub(super) struct Exchange {
    owner: Stage,
    user: Stage,
    /// Gives the user's gradient.
    give: FuncId,
    /// Adds it to the owner's.
    take: FuncId,
    /// Gives the new weight.
    send: FuncId,
    /// Writes it.
    receive: FuncId,
}

/// The functions of these exchanges.
///
/// # Errors
/// None for weights of a program that verifies.
pub(super) fn exchanges(
    space: &Space,
    functions: &mut Arena<FuncId, Function>,
    tied: &[Tied],
) -> Result<Vec<Exchange>, OpError> {
    let none = Arena::new();
    let mut exchanges = Vec::new();
    for (i, one) in distinct(tied).into_iter().enumerate() {
        let Tied { binding, ty, owner, user } = one;
        let wide = gradient_type(ty);
        let builder = |of: &str, part: &str| {
            let b = FunctionBuilder::new(format!("{of}.{part}{i}.update"), space, &none);
            b.made_from(of).in_phase(Phase::Update)
        };
        let returns = |value: ValueId| [Output { name: None, value }];

        let mut b = builder(&user.0, "give");
        let own = b.push_as(Op::State(one.kept().home(binding)), &[], wide.clone())?;
        let give = functions.push(b.finish(returns(own)));

        let mut b = builder(&owner.0, "take");
        let given = b.param(wide.clone(), None);
        let home = renamed(binding, state::GRADIENT);
        let own = b.push_as(Op::State(home.clone()), &[], wide)?;
        let sum = b.push(Op::Binary(Binary::Add), &[own, given])?;
        assign(&mut b, Target::State, home, sum)?;
        let take = functions.push(b.finish([]));

        let mut b = builder(&owner.0, "send");
        let weight = b.weight(binding.clone(), ty.clone())?;
        let send = functions.push(b.finish(returns(weight)));

        let mut b = builder(&user.0, "receive");
        let weight = b.param(ty.clone(), None);
        assign(&mut b, Target::Param, binding.clone(), weight)?;
        let receive = functions.push(b.finish([]));
        exchanges.push(Exchange { owner: owner.1, user: user.1, give, take, send, receive });
    }
    Ok(exchanges)
}

/// Calls one function on one stage and another on another with what the first gives.
fn pass_on(
    b: &mut FunctionBuilder<'_>,
    (from, gives): (Stage, FuncId),
    (to, takes): (Stage, FuncId),
) -> Result<(), OpError> {
    let call = |callee: FuncId, stage: Stage| Op::Call {
        callee,
        layers: 0..1,
        stride: 0,
        scan: None,
        stage: Some(stage),
    };
    let given = b.node(call(gives, from), &[], &[])?[0];
    b.node(call(takes, to), &[given], &[]).map(|_| ())
}

/// Shared parts of a step.
pub(super) struct Ends<'a> {
    pub(super) zero: &'a Sweep,
    pub(super) optimize: Option<&'a Optimize>,
    pub(super) exchanges: &'a [Exchange],
}

/// `main`, unrolled over micro-batches and stages.
///
/// # Errors
/// `P52` as for micro-batches, and for operations of `main` that have no adjoint.
pub(super) fn main(
    cx: &Cx<'_>,
    module: &Module,
    (loss, cut): (ValueId, Cut),
    (chunks, order): (&[Option<usize>], &[Step]),
    shape: Shape,
    ends: &Ends<'_>,
) -> Result<Function, OpError> {
    let source = cx.function();
    only_loss(source)?;
    let mut b = FunctionBuilder::like(source, &module.space, &module.functions);
    let mut known: Vec<Option<ValueId>> = vec![None; source.values.len()];
    let whole = needed_whole(cx, cut);
    for node in source.nodes.iter().filter(|n| is_outside(cx, n)) {
        if let Op::Random(Random::Key { .. }) = node.op {
            known[node.result().index()] = Some(cx.key(&mut b, node)?);
        } else if node.results.is_empty() || node.results.iter().any(|v| whole[v.index()]) {
            of_all(&mut b, source, node, cut, &mut known)?;
        }
    }
    ends.zero.run(&mut b, &[])?;

    let mut runs = Vec::with_capacity(shape.micros);
    for micro in 0..shape.micros {
        let mut own = own_inputs(cx, &mut b, &known, cut, micro)?;
        if shape.micros > 1 {
            own_keys(source, &mut b, &mut own, micro)?;
        }
        runs.push(Run::new(cx, own));
    }
    let last = shape.stages * shape.chunks - 1;
    // What depends on no call runs with the first chunk.
    let of_chunk: Vec<Vec<usize>> = (0..=last)
        .map(|chunk| {
            let inside = |&i: &usize| !is_outside(cx, &source.nodes[i]);
            (0..source.nodes.len()).filter(inside).filter(|&i| chunks[i].unwrap_or(0) == chunk).collect()
        })
        .collect();
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
                    let part = run.map[loss.index()].expect("the last chunk computes the loss");
                    sum = Some(match sum {
                        None => part,
                        Some(sum) => b.push(Op::Binary(Binary::Add), &[sum, part])?,
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
            }
        }
    }
    for exchange in ends.exchanges {
        pass_on(&mut b, (exchange.user, exchange.give), (exchange.owner, exchange.take))?;
    }
    if let Some(optimize) = ends.optimize {
        optimize.run(&mut b)?;
        for exchange in ends.exchanges {
            pass_on(&mut b, (exchange.owner, exchange.send), (exchange.user, exchange.receive))?;
        }
    }
    let value = sum.expect("there is a micro-batch");
    b.name(value, source.values[loss].name.as_deref());
    Ok(b.finish([Output { name: source.outputs[0].name.clone(), value }]))
}

/// The values outside of calls that are needed of the whole batch: what has no batch, and what that is made of.
fn needed_whole(cx: &Cx<'_>, cut: Cut) -> Vec<bool> {
    let source = cx.function();
    let mut needed: Vec<bool> = source.values.values().map(|value| !value.ty.has(cut.batch)).collect();
    for node in source.nodes.iter().rev().filter(|n| is_outside(cx, n)) {
        if node.results.is_empty() || node.results.iter().any(|v| needed[v.index()]) {
            node.operands.iter().for_each(|v| needed[v.index()] = true);
        }
    }
    needed
}

/// A node of the whole batch.
fn of_all(
    b: &mut FunctionBuilder<'_>,
    source: &Function,
    node: &Node,
    cut: Cut,
    known: &mut [Option<ValueId>],
) -> Result<(), OpError> {
    let operand = |v: &ValueId| {
        known[v.index()].ok_or_else(|| {
            let message =
                format!("`{}` of `@main` needs what is computed of one micro-batch", node.op.name());
            OpError::new("P52", message)
        })
    };
    let operands = node.operands.iter().map(operand).collect::<Result<Vec<_>, _>>()?;
    let all = |&v: &ValueId| {
        let mut ty = source.ty(v).clone();
        ty.dims.iter_mut().filter(|d| **d == cut.batch).for_each(|d| *d = cut.over);
        ty
    };
    let declared: Vec<TensorType> = node.results.iter().map(all).collect();
    let results = b.node(node.op.clone(), &operands, &declared)?;
    for (&old, &new) in node.results.iter().zip(&results) {
        b.name(new, source.values[old].name.as_deref());
        known[old.index()] = Some(new);
    }
    Ok(())
}

/// The keys of one micro-batch: those of the step with its number folded in, as where micro-batches are a loop.
fn own_keys(
    source: &Function,
    b: &mut FunctionBuilder<'_>,
    own: &mut [Option<ValueId>],
    micro: usize,
) -> Result<(), OpError> {
    for v in source.values.ids().filter(|&v| is_key(source, v)) {
        if let Some(key) = own[v.index()] {
            let number = Op::Fill { value: micro as f64 };
            let number = b.push_as(number, &[], TensorType::new(DType::F32, []))?;
            own[v.index()] = Some(b.push(Op::Random(Random::FoldIn), &[key, number])?);
        }
    }
    Ok(())
}

/// What one micro-batch finds: what is known of the whole batch, and its own part of what has a batch.
fn own_inputs(
    cx: &Cx<'_>,
    b: &mut FunctionBuilder<'_>,
    known: &[Option<ValueId>],
    cut: Cut,
    micro: usize,
) -> Result<Vec<Option<ValueId>>, OpError> {
    let source = cx.function();
    let has_batch = |v: ValueId| source.ty(v).has(cut.batch);
    let mut map: Vec<Option<ValueId>> = vec![None; source.values.len()];
    for (v, value) in source.values.ids().zip(known) {
        if !has_batch(v) {
            map[v.index()] = *value;
        }
    }
    // Of what has a batch only what is read inside, and what that is made of.
    let mut needed = vec![false; source.values.len()];
    for node in source.nodes.iter().rev() {
        let outside = is_outside(cx, node);
        if !outside || node.results.iter().any(|&v| needed[v.index()] && has_batch(v)) {
            node.operands.iter().for_each(|v| needed[v.index()] = true);
        }
    }
    for node in source.nodes.iter().filter(|n| is_outside(cx, n)) {
        if !node.results.iter().any(|&v| needed[v.index()] && has_batch(v)) {
            continue;
        }
        match &node.op {
            Op::Input(binding) => {
                let ty = source.ty(node.result());
                let window = window(b.space(), binding, ty, cut, micro as u64)?;
                let input = b.push_as(Op::Input(window), &[], ty.clone())?;
                map[node.result().index()] = Some(input);
            }
            _ => copy_node(b, source, node, &mut map)?,
        }
    }
    Ok(map)
}

/// The binding that sees one micro-batch of a file's batch.
fn window(
    space: &Space,
    binding: &Binding,
    ty: &TensorType,
    cut: Cut,
    micro: u64,
) -> Result<Binding, OpError> {
    if !binding.stored.is_empty() || ty.dims.first() != Some(&cut.batch) {
        let message = format!("input `{}` is not stored with the batch first", binding.name);
        return Err(OpError::new("P52", message));
    }
    let mut stored: Vec<u64> = ty.dims.iter().map(|&d| source::stored_size(space, d)).collect();
    let mut window: Vec<Layers> = stored.iter().map(|&n| 0..n).collect();
    let each = stored[0];
    window[0] = micro * each..(micro + 1) * each;
    stored[0] = space.size(cut.over);
    Ok(Binding { stored, window, ..binding.clone() })
}

/// How the pipeline is cut and in which order it runs.
///
/// # Errors
/// `P53` when interleaved micro-batches do not divide into groups of as many as there are stages.
pub(super) fn order_of(training: &super::Training) -> Result<(Shape, Vec<Step>), OpError> {
    let small = |n: u64| usize::try_from(n).unwrap_or(usize::MAX);
    let interleaved = training.pipeline == super::PipelineOrder::Interleaved;
    if interleaved && !training.micro_batches.is_multiple_of(training.stages) {
        let message = format!(
            "{} micro-batches do not divide into groups of {}, as interleaved stages take them",
            training.micro_batches, training.stages
        );
        return Err(OpError::new("P53", message));
    }
    let chunks = if interleaved { small(training.chunks) } else { 1 };
    let shape = Shape { stages: small(training.stages), chunks, micros: small(training.micro_batches) };
    Ok((shape, order::all(training.pipeline, shape)))
}
