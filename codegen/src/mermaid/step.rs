//! The steps and phases of a diagram.

use super::mesh::{Arrows, Ends};

/// A part of a training step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// Before inputs are used.
    Load,
    /// The model.
    Forward,
    /// Gradients.
    Backward,
    /// The optimizer.
    Update,
}

impl Phase {
    /// The title of its part of the diagram.
    pub(super) fn title(self) -> &'static str {
        match self {
            Phase::Load => "load",
            Phase::Forward => "forward",
            Phase::Backward => "backward",
            Phase::Update => "update",
        }
    }
}

/// A step of all ranks, or of the ranks of a pipeline stage.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Step {
    /// Local work.
    Local {
        /// Operations by name, in order of first use, with their numbers.
        ops: Vec<(&'static str, u64)>,
        /// The ranks that run it.
        over: Ends,
    },
    /// Collectives of one kind along the same axes, one after another.
    Exchange {
        /// The operation's name.
        kind: &'static str,
        /// The axes, as plans name them.
        axis: String,
        /// Their number.
        count: u64,
        /// Bytes that the busiest rank sends in all of them.
        bytes: u64,
        /// The arrows between ranks.
        arrows: Arrows,
    },
    /// A call.
    Call {
        /// The function's name.
        name: String,
        /// The ranks that run it.
        over: Ends,
        /// The pipeline stage that runs it, as types print it.
        stage: Option<String>,
        /// The number of runs: layers, or parts of the batch.
        layers: u64,
        /// The phase of its steps; `None` if it calls functions itself.
        phase: Option<Phase>,
        /// Its steps.
        steps: Vec<(Phase, Step)>,
    },
    /// Repeated steps, such as those of a ring.
    Again {
        /// The number of repetitions.
        times: u64,
        /// The steps.
        steps: Vec<(Phase, Step)>,
    },
}
