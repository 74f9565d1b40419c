//! Mixtures of experts: routing, slots, and their attributes.

use crate::dim::DimId;
use crate::ops::attr::{Attr, Names};
use crate::ops::attribute::{Refused, Value};
use crate::ops::declare::{attributes, call, ops, words};

ops! {
    /// Operations of a mixture of experts.
    #[derive(Clone, Debug, PartialEq)]
    pub enum Experts {
        family Experts {
            /// The experts of each token, the best first, and their weights; a bias affects the choice only.
            Route(route: Route) = "route", "b s r, (r) -> b s n, b s n", Compute, Vector, Largest(6);
            /// The gradient of the logits, from logits, choices and the gradient of the gates; the choice is fixed.
            RouteBackward(route: Route)
                = "route_backward", "b s r, b s n, b s n -> b s r", Compute, Vector, Largest(8);
            /// The slot of each choice of each token: `expert · slots + slot`, counted within the group of the token; −1
            /// without one. Slots are dealt in order of position.
            Deal(deal: Deal) = "deal", "b s n -> b s n", Compute, Vector, Largest(1);
            /// Every token in its slots at the experts of its choice, times its gates; zero in a slot without a token.
            Dispatch(slots: Slots) = "dispatch", "b s n, b s m, (b s n) -> e p g c m", Compute, Vector, Largest(1);
            /// Every token sums its slots, times its gates; a rank sums the experts that it holds.
            Combine(slots: Slots) = "combine", "b s n, e p g c m, (b s n) -> b s m", Compute, Vector, Largest(2);
            /// The product of a token with each of its slots: the gradient of a gate.
            Products(slots: Slots)
                = "slot_products", "b s n, e p g c m, b s m -> b s n", Compute, Vector, Largest(2);
        }
    }
}

attributes! {
    /// The way in which tokens choose experts.
    #[derive(Clone, Debug, PartialEq)]
    pub struct Route {
        /// The experts to choose from, the last dimension of the logits.
        pub over: DimId,
        /// The chosen experts, the last dimension of the result.
        pub top: DimId,
        /// The function from logits to scores: the softmax over all experts, or the sigmoid of each.
        pub scoring: Scoring,
        /// The gates of the chosen experts: their scores, or shares, which are scores divided by their sum.
        pub gates: Gates,
        /// The factor of the gates.
        pub scale: f64 = 1.0,
        /// Experts are in COUNT groups, and a token chooses from the KEPT best groups only.
        pub groups: Option<ExpertGroups> = None,
    }
}

words! {
    /// The rows of a ragged dimension that an all-to-all sends; a tensor without one has all its rows.
    #[derive(Default)]
    pub enum Rows {
        /// Their counts, and then those that are filled.
        #[default]
        Filled = "filled",
        /// All, in one message: of few rows they cost less than the counts do.
        All = "all",
    }
}

words! {
    /// The function from logits to scores.
    pub enum Scoring {
        /// The softmax over all experts.
        Softmax = "softmax",
        /// The logistic function of each.
        Sigmoid = "sigmoid",
    }
}

words! {
    /// The gates of the chosen experts.
    pub enum Gates {
        /// Their scores.
        Scores = "scores",
        /// Their scores, divided by the sum of those that were chosen.
        Shares = "shares",
    }
}

/// Experts in groups, of which a token may choose from the best only (DeepSeek-V3, arXiv 2412.19437, section 2.1.2). The
/// score of a group is the sum of its two best scores, the bias included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertGroups {
    /// Number of groups, a divisor of the experts.
    pub count: u64,
    /// Groups that a token may choose from.
    pub kept: u64,
}

impl Value for ExpertGroups {
    const KIND: &'static str = "best(KEPT, COUNT)";

    fn to_attr(&self, _: Names<'_>) -> Attr {
        Attr::Numbers("best".to_owned(), vec![self.kept, self.count])
    }

    fn from_attr(attr: Attr, _: Names<'_>) -> Result<Self, Refused> {
        match attr {
            Attr::Numbers(name, numbers) if name == "best" && numbers.len() == 2 => {
                Ok(ExpertGroups { kept: numbers[0], count: numbers[1] })
            }
            other => Err(Refused::Kind(other)),
        }
    }
}

attributes! {
    /// The assignment of slots to tokens.
    #[derive(Clone, Copy, Debug, PartialEq)]
    pub struct Deal {
        /// The dimension of the experts that slots have.
        pub experts: DimId,
        /// The last dimension of the choices.
        pub top: DimId,
        /// The groups of tokens and their slots.
        pub shared: Shared,
        /// A token without a slot ends the run: an expert has slots for so many times its even share of a group. When left
        /// out, such a token is dropped by the expert.
        pub bound: Option<f64> = None,
    }
}

attributes! {
    /// The slots of experts, `[e, p, g, c, m]`, which `dispatch` fills and `combine` reads.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Slots {
        /// The dimension of the experts that slots have.
        pub experts: DimId,
        /// The last dimension of the choices.
        pub top: DimId,
        /// The groups of tokens and their slots.
        pub shared: Shared,
    }
}

call! {
    /// Slots that the tokens of a group share. A group has consecutive tokens of consecutive sequences.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Shared as "groups" {
        /// The sequences.
        pub batch: DimId,
        /// Groups of sequences; `batch` itself if a group has tokens of one sequence.
        pub batches: DimId,
        /// The tokens of a sequence.
        pub sequence: DimId,
        /// The groups of a sequence.
        pub groups: DimId,
        /// The slots of an expert for each group.
        pub slots: DimId,
    }
}
