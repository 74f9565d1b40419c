//! The interpreter: all ranks, node by node, in lock-step.

use std::borrow::Cow;
use std::rc::Rc;

use ithaca_ir::entity::Entity;
use ithaca_ir::module::{FuncId, Function, Node};
use ithaca_ir::ops::Binding;
use ithaca_ir::{Module, Op, Rank, TensorType, ValueId};

use super::{Operand, Value, collective, eval};
use crate::Outputs;
use crate::error::RunError;
use crate::real::Real;
use crate::source;
use crate::store::TensorSource;
use crate::tensor::index;

/// How deep calls may nest.
const MAX_DEPTH: usize = 64;

/// What all ranks hold of a value, in order of ranks.
type Held<T> = Vec<Rc<Value<T>>>;

struct Interpreter<'a> {
    module: &'a Module,
    weights: &'a dyn TensorSource,
    inputs: &'a dyn TensorSource,
}

pub(super) fn run<T: Real>(
    module: &Module,
    weights: &dyn TensorSource,
    inputs: &dyn TensorSource,
) -> Result<Outputs<T>, RunError> {
    let main = module.main().ok_or_else(|| RunError::NoMain(module.name.clone()))?;
    let function = &module.functions[main];
    if !function.params.is_empty() {
        return Err(RunError::invalid("`main` has parameters"));
    }
    let interpreter = Interpreter { module, weights, inputs };
    let results = interpreter.call::<T>(main, 0, Vec::new(), 0)?;
    let mut outputs = Outputs::new();
    for (i, (output, held)) in function.outputs.iter().zip(results).enumerate() {
        let name = output.name.clone().unwrap_or_else(|| i.to_string());
        let numbers = |rank: Rank| {
            Ok(Cow::Owned(match &*held[index(rank.0)] {
                Value::Real(t) => t.data.clone(),
                Value::Int(t) => t.data.iter().map(|&x| T::from_f64(f64::from(x))).collect(),
            }))
        };
        let tensor = super::assemble(&module.space, &name, function.ty(output.value), numbers)?;
        outputs.insert(name, tensor);
    }
    Ok(outputs)
}

impl Interpreter<'_> {
    fn call<T: Real>(
        &self,
        callee: FuncId,
        layer: u64,
        arguments: Vec<Held<T>>,
        depth: usize,
    ) -> Result<Vec<Held<T>>, RunError> {
        if depth > MAX_DEPTH {
            return Err(RunError::Unsupported(format!("nesting of calls deeper than {MAX_DEPTH}")));
        }
        let function = &self.module.functions[callee];
        let last_use = last_uses(function);
        let mut values: Vec<Option<Held<T>>> = vec![None; function.values.len()];
        for (&param, argument) in function.params.iter().zip(arguments) {
            values[param.index()] = Some(argument);
        }
        for (i, node) in function.nodes.iter().enumerate() {
            let operands: Vec<&Held<T>> = node
                .operands
                .iter()
                .map(|v| values[v.index()].as_ref().ok_or_else(|| undefined(function, *v)))
                .collect::<Result<_, _>>()?;
            let results = self.node(function, node, layer, &operands, depth)?;
            for (result, held) in node.results.iter().zip(results) {
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
    fn node<T: Real>(
        &self,
        function: &Function,
        node: &Node,
        layer: u64,
        operands: &[&Held<T>],
        depth: usize,
    ) -> Result<Vec<Held<T>>, RunError> {
        match &node.op {
            Op::Call { callee, layers } => {
                let mut arguments: Vec<Held<T>> = operands.iter().map(|&held| held.clone()).collect();
                let mut results = Vec::new();
                for layer in layers.clone() {
                    results = self.call(*callee, layer, arguments.clone(), depth + 1)?;
                    for (argument, result) in arguments.iter_mut().zip(&results) {
                        argument.clone_from(result);
                    }
                }
                Ok(results)
            }
            Op::Param(binding) => {
                self.source(binding, function.ty(node.result()), layer, self.weights).map(|h| vec![h])
            }
            Op::Input(binding) => {
                self.source(binding, function.ty(node.result()), layer, self.inputs).map(|h| vec![h])
            }
            op if op.is_communication() || *op == Op::Reshard => {
                let (from, to) = (function.ty(node.operands[0]), function.ty(node.result()));
                collective::communicate(&self.module.space, op, from, to, operands[0]).map(|h| vec![h])
            }
            op => {
                let ranks = self.module.space.mesh.iter_ranks();
                let held = ranks.map(|rank| self.compute(function, node, op, operands, rank).map(Rc::new));
                held.collect::<Result<_, _>>().map(|h| vec![h])
            }
        }
    }

    /// One rank's part of the result.
    fn compute<T: Real>(
        &self,
        function: &Function,
        node: &Node,
        op: &Op,
        operands: &[&Held<T>],
        rank: Rank,
    ) -> Result<Value<T>, RunError> {
        let space = &self.module.space;
        let operands: Vec<Operand<'_, T>> = node
            .operands
            .iter()
            .zip(operands)
            .map(|(&v, held)| {
                let ty = function.ty(v);
                let elements = held[index(rank.0)].elements();
                Operand { ty, region: space.local_box(ty, rank), elements }
            })
            .collect();
        let ty = function.ty(node.result());
        eval::eval(space, op, &operands, ty, &space.local_box(ty, rank))
    }

    /// Every rank's part of a source.
    fn source<T: Real>(
        &self,
        binding: &Binding,
        ty: &TensorType,
        layer: u64,
        from: &dyn TensorSource,
    ) -> Result<Held<T>, RunError> {
        let space = &self.module.space;
        let stored = source::load(space, binding, ty, layer, from)?;
        let part = |rank: Rank| {
            let region = space.local_box(ty, rank);
            Rc::new(match ty.dtype.is_float() {
                true => Value::Real(source::cut(space, ty, &region, &stored, T::from_f64)),
                false => Value::Int(source::cut(space, ty, &region, &stored, |x| x as i32)),
            })
        };
        Ok(space.mesh.iter_ranks().map(part).collect())
    }
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
