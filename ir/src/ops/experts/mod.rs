//! Mixtures of experts: which experts a token goes to, the way there, and the way back.
//!
//! ```text
//! %gates, %choices = route %logits {over=r, top=n, …} : f32[b s n], i32[b s n]
//! %slots = dispatch %choices, %x {experts=e} : f32[e b s m]
//! …a feed-forward network whose weights have the dimension e…
//! %y = combine %choices, %done, %gates {experts=e} : f32[b s m]
//! ```
//! The experts are a dimension like any other, so that expert parallelism is a layout: where the weights of experts are
//! split by axes that split tokens elsewhere, a reshard from tokens to experts stands behind `dispatch`, and one from
//! experts to tokens before `combine`, and both become all-to-alls.
//!
//! *Dropless*, a token has a slot of its own at every expert, filled where it goes there and zero elsewhere; that is the
//! worst case, exactly. *With a capacity*, the tokens of a group share a few slots at each expert, which are dealt in order
//! of position; a token that finds none is dropped by that expert. Groups are runs of tokens of one sequence and belong to
//! the program, so what is dropped does not depend on who computes it: a layout that would tear a group is refused.

mod adjoint;
mod infer;
mod slots;

use crate::dim::DimId;
use crate::rule::{FactorKind, FactorRule, Factors};
use crate::types::TensorType;

pub use slots::{Capacity, Slots};

/// Operations of a mixture of experts.
#[derive(Clone, Debug, PartialEq)]
pub enum Experts {
    /// `logits […, r], (bias [r]) → gates […, n], choices […, n]`: the experts of each token, the best first, and their
    /// weights. The bias takes part in the choice and in nothing else.
    Route(Route),
    /// `logits […, r], choices […, n], d_gates […, n] → d_logits […, r]`: the gradient of [`Route`](Self::Route), the
    /// choice being fixed.
    RouteBackward(Route),
    /// `choices […, n], x […, m], (gates […, n]) → [e, …, m]`: every token in its slots, times its gate where there is one.
    Dispatch(Slots),
    /// `choices […, n], y [e, …, m], (gates […, n]) → […, m]`: every token sums its slots, times their gates. A rank sums
    /// the experts that it holds.
    Combine(Slots),
    /// `choices […, n], y [e, …, m], x […, m] → […, n]`: the product of each of its slots with the token; the gradient of
    /// a gate.
    Products(Slots),
}

/// How tokens choose experts.
#[derive(Clone, Debug, PartialEq)]
pub struct Route {
    /// The dimension of the logits: the experts to choose from.
    pub over: DimId,
    /// The dimension of the result: how many are chosen.
    pub top: DimId,
    /// What makes scores of logits.
    pub scoring: Scoring,
    /// Whether gates are scores or shares.
    pub gates: Gates,
    /// Factor of the gates.
    pub scale: f64,
    /// Groups of experts that are chosen first, if any are.
    pub groups: Option<ExpertGroups>,
}

/// What makes scores of logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scoring {
    /// The softmax over all experts.
    Softmax,
    /// The logistic function of each.
    Sigmoid,
}

/// What the gates of the chosen experts are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Gates {
    /// Their scores.
    Scores,
    /// Their scores, divided by the sum of those that were chosen.
    Shares,
}

/// Experts in groups, of which a token may choose from the best only (DeepSeek-V3, arXiv 2412.19437, section 2.1.2). A
/// group is worth the sum of its two best scores, the bias included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertGroups {
    /// Number of groups, a divisor of the experts.
    pub count: u64,
    /// Groups that a token may choose from.
    pub kept: u64,
}

/// Added to the sum that shares are divided by, as the library does.
pub const SHARE_EPS: f64 = 1e-20;

impl Scoring {
    /// Both.
    pub const ALL: [Scoring; 2] = [Scoring::Softmax, Scoring::Sigmoid];

    /// The spelling in the text form.
    pub fn name(self) -> &'static str {
        match self {
            Scoring::Softmax => "softmax",
            Scoring::Sigmoid => "sigmoid",
        }
    }
}

impl Gates {
    /// Both.
    pub const ALL: [Gates; 2] = [Gates::Scores, Gates::Shares];

    /// The spelling in the text form.
    pub fn name(self) -> &'static str {
        match self {
            Gates::Scores => "scores",
            Gates::Shares => "shares",
        }
    }
}

impl Experts {
    /// The name in the text form.
    pub fn name(&self) -> &'static str {
        match self {
            Experts::Route(_) => "route",
            Experts::RouteBackward(_) => "route_backward",
            Experts::Dispatch(_) => "dispatch",
            Experts::Combine(_) => "combine",
            Experts::Products(_) => "slot_products",
        }
    }

    /// How many results it has.
    pub fn n_results(&self) -> usize {
        match self {
            Experts::Route(_) => 2,
            Experts::RouteBackward(_) | Experts::Dispatch(_) | Experts::Combine(_) | Experts::Products(_) => {
                1
            }
        }
    }

    /// Whether operand `i` has a gradient: choices have none, nor has what takes part in the choice alone.
    pub fn has_gradient(&self, i: usize) -> bool {
        match self {
            Experts::Route(_) | Experts::RouteBackward(_) => i != 1,
            Experts::Dispatch(_) | Experts::Combine(_) | Experts::Products(_) => i != 0,
        }
    }

    /// The dimensions among the attributes, for a pass to replace.
    pub fn dims_mut(&mut self) -> impl Iterator<Item = &mut DimId> {
        let dims: Vec<&mut DimId> = match self {
            Experts::Route(route) | Experts::RouteBackward(route) => vec![&mut route.over, &mut route.top],
            Experts::Dispatch(slots) | Experts::Combine(slots) | Experts::Products(slots) => {
                let capacity = slots.capacity.iter_mut();
                let shared = capacity.flat_map(|c| [&mut c.sequence, &mut c.groups, &mut c.slots]);
                std::iter::once(&mut slots.experts).chain(shared).collect()
            }
        };
        dims.into_iter()
    }

    /// FLOPs for each element of the widest operand or result.
    pub(super) fn flops(&self) -> u128 {
        match self {
            Experts::Route(_) => 6,
            Experts::RouteBackward(_) => 8,
            Experts::Dispatch(_) => 1,
            Experts::Combine(_) | Experts::Products(_) => 2,
        }
    }

    /// The factor rule: experts to choose from, choices and slots are whole; tokens of a sequence and its groups are one
    /// factor; experts that hold slots are summed where a token collects them.
    pub(super) fn rule(&self, operands: &[&TensorType], results: &[&TensorType]) -> FactorRule {
        let mut names: Vec<DimId> = Vec::new();
        let mut kinds = FactorRule::default();
        let mut factors_of = |ty: &TensorType| -> Factors {
            let factor = |&d: &DimId| {
                let (name, kind) = self.factor(d);
                names.iter().position(|&known| known == name).unwrap_or_else(|| {
                    names.push(name);
                    kinds.factors.push(kind);
                    names.len() - 1
                })
            };
            ty.dims.iter().map(factor).collect()
        };
        let operands = operands.iter().map(|ty| factors_of(ty)).collect();
        let results = results.iter().map(|ty| factors_of(ty)).collect();
        FactorRule { operands, results, ..kinds }
    }

    /// The dimension that stands for the factor of `dim`, and what ranks may do with it.
    fn factor(&self, dim: DimId) -> (DimId, FactorKind) {
        let slots = match self {
            Experts::Route(route) | Experts::RouteBackward(route) => {
                let whole = dim == route.over || dim == route.top;
                return (dim, if whole { FactorKind::Whole } else { FactorKind::Parallel });
            }
            Experts::Dispatch(slots) | Experts::Combine(slots) | Experts::Products(slots) => slots,
        };
        match slots.capacity {
            Some(c) if dim == c.groups => (c.sequence, FactorKind::Parallel),
            Some(c) if dim == c.slots => (dim, FactorKind::Whole),
            Some(_) | None if dim == slots.top => (dim, FactorKind::Whole),
            Some(_) | None => (dim, FactorKind::Parallel),
        }
    }
}
