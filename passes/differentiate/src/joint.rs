//! A function and its gradient in one: the forward nodes, then the nodes that compute gradients of arguments and weights
//! from gradients of results.
//!
//! What of the forward pass is kept and what is computed again is decided afterwards (`split`), on this function.

use ithaca_ir::entity::Entity;
use ithaca_ir::module::{FuncId, Function, Node, ValueId};
use ithaca_ir::ops::{Binary, Binding, OpError, Returns, Target, state};
use ithaca_ir::{DType, FunctionBuilder, Op, Space, TensorType};

use super::active::Activity;

/// The joint function.
pub(super) struct Joint {
    /// Parameters: those of the function, then the gradients of its active results. No outputs.
    pub(super) function: Function,
    /// The value of each value of the function as it was.
    pub(super) map: Vec<ValueId>,
    /// The first nodes, which are those of the forward pass.
    pub(super) n_forward: usize,
    /// For each active result its number and the parameter that is its gradient.
    pub(super) seeds: Vec<(usize, ValueId)>,
    /// For each parameter of the function its gradient, where it has one.
    pub(super) gradients: Vec<Option<ValueId>>,
}

/// How the gradient of a weight is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kept {
    /// It is the only one of a step.
    Once,
    /// It is added to what was there before.
    Added,
    /// The same, on another stage of a pipeline than that which updates the weight.
    AddedOn(u64),
}

impl Kept {
    /// Whether there are several gradients in a step, so that they begin with zero.
    pub(super) fn is_summed(self) -> bool {
        match self {
            Kept::Once => false,
            Kept::Added | Kept::AddedOn(_) => true,
        }
    }

    /// Where the gradient of a weight is kept.
    pub(super) fn home(self, binding: &Binding) -> Binding {
        let gradient = renamed(binding, state::GRADIENT);
        match self {
            Kept::Once | Kept::Added => gradient,
            Kept::AddedOn(stage) => renamed(&gradient, &state::of_stage(stage)),
        }
    }
}

/// The joint function of `source`, which calls no other; `kept` says how the gradient of each weight is kept.
///
/// # Errors
/// An operation that has no adjoint.
pub(super) fn joint(
    space: &Space,
    id: FuncId,
    source: &Function,
    activity: &Activity,
    kept: impl Fn(&Binding) -> Kept,
) -> Result<Joint, OpError> {
    let none = ithaca_ir::Arena::new();
    let mut b = FunctionBuilder::like(source, space, &none);
    let mut map: Vec<ValueId> = Vec::with_capacity(source.values.len());
    for &param in &source.params {
        map.push(b.param(source.ty(param).clone(), source.values[param].name.as_deref()));
    }
    let mut seeds = Vec::new();
    for (i, output) in source.outputs.iter().enumerate() {
        if activity.is_active(id, output.value) {
            let name = source.values[output.value].name.as_deref().map(|name| format!("d_{name}"));
            seeds.push((i, b.param(source.ty(output.value).clone(), name.as_deref())));
        }
    }
    let mut forward: Vec<Forward<'_>> = Vec::with_capacity(source.nodes.len());
    for node in &source.nodes {
        let operands: Vec<ValueId> = node.operands.iter().map(|v| map[v.index()]).collect();
        let (op, results) = copy(&mut b, source, node, &operands)?;
        map.extend(&results[..node.results.len()]);
        forward.push(Forward { node, op, operands, results });
    }
    let n_forward = b.function().nodes.len();

    let mut tape = Tape { gradient: vec![None; b.function().values.len()] };
    for &(i, seed) in &seeds {
        tape.add(&mut b, map[source.outputs[i].value.index()], seed)?;
    }
    let mut weights: Vec<(&Binding, ValueId)> = Vec::new();
    for Forward { node, op, operands, results } in forward.iter().rev() {
        let gradients: Vec<Option<ValueId>> = results.iter().map(|&r| tape.of(r)).collect();
        if gradients.iter().all(Option::is_none) {
            continue;
        }
        if let Op::Param(binding) = &node.op {
            let gradient = gradients[0].expect("one of one gradients is there");
            match weights.iter_mut().find(|(known, _)| *known == binding) {
                None => weights.push((binding, gradient)),
                Some((_, sum)) => *sum = b.push(Op::Binary(Binary::Add), &[*sum, gradient])?,
            }
            continue;
        }
        if !node.operands.iter().any(|&v| activity.is_active(id, v)) {
            continue;
        }
        let contributions = op.adjoint(&mut b, operands, results, &gradients)?;
        for ((&old, &operand), contribution) in node.operands.iter().zip(operands).zip(contributions) {
            if let Some(contribution) = contribution.filter(|_| activity.is_active(id, old)) {
                tape.add(&mut b, operand, contribution)?;
            }
        }
    }
    for (binding, gradient) in weights {
        keep(&mut b, binding, gradient, kept(binding))?;
    }
    let gradients = source.params.iter().map(|&p| tape.of(map[p.index()])).collect();
    Ok(Joint { function: b.finish([]), map, n_forward, seeds, gradients })
}

/// A node of the function and what stands for it.
struct Forward<'a> {
    node: &'a Node,
    op: Op,
    operands: Vec<ValueId>,
    results: Vec<ValueId>,
}

/// A forward node as it was, but that attention returns its lse, which its gradient needs.
fn copy(
    b: &mut FunctionBuilder<'_>,
    source: &Function,
    node: &Node,
    operands: &[ValueId],
) -> Result<(Op, Vec<ValueId>), OpError> {
    let mut op = node.op.clone();
    if let Op::Attention(attention) = &mut op {
        attention.returns = match attention.returns {
            Returns::Output | Returns::WithLse => Returns::WithLse,
            Returns::Part => Returns::Part,
        };
    }
    let declared: Vec<TensorType> = node.results.iter().map(|&v| source.ty(v).clone()).collect();
    let results = b.node(op.clone(), operands, &declared)?;
    for (&old, &new) in node.results.iter().zip(&results) {
        b.name(new, source.values[old].name.as_deref());
    }
    Ok((op, results.to_vec()))
}

/// Writes the gradient of a weight to its state.
pub(super) fn keep(
    b: &mut FunctionBuilder<'_>,
    binding: &Binding,
    gradient: ValueId,
    kept: Kept,
) -> Result<(), OpError> {
    let ty = b.ty(gradient).clone();
    let wide = wide(ty.dtype);
    let mut value = gradient;
    if ty.dtype != wide {
        value = b.push(Op::Cast { to: wide }, &[value])?;
    }
    let binding = kept.home(binding);
    if kept.is_summed() {
        let before = b.push_as(Op::State(binding.clone()), &[], TensorType { dtype: wide, ..ty })?;
        value = b.push(Op::Binary(Binary::Add), &[before, value])?;
    }
    assign(b, Target::State, binding, value)
}

/// The binding of what is kept of a weight under a prefix.
pub(super) fn renamed(binding: &Binding, prefix: &str) -> Binding {
    Binding { name: format!("{prefix}{}", binding.name), ..binding.clone() }
}

/// In what type gradients and moments are kept.
pub(super) fn wide(dtype: DType) -> DType {
    match dtype {
        DType::F64 => DType::F64,
        DType::F32 | DType::F16 | DType::BF16 | DType::I32 | DType::Bool => DType::F32,
    }
}

/// Gradients found so far, by the value that they are gradients of.
pub(super) struct Tape {
    gradient: Vec<Option<ValueId>>,
}

impl Tape {
    /// A tape for values below `n`.
    pub(super) fn new(n: usize) -> Self {
        Self { gradient: vec![None; n] }
    }

    /// The gradient of `value`, if one flows to it.
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
            Some(sum) => b.push(Op::Binary(Binary::Add), &[sum, contribution])?,
        };
        self.gradient[value.index()] = Some(sum);
        Ok(())
    }
}

/// Zeros of a type.
pub(super) fn zeros(b: &mut FunctionBuilder<'_>, ty: &TensorType) -> Result<ValueId, OpError> {
    b.push_as(Op::Fill { value: 0.0 }, &[], ty.clone())
}

/// The value of a node in another function, for what the rebuilding of functions has in common.
pub(super) fn copy_node(
    b: &mut FunctionBuilder<'_>,
    source: &Function,
    node: &Node,
    map: &mut [Option<ValueId>],
) -> Result<(), OpError> {
    let operands: Vec<ValueId> =
        node.operands.iter().map(|v| map[v.index()].expect("what a node reads was put before it")).collect();
    let declared: Vec<TensorType> = node.results.iter().map(|&v| source.ty(v).clone()).collect();
    let results = b.node(node.op.clone(), &operands, &declared)?;
    for (&old, &new) in node.results.iter().zip(&results) {
        b.name(new, source.values[old].name.as_deref());
        map[old.index()] = Some(new);
    }
    Ok(())
}

/// Writes `value` to what is kept.
pub(super) fn assign(
    b: &mut FunctionBuilder<'_>,
    target: Target,
    binding: Binding,
    value: ValueId,
) -> Result<(), OpError> {
    b.node(Op::Assign { target, binding }, &[value], &[]).map(|_| ())
}
