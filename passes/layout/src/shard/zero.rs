//! ZeRO: the parts of parameters, gradients and optimizer states on ranks that split tokens (Rajbhandari et al., arXiv
//! 1910.02054).
//!
//! Ranks that hold other tokens hold the same weights, so one dimension of each tensor can be split among them further
//! than tensor parallelism does: the first that divides. What a stage splits is all that is said here; the collectives
//! follow from layouts, as everywhere:
//!
//! - without ZeRO gradients are all-reduced and every rank makes the same step;
//! - stages 1 and 2 reduce-scatter gradients, make the step on shards, and all-gather new weights;
//! - stage 3 gathers weights where they are used, forward and backward, and keeps none of it.
//!
//! Without ZeRO and at stage 1 each rank sums the gradients of its own micro-batches, whole, and they are reduced once,
//! with the last micro-batch. From stage 2 on no rank holds a whole gradient: each micro-batch's is reduced as soon as it
//! is made.

use std::fmt;
use std::str::FromStr;

use ithaca_ir::Diagnostic;
use ithaca_ir::ops::{Binding, Target, state};

use crate::fuse::Fusion;
use crate::fuse::prefetch::Prefetch;

/// What is split over ranks that hold the same weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Zero {
    /// Nothing.
    #[default]
    Off,
    /// States of the optimizer, and gradients (see the module).
    Optimizer,
    /// Gradients too.
    Gradients,
    /// Parameters too.
    Parameters,
}

impl Zero {
    /// Every stage.
    pub const ALL: [Zero; 4] = [Zero::Off, Zero::Optimizer, Zero::Gradients, Zero::Parameters];

    /// The number of the stage.
    pub fn stage(self) -> u64 {
        self as u64
    }

    /// The fusion of a plan that asks for none: coalesced messages, folded into kernels, and prefetched weights where
    /// ranks hold parts of them.
    pub fn usual_fusion(self) -> Fusion {
        let usual = Fusion::PACK.folded();
        match self {
            Zero::Off | Zero::Optimizer | Zero::Gradients => usual,
            Zero::Parameters => usual.ahead(Prefetch::default()),
        }
    }

    /// The stage of this number.
    ///
    /// # Errors
    /// `P02` for a number above 3.
    pub fn of_stage(stage: u64) -> Result<Self, Diagnostic> {
        let found = Self::ALL.into_iter().find(|z| z.stage() == stage);
        found.ok_or_else(|| {
            Diagnostic::new("P02", format!("there is no ZeRO stage {stage}"))
                .help("0 splits nothing, 1 and 2 states of the optimizer and gradients, 3 parameters too")
        })
    }

    /// Whether each rank sums the gradients of its micro-batches before they are reduced.
    pub(super) fn keeps_sums(self) -> bool {
        self <= Zero::Optimizer
    }

    /// Whether the stage splits the tensor under `binding`.
    pub(super) fn splits(self, target: Target, binding: &Binding) -> bool {
        let of_optimizer = [state::FIRST_MOMENT, state::SECOND_MOMENT, state::MASTER];
        match target {
            Target::Param => self >= Zero::Parameters,
            Target::State if state::is_gradient(&binding.name) => self >= Zero::Optimizer,
            Target::State => {
                self >= Zero::Optimizer && of_optimizer.iter().any(|p| binding.name.starts_with(p))
            }
        }
    }
}

impl fmt::Display for Zero {
    /// The number of the stage.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.stage())
    }
}

impl FromStr for Zero {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let stage = text.parse().ok().and_then(|stage| Self::of_stage(stage).ok());
        stage.ok_or("a stage from 0 to 3")
    }
}
