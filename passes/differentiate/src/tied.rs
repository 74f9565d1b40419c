//! Weights that two stages of a pipeline use, as a tied embedding: the first of them updates the weight. The other
//! accumulates its own gradient, sends the sum before the update, and receives the new weight.

use ithaca_ir::module::{FuncId, Function, Output, ValueId};
use ithaca_ir::ops::{Binding, OpError, Stage, Target, state};
use ithaca_ir::phase::Phase;
use ithaca_ir::{Arena, FunctionBuilder, Op, Space, TensorType};

use super::options::GradientType;
use super::tape::{Accumulation, assign, prefixed};
use super::update::{OwnedWeights, call_on};

/// A weight that one stage owns and another stage uses too.
#[derive(Clone, Debug)]
pub(super) struct TiedWeight {
    pub(super) binding: Binding,
    pub(super) ty: TensorType,
    /// The function that owns the weight.
    pub(super) owner: (String, Stage),
    /// The other function that uses it.
    pub(super) user: (String, Stage),
}

impl TiedWeight {
    fn accumulation(&self) -> Accumulation {
        Accumulation::AddOnStage(self.user.1.number)
    }
}

/// Each weight once per stage that uses it.
fn distinct(tied: &[TiedWeight]) -> Vec<&TiedWeight> {
    let mut distinct: Vec<&TiedWeight> = Vec::new();
    for one in tied {
        if !distinct.iter().any(|t| t.binding == one.binding && t.user.1 == one.user.1) {
            distinct.push(one);
        }
    }
    distinct
}

/// The users' gradients of tied weights, to be cleared like those of owned weights.
pub(super) fn tied_gradients(tied: &[TiedWeight], gradients: GradientType) -> Vec<OwnedWeights> {
    let mut tied_gradients: Vec<OwnedWeights> = Vec::new();
    for one in distinct(tied) {
        let name = format!("{}.tied", one.user.0);
        let weight = (one.binding.clone(), one.ty.clone(), one.accumulation());
        match tied_gradients.iter_mut().find(|owned| owned.name == name) {
            Some(owned) => owned.weights.push(weight),
            None => tied_gradients.push(OwnedWeights {
                name,
                weights: vec![weight],
                layers: vec![(0..1, Some(one.user.1))],
                gradients,
            }),
        }
    }
    tied_gradients
}

/// The functions that two stages exchange a tied weight with, before and after the update.
pub(super) struct Exchange {
    owner: Stage,
    user: Stage,
    /// Returns the user's gradient.
    give: FuncId,
    /// Adds it to the owner's gradient.
    take: FuncId,
    /// Returns the new weight.
    send: FuncId,
    /// Stores it.
    receive: FuncId,
}

/// Declares the functions of the exchanges.
///
/// # Errors
/// None for weights of a program that verifies.
pub(super) fn exchanges(
    space: &Space,
    functions: &mut Arena<FuncId, Function>,
    tied: &[TiedWeight],
    gradients: GradientType,
) -> Result<Vec<Exchange>, OpError> {
    let none = Arena::new();
    let mut exchanges = Vec::new();
    for (i, one) in distinct(tied).into_iter().enumerate() {
        let TiedWeight { binding, ty, owner, user } = one;
        let gradient = gradients.tensor(ty);
        let builder = |of: &str, part: &str| {
            let b = FunctionBuilder::new(format!("{of}.{part}{i}.update"), space, &none);
            b.made_from(of).in_phase(Phase::Update)
        };
        let returns = |value: ValueId| [Output { name: None, value }];

        let mut b = builder(&user.0, "give");
        let own =
            b.push_as(Op::State(one.accumulation().gradient_binding(binding)), &[], gradient.clone())?;
        let give = functions.push(b.finish(returns(own)));

        let mut b = builder(&owner.0, "take");
        let received = b.param(gradient.clone(), None);
        let home = prefixed(binding, state::GRADIENT);
        let own = b.push_as(Op::State(home.clone()), &[], gradient)?;
        let sum = b.add(own, received)?;
        assign(&mut b, Target::State, home, sum)?;
        let take = functions.push(b.finish([]));

        let mut b = builder(&owner.0, "send");
        let weight = b.weight(binding.clone(), ty.clone())?;
        let send = functions.push(b.finish(returns(weight)));

        let mut b = builder(&user.0, "receive");
        let weight = b.param(ty.clone(), None);
        assign(&mut b, Target::Param, binding.clone(), weight)?;
        let receive = functions.push(b.finish([]));
        exchanges.push(Exchange { owner: owner.1, user: user.1, give, take, send, receive });
    }
    Ok(exchanges)
}

impl Exchange {
    /// Adds the user's gradient to the owner's.
    pub(super) fn add_gradient(&self, b: &mut FunctionBuilder<'_>) -> Result<(), OpError> {
        call_across(b, (self.user, self.give), (self.owner, self.take))
    }

    /// Sends the new weight to the user.
    pub(super) fn send_weight(&self, b: &mut FunctionBuilder<'_>) -> Result<(), OpError> {
        call_across(b, (self.owner, self.send), (self.user, self.receive))
    }
}

/// Calls one function on one stage, and another on another stage with the first one's result.
fn call_across(
    b: &mut FunctionBuilder<'_>,
    (from, gives): (Stage, FuncId),
    (to, takes): (Stage, FuncId),
) -> Result<(), OpError> {
    let received = b.push(call_on(gives, &(0..1), Some(from)), &[])?;
    b.node(call_on(takes, &(0..1), Some(to)), &[received], &[]).map(|_| ())
}
