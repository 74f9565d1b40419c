//! Phases of a training step.

use serde::{Deserialize, Serialize};

/// When in a step a function runs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// In the forward pass.
    #[default]
    Forward,
    /// In the backward pass.
    Backward,
    /// In the step of the optimizer.
    Update,
}

impl Phase {
    /// Every phase, in the order of a step.
    pub const ALL: [Phase; 3] = [Phase::Forward, Phase::Backward, Phase::Update];

    /// The spelling in text forms, plans and tables.
    pub fn name(self) -> &'static str {
        match self {
            Phase::Forward => "forward",
            Phase::Backward => "backward",
            Phase::Update => "update",
        }
    }

    /// The phase spelled `name`.
    pub fn parse(name: &str) -> Option<Phase> {
        Self::ALL.into_iter().find(|phase| phase.name() == name)
    }
}
