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
            /// Every token in its slots at the experts of its choice, times its gates; zero in a slot without a token.
            Dispatch(slots: Slots) = "dispatch", "b s n, b s m, (b s n) -> e b s m", Compute, Vector, Largest(1);
            /// Every token sums its slots, times its gates; a rank sums the experts that it holds.
            Combine(slots: Slots) = "combine", "b s n, e b s m, (b s n) -> b s m", Compute, Vector, Largest(2);
            /// The product of a token with each of its slots: the gradient of a gate.
            Products(slots: Slots)
                = "slot_products", "b s n, e b s m, b s m -> b s n", Compute, Vector, Largest(2);
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
    /// The slots of experts, which `dispatch` fills and `combine` reads.
    ///
    /// Without a capacity their type is `[e, tokens…, m]`: each token has slots of its own. With one it is
    /// `[e, tokens…, c, m]`, `tokens…` naming groups in place of the sequence.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Slots {
        /// The dimension of the experts that slots have.
        pub experts: DimId,
        /// The last dimension of the choices.
        pub top: DimId,
        /// The tokens of a group share slots, dealt in order of position; a slot for every token when left out.
        pub capacity: Option<Capacity> = None,
    }
}

call! {
    /// Slots that the tokens of a group share, dealt in order of position.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Capacity as "dealt" {
        /// The sequence whose tokens are grouped.
        pub sequence: DimId,
        /// The groups of a sequence, runs of as many tokens each.
        pub groups: DimId,
        /// The slots of an expert for each group.
        pub slots: DimId,
    }
}
