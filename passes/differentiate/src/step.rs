//! `main` of a training step: forward calls, backward calls in reverse, the optimizer.

use ithaca_ir::entity::Entity;
use ithaca_ir::module::{FuncId, Function, Layers, Node, Output, ValueId};
use ithaca_ir::ops::{Binary, Binding, OpError, Optimizer, Random, Scan, ScanOrder, Stage, Target, state};
use ithaca_ir::{Arena, DimId, FunctionBuilder, Module, Op, Space, TensorType};

use super::active::Activity;
use super::joint::{Kept, Tape, assign, copy_node, keep, zeros};
use super::split::Halves;
use super::update::Place;

/// A function of the program and what it became.
pub(super) struct Differentiated {
    pub(super) halves: Halves,
    /// The function that keeps nothing, where it runs in groups.
    pub(super) plain: Option<FuncId>,
    pub(super) forward: FuncId,
    /// None where the forward function gives gradients at once.
    pub(super) backward: Option<FuncId>,
}

/// What `main` is rewritten by.
pub(super) struct Cx<'a> {
    pub(super) source: &'a Module,
    pub(super) main: FuncId,
    pub(super) activity: &'a Activity,
    /// By function of the source; none for `main`.
    pub(super) functions: &'a [Option<Differentiated>],
    /// The dimension of so many layers.
    pub(super) stack: &'a dyn Fn(u64) -> DimId,
    /// How the gradient of a weight is kept that a function reads.
    pub(super) kept: &'a dyn Fn(FuncId, &Binding) -> Kept,
    /// The type of the count of steps, where steps are counted.
    pub(super) counts: Option<&'a TensorType>,
}

/// One batch on its way through `main` and back.
pub(super) struct Run<'a> {
    /// The new value of each old one.
    pub(super) map: Vec<Option<ValueId>>,
    /// By node.
    calls: Vec<Option<Called<'a>>>,
    pub(super) tape: Tape,
}

impl Run<'_> {
    /// A run in which some values are known.
    pub(super) fn new(cx: &Cx<'_>, map: Vec<Option<ValueId>>) -> Self {
        let source = cx.function();
        let calls = source.nodes.iter().map(|_| None).collect();
        Self { map, calls, tape: Tape::new(source.values.len()) }
    }
}

/// A call of the forward pass, as its backward pass needs it.
struct Called<'a> {
    function: &'a Differentiated,
    layers: Layers,
    stride: u64,
    /// Arguments in the new function.
    arguments: Vec<ValueId>,
    /// What was kept.
    saved: Vec<ValueId>,
}

impl<'a> Cx<'a> {
    pub(super) fn function(&self) -> &'a Function {
        &self.source.functions[self.main]
    }

    /// The nodes for which `runs` holds, forward, then the gradients of all weights from the gradient of `loss`.
    ///
    /// # Errors
    /// An operation of `main` that has no adjoint.
    pub(super) fn forward_and_backward(
        &self,
        b: &mut FunctionBuilder<'_>,
        map: &mut Vec<Option<ValueId>>,
        loss: ValueId,
        runs: impl Fn(&Node) -> bool,
    ) -> Result<(), OpError> {
        let source = self.function();
        let mut run = Run::new(self, std::mem::take(map));
        for i in (0..source.nodes.len()).filter(|&i| runs(&source.nodes[i])) {
            self.forward(b, &mut run, i, None)?;
        }
        self.seed(b, &mut run, loss)?;
        for i in (0..source.nodes.len()).rev().filter(|&i| runs(&source.nodes[i])) {
            self.backward(b, &mut run, i, None)?;
        }
        *map = run.map;
        Ok(())
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
        let source = self.function();
        let node = &source.nodes[i];
        match &node.op {
            Op::Call { callee, layers, stride, .. } => {
                let layers = (layers, *stride);
                run.calls[i] = Some(self.call(b, &mut run.map, node, (*callee, layers, stage))?);
            }
            Op::Random(Random::Key { .. }) => {
                run.map[node.result().index()] = Some(self.key(b, node)?);
            }
            _ => copy_node(b, source, node, &mut run.map)?,
        }
        Ok(())
    }

    /// The key of this step: where keys begin, with the number of steps before folded in.
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

    /// The gradient of the loss, with which the backward pass begins.
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

    /// Node `i`, backward, if a gradient flows to it.
    ///
    /// # Errors
    /// An operation of `main` that has no adjoint.
    pub(super) fn backward(
        &self,
        b: &mut FunctionBuilder<'_>,
        run: &mut Run<'a>,
        i: usize,
        stage: Option<Stage>,
    ) -> Result<(), OpError> {
        let node = &self.function().nodes[i];
        let Run { map, calls, tape } = run;
        let gradients: Vec<Option<ValueId>> = node.results.iter().map(|&r| tape.of(r)).collect();
        if gradients.iter().all(Option::is_none) {
            return Ok(());
        }
        match (&node.op, &calls[i]) {
            (Op::Param(binding), _) => {
                let gradient = gradients[0].expect("one of one gradients is there");
                keep(b, binding, gradient, (self.kept)(self.main, binding))
            }
            (_, Some(called)) => self.call_backward(b, tape, node, (called, stage), &gradients),
            (op, None) => self.adjoint(b, tape, map, node, op, &gradients),
        }
    }

    /// The adjoint of an operation of `main` itself.
    fn adjoint(
        &self,
        b: &mut FunctionBuilder<'_>,
        tape: &mut Tape,
        map: &[Option<ValueId>],
        node: &Node,
        op: &Op,
        gradients: &[Option<ValueId>],
    ) -> Result<(), OpError> {
        let active = |v: ValueId| self.activity.is_active(self.main, v);
        if !node.operands.iter().any(|&v| active(v)) {
            return Ok(());
        }
        let new = |v: &ValueId| map[v.index()].expect("what ran has values");
        let operands: Vec<ValueId> = node.operands.iter().map(new).collect();
        let results: Vec<ValueId> = node.results.iter().map(new).collect();
        let contributions = op.adjoint(b, &operands, &results, gradients)?;
        for (&operand, contribution) in node.operands.iter().zip(contributions) {
            if let Some(contribution) = contribution.filter(|_| active(operand)) {
                tape.add(b, operand, contribution)?;
            }
        }
        Ok(())
    }

    fn call(
        &self,
        b: &mut FunctionBuilder<'_>,
        map: &mut [Option<ValueId>],
        node: &Node,
        (callee, (layers, stride), stage): (FuncId, (&Layers, u64), Option<Stage>),
    ) -> Result<Called<'a>, OpError> {
        let function =
            self.functions[callee.index()].as_ref().expect("only main is not differentiated by itself");
        let new = |v: &ValueId| map[v.index()].expect("what a call reads was put before it");
        let arguments: Vec<ValueId> = node.operands.iter().map(new).collect();
        let n_results = function.halves.n_results;
        let n_saved = function.halves.forward.outputs.len() - n_results;
        let scan = (layers.end - layers.start > 1 && n_saved > 0).then(|| Scan {
            over: (self.stack)(layers.end - layers.start),
            carried: n_results,
            order: ScanOrder::Ascending,
        });
        let op = Op::Call { callee: function.forward, layers: layers.clone(), stride, scan, stage };
        let results = b.node(op, &arguments, &[])?;
        for (&old, &result) in node.results.iter().zip(&results) {
            b.name(result, self.function().values[old].name.as_deref());
            map[old.index()] = Some(result);
        }
        let saved = results[n_results..].to_vec();
        Ok(Called { function, layers: layers.clone(), stride, arguments, saved })
    }

    fn call_backward(
        &self,
        b: &mut FunctionBuilder<'_>,
        tape: &mut Tape,
        node: &Node,
        (called, stage): (&Called<'_>, Option<Stage>),
        gradients: &[Option<ValueId>],
    ) -> Result<(), OpError> {
        let source = self.function();
        let Called { function, layers, stride, arguments, saved } = called;
        let halves = &function.halves;
        let Some(backward) = function.backward else {
            for (&i, &gradient) in halves.gives.iter().zip(saved) {
                tape.add(b, node.operands[i], gradient)?;
            }
            return Ok(());
        };
        let mut operands = Vec::new();
        for &i in &halves.seeds {
            operands.push(match gradients[i] {
                Some(gradient) => gradient,
                None => zeros(b, source.ty(node.results[i]))?,
            });
        }
        for &i in &halves.sums {
            operands.push(match tape.of(node.operands[i]) {
                Some(gradient) => gradient,
                None => zeros(b, source.ty(node.operands[i]))?,
            });
        }
        let n_carried = operands.len();
        operands.extend(halves.again.iter().map(|&i| arguments[i]));
        operands.extend(saved);
        let n_layers = layers.end - layers.start;
        let scan = (n_layers > 1).then(|| Scan {
            over: (self.stack)(n_layers),
            carried: n_carried,
            order: ScanOrder::Descending,
        });
        let op = Op::Call { callee: backward, layers: layers.clone(), stride: *stride, scan, stage };
        let results = b.node(op, &operands, &[])?;
        let active = |v: ValueId| self.activity.is_active(self.main, v);
        for (&i, &gradient) in halves.gives.iter().zip(&results) {
            if active(node.operands[i]) {
                tape.add(b, node.operands[i], gradient)?;
            }
        }
        for (&i, &sum) in halves.sums.iter().zip(&results[halves.gives.len()..]) {
            if active(node.operands[i]) {
                tape.set(node.operands[i], sum);
            }
        }
        Ok(())
    }
}

/// What runs over the layers of the functions that own weights.
#[derive(Clone, Debug, Default)]
pub(super) struct Sweep {
    /// For each function its layers, and the stages that have them.
    pub(super) calls: Vec<(FuncId, Vec<Place>)>,
}

impl Sweep {
    /// Calls every function on `constant` arguments.
    pub(super) fn run(&self, b: &mut FunctionBuilder<'_>, constant: &[ValueId]) -> Result<(), OpError> {
        for (function, layers) in &self.calls {
            for (layers, stage) in layers {
                // Without results nothing is handed on, and arguments are the same for all layers.
                let op = Op::Call {
                    callee: *function,
                    layers: layers.clone(),
                    stride: 0,
                    scan: None,
                    stage: *stage,
                };
                b.node(op, constant, &[])?;
            }
        }
        Ok(())
    }

    /// Calls every function on a sum that each adds to.
    pub(super) fn sum(&self, b: &mut FunctionBuilder<'_>, mut sum: ValueId) -> Result<ValueId, OpError> {
        let calls = self.calls.iter().flat_map(|(f, places)| places.iter().map(move |place| (f, place)));
        let mut calls: Vec<(&FuncId, &Place)> = calls.collect();
        // The sum goes from stage to stage once.
        calls.sort_by_key(|(_, (_, stage))| stage.map(|stage| stage.number));
        for (function, (layers, stage)) in calls {
            let op =
                Op::Call { callee: *function, layers: layers.clone(), stride: 0, scan: None, stage: *stage };
            sum = b.node(op, &[sum], &[])?[0];
        }
        Ok(sum)
    }
}

/// The optimizer's functions, and what they are called with.
pub(super) struct Optimize {
    pub(super) squares: Sweep,
    pub(super) update: Sweep,
    pub(super) clip: Option<f64>,
    pub(super) scalar: TensorType,
}

impl Optimize {
    /// Counts the step, finds the factor that clips, updates the weights.
    pub(super) fn run(&self, b: &mut FunctionBuilder<'_>) -> Result<(), OpError> {
        let binding = Binding::named(state::STEP);
        let one = b.push_as(Op::Fill { value: 1.0 }, &[], self.scalar.clone())?;
        let before = b.push_as(Op::State(binding.clone()), &[], self.scalar.clone())?;
        let step = b.push(Op::Binary(Binary::Add), &[before, one])?;
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

/// `main` for one batch.
///
/// # Errors
/// An operation of `main` that has no adjoint.
pub(super) fn main(
    cx: &Cx<'_>,
    space: &Space,
    functions: &Arena<FuncId, Function>,
    loss: ValueId,
    (zero, optimize): (&Sweep, Option<&Optimize>),
) -> Result<Function, OpError> {
    let source = cx.function();
    let mut b = FunctionBuilder::like(source, space, functions);
    let mut map = vec![None; source.values.len()];
    zero.run(&mut b, &[])?;
    cx.forward_and_backward(&mut b, &mut map, loss, |_| true)?;
    if let Some(optimize) = optimize {
        optimize.run(&mut b)?;
    }
    let output = |o: &Output| Output {
        name: o.name.clone(),
        value: map[o.value.index()].expect("every node of main ran"),
    };
    Ok(b.finish(source.outputs.iter().map(output).collect::<Vec<_>>()))
}
