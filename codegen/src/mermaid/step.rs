//! Steps of a diagram, and the phases that they belong to.

use super::mesh::{Arrows, Ends};

/// The part of a training step that something belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Phase {
    /// Before anything is computed of inputs.
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

/// One thing that all ranks do, or those of a stage of a pipeline.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Step {
    /// Local work.
    Local {
        /// Operations by name, in order of first use, with their numbers.
        ops: Vec<(&'static str, u64)>,
        /// The ranks that do it.
        over: Ends,
    },
    /// Collectives of one kind along the same axes, one after another.
    Exchange {
        /// The operation's name.
        kind: &'static str,
        /// The axes, as plans name them.
        axis: String,
        /// How many.
        count: u64,
        /// Bytes that the busiest rank sends in all of them.
        bytes: u64,
        /// Between whom.
        arrows: Arrows,
    },
    /// A call.
    Call {
        /// The function's name.
        name: String,
        /// The ranks that run it.
        over: Ends,
        /// The stage of a pipeline that they are, as types have it.
        stage: Option<String>,
        /// How often it runs: over how many layers, or parts of the batch.
        layers: u64,
        /// The phase of all that it does; none where it calls functions of its own.
        phase: Option<Phase>,
        /// What it does.
        steps: Vec<(Phase, Step)>,
    },
    /// The same steps again and again, as those of a ring.
    Again {
        /// How often.
        times: u64,
        /// The steps.
        steps: Vec<(Phase, Step)>,
    },
}
