//! The joint function of a function and its gradient: the forward nodes, then the nodes that compute gradients of
//! arguments and weights from gradients of results.
//!
//! `split` then decides on this function which forward values are saved and which are recomputed.

use ithaca_ir::entity::Entity;
use ithaca_ir::module::{FuncId, Function, Node, Output, ValueId};
use ithaca_ir::ops::{Binding, OpError, Returns, Target, cast, state, sums_in};
use ithaca_ir::{FunctionBuilder, Op, Space, TensorType};
use ithaca_pass::rebuild::ValueMap;

use super::active::Activity;

/// The joint function.
pub(super) struct Joint {
    /// Parameters: those of the function, then the gradients of its active results. No outputs.
    pub(super) function: Function,
    /// The outputs of the source in the function.
    pub(super) outputs: Vec<Output>,
    /// The number of forward nodes, which come first.
    pub(super) n_forward: usize,
    /// For each active result its index and the parameter that is its gradient.
    pub(super) seeds: Vec<(usize, ValueId)>,
    /// For each parameter of the source its gradient, if it has one.
    pub(super) gradients: Vec<Option<ValueId>>,
}

/// How the gradient of a weight is accumulated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Accumulation {
    /// One contribution per step: it is assigned.
    Assign,
    /// Several contributions per step: each is added.
    Add,
    /// As `Add`, but on this stage, which is not the stage that updates the weight.
    AddOnStage(u64),
}

impl Accumulation {
    /// Whether gradients are summed, so that a step must clear them first.
    pub(super) fn is_summed(self) -> bool {
        match self {
            Accumulation::Assign => false,
            Accumulation::Add | Accumulation::AddOnStage(_) => true,
        }
    }

    /// The binding of the gradient's state.
    pub(super) fn gradient_binding(self, binding: &Binding) -> Binding {
        let gradient = prefixed(binding, state::GRADIENT);
        match self {
            Accumulation::Assign | Accumulation::Add => gradient,
            Accumulation::AddOnStage(stage) => prefixed(&gradient, &state::of_stage(stage)),
        }
    }
}

/// The joint function of `source`, which calls no other function.
///
/// # Errors
/// An operation without an adjoint.
pub(super) fn joint(
    space: &Space,
    id: FuncId,
    source: &Function,
    activity: &Activity,
    accumulation: impl Fn(&Binding) -> Accumulation,
) -> Result<Joint, OpError> {
    let none = ithaca_ir::Arena::new();
    let mut b = FunctionBuilder::like(source, space, &none);
    let mut map = ValueMap::with_params(&mut b, source);
    let mut seeds = Vec::new();
    for (i, output) in source.outputs.iter().enumerate() {
        if activity.is_active(id, output.value) {
            let name = source.values[output.value].name.as_deref().map(|name| format!("d_{name}"));
            seeds.push((i, b.param(source.ty(output.value).clone(), name.as_deref())));
        }
    }
    let mut forward: Vec<Forward<'_>> = Vec::with_capacity(source.nodes.len());
    for node in &source.nodes {
        let operands = map.operands(node);
        let op = with_lse(&node.op);
        let results = b.node(op.clone(), &operands, &map.declared(&node.results))?.to_vec();
        map.replace(&mut b, &node.results, &results);
        forward.push(Forward { node, op, operands, results });
    }
    let n_forward = b.function().nodes.len();

    let mut tape = Tape::new(b.function().values.len());
    for &(i, seed) in &seeds {
        tape.add(&mut b, map[source.outputs[i].value], seed)?;
    }
    let mut weights: Vec<(&Binding, ValueId)> = Vec::new();
    for record in forward.iter().rev() {
        let gradients: Vec<Option<ValueId>> = record.results.iter().map(|&r| tape.of(r)).collect();
        if let (Op::Param(binding), &[Some(gradient)]) = (&record.op, &gradients[..]) {
            match weights.iter_mut().find(|(known, _)| *known == binding) {
                None => weights.push((binding, gradient)),
                Some((_, sum)) => *sum = b.add(*sum, gradient)?,
            }
            continue;
        }
        let is_active = |v: ValueId| activity.is_active(id, v);
        record.adjoint(&mut b, &gradients, is_active, |b, old, part| tape.add(b, map[old], part))?;
    }
    for (binding, gradient) in weights {
        store_gradient(&mut b, binding, gradient, accumulation(binding))?;
    }
    let gradients = source.params.iter().map(|&p| tape.of(map[p])).collect();
    Ok(Joint { function: b.finish([]), outputs: map.outputs(), n_forward, seeds, gradients })
}

/// A forward node: the node of the source and its copy.
pub(super) struct Forward<'a> {
    node: &'a Node,
    op: Op,
    operands: Vec<ValueId>,
    results: Vec<ValueId>,
}

impl<'a> Forward<'a> {
    /// The record of `node`, which was copied unchanged.
    pub(super) fn copied(node: &'a Node, map: &ValueMap<'_>) -> Self {
        let results = node.results.iter().map(|&v| map[v]).collect();
        Self { node, op: node.op.clone(), operands: map.operands(node), results }
    }

    /// Adds the adjoint for these gradients of the results; `add` takes the contribution to each active operand of the
    /// source.
    ///
    /// # Errors
    /// An operation without an adjoint.
    pub(super) fn adjoint(
        &self,
        b: &mut FunctionBuilder<'_>,
        gradients: &[Option<ValueId>],
        is_active: impl Fn(ValueId) -> bool,
        mut add: impl FnMut(&mut FunctionBuilder<'_>, ValueId, ValueId) -> Result<(), OpError>,
    ) -> Result<(), OpError> {
        let Self { node, op, operands, results } = self;
        if gradients.iter().all(Option::is_none) || !node.operands.iter().any(|&v| is_active(v)) {
            return Ok(());
        }
        let contributions = op.adjoint(b, operands, results, gradients)?;
        for (&operand, contribution) in node.operands.iter().zip(contributions) {
            if let Some(contribution) = contribution.filter(|_| is_active(operand)) {
                add(b, operand, contribution)?;
            }
        }
        Ok(())
    }
}

/// The same operation; attention also returns its lse, which its adjoint needs.
fn with_lse(op: &Op) -> Op {
    let mut op = op.clone();
    if let Op::Attention(attention) = &mut op {
        attention.returns = match attention.returns {
            Returns::Output | Returns::WithLse => Returns::WithLse,
            Returns::Part => Returns::Part,
        };
    }
    op
}

/// Stores the gradient of a weight in its state.
pub(super) fn store_gradient(
    b: &mut FunctionBuilder<'_>,
    binding: &Binding,
    gradient: ValueId,
    accumulation: Accumulation,
) -> Result<(), OpError> {
    let mut value = cast(b, gradient, sums_in(b.ty(gradient).dtype))?;
    let binding = accumulation.gradient_binding(binding);
    if accumulation.is_summed() {
        let before = b.push_as(Op::State(binding.clone()), &[], b.ty(value).clone())?;
        value = b.add(before, value)?;
    }
    assign(b, Target::State, binding, value)
}

/// The binding of a weight's state with this prefix.
pub(super) fn prefixed(binding: &Binding, prefix: &str) -> Binding {
    Binding { name: format!("{prefix}{}", binding.name), ..binding.clone() }
}

/// The gradients found so far, by value.
pub(super) struct Tape {
    gradient: Vec<Option<ValueId>>,
}

impl Tape {
    /// A tape for values below `n`.
    pub(super) fn new(n: usize) -> Self {
        Self { gradient: vec![None; n] }
    }

    /// The gradient of `value`, if it has one.
    pub(super) fn of(&self, value: ValueId) -> Option<ValueId> {
        self.gradient.get(value.index()).copied().flatten()
    }

    /// Replaces the gradient of `value`.
    pub(super) fn set(&mut self, value: ValueId, gradient: ValueId) {
        self.gradient[value.index()] = Some(gradient);
    }

    /// Adds a contribution to the gradient of `value`.
    pub(super) fn add(
        &mut self,
        b: &mut FunctionBuilder<'_>,
        value: ValueId,
        contribution: ValueId,
    ) -> Result<(), OpError> {
        let sum = match self.of(value) {
            None => contribution,
            Some(sum) => b.add(sum, contribution)?,
        };
        self.gradient[value.index()] = Some(sum);
        Ok(())
    }
}

/// The gradient of a value of type `ty`: zeros, where it has none.
pub(super) fn or_zeros(
    b: &mut FunctionBuilder<'_>,
    gradient: Option<ValueId>,
    ty: &TensorType,
) -> Result<ValueId, OpError> {
    gradient.map_or_else(|| zeros(b, ty), Ok)
}

/// Zeros of a type.
pub(super) fn zeros(b: &mut FunctionBuilder<'_>, ty: &TensorType) -> Result<ValueId, OpError> {
    b.push_as(Op::Fill { value: 0.0 }, &[], ty.clone())
}

/// Stores `value` in a state or parameter.
pub(super) fn assign(
    b: &mut FunctionBuilder<'_>,
    target: Target,
    binding: Binding,
    value: ValueId,
) -> Result<(), OpError> {
    b.node(Op::Assign { target, binding }, &[value], &[]).map(|_| ())
}
