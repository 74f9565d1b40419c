//! What a model is asked to do: how much, in which type, and for what.

use ithaca_differentiate::Training;
use ithaca_ir::DType;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::capacity::Capacity;

/// What the program is run for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Mode {
    /// All tokens of a sequence at once, no gradients.
    #[default]
    Prefill,
    /// Forward and backward.
    Train,
    /// One token at a time, against a cache of keys and values.
    Decode,
}

impl Mode {
    /// Every mode.
    pub const ALL: [Mode; 3] = [Mode::Prefill, Mode::Train, Mode::Decode];

    /// The spelling on the command line and in plans.
    pub fn name(self) -> &'static str {
        match self {
            Mode::Prefill => "prefill",
            Mode::Train => "train",
            Mode::Decode => "decode",
        }
    }

    /// The mode spelled `name`.
    pub fn parse(name: &str) -> Option<Mode> {
        Mode::ALL.into_iter().find(|m| m.name() == name)
    }
}

/// Which label belongs to which token, and which labels count.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Labels {
    /// The label of token `i` is that at `i + ahead` of the input; 1 where the labels are the tokens themselves. Beyond the
    /// end no label counts.
    pub ahead: u64,
    /// The label that counts for nothing.
    pub ignore: i64,
}

impl Default for Labels {
    /// Labels as they stand beside the tokens; −100 counts for nothing, as in the library.
    fn default() -> Self {
        Self { ahead: 0, ignore: -100 }
    }
}

/// What a model is asked to do.
#[derive(Clone, Debug, PartialEq)]
pub struct Workload {
    /// Sequences.
    pub batch: u64,
    /// Tokens of each sequence; of the encoder's, where there is one beside the decoder.
    pub sequence: u64,
    /// Tokens of each sequence of the decoder, for models with an encoder and a decoder; `sequence` when `None`.
    pub target_sequence: Option<u64>,
    /// Element type of weights and activations; that of the description (`dtype`, else f32) when `None`.
    pub dtype: Option<DType>,
    /// What the program is run for.
    pub mode: Mode,
    /// Of models with experts: how many tokens an expert takes; all that choose it when `None`.
    pub capacity: Option<Capacity>,
    /// In training: which label belongs to which token.
    pub labels: Labels,
    /// In training: what a step does beside the forward pass.
    pub training: Training,
    /// Fields of the description that the caller knows to have no influence, though the importer does not know them;
    /// `rope_scaling.name` for a field of the rotary parameters.
    pub ignore: Vec<String>,
}

impl Workload {
    /// Prefill in the description's element type.
    pub fn prefill(batch: u64, sequence: u64) -> Self {
        Self {
            batch,
            sequence,
            target_sequence: None,
            dtype: None,
            mode: Mode::Prefill,
            capacity: None,
            labels: Labels::default(),
            training: Training::default(),
            ignore: Vec::new(),
        }
    }
}
