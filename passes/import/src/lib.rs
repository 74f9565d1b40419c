//! Import: a model description of the HuggingFace library (`config.json`) becomes a program, without weights.
//!
//! Guarantees: an imported program computes the library's function for sequences without padding; any other description
//! is refused. Each field of the description is understood, known to have no influence on the logits, or refused by
//! name. Parameters are bound by the library's names and stored shapes, so a checkpoint is read unchanged and no weight
//! is transposed.
//!
//! Not here: reading files, loading weights, choosing layouts. The runtime decides whether norms and the softmax
//! accumulate in a wider type than the program's.
//!
//! | code | meaning |
//! |---|---|
//! | `M01` | the description is not a JSON object |
//! | `M02` | `model_type` is missing or unknown |
//! | `M03` | a field has the wrong JSON type |
//! | `M04` | a number is out of range |
//! | `M05` | a field asks for a computation that is not supported |
//! | `M06` | a field is unknown and may change the computation |
//! | `M07` | sizes do not match: heads, widths, layer lists |
//! | `M08` | the sequence is longer than the learned positions |
//! | `M09` | the mode is not supported yet |
//! | `M10` | the workload is out of range |
//! | `M11` | the checkpoint's head is not supported |
//! | `M12` | `--ignore-field` names a field that the importer understands |

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

/// Inputs that default to zeros, as in the library.
pub const OPTIONAL_INPUTS: &[&str] = &["token_type_ids"];

/// The use of a program.
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
    /// The label of token `i` is the input's label at `i + ahead`; 1 if the labels are the tokens themselves. Positions
    /// past the end have no label.
    pub ahead: u64,
    /// The label value that is excluded from the loss.
    pub ignore: i64,
}

impl Default for Labels {
    /// Labels aligned with tokens; −100 is excluded, as in the library.
    fn default() -> Self {
        Self { ahead: 0, ignore: -100 }
    }
}

/// The workload of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct Workload {
    /// Sequences.
    pub batch: u64,
    /// Tokens of each sequence; for models with an encoder and a decoder, tokens of the encoder's sequences.
    pub sequence: u64,
    /// Tokens of each decoder sequence, for models with an encoder and a decoder; `sequence` when `None`.
    pub target_sequence: Option<u64>,
    /// Element type of weights and activations; `None` takes the description's (`dtype`, else f32).
    pub dtype: Option<DType>,
    /// The use of the program.
    pub mode: Mode,
    /// The capacity of experts; unlimited when `None`.
    pub capacity: Option<Capacity>,
    /// In training: the alignment of labels with tokens.
    pub labels: Labels,
    /// In training: the options of a step.
    pub training: Training,
    /// Fields of the description that the importer does not know and the caller declares to have no influence;
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
/// A decoder has the input `input_ids` `i32[b s]`, the output `logits` `[b s v]`, and the functions `@embed`, one per
/// kind of block, `@head` and `@main`. A T5 reads `input_ids` `[b s]` and `decoder_input_ids` `[b t]`, which are not
/// shifted, and returns `logits` `[b t v]`. A BERT reads `input_ids` and `token_type_ids` `[b s]`; the second is optional
/// ([`OPTIONAL_INPUTS`]). It returns `logits`, or `last_hidden_state` `[b s m]` and `pooler_output` `[b n]`. No input
/// masks padding: every token counts. With rotary positions a sequence may exceed `max_position_embeddings`, as in the
/// library; with learned positions it is refused.
///
/// # Errors
/// An `M` diagnostic, see the module's table.
pub fn import(config: &Value, name: &str, workload: &Workload) -> Result<Module, Diagnostic> {
    check_workload(workload)?;
    let model = family::read(config, &workload.ignore)?;
    model.check(workload)?;
    build::module(&model, name, workload)
}

/// The whole program of a workload: the module from [`import`], and in training the step that `differentiate` makes of
/// it.
///
/// # Errors
/// As [`import`], and `P50`–`P52` for programs that cannot be differentiated.
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
            return Err(Diagnostic::new(
                "M09",
                format!("mode {} is not supported yet", workload.mode.name()),
            )
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
