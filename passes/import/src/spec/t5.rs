//! The structure of a T5: an encoder, and a decoder that attends to it.

use ithaca_ir::Diagnostic;
use ithaca_ir::diagnostic::counted;

use super::limits::check_elements;
use super::sizes::Sizes;
use crate::workload::Workload;

/// A T5 with the head of a language model, without its weights.
#[derive(Clone, Debug)]
pub(crate) struct T5 {
    /// The sizes of every family, for both stacks; `layers` are those of the encoder. Heads together may be wider or
    /// narrower than the stream, and no table bounds positions.
    pub(crate) sizes: Sizes,
    /// Whether a second product gates the MLP.
    pub(crate) gated: bool,
    /// Layers of the decoder.
    pub(crate) decoder_layers: u64,
    /// Buckets of relative positions.
    pub(crate) buckets: u64,
    /// The distance from which all keys share the last bucket.
    pub(crate) max_distance: u64,
    /// Whether the stream is scaled by `hidden^(−1/2)` before the head.
    pub(crate) scaled: bool,
    /// The token that every sequence of the decoder starts with.
    pub(crate) first: u64,
}

impl T5 {
    /// Tokens of the decoder: by default as many as the encoder's; one where sequences are continued.
    pub(crate) fn target(workload: &Workload) -> u64 {
        if workload.cache.is_some() { 1 } else { workload.target_sequence.unwrap_or(workload.sequence) }
    }

    pub(super) fn check(&self, workload: &Workload) -> Result<(), Diagnostic> {
        if let (Some(_), Some(target)) = (workload.cache, workload.target_sequence) {
            let message = format!(
                "a target sequence of {}, and each step continues sequences by one",
                counted(target, "token")
            );
            return Err(Diagnostic::new("M09", message).help("leave `--target-seq` out"));
        }
        self.sizes.check(None, workload)?;
        let target = Workload { sequence: Self::target(workload), ..workload.clone() };
        self.sizes.check(None, &target)?;
        check_elements(&[("the biases of relative positions", self.buckets.into(), self.sizes.heads)])
    }
}
