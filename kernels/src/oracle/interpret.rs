//! The interpreter: all ranks, node by node, in lock-step.

use std::borrow::Cow;
use std::rc::Rc;

use ithaca_ir::entity::Entity;
use ithaca_ir::module::{FuncId, Function, Node};
use ithaca_ir::ops::Binding;
use ithaca_ir::{Module, Op, Rank, Space, TensorType, ValueId};

use super::{Operand, Value, Wanted, collective, eval, movement};
use crate::Outputs;
use crate::error::RunError;
use crate::real::Real;
use crate::source;
use crate::storage::Storage;
use crate::store::TensorSource;
use crate::tensor::index;

/// How deep calls may nest.
const MAX_DEPTH: usize = 64;

/// What all ranks hold of a value, in order of ranks.
pub(super) type Held<T> = Vec<Rc<Value<T>>>;

struct Interpreter<'a> {
    module: &'a Module,
    weights: &'a dyn TensorSource,
    inputs: &'a dyn TensorSource,
    storage: Storage,
}

pub(super) fn run<T: Real>(
    module: &Module,
    weights: &dyn TensorSource,
    inputs: &dyn TensorSource,
    storage: Storage,
) -> Result<Outputs<T>, RunError> {
    let main = module.main().ok_or_else(|| RunError::NoMain(module.name.clone()))?;
    let function = &module.functions[main];
    if !function.params.is_empty() {
        return Err(RunError::invalid("`main` has parameters"));
    }
    let interpreter = Interpreter { module, weights, inputs, storage };
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
            if results.len() < node.results.len() {
                return Err(RunError::invalid(format!("`{}` gives too few results", node.op.name())));
            }
            for (result, mut held) in node.results.iter().zip(results) {
                self.keep(function.ty(*result), &mut held);
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
            Op::Call { callee, layers, scan: _ } => {
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
                let types: Vec<&TensorType> = node.operands.iter().map(|&v| function.ty(v)).collect();
                let results: Vec<&TensorType> = node.results.iter().map(|&v| function.ty(v)).collect();
                let space = &self.module.space;
                if let Some(visited) = movement::visited(space, op, &types) {
                    return visited?.compute(space, op, &types, &results, operands);
                }
                compute_all(space, op, &types, &results, operands)
            }
        }
    }

    /// Rounds what is kept in a narrower type.
    fn keep<T: Real>(&self, ty: &TensorType, held: &mut Held<T>) {
        if self.storage == Storage::Wide {
            return;
        }
        for value in held {
            if let Value::Real(tensor) = Rc::make_mut(value) {
                self.storage.keep(ty.dtype, &mut tensor.data);
            }
        }
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
                true => Value::Real(source::cut(space, ty, &region, (binding, &stored), T::from_f64)),
                false => Value::Int(source::cut(space, ty, &region, (binding, &stored), |x| x as i32)),
            })
        };
        Ok(space.mesh.iter_ranks().map(part).collect())
    }
}

/// Every rank's part of every result of an operation on local tensors.
pub(super) fn compute_all<T: Real>(
    space: &Space,
    op: &Op,
    types: &[&TensorType],
    results: &[&TensorType],
    operands: &[&Held<T>],
) -> Result<Vec<Held<T>>, RunError> {
    let mut out: Vec<Held<T>> = vec![Vec::new(); results.len()];
    for rank in space.mesh.iter_ranks() {
        let mut parts: Vec<Operand<'_, T>> = Vec::with_capacity(types.len());
        for (&ty, held) in types.iter().zip(operands) {
            let elements = held[index(rank.0)].elements();
            parts.push(Operand { ty, region: space.local_box(ty, rank), elements });
        }
        let wanted: Vec<Wanted<'_>> =
            results.iter().map(|&ty| Wanted { ty, region: space.local_box(ty, rank) }).collect();
        let values = eval::eval(space, op, &parts, &wanted)?;
        if values.len() < results.len() {
            return Err(RunError::invalid(format!("`{}` gives too few results", op.name())));
        }
        for (held, value) in out.iter_mut().zip(values) {
            held.push(Rc::new(value));
        }
    }
    Ok(out)
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
