//! The interpreter: all ranks, node by node, in lock-step.

use std::borrow::Cow;
use std::rc::Rc;

use ithaca_ir::entity::Entity;
use ithaca_ir::layers;
use ithaca_ir::layout::At;
use ithaca_ir::module::{FuncId, Function, Layers, Node};
use ithaca_ir::ops::{Binding, Random, Scan, ScanOrder, Stage, Target, state, structure};
use ithaca_ir::phase::Phase;
use ithaca_ir::{Module, Op, Rank, Space, TensorType, ValueId};

use super::assigned::Assigned;
use super::ranks::{RankValues, absent, compute_all};
use super::value::{Elements, Value};
use super::{collective, movement, random};
use crate::assemble::assemble;
use crate::error::RunError;
use crate::real::Real;
use crate::source;
use crate::storage::{Rounding, Storage};
use crate::store::TensorSource;
use crate::tensor::{Outputs, Tensor, index};

/// How deep calls may nest.
const MAX_DEPTH: usize = 64;

/// The results of a run.
#[derive(Clone, Debug)]
pub struct Results<T> {
    /// The outputs of `main`, cut to the valid part of every dimension; integers are returned as numbers.
    pub outputs: Outputs<T>,
    /// Every weight and state that the run assigned, under its stored name and in its stored shape, in order of
    /// names. [`Tensors`](crate::store::Tensors) can be made of them, and [`Layered`](crate::store::Layered) over the
    /// weights is the source of the next step.
    pub kept: Outputs<T>,
}

/// How a step is computed.
#[derive(Clone, Copy)]
pub struct StepOptions<'a> {
    /// The rounding of its values.
    pub rounding: Rounding,
    /// Gradients under their stored names, which the update reads in place of those of the step: it computes both, and neither
    /// depends on the other.
    pub gradients: Option<&'a dyn TensorSource>,
}

impl StepOptions<'_> {
    /// A step with this rounding, whose update reads its own gradients.
    pub fn of(rounding: Rounding) -> Self {
        Self { rounding, gradients: None }
    }
}

struct Interpreter<'a, T: Real> {
    module: &'a Module,
    weights: &'a dyn TensorSource,
    inputs: &'a dyn TensorSource,
    options: &'a StepOptions<'a>,
    /// The number of values computed so far.
    computed: u64,
    /// The weights and states assigned so far.
    assigned: Assigned<T>,
}

pub(super) fn run<T: Real>(
    module: &Module,
    weights: &dyn TensorSource,
    inputs: &dyn TensorSource,
    options: &StepOptions<'_>,
) -> Result<Results<T>, RunError> {
    let main = module.main().ok_or_else(|| RunError::NoMain(module.name.clone()))?;
    let function = &module.functions[main];
    if !function.params.is_empty() {
        return Err(RunError::invalid("`main` has parameters"));
    }
    let mut interpreter =
        Interpreter { module, weights, inputs, options, computed: 0, assigned: Assigned::default() };
    let results = interpreter.call(main, (0, None), Vec::new(), 0)?;
    let mut outputs = Outputs::new();
    for (i, (output, held)) in function.outputs.iter().zip(results).enumerate() {
        let name = output.name.clone().unwrap_or_else(|| i.to_string());
        let numbers = |rank: Rank| {
            Ok(Cow::Owned(match &*held[index(rank.0)] {
                Value::Real(t) => t.data.clone(),
                Value::Int(t) => t.data.iter().map(|&x| T::from_f64(f64::from(x))).collect(),
            }))
        };
        let tensor = assemble(&module.space, &name, function.ty(output.value), numbers)?;
        outputs.insert(name, tensor);
    }
    let kept = interpreter.assigned.kept(&module.space, weights)?;
    Ok(Results { outputs, kept })
}

impl<'a, T: Real> Interpreter<'a, T> {
    fn call(
        &mut self,
        callee: FuncId,
        (layer, at): (u64, Option<At>),
        arguments: Vec<RankValues<T>>,
        depth: usize,
    ) -> Result<Vec<RankValues<T>>, RunError> {
        if depth > MAX_DEPTH {
            return Err(RunError::Unsupported(format!("nesting of calls deeper than {MAX_DEPTH}")));
        }
        let function: &'a Function = &self.module.functions[callee];
        let last_use = last_uses(function);
        let mut values: Vec<Option<RankValues<T>>> = vec![None; function.values.len()];
        for (&param, argument) in function.params.iter().zip(arguments) {
            values[param.index()] = Some(argument);
        }
        for (i, node) in function.nodes.iter().enumerate() {
            let operands: Vec<&RankValues<T>> = node
                .operands
                .iter()
                .map(|v| values[v.index()].as_ref().ok_or_else(|| undefined(function, *v)))
                .collect::<Result<_, _>>()?;
            let results = self.node(function, node, (layer, at), &operands, depth)?;
            if results.len() < node.results.len() {
                return Err(RunError::invalid(format!("`{}` gives too few results", node.op.name())));
            }
            for (result, mut held) in node.results.iter().zip(results) {
                self.keep(&node.op, function.ty(*result), &mut held);
                values[result.index()] = Some(held);
            }
            for v in node.operands.iter().chain(&node.results).filter(|v| last_use[v.index()] == Some(i)) {
                values[v.index()] = None;
            }
        }
        function
            .outputs
            .iter()
            .map(|o| values[o.value.index()].clone().ok_or_else(|| undefined(function, o.value)))
            .collect()
    }

    /// The results of one node.
    fn node(
        &mut self,
        function: &'a Function,
        node: &'a Node,
        (layer, at): (u64, Option<At>),
        operands: &[&RankValues<T>],
        depth: usize,
    ) -> Result<Vec<RankValues<T>>, RunError> {
        // Values of a function are on the ranks that run it.
        let located = |v: ValueId| match at {
            Some(_) => function.ty(v).located(at),
            None => function.ty(v).clone(),
        };
        match &node.op {
            Op::Call { callee, layers, stride, scan, stage } => {
                let at = stage.and_then(Stage::at).or(at);
                let layers = layers::shifted(layers, *stride, layer);
                let layers = Loop { callee: *callee, layers: &layers, scan: scan.as_ref(), at, depth };
                self.layers(function, node, &layers, operands)
            }
            Op::Param(binding) | Op::State(binding) => {
                let (space, ty) = (&self.module.space, &located(node.result()));
                let (target, load): (_, Load) = match &node.op {
                    Op::State(_) => (Target::State, source::load_state),
                    _ => (Target::Param, source::load),
                };
                if let Some(given) = self.options.gradients
                    && function.phase == Phase::Update
                    && binding.name.starts_with(state::GRADIENT)
                    && given.shape(&binding.stored_name(layer)).is_some()
                {
                    let stored = source::load(space, binding, ty, layer, given)?;
                    return Ok(vec![self.cut(ty, binding, &stored)]);
                }
                if let Some(held) = self.assigned.get(target, binding, layer, ty)? {
                    return Ok(vec![held]);
                }
                let stored = load(space, binding, ty, layer, self.weights)?;
                Ok(vec![self.cut(ty, binding, &stored)])
            }
            Op::Assign { target, binding } => {
                let ty = &located(node.operands[0]);
                self.assigned.set(*target, binding, layer, ty, operands[0].clone())?;
                Ok(Vec::new())
            }
            Op::Input(binding) => {
                let ty = &located(node.result());
                let stored = source::load(&self.module.space, binding, ty, layer, self.inputs)?;
                Ok(vec![self.cut(ty, binding, &stored)])
            }
            Op::Coalesced(members) => {
                // Coalesced collectives give the results of separate ones.
                let ends = members.iter().zip(operands).zip(node.operands.iter().zip(&node.results));
                let one = |((op, held), (&x, &z)): ((&Op, &&RankValues<T>), (&ValueId, &ValueId))| {
                    collective::communicate(&self.module.space, op, &located(x), &located(z), held)
                };
                ends.map(one).collect()
            }
            Op::Random(Random::LayerKey) => {
                let of = |held: &Rc<Value<T>>| random::layer_key(held.elements(), layer).map(Rc::new);
                Ok(vec![operands[0].iter().map(of).collect::<Result<_, _>>()?])
            }
            op if op.is_communication() || *op == Op::Reshard => {
                let (from, to) = (located(node.operands[0]), located(node.result()));
                collective::communicate(&self.module.space, op, &from, &to, operands[0]).map(|h| vec![h])
            }
            op => {
                let types: Vec<TensorType> = node.operands.iter().map(|&v| located(v)).collect();
                let results: Vec<TensorType> = node.results.iter().map(|&v| located(v)).collect();
                let space = &self.module.space;
                if let Some(whole) = movement::whole_attention(space, op, &types) {
                    return whole?.compute(space, op, &types, &results, operands);
                }
                compute_all(space, op, &types, &results, operands)
            }
        }
    }

    /// Runs a function for each layer: carried values pass from layer to layer, stacks are sliced and stacked.
    fn layers(
        &mut self,
        function: &Function,
        node: &Node,
        run: &Loop<'_>,
        operands: &[&RankValues<T>],
    ) -> Result<Vec<RankValues<T>>, RunError> {
        let callee = &self.module.functions[run.callee];
        let is_sliced: Vec<bool> = node
            .operands
            .iter()
            .zip(&callee.params)
            .enumerate()
            .map(|(i, (&v, &p))| structure::is_sliced(run.scan, i, function.ty(v), callee.ty(p)))
            .collect();
        let n_carried = run.scan.map_or(callee.outputs.len(), |scan| scan.carried);
        let order = run.scan.map_or(ScanOrder::Ascending, |scan| scan.order);
        let n_layers = index(run.layers.end.saturating_sub(run.layers.start));
        let mut carried: Vec<RankValues<T>> =
            operands.iter().take(n_carried).map(|&held| held.clone()).collect();
        let mut stacks: Vec<Stack<T>> =
            vec![vec![None; n_layers]; callee.outputs.len().saturating_sub(n_carried)];
        for layer in order.layers(run.layers) {
            let k = index(layer - run.layers.start);
            let arguments =
                operands.iter().zip(&is_sliced).enumerate().map(|(i, (&held, &is_sliced))| {
                    match (carried.get(i), is_sliced) {
                        (Some(carried), _) => carried.clone(),
                        (None, true) => slice(held, k),
                        (None, false) => held.clone(),
                    }
                });
            let mut results = self.call(run.callee, (layer, run.at), arguments.collect(), run.depth + 1)?;
            for (stack, own) in stacks.iter_mut().zip(results.split_off(n_carried.min(results.len()))) {
                stack[k] = Some(own);
            }
            carried = results;
        }
        for elements in &stacks {
            carried.push(stack(elements)?);
        }
        Ok(carried)
    }

    /// Rounds the values of a result.
    fn keep(&mut self, op: &Op, ty: &TensorType, held: &mut RankValues<T>) {
        self.computed += 1;
        let is_source = matches!(op, Op::Param(_) | Op::State(_) | Op::Input(_));
        if self.options.rounding == Rounding::Nearest(Storage::Wide) {
            return;
        }
        for value in held {
            if let Value::Real(tensor) = Rc::make_mut(value) {
                self.options.rounding.keep(ty.dtype, &mut tensor.data, (self.computed, is_source));
            }
        }
    }

    /// Every rank's part of a source.
    fn cut(&self, ty: &TensorType, binding: &Binding, stored: &Tensor<f64>) -> RankValues<T> {
        let space = &self.module.space;
        let part = |rank: Rank| {
            if !space.holds(ty, rank) {
                return Rc::new(absent(ty));
            }
            let region = space.local_box(ty, rank);
            Rc::new(if ty.dtype.is_float() {
                Value::Real(source::cut(space, ty, &region, (binding, stored), T::from_f64))
            } else {
                Value::Int(source::cut(space, ty, &region, (binding, stored), |x| x as i32))
            })
        };
        space.mesh.iter_ranks().map(part).collect()
    }
}

/// A call with its depth.
struct Loop<'a> {
    callee: FuncId,
    layers: &'a Layers,
    scan: Option<&'a Scan>,
    /// The ranks that run it.
    at: Option<At>,
    depth: usize,
}

/// How a weight or a state is read.
type Load = fn(&Space, &Binding, &TensorType, u64, &dyn TensorSource) -> Result<Tensor<f64>, RunError>;

/// One result of each layer of a call.
type Stack<T> = Vec<Option<RankValues<T>>>;

/// Element `k` of a stack, on every rank.
fn slice<T: Real>(stack: &RankValues<T>, k: usize) -> RankValues<T> {
    let one = |value: &Rc<Value<T>>| {
        // Others hold an empty one.
        let (shape, n) = match value.shape() {
            [0, ..] | [] => (vec![0], 0),
            [_, shape @ ..] => (shape.to_vec(), shape.iter().product()),
        };
        Rc::new(value.elements().gather(shape, k * n..(k + 1) * n))
    };
    stack.iter().map(one).collect()
}

/// All elements of a stack, on every rank.
fn stack<T: Real>(elements: &Stack<T>) -> Result<RankValues<T>, RunError> {
    let elements: Vec<&RankValues<T>> = elements.iter().flatten().collect();
    let n_ranks = elements.first().map_or(0, |held| held.len());
    let of_rank = |rank: usize| {
        let shape = [&[elements.len()], elements[0][rank].shape()].concat();
        let parts: Vec<Elements<'_, T>> = elements.iter().map(|held| held[rank].elements()).collect();
        Elements::concatenated(shape, &parts).map(Rc::new)
    };
    (0..n_ranks).map(of_rank).collect()
}

/// The node after which each value is needed no more; `None` for outputs and parameters that no node reads.
fn last_uses(function: &Function) -> Vec<Option<usize>> {
    let mut last = vec![None; function.values.len()];
    for (i, node) in function.nodes.iter().enumerate() {
        for v in node.operands.iter().chain(&node.results) {
            last[v.index()] = Some(i);
        }
    }
    for output in &function.outputs {
        last[output.value.index()] = None;
    }
    last
}

fn undefined(function: &Function, value: ValueId) -> RunError {
    RunError::invalid(format!("{value:?} of `@{}` is used before it is defined", function.name))
}
