//! Builds the program of a model.
//!
//! Dimensions: `b` sequences, `s` tokens, `m` hidden width, `h` query heads, `k` key/value heads if they are fewer, `d`
//! head width, `f` MLP width, `v` vocabulary, `p` learned positions, `kv` tokens of a cache; T5, BERT, experts and latents have more. Query
//! heads that share a key/value head are a granule of `h`, so no pass can split a group.

mod bert;
mod body;
mod cached;
mod cx;
mod decoder;
mod dims;
mod dropout;
mod drops;
mod experts;
mod latent;
mod loss;
mod t5;

use ithaca_ir::{Diagnostic, Module};

use crate::spec::{Model, Structure};
use crate::workload::{Mode, Workload};
use drops::Drops;

/// The program of a model.
///
/// # Errors
/// The violated invariant of the language; a checked description violates none.
pub(super) fn module(model: &Model, name: &str, workload: &Workload) -> Result<Module, Diagnostic> {
    let drops = Drops::of(&model.dropout, workload.mode);
    let dtype = workload.dtype.unwrap_or(model.dtype);
    let built = match &model.structure {
        Structure::Decoder(spec) => decoder::module(spec, name, workload, dtype, drops),
        Structure::T5(spec) => t5::module(spec, name, workload, dtype, drops),
        Structure::Bert(spec) => bert::module(spec, name, workload, dtype, drops),
    };
    let built = built.map_err(|e| Diagnostic::new(e.code, e.message))?;
    match workload.mode {
        Mode::Train => loss::of_logits(&built, workload.labels),
        Mode::Prefill | Mode::Decode => Ok(built),
    }
}
