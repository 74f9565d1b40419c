//! Mixtures of experts: the choice of experts, dispatch of tokens to them, and combination.
//!
//! ```text
//! %gates, %choices = route %logits {over=r, top=n, …} : f32[b s n], i32[b s n]
//! %places = deal %choices {experts=e, top=n, shared=groups(…), bound=2.0} : i32[b s n]
//! %slots = dispatch %places, %x {experts=e, top=n, shared=groups(…)} : f32[e p g c m]
//! …a feed-forward network whose weights have the dimension e…
//! %y = combine %places, %done, %gates {experts=e, top=n, shared=groups(…)} : f32[b s m]
//! ```
//! The experts are a dimension like any other, so that expert parallelism is a layout: where the weights of experts are
//! split by axes that split tokens elsewhere, a reshard from tokens to experts follows `dispatch`, and one from experts
//! to tokens precedes `combine`, and both become all-to-alls.
//!
//! The tokens of a group share the slots of each expert, dealt in order. *With a bound*, an expert that chooses more tokens
//! than it has slots ends the run, so no result depends on the groups: `shard` makes the tokens of a rank one group. *With a
//! capacity*, the expert drops further tokens. Groups then are runs of tokens of one sequence and belong to the program, so
//! the dropped tokens do not depend on the layout: a layout that would split a group is refused.

mod adjoint;
mod infer;
mod slots;

use crate::dim::DimId;
use crate::rule::{FactorKind, FactorRule};
use crate::types::TensorType;

pub use crate::ops::table::experts::{
    Deal, ExpertGroups, Experts, Gates, Route, Rows, Scoring, Shared, Slots,
};
pub use slots::{EXPECTED_LOAD, FEW_SLOTS, MIN_SLOTS, bounded_slots, expected_slots};

/// Added to the sum that shares are divided by, as the library does.
pub const SHARE_EPS: f64 = 1e-20;

impl Experts {
    /// Whether operand `i` has a gradient: choices have none, and neither does the bias of a choice.
    pub fn has_gradient(&self, i: usize) -> bool {
        match self {
            Experts::Route(_) | Experts::RouteBackward(_) => i != 1,
            Experts::Deal(_) => false,
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
        let (top, shared) = match self {
            Experts::Route(route) | Experts::RouteBackward(route) => {
                let whole = dim == route.over || dim == route.top;
                return (dim, if whole { FactorKind::Whole } else { FactorKind::Parallel });
            }
            Experts::Deal(deal) => (deal.top, &deal.shared),
            Experts::Dispatch(slots) | Experts::Combine(slots) | Experts::Products(slots) => {
                (slots.top, &slots.shared)
            }
        };
        match dim {
            _ if dim == shared.groups => (shared.sequence, FactorKind::Parallel),
            _ if dim == shared.batches => (shared.batch, FactorKind::Parallel),
            _ if dim == shared.slots || dim == top => (dim, FactorKind::Whole),
            _ => (dim, FactorKind::Parallel),
        }
    }
}
