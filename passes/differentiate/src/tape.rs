//! The parts of reverse mode: records of forward nodes, the tape of gradients, and the states of weights' gradients.

use ithaca_ir::entity::Entity;
use ithaca_ir::module::{Node, ValueId};
use ithaca_ir::ops::{Binding, OpError, Returns, Target, cast, state};
use ithaca_ir::{FunctionBuilder, Op, TensorType};
use ithaca_pass::rebuild::ValueMap;

use super::options::GradientType;

/// How the gradient of a weight is accumulated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Accumulation {
    /// One contribution per step: it is the gradient.
    Assign,
    /// Several contributions per step, of which the owner's backward pass of the last micro-batch adds the last.
    AddByOwner,
    /// Several contributions per step; `.reduce` makes their sum the gradient.
    Add,
    /// As `Add`, but on this stage, which is not the stage that updates the weight.
    AddOnStage(u64),
}

impl Accumulation {
    /// Whether contributions are summed, so that a step must clear the sum first.
    pub(super) fn is_summed(self) -> bool {
        self != Accumulation::Assign
    }

    /// Whether the sum becomes the gradient after all passes.
    pub(super) fn is_reduced_last(self) -> bool {
        match self {
            Accumulation::Assign | Accumulation::AddByOwner => false,
            Accumulation::Add | Accumulation::AddOnStage(_) => true,
        }
    }

    /// The binding of the gradient's state.
    pub(super) fn gradient_binding(self, binding: &Binding) -> Binding {
        let gradient = prefixed(binding, state::GRADIENT);
        match self {
            Accumulation::Assign | Accumulation::AddByOwner | Accumulation::Add => gradient,
            Accumulation::AddOnStage(stage) => prefixed(&gradient, &state::of_stage(stage)),
        }
    }

    /// The binding of the sum of contributions.
    pub(super) fn sum_binding(self, binding: &Binding) -> Binding {
        prefixed(&self.gradient_binding(binding), state::SUM)
    }
}

/// A forward node: the node of the source and its copy.
pub(super) struct Forward<'a> {
    node: &'a Node,
    op: Op,
    operands: Vec<ValueId>,
    results: Vec<ValueId>,
}

impl<'a> Forward<'a> {
    /// Copies `node`; attention also returns its lse, which its adjoint needs.
    ///
    /// # Errors
    /// None on a program that verifies.
    pub(super) fn run(
        b: &mut FunctionBuilder<'_>,
        node: &'a Node,
        map: &mut ValueMap<'_>,
    ) -> Result<Self, OpError> {
        let mut op = node.op.clone();
        if let Op::Attention(attention) = &mut op
            && attention.returns == Returns::Output
        {
            attention.returns = Returns::WithLse;
        }
        let operands = map.operands(node);
        let results = b.node(op.clone(), &operands, &map.declared(&node.results))?.to_vec();
        map.replace(b, &node.results, &results);
        Ok(Self { node, op, operands, results })
    }

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
        // The lse of attention has no gradient where the source does not return it.
        let mut gradients = gradients.to_vec();
        gradients.resize(results.len(), None);
        let contributions = op.adjoint(b, operands, results, &gradients)?;
        for (&operand, contribution) in node.operands.iter().zip(contributions) {
            if let Some(contribution) = contribution.filter(|_| is_active(operand)) {
                add(b, operand, contribution)?;
            }
        }
        Ok(())
    }
}

/// Stores the gradients of weights in their states, in the type of `gradients`; those of several reads of one weight are summed.
pub(super) fn store_gradients<'a>(
    b: &mut FunctionBuilder<'_>,
    reads: impl IntoIterator<Item = (&'a Binding, ValueId)>,
    (gradients, accumulation): (GradientType, impl Fn(&Binding) -> Accumulation),
) -> Result<(), OpError> {
    let mut sums: Vec<(&Binding, ValueId)> = Vec::new();
    for (binding, gradient) in reads {
        match sums.iter_mut().find(|(known, _)| *known == binding) {
            None => sums.push((binding, gradient)),
            Some((_, sum)) => *sum = b.add(*sum, gradient)?,
        }
    }
    for (binding, gradient) in sums {
        let accumulation = accumulation(binding);
        let value = cast(b, gradient, gradients.of(b.ty(gradient).dtype))?;
        if accumulation.is_summed() {
            let sum = accumulation.sum_binding(binding);
            let before = b.push_as(Op::State(sum.clone()), &[], b.ty(value).clone())?;
            let value = b.add(before, value)?;
            assign(b, Target::State, sum, value)?;
        } else {
            assign(b, Target::State, accumulation.gradient_binding(binding), value)?;
        }
    }
    Ok(())
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
