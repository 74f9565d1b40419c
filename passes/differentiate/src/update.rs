//! The end of a step: the norm of all gradients, the optimizer, and states that begin at zero.
//!
//! For each function that owns weights there are up to three: `.zero` clears gradients that are summed, `.squares` adds up
//! the squares of gradients, `.update` changes the weights. They run over the layers that the function runs over.

use ithaca_ir::module::{FuncId, Function, Layers, Output, ValueId};
use ithaca_ir::ops::{AdamW, Binary, Binding, OpError, Optimizer, Stage, Target, state};
use ithaca_ir::phase::Phase;
use ithaca_ir::{Arena, DType, FunctionBuilder, Op, Space, TensorType};

use super::joint::{Kept, assign, renamed, wide, zeros};

/// Layers, and the stage that has them.
pub(super) type Place = (Layers, Option<Stage>);

/// Weights that one function owns: each weight of the program is owned once.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Owned {
    /// The function's name.
    pub(super) name: String,
    /// The weights with their types.
    pub(super) weights: Vec<(Binding, TensorType, Kept)>,
    /// The layers that it runs over, and the stages that have them.
    pub(super) layers: Vec<Place>,
}

impl Owned {
    /// Starts `@name.part`, which runs in the step of the optimizer.
    fn builder<'a>(
        &self,
        part: &str,
        space: &'a Space,
        functions: &'a Arena<FuncId, Function>,
    ) -> FunctionBuilder<'a> {
        let b = FunctionBuilder::new(format!("{}.{part}", self.name), space, functions);
        b.made_from(self.name.as_str()).in_phase(Phase::Update)
    }

    /// Whether gradients must be cleared at the start of a step.
    pub(super) fn is_summed(&self) -> bool {
        self.weights.iter().any(|(_, _, kept)| kept.is_summed())
    }
}

/// `@name.zero()`.
pub(super) fn zero(space: &Space, owned: &Owned) -> Result<Function, OpError> {
    let none = Arena::new();
    let mut b = owned.builder("zero", space, &none);
    for (binding, ty, kept) in owned.weights.iter().filter(|(_, _, kept)| kept.is_summed()) {
        let zero = zeros(&mut b, &gradient_type(ty))?;
        assign(&mut b, Target::State, kept.home(binding), zero)?;
    }
    Ok(b.finish([]))
}

/// `@name.squares(sum) → sum`, in the type that gradients are kept in.
pub(super) fn squares(space: &Space, owned: &Owned, scalar: &TensorType) -> Result<Function, OpError> {
    let none = Arena::new();
    let mut b = owned.builder("squares", space, &none);
    let mut sum = b.param(scalar.clone(), Some("squares"));
    for (binding, ty, _) in &owned.weights {
        let gradient = gradient(&mut b, binding, ty)?;
        let squares = b.push_as(Op::Einsum, &[gradient, gradient], scalar.clone())?;
        sum = b.push(Op::Binary(Binary::Add), &[sum, squares])?;
    }
    Ok(b.finish([Output { name: None, value: sum }]))
}

/// `@name.update(step, clip)`.
pub(super) fn update(
    space: &Space,
    owned: &Owned,
    adamw: AdamW,
    scalar: &TensorType,
) -> Result<Function, OpError> {
    let none = Arena::new();
    let mut b = owned.builder("update", space, &none);
    let step = b.param(scalar.clone(), Some("step"));
    let clip = b.param(scalar.clone(), Some("clip"));
    for (binding, ty, _) in &owned.weights {
        let kept = gradient_type(ty);
        let narrow = ty.dtype != kept.dtype;
        let weight = match narrow {
            true => b.push_as(Op::State(renamed(binding, state::MASTER)), &[], kept.clone())?,
            false => b.weight(binding.clone(), ty.clone())?,
        };
        let gradient = gradient(&mut b, binding, ty)?;
        let (first, second) = (renamed(binding, state::FIRST_MOMENT), renamed(binding, state::SECOND_MOMENT));
        let m = b.push_as(Op::State(first.clone()), &[], kept.clone())?;
        let v = b.push_as(Op::State(second.clone()), &[], kept)?;
        let op = Op::Optimizer(Optimizer::AdamW(adamw));
        let results = b.node(op, &[weight, gradient, m, v, step, clip], &[])?;
        let [mut weight, m, v] = [0, 1, 2].map(|i| results[i]);
        assign(&mut b, Target::State, first, m)?;
        assign(&mut b, Target::State, second, v)?;
        if narrow {
            assign(&mut b, Target::State, renamed(binding, state::MASTER), weight)?;
            weight = b.push(Op::Cast { to: ty.dtype }, &[weight])?;
        }
        assign(&mut b, Target::Param, binding.clone(), weight)?;
    }
    Ok(b.finish([]))
}

pub(super) fn gradient(
    b: &mut FunctionBuilder<'_>,
    binding: &Binding,
    ty: &TensorType,
) -> Result<ValueId, OpError> {
    b.push_as(Op::State(renamed(binding, state::GRADIENT)), &[], gradient_type(ty))
}

/// The type in which the gradient of a weight is kept.
pub(super) fn gradient_type(ty: &TensorType) -> TensorType {
    TensorType { dtype: wide(ty.dtype), ..ty.clone() }
}

/// The type of scalars beside these weights: the widest.
pub(super) fn scalar_type(owned: &[Owned]) -> DType {
    let mut types = owned.iter().flat_map(|o| &o.weights).map(|(_, ty, _)| wide(ty.dtype));
    match types.any(|dtype| dtype == DType::F64) {
        true => DType::F64,
        false => DType::F32,
    }
}
