//! Import: a model description of the HuggingFace library (`config.json`) becomes a program, without weights.
//!
//! Guarantees: what comes out computes what the library computes for sequences without padding, or nothing comes out. Every field of the description is understood, known to have no influence on the logits, or
//! refused by name; no field is passed over in silence. Parameters are bound by the library's names and stored shapes,
//! so a checkpoint can be read as it is; no weight is ever transposed.
//!
//! Left to others: reading files, loading weights, choosing layouts. Statistics of norms and of the softmax in a wider
//! type than the program's are a matter of the runtime.
//!
//! | code | meaning |
//! |---|---|
//! | `M01` | the description is not a JSON object |
//! | `M02` | `model_type` is missing or unknown |
//! | `M03` | a field has the wrong JSON type |
//! | `M04` | a number is outside the range that makes sense |
//! | `M05` | a field asks for a computation that is not supported |
//! | `M06` | a field is unknown, so nobody can say that it has no influence |
//! | `M07` | sizes do not fit each other: heads, widths, layer lists |
//! | `M08` | the sequence is longer than the learned positions |
//! | `M09` | the mode is not supported yet |
//! | `M10` | the workload is out of range |
//! | `M11` | the checkpoint has another head than those that are imported |
//! | `M12` | a field that is understood was asked to be ignored |

mod build;
mod capacity;
mod family;
mod fields;
mod rope;
mod shrink;
mod spec;

use ithaca_differentiate::{Differentiate, Training};
use ithaca_ir::{DType, Diagnostic, Diagnostics, Module};
use ithaca_pass::{Context, Pass, Unwatched, Volume, run_passes};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

pub use capacity::Capacity;
pub use family::FAMILIES;
pub use shrink::{Shrink, shrink};

/// Inputs that are zero where they are not given, as the library has them.
pub const OPTIONAL_INPUTS: &[&str] = &["token_type_ids"];

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

/// The program of the model that `config` describes, called `name`.
///
/// Of a decoder, input `input_ids` is `i32[b s]`, output `logits` is `[b s v]`, and functions are `@embed`, one per kind
/// of block, `@head` and `@main`. A T5 reads `input_ids` `[b s]` and `decoder_input_ids` `[b t]`, which are not shifted,
/// and returns `logits` `[b t v]`. A BERT reads `input_ids` and `token_type_ids` `[b s]`, of which
/// the second is optional ([`OPTIONAL_INPUTS`]). It returns `logits`, or `last_hidden_state` `[b s m]` and `pooler_output`
/// `[b n]`. The inputs have no padding mask: every token counts. A sequence beyond `max_position_embeddings` is accepted
/// for rotary positions, as the library computes it too; for learned positions it is refused.
///
/// # Errors
/// An `M` diagnostic, see the module's table.
pub fn import(config: &Value, name: &str, workload: &Workload) -> Result<Module, Diagnostic> {
    check_workload(workload)?;
    let model = family::read(config, &workload.ignore)?;
    model.check(workload)?;
    build::module(&model, name, workload)
}

/// The whole program of a workload: what [`import`] gives, and in training the step that `differentiate` makes of it.
///
/// # Errors
/// As [`import`], and `P50`–`P52` for what cannot be differentiated.
pub fn program(config: &Value, name: &str, workload: &Workload) -> Result<Module, Diagnostics> {
    let module = import(config, name, workload).map_err(|refusal| vec![refusal])?;
    match workload.mode {
        Mode::Prefill | Mode::Decode => Ok(module),
        Mode::Train => {
            let pass: Box<dyn Pass> = Box::new(Differentiate::new(workload.training.clone()));
            run_passes(module, &[pass], &mut Context::new(&Volume), &mut Unwatched)
        }
    }
}

fn check_workload(workload: &Workload) -> Result<(), Diagnostic> {
    match workload.mode {
        Mode::Prefill | Mode::Train => {}
        Mode::Decode => {
            return Err(Diagnostic::new("M09", format!("mode {} is not there yet", workload.mode.name()))
                .help("import the model for prefill")
                .repairs(["--mode prefill".to_owned()]));
        }
    }
    // Positions are 32-bit integers.
    const MAX_TOKENS: u64 = (1 << 31) - 1;
    let lengths = [
        ("sequences", workload.batch, 1 << 31),
        ("tokens", workload.sequence, MAX_TOKENS),
        ("tokens of the target", workload.target_sequence.unwrap_or(1), MAX_TOKENS),
    ];
    for (what, n, max) in lengths {
        if n == 0 || n > max {
            return Err(Diagnostic::new("M10", format!("a workload of {n} {what}; it needs 1 to {max}")));
        }
    }
    match workload.dtype {
        Some(dtype) if !dtype.is_float() => {
            Err(Diagnostic::new("M10", format!("a model cannot compute in {dtype}"))
                .help("choose f32, bf16, f16 or f64"))
        }
        Some(_) | None => Ok(()),
    }
}

#[cfg(test)]
mod tests;
