//! Mixtures of experts: the choice of experts, dispatch of tokens to them, and combination.
//!
//! ```text
//! %gates, %choices = route %logits {over=r, top=n, …} : f32[b s n], i32[b s n]
//! %slots = dispatch %choices, %x {experts=e} : f32[e b s m]
//! …a feed-forward network whose weights have the dimension e…
//! %y = combine %choices, %done, %gates {experts=e} : f32[b s m]
//! ```
//! The experts are a dimension like any other, so that expert parallelism is a layout: where the weights of experts are
//! split by axes that split tokens elsewhere, a reshard from tokens to experts follows `dispatch`, and one from experts
//! to tokens precedes `combine`, and both become all-to-alls.
//!
//! *Dropless*, a token has a slot of its own at every expert, filled where it goes there and zero elsewhere; that is the
//! worst case, exactly. *With a capacity*, the tokens of a group share a few slots at each expert, which are dealt in order
//! of position; a token that finds none is dropped by that expert. Groups are runs of tokens of one sequence and belong to
//! the program, so the dropped tokens do not depend on the layout: a layout that would split a group is refused.

mod adjoint;
mod infer;
mod slots;

use crate::dim::DimId;
use crate::rule::{FactorKind, FactorRule};
use crate::types::TensorType;

pub use crate::ops::table::experts::{Capacity, ExpertGroups, Experts, Gates, Route, Scoring, Slots};

/// Added to the sum that shares are divided by, as the library does.
pub const SHARE_EPS: f64 = 1e-20;

impl Experts {
    /// Whether operand `i` has a gradient: choices have none, and neither does the bias of a choice.
    pub fn has_gradient(&self, i: usize) -> bool {
        match self {
            Experts::Route(_) | Experts::RouteBackward(_) => i != 1,
            Experts::Dispatch(_) | Experts::Combine(_) | Experts::Products(_) => i != 0,
        }
    }

    /// The factor rule: experts to choose from, choices and slots are whole; tokens of a sequence and its groups are one
    /// factor; experts that hold slots are summed where a token collects them.
    pub(super) fn rule(&self, operands: &[&TensorType], results: &[&TensorType]) -> FactorRule {
        FactorRule::by_factor(operands, results, |dim| self.factor(dim))
    }

    /// The dimension that represents the factor of `dim`, and its kind.
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
