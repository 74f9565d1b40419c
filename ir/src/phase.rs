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

crate::spellings! {
    Phase {
        Forward = "forward",
        Backward = "backward",
        Update = "update",
    }
}
