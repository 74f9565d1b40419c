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
mod documents;
mod facts;
mod family;
mod fields;
mod rope;
mod shrink;
mod spec;
mod text;
mod workload;

use std::collections::BTreeSet;

use ithaca_differentiate::{self as differentiate, Differentiate};
use ithaca_ir::ops::Binding;
use ithaca_ir::{Diagnostic, Diagnostics, Module, Op};
use ithaca_pass::{Context, Pass, Unwatched, Volume, run_passes};
use serde_json::Value;

use spec::Structure;

pub use capacity::{Capacity, ExpertBound};
pub use documents::Documents;
pub use facts::{ExpertFacts, Facts, LlamaFacts, facts};
pub use family::{families, stored_weights, text_part};
pub use shrink::{Cuts, Degrees, Detail, OfSize, Shrink, SmallTokens, shrink};
pub use text::{of_program, program_text, workload_of};
pub use workload::{Labels, Logits, Mode, Pages, STEP, Workload};

/// Inputs that default to zeros, as in the library.
pub const OPTIONAL_INPUTS: &[&str] = &["token_type_ids"];

/// The program of the model that `config` describes, called `name`.
///
/// A decoder has the input `input_ids` `i32[b s]`, the output `logits` `[b s v]`, `[b v]` for the last token, and the functions `@embed`, one per
/// kind of block, `@head` and `@main`. A T5 reads `input_ids` `[b s]` and `decoder_input_ids` `[b t]`, which are not
/// shifted, and returns `logits` `[b t v]` or `[b v]`. A BERT reads `input_ids` and `token_type_ids` `[b s]`; the second is optional
/// ([`OPTIONAL_INPUTS`]). It returns `logits`, or `last_hidden_state` `[b s m]` and `pooler_output` `[b n]`. No input
/// masks padding: every token counts. With rotary positions a sequence may exceed `max_position_embeddings`, as in the
/// library; with learned positions it is refused.
///
/// A description that is a program in text form ([`of_program`]) is that program, with its own name.
///
/// # Errors
/// An `M` diagnostic, see the module's table.
pub fn import(config: &Value, name: &str, workload: &Workload) -> Result<Module, Diagnostic> {
    check_workload(workload)?;
    if let Some(text) = program_text(config) {
        return text::import(text, workload);
    }
    let model = family::read(config, &workload.ignore)?;
    model.check(workload)?;
    build::module(&model, name, workload)
}

/// Whether the model that `config` describes predicts a token from those before it, so that the last token's logits are
/// enough to continue a sequence.
///
/// # Errors
/// An `M` diagnostic for a description that cannot be imported; `ignore` are the fields declared without influence.
pub fn predicts_next(config: &Value, ignore: &[String]) -> Result<bool, Diagnostic> {
    if program_text(config).is_some() {
        return Ok(false);
    }
    let model = family::read(config, ignore)?;
    Ok(match model.structure {
        Structure::Decoder(_) | Structure::T5(_) => true,
        Structure::Bert(_) => false,
    })
}

/// Whether the model that `config` describes has an encoder that reads prompts, so that none can be continued in parts.
///
/// # Errors
/// An `M` diagnostic for a description that cannot be imported; `ignore` are the fields declared without influence.
pub fn encodes_prompts(config: &Value, ignore: &[String]) -> Result<bool, Diagnostic> {
    if program_text(config).is_some() {
        return Ok(false);
    }
    Ok(matches!(family::read(config, ignore)?.structure, Structure::T5(_)))
}

/// A name for the model that `config` describes, the same wherever the description is: its type and its parameters, as in
/// `llama-8.0b`. A program in text form has a name of its own.
///
/// # Errors
/// An `M` diagnostic for a description that cannot be imported; `ignore` are the fields declared without influence.
pub fn described_name(config: &Value, ignore: &[String]) -> Result<String, Diagnostic> {
    if let Some(text) = program_text(config) {
        return ithaca_ir::text::parse(text).map(|module| module.name).map_err(ithaca_pass::first);
    }
    let kind = config.get("model_type").and_then(Value::as_str).unwrap_or("model");
    let workload = Workload { ignore: ignore.to_vec(), ..Workload::prefill(1, 1) };
    let parameters = parameters(&import(config, kind, &workload)?) as f64;
    let (number, unit, decimals) = match parameters {
        n if n >= 1e9 => (n / 1e9, "b", 1),
        n if n >= 1e6 => (n / 1e6, "m", 0),
        n => (n / 1e3, "k", 0),
    };
    Ok(format!("{kind}-{number:.decimals$}{unit}"))
}

/// The elements of all weights; of a weight that several functions read, once.
pub fn parameters(module: &Module) -> u64 {
    elements(module, |op| match op {
        Op::Param(binding) => Some(binding),
        _ => None,
    })
}

/// The elements of all weights and states, such as moments and caches.
pub fn held(module: &Module) -> u64 {
    elements(module, |op| match op {
        Op::Param(binding) | Op::State(binding) => Some(binding),
        _ => None,
    })
}

/// The elements of the sources that `of` names; of one that several functions read, once.
fn elements(module: &Module, of: impl Fn(&Op) -> Option<&Binding>) -> u64 {
    let mut shared = BTreeSet::new();
    let mut all = 0;
    for (function, runs) in module.functions.values().zip(module.run_counts()) {
        for node in &function.nodes {
            let Some(binding) = of(&node.op) else { continue };
            let is_of_layer = binding.name.contains("{layer}");
            if is_of_layer || shared.insert(&binding.name) {
                let elements: u64 = module.space.shape(function.ty(node.result())).iter().product();
                all = elements.saturating_mul(if is_of_layer { runs } else { 1 }).saturating_add(all);
            }
        }
    }
    all
}

/// The whole program of a workload: the module from [`import`], in the workload's stages; in training the step that
/// `differentiate` makes of it.
///
/// # Errors
/// As [`import`], `P50`–`P52` for programs that cannot be differentiated, and `P53` for stages without a layer.
pub fn program(config: &Value, name: &str, workload: &Workload) -> Result<Module, Diagnostics> {
    let import = |workload: &Workload| import(config, name, workload).map_err(|refusal| vec![refusal]);
    match workload.mode {
        Mode::Prefill | Mode::Decode => match (workload.training.stages, workload.training.micro_batches) {
            (1, _) => Ok(import(workload)?),
            (_, 1) => Ok(differentiate::in_stages(&import(workload)?, &workload.training)?),
            (_, n) => {
                let one = import(&workload.of_micro_batch(n).map_err(|refusal| vec![refusal])?)?;
                Ok(differentiate::in_micro_batches(&differentiate::in_stages(&one, &workload.training)?, n)?)
            }
        },
        Mode::Train => {
            let module = import(workload)?;
            let pass: Box<dyn Pass> = Box::new(Differentiate::new(workload.training.clone()));
            run_passes(module, &[pass], &mut Context::new(&Volume), &mut Unwatched)
        }
    }
}

fn check_workload(workload: &Workload) -> Result<(), Diagnostic> {
    // Positions are 32-bit integers.
    const MAX_TOKENS: u64 = (1 << 31) - 1;
    let lengths = [
        ("sequences", workload.batch, 1 << 31),
        ("tokens", workload.sequence, MAX_TOKENS),
        ("tokens of the target", workload.target_sequence.unwrap_or(1), MAX_TOKENS),
        ("tokens of the cache", workload.cache.unwrap_or(1), MAX_TOKENS),
    ];
    for (what, n, max) in lengths {
        if n == 0 || n > max {
            return Err(Diagnostic::new("M10", format!("a workload of {n} {what}; it needs 1 to {max}")));
        }
    }
    match workload.dtype {
        Some(dtype) if !dtype.is_arithmetic() => {
            Err(Diagnostic::new("M10", format!("a model cannot compute in {dtype}"))
                .help("choose f32, bf16, f16 or f64"))
        }
        Some(_) | None => Ok(()),
    }
}

#[cfg(test)]
mod tests;
