//! The end of a step: the gradient norm, the optimizer, and the clearing of gradients.
//!
//! Each function that owns weights has up to four functions: `.zero` clears sums of gradients, `.reduce` makes sums the
//! gradients where no backward pass does, `.squares` adds up the squares of gradients, `.update` updates the weights.
//! They run over the same layers.

use ithaca_ir::module::{FuncId, Function, Layers, Output, ValueId};
use ithaca_ir::ops::{AdamW, Binding, Cache, OpError, Optimizer, Stage, Target, cast, state, sums_in};
use ithaca_ir::phase::Phase;
use ithaca_ir::{Arena, DType, FunctionBuilder, Op, Space, TensorType};

use super::options::{GradientType, Offload};
use super::tape::{Accumulation, assign, prefixed, zeros};

/// A range of layers and its stage.
pub(super) type Place = (Layers, Option<Stage>);

/// A call of `callee` for each layer on one stage.
pub(super) fn call_on(callee: FuncId, layers: &Layers, stage: Option<Stage>) -> Op {
    Op::Call { callee, layers: layers.clone(), stride: 0, scan: None, stage }
}

/// The weights that one function owns; each weight of the program has one owner.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct OwnedWeights {
    /// The function's name.
    pub(super) name: String,
    /// The weights with their types.
    pub(super) weights: Vec<(Binding, TensorType, Accumulation)>,
    /// The layers of the function, and their stages.
    pub(super) layers: Vec<Place>,
    /// The type of the gradients.
    pub(super) gradients: GradientType,
}

impl OwnedWeights {
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

    /// The gradient of a weight.
    fn gradient(
        &self,
        b: &mut FunctionBuilder<'_>,
        binding: &Binding,
        ty: &TensorType,
    ) -> Result<ValueId, OpError> {
        b.push_as(Op::State(prefixed(binding, state::GRADIENT)), &[], self.gradients.tensor(ty))
    }

    /// Whether a step must clear sums first.
    pub(super) fn is_summed(&self) -> bool {
        self.weights.iter().any(|(_, _, accumulation)| accumulation.is_summed())
    }

    /// Where sums become gradients after all passes: everywhere for some ways to accumulate, and for those that a backward pass
    /// completes on all stages but the only one that does.
    pub(super) fn reduced_last(&self, completes_on: Option<u64>) -> Vec<Place> {
        if self.weights.iter().any(|(_, _, accumulation)| accumulation.is_reduced_last()) {
            return self.layers.clone();
        }
        let is_left = |place: &&Place| {
            completes_on.is_some_and(|only| place.1.is_some_and(|stage| stage.number != only))
        };
        if self.is_summed() { self.layers.iter().filter(is_left).cloned().collect() } else { Vec::new() }
    }

    /// Leaves the sums of all weights to `.reduce` where it makes those of some gradients.
    pub(super) fn complete_together(&mut self) {
        if self.weights.iter().any(|(_, _, accumulation)| accumulation.is_reduced_last()) {
            for (_, _, accumulation) in &mut self.weights {
                if *accumulation == Accumulation::AddByOwner {
                    *accumulation = Accumulation::Add;
                }
            }
        }
    }
}

/// `@name.zero()`.
pub(super) fn zero(space: &Space, owned: &OwnedWeights) -> Result<Function, OpError> {
    let none = Arena::new();
    let mut b = owned.builder("zero", space, &none);
    for (binding, ty, accumulation) in
        owned.weights.iter().filter(|(_, _, accumulation)| accumulation.is_summed())
    {
        let zero = zeros(&mut b, &owned.gradients.tensor(ty))?;
        assign(&mut b, Target::State, accumulation.sum_binding(binding), zero)?;
    }
    Ok(b.finish([]))
}

/// `@name.reduce()`.
pub(super) fn reduce(
    space: &Space,
    owned: &OwnedWeights,
    completes_on: Option<u64>,
) -> Result<Function, OpError> {
    let none = Arena::new();
    let mut b = owned.builder("reduce", space, &none);
    let is_reduced = |a: Accumulation| a.is_reduced_last() || a.is_summed() && completes_on.is_some();
    for (binding, ty, accumulation) in
        owned.weights.iter().filter(|(_, _, accumulation)| is_reduced(*accumulation))
    {
        let sum = b.push_as(Op::State(accumulation.sum_binding(binding)), &[], owned.gradients.tensor(ty))?;
        assign(&mut b, Target::State, accumulation.gradient_binding(binding), sum)?;
    }
    Ok(b.finish([]))
}

/// `@name.squares(sum) → sum`, in the accumulation type.
pub(super) fn squares(space: &Space, owned: &OwnedWeights, scalar: &TensorType) -> Result<Function, OpError> {
    let none = Arena::new();
    let mut b = owned.builder("squares", space, &none);
    let mut sum = b.param(scalar.clone(), Some("squares"));
    for (binding, ty, _) in &owned.weights {
        let gradient = owned.gradient(&mut b, binding, ty)?;
        let squares = b.push_as(Op::Einsum, &[gradient, gradient], scalar.clone())?;
        sum = b.add(sum, squares)?;
    }
    Ok(b.finish([Output { name: None, value: sum }]))
}

/// `@name.update(step, clip)`.
///
/// States in host memory are copied to the device one weight ahead of its update, and copied back after it.
pub(super) fn update(
    space: &Space,
    owned: &OwnedWeights,
    (adamw, offload): (AdamW, Offload),
    scalar: &TensorType,
) -> Result<Function, OpError> {
    let none = Arena::new();
    let mut b = owned.builder("update", space, &none);
    let step = b.param(scalar.clone(), Some("step"));
    let clip = b.param(scalar.clone(), Some("clip"));
    let mut states = States { offload, copies: Vec::new() };
    let mut ahead = owned.weights.iter();
    states.copy(&mut b, ahead.next())?;
    for (binding, ty, _) in &owned.weights {
        states.copy(&mut b, ahead.next())?;
        let state_ty = state_type(ty);
        let is_narrow = is_narrow(ty);
        let weight = if is_narrow {
            states.read(&mut b, (binding, state::MASTER), &state_ty)?
        } else {
            b.weight(binding.clone(), ty.clone())?
        };
        let gradient = owned.gradient(&mut b, binding, ty)?;
        let gradient = cast(&mut b, gradient, state_ty.dtype)?;
        let m = states.read(&mut b, (binding, state::FIRST_MOMENT), &state_ty)?;
        let v = states.read(&mut b, (binding, state::SECOND_MOMENT), &state_ty)?;
        let op = Op::Optimizer(Optimizer::AdamW(adamw));
        let results = b.node(op, &[weight, gradient, m, v, step, clip], &[])?;
        let [mut weight, m, v] = [0, 1, 2].map(|i| results[i]);
        assign(&mut b, Target::State, states.binding(binding, state::FIRST_MOMENT), m)?;
        assign(&mut b, Target::State, states.binding(binding, state::SECOND_MOMENT), v)?;
        if is_narrow {
            assign(&mut b, Target::State, states.binding(binding, state::MASTER), weight)?;
            weight = cast(&mut b, weight, ty.dtype)?;
        }
        assign(&mut b, Target::Param, binding.clone(), weight)?;
    }
    Ok(b.finish([]))
}

/// Whether the optimizer keeps a weight in full precision.
fn is_narrow(ty: &TensorType) -> bool {
    ty.dtype != sums_in(ty.dtype)
}

/// The states of an optimizer as an update reads them.
struct States {
    offload: Offload,
    /// The copies on the device of states in host memory; several may be windows of one stored tensor.
    copies: Vec<(Binding, ValueId)>,
}

impl States {
    fn binding(&self, weight: &Binding, kind: &str) -> Binding {
        Binding { host: self.offload == Offload::Optimizer, ..prefixed(weight, kind) }
    }

    /// Copies the states of a weight to the device, where they are in host memory.
    fn copy(
        &mut self,
        b: &mut FunctionBuilder<'_>,
        weight: Option<&(Binding, TensorType, Accumulation)>,
    ) -> Result<(), OpError> {
        let (Some((weight, ty, _)), Offload::Optimizer) = (weight, self.offload) else { return Ok(()) };
        let master = is_narrow(ty).then_some(state::MASTER);
        for kind in master.into_iter().chain([state::FIRST_MOMENT, state::SECOND_MOMENT]) {
            let binding = self.binding(weight, kind);
            let state = b.push_as(Op::State(binding.clone()), &[], state_type(ty))?;
            self.copies.push((binding, b.push(Op::Cache(Cache::Upload), &[state])?));
        }
        Ok(())
    }

    fn read(
        &self,
        b: &mut FunctionBuilder<'_>,
        (weight, kind): (&Binding, &str),
        ty: &TensorType,
    ) -> Result<ValueId, OpError> {
        let binding = self.binding(weight, kind);
        match self.copies.iter().find(|(of, _)| *of == binding) {
            Some(&(_, copy)) => Ok(copy),
            None => b.push_as(Op::State(binding), &[], ty.clone()),
        }
    }
}

/// The type of the states of an optimizer for a weight.
fn state_type(ty: &TensorType) -> TensorType {
    TensorType { dtype: sums_in(ty.dtype), ..ty.clone() }
}

/// The type of scalars for these weights: the widest.
pub(super) fn scalar_type(owned: &[OwnedWeights]) -> DType {
    let mut types = owned.iter().flat_map(|o| &o.weights).map(|(_, ty, _)| sums_in(ty.dtype));
    if types.any(|dtype| dtype == DType::F64) { DType::F64 } else { DType::F32 }
}
