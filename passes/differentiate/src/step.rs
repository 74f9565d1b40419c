//! `main` of a training step: forward calls, backward calls in reverse, the optimizer.

use std::collections::BTreeMap;

use ithaca_ir::entity::Entity;
use ithaca_ir::module::{FuncId, Function, Layers, Node, ValueId};
use ithaca_ir::ops::{Binding, OpError, Optimizer, Random, Scan, ScanOrder, Stage, Target, state};
use ithaca_ir::{Arena, DimId, FunctionBuilder, Module, Op, Space, TensorType};
use ithaca_pass::rebuild::ValueMap;

use super::active::Activity;
use super::options::GradientType;
use super::split::Halves;
use super::tape::{Accumulation, Forward, Tape, assign, or_zeros, store_gradients, zeros};
use super::tied::Exchange;
use super::update::{Place, call_on};

/// A function of the source and its halves.
pub(super) struct DifferentiatedFunction {
    pub(super) halves: Halves,
    /// The version that saves nothing, for members of a group.
    pub(super) plain: Option<FuncId>,
    pub(super) forward: FuncId,
    pub(super) backward: Backward,
}

/// The backward function of a function.
pub(super) enum Backward {
    /// None: the forward function returns the gradients.
    InForward,
    /// One function.
    Whole(FuncId),
    /// Gradients of arguments and gradients of weights apart.
    Apart {
        /// `None` if no argument has a gradient.
        inputs: Option<FuncId>,
        weights: FuncId,
        /// The operands of the backward call that `weights` takes, after the further results of `inputs`.
        operands: Vec<usize>,
    },
}

impl DifferentiatedFunction {
    /// The functions that a step calls.
    pub(super) fn functions(&self) -> Vec<FuncId> {
        let mut functions = vec![self.forward];
        match &self.backward {
            Backward::InForward => {}
            Backward::Whole(id) => functions.push(*id),
            Backward::Apart { inputs, weights, .. } => functions.extend(inputs.iter().chain([weights])),
        }
        functions
    }
}

/// The context in which `main` is rewritten.
pub(super) struct Cx<'a> {
    pub(super) source: &'a Module,
    pub(super) main: FuncId,
    pub(super) activity: &'a Activity,
    /// By function of the source; `None` for `main`.
    pub(super) functions: &'a [Option<DifferentiatedFunction>],
    /// The stack dimension for a number of layers.
    pub(super) stack: &'a dyn Fn(u64) -> DimId,
    /// The type of the gradients of weights.
    pub(super) gradients: GradientType,
    /// How a function accumulates the gradient of a weight.
    pub(super) accumulation: &'a dyn Fn(FuncId, &Binding) -> Accumulation,
    /// The type of the step count, if steps are counted.
    pub(super) counts: Option<&'a TensorType>,
    /// For functions that complete gradients, the functions that the last micro-batch runs.
    pub(super) last: &'a BTreeMap<FuncId, FuncId>,
    /// The only stage that runs them; `None` if every stage does.
    pub(super) completes_on: Option<u64>,
}

/// The state of one batch during its forward and backward pass.
pub(super) struct Run<'a> {
    /// The new value of each old one.
    pub(super) map: ValueMap<'a>,
    /// By node; `None` before it runs.
    records: Vec<Option<Record<'a>>>,
    pub(super) tape: Tape,
    /// The weights that the function reads, with their gradients.
    pub(super) weights: Vec<(&'a Binding, ValueId)>,
    /// Calls that store gradients of weights, and that no value of the backward pass depends on.
    pub(super) deferred: Vec<(Op, Vec<ValueId>)>,
    /// Whether it is the last micro-batch of several that `main` runs one by one.
    pub(super) is_last: bool,
}

/// The values of a forward node that its backward pass needs.
enum Record<'a> {
    Node(Forward<'a>),
    Call(ForwardCall<'a>),
}

impl<'a> Run<'a> {
    /// A run with some values known.
    pub(super) fn new(cx: &Cx<'_>, map: ValueMap<'a>) -> Self {
        let source = cx.function();
        let records = source.nodes.iter().map(|_| None).collect();
        let tape = Tape::new(source.values.len());
        Self { map, records, tape, weights: Vec::new(), deferred: Vec::new(), is_last: false }
    }
}

/// A call of the forward pass, with the values that its backward pass needs.
struct ForwardCall<'a> {
    function: &'a DifferentiatedFunction,
    layers: Layers,
    stride: u64,
    arguments: Vec<ValueId>,
    /// What was kept.
    saved: Vec<ValueId>,
}

impl<'a> Cx<'a> {
    pub(super) fn function(&self) -> &'a Function {
        &self.source.functions[self.main]
    }

    /// Runs the nodes selected by `runs` forward, then backward from the gradient of `loss` to all weights; returns the
    /// known values and those of the nodes.
    ///
    /// # Errors
    /// An operation of `main` without an adjoint.
    pub(super) fn forward_and_backward(
        &self,
        b: &mut FunctionBuilder<'_>,
        known: ValueMap<'a>,
        loss: ValueId,
        runs: impl Fn(&Node) -> bool,
    ) -> Result<ValueMap<'a>, OpError> {
        let source = self.function();
        let mut run = Run::new(self, known);
        for i in (0..source.nodes.len()).filter(|&i| runs(&source.nodes[i])) {
            self.forward(b, &mut run, i, None)?;
        }
        self.seed(b, &mut run, loss)?;
        for i in (0..source.nodes.len()).rev().filter(|&i| runs(&source.nodes[i])) {
            self.backward(b, &mut run, i, None)?;
        }
        store_gradients(b, run.weights, (self.gradients, |binding| (self.accumulation)(self.main, binding)))?;
        assert!(run.deferred.is_empty(), "only stages of a pipeline defer gradients of weights");
        Ok(run.map)
    }

    /// Node `i`, forward.
    ///
    /// # Errors
    /// None on a program that verifies.
    pub(super) fn forward(
        &self,
        b: &mut FunctionBuilder<'_>,
        run: &mut Run<'a>,
        i: usize,
        stage: Option<Stage>,
    ) -> Result<(), OpError> {
        let node = &self.function().nodes[i];
        run.records[i] = match &node.op {
            Op::Call { callee, layers, stride, .. } => {
                let layers = (layers, *stride);
                Some(Record::Call(self.call(b, run, node, (*callee, layers, stage))?))
            }
            Op::Random(Random::Key { .. }) => {
                run.map.insert(node.result(), self.key(b, node)?);
                None
            }
            _ => Some(Record::Node(Forward::run(b, node, &mut run.map)?)),
        };
        Ok(())
    }

    /// The key of this step: the initial key with the number of earlier steps folded in.
    ///
    /// # Errors
    /// None on a program that verifies.
    pub(super) fn key(&self, b: &mut FunctionBuilder<'_>, node: &Node) -> Result<ValueId, OpError> {
        let mut key = b.push(node.op.clone(), &[])?;
        if let Some(counts) = self.counts {
            let step = b.push_as(Op::State(Binding::named(state::STEP)), &[], counts.clone())?;
            key = b.push(Op::Random(Random::FoldIn), &[key, step])?;
        }
        b.name(key, self.function().values[node.result()].name.as_deref());
        Ok(key)
    }

    /// Sets the gradient of the loss, where the backward pass starts.
    ///
    /// # Errors
    /// None on a program that verifies.
    pub(super) fn seed(
        &self,
        b: &mut FunctionBuilder<'_>,
        run: &mut Run<'a>,
        loss: ValueId,
    ) -> Result<(), OpError> {
        let loss_type = self.function().ty(loss).clone();
        let one = b.push_as(Op::Fill { value: 1.0 }, &[], loss_type)?;
        run.tape.set(loss, one);
        Ok(())
    }

    /// Node `i`, backward, if its results have a gradient.
    ///
    /// # Errors
    /// An operation of `main` without an adjoint.
    pub(super) fn backward(
        &self,
        b: &mut FunctionBuilder<'_>,
        run: &mut Run<'a>,
        i: usize,
        stage: Option<Stage>,
    ) -> Result<(), OpError> {
        let node = &self.function().nodes[i];
        let Run { records, tape, weights, deferred, is_last, .. } = run;
        let gradients: Vec<Option<ValueId>> = node.results.iter().map(|&r| tape.of(r)).collect();
        if gradients.iter().all(Option::is_none) {
            return Ok(());
        }
        match (&node.op, &records[i]) {
            (Op::Param(binding), _) => {
                weights.push((binding, gradients[0].expect("a parameter has one result")));
                Ok(())
            }
            (_, Some(Record::Call(called))) => {
                self.call_backward(b, (tape, deferred, *is_last), node, (called, stage), &gradients)
            }
            (_, Some(Record::Node(record))) => {
                let is_active = |v: ValueId| self.activity.is_active(self.main, v);
                record.adjoint(b, &gradients, is_active, |b, old, part| tape.add(b, old, part))
            }
            // A key has no gradient.
            (_, None) => Ok(()),
        }
    }

    /// Makes the deferred calls.
    ///
    /// # Errors
    /// None on a program that verifies.
    pub(super) fn store_deferred(
        b: &mut FunctionBuilder<'_>,
        deferred: Vec<(Op, Vec<ValueId>)>,
    ) -> Result<(), OpError> {
        for (op, operands) in deferred {
            b.node(op, &operands, &[])?;
        }
        Ok(())
    }

    /// The function that runs in place of `id` on a stage, in the last micro-batch or another.
    fn in_pass(&self, id: FuncId, stage: Option<Stage>, is_last: bool) -> FuncId {
        let completes = self.completes_on.is_none_or(|only| stage.is_some_and(|stage| stage.number == only));
        if is_last && completes { self.last.get(&id).copied().unwrap_or(id) } else { id }
    }

    fn call(
        &self,
        b: &mut FunctionBuilder<'_>,
        run: &mut Run<'_>,
        node: &Node,
        (callee, (layers, stride), stage): (FuncId, (&Layers, u64), Option<Stage>),
    ) -> Result<ForwardCall<'a>, OpError> {
        let Run { map, is_last, .. } = run;
        let function =
            self.functions[callee.index()].as_ref().expect("every function except main is differentiated");
        let arguments = map.operands(node);
        let n_results = function.halves.n_results;
        let n_saved = function.halves.forward.outputs.len() - n_results;
        let scan = (layers.end - layers.start > 1 && n_saved > 0).then(|| Scan {
            over: (self.stack)(layers.end - layers.start),
            carried: n_results,
            order: ScanOrder::Ascending,
        });
        let callee = self.in_pass(function.forward, stage, *is_last);
        let op = Op::Call { callee, layers: layers.clone(), stride, scan, stage };
        let results = b.node(op, &arguments, &[])?;
        map.replace(b, &node.results, &results);
        let saved = results[n_results..].to_vec();
        Ok(ForwardCall { function, layers: layers.clone(), stride, arguments, saved })
    }

    fn call_backward(
        &self,
        b: &mut FunctionBuilder<'_>,
        (tape, deferred, is_last): (&mut Tape, &mut Vec<(Op, Vec<ValueId>)>, bool),
        node: &Node,
        (called, stage): (&ForwardCall<'_>, Option<Stage>),
        gradients: &[Option<ValueId>],
    ) -> Result<(), OpError> {
        let source = self.function();
        let ForwardCall { function, layers, stride, arguments, saved } = called;
        let halves = &function.halves;
        if let Backward::InForward = function.backward {
            for (&i, &gradient) in halves.returned.iter().zip(saved) {
                tape.add(b, node.operands[i], gradient)?;
            }
            return Ok(());
        }
        let mut operands = Vec::new();
        for &i in &halves.seeds {
            operands.push(or_zeros(b, gradients[i], source.ty(node.results[i]))?);
        }
        for &i in &halves.sums {
            operands.push(or_zeros(b, tape.of(node.operands[i]), source.ty(node.operands[i]))?);
        }
        let n_carried = operands.len();
        operands.extend(halves.reused.iter().map(|&i| arguments[i]));
        operands.extend(saved);
        let n_layers = layers.end - layers.start;
        let call = |function: FuncId, carried: usize| Op::Call {
            callee: self.in_pass(function, stage, is_last),
            layers: layers.clone(),
            stride: *stride,
            scan: (n_layers > 1).then(|| Scan {
                over: (self.stack)(n_layers),
                carried,
                order: ScanOrder::Descending,
            }),
            stage,
        };
        let results = match &function.backward {
            Backward::InForward => return Ok(()),
            Backward::Whole(backward) => b.node(call(*backward, n_carried), &operands, &[])?.to_vec(),
            Backward::Apart { inputs, weights, operands: read } => {
                let results = match inputs {
                    Some(inputs) => b.node(call(*inputs, n_carried), &operands, &[])?.to_vec(),
                    None => Vec::new(),
                };
                let kept = &results[halves.returned.len() + halves.sums.len()..];
                let arguments = kept.iter().copied().chain(read.iter().map(|&i| operands[i]));
                deferred.push((call(*weights, 0), arguments.collect()));
                results
            }
        };
        let active = |v: ValueId| self.activity.is_active(self.main, v);
        for (&i, &gradient) in halves.returned.iter().zip(&results) {
            if active(node.operands[i]) {
                tape.add(b, node.operands[i], gradient)?;
            }
        }
        for (&i, &sum) in halves.sums.iter().zip(&results[halves.returned.len()..]) {
            if active(node.operands[i]) {
                tape.set(node.operands[i], sum);
            }
        }
        Ok(())
    }
}

/// Calls over the layers of the functions that own weights.
#[derive(Clone, Debug, Default)]
pub(super) struct Sweep {
    /// For each function its layers and their stages.
    pub(super) calls: Vec<(FuncId, Vec<Place>)>,
}

impl Sweep {
    /// Calls every function on `constant` arguments.
    pub(super) fn run(&self, b: &mut FunctionBuilder<'_>, constant: &[ValueId]) -> Result<(), OpError> {
        for (function, layers) in &self.calls {
            for (layers, stage) in layers {
                // Without results nothing is carried, so arguments are the same for all layers.
                b.node(call_on(*function, layers, *stage), constant, &[])?;
            }
        }
        Ok(())
    }

    /// Passes a sum through every function, which adds to it.
    pub(super) fn sum(&self, b: &mut FunctionBuilder<'_>, mut sum: ValueId) -> Result<ValueId, OpError> {
        let calls = self.calls.iter().flat_map(|(f, places)| places.iter().map(move |place| (f, place)));
        let mut calls: Vec<(&FuncId, &Place)> = calls.collect();
        // The sum passes each stage once.
        calls.sort_by_key(|(_, (_, stage))| stage.map(|stage| stage.number));
        for (function, (layers, stage)) in calls {
            sum = b.push(call_on(*function, layers, *stage), &[sum])?;
        }
        Ok(sum)
    }
}

/// The optimizer's functions and their arguments.
pub(super) struct Optimize {
    pub(super) squares: Sweep,
    pub(super) update: Sweep,
    pub(super) clip: Option<f64>,
    pub(super) scalar: TensorType,
}

impl Optimize {
    /// Counts the step, computes the clip factor, updates the weights.
    pub(super) fn run(&self, b: &mut FunctionBuilder<'_>) -> Result<(), OpError> {
        let binding = Binding::named(state::STEP);
        let one = b.push_as(Op::Fill { value: 1.0 }, &[], self.scalar.clone())?;
        let before = b.push_as(Op::State(binding.clone()), &[], self.scalar.clone())?;
        let step = b.add(before, one)?;
        assign(b, Target::State, binding, step)?;
        let clip = match self.clip {
            None => one,
            Some(max_norm) => {
                let zero = zeros(b, &self.scalar)?;
                let squares = self.squares.sum(b, zero)?;
                b.name(squares, Some("squares"));
                b.push(Op::Optimizer(Optimizer::ClipFactor { max_norm }), &[squares])?
            }
        };
        self.update.run(b, &[step, clip])
    }
}

/// The parts of a step around its passes.
pub(super) struct StepParts<'a> {
    pub(super) zero: &'a Sweep,
    pub(super) reduce: &'a Sweep,
    pub(super) exchanges: &'a [Exchange],
    pub(super) optimize: Option<&'a Optimize>,
}

impl StepParts<'_> {
    /// The parts after the passes.
    pub(super) fn finish(&self, b: &mut FunctionBuilder<'_>) -> Result<(), OpError> {
        self.reduce.run(b, &[])?;
        for exchange in self.exchanges {
            exchange.add_gradient(b)?;
        }
        if let Some(optimize) = self.optimize {
            optimize.run(b)?;
            for exchange in self.exchanges {
                exchange.send_weight(b)?;
            }
        }
        Ok(())
    }
}

/// `main` for one batch.
///
/// # Errors
/// An operation of `main` without an adjoint.
pub(super) fn main(
    cx: &Cx<'_>,
    space: &Space,
    functions: &Arena<FuncId, Function>,
    loss: ValueId,
    parts: &StepParts<'_>,
) -> Result<Function, OpError> {
    let source = cx.function();
    let mut b = FunctionBuilder::like(source, space, functions);
    parts.zero.run(&mut b, &[])?;
    let map = cx.forward_and_backward(&mut b, ValueMap::new(source), loss, |_| true)?;
    parts.finish(&mut b)?;
    Ok(b.finish(map.outputs()))
}
