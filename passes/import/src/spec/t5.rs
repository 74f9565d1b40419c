//! The structure of a T5: an encoder, and a decoder that attends to it.

use ithaca_ir::Diagnostic;
use ithaca_ir::ops::Unary;

use super::limits::{check_elements, check_heads, tokens};
use crate::workload::Workload;

/// A T5 with the head of a language model, without its weights.
#[derive(Clone, Debug)]
pub(crate) struct T5 {
    /// Width of the residual streams.
    pub(crate) hidden: u64,
    /// Heads of every attention.
    pub(crate) heads: u64,
    /// Width of a head; heads together may be wider or narrower than the stream.
    pub(crate) head_dim: u64,
    /// Width of the MLP.
    pub(crate) ffn: u64,
    /// Tokens of the vocabulary, which both stacks share.
    pub(crate) vocab: u64,
    /// The epsilon of every norm.
    pub(crate) eps: f64,
    /// The activation of the MLP.
    pub(crate) activation: Unary,
    /// Whether a second product gates the MLP.
    pub(crate) gated: bool,
    /// Layers of the encoder.
    pub(crate) encoder_layers: u64,
    /// Layers of the decoder.
    pub(crate) decoder_layers: u64,
    /// Buckets of relative positions.
    pub(crate) buckets: u64,
    /// The distance from which all keys share the last bucket.
    pub(crate) max_distance: u64,
    /// Whether the head reads the embedding's table.
    pub(crate) tied: bool,
    /// Whether the stream is scaled by `hidden^(−1/2)` before the head.
    pub(crate) scaled: bool,
}

impl T5 {
    /// Tokens of the decoder; by default as many as the encoder's.
    pub(crate) fn target(workload: &Workload) -> u64 {
        workload.target_sequence.unwrap_or(workload.sequence)
    }

    pub(super) fn check(&self, workload: &Workload) -> Result<(), Diagnostic> {
        let wide = check_heads(self.heads, self.head_dim)?;
        let widest = self.hidden.max(wide).max(self.ffn).max(self.vocab);
        check_elements(&[
            ("the attention's projections", wide.into(), self.hidden),
            ("the MLP's projections", self.ffn.into(), self.hidden),
            ("the embedding", self.vocab.into(), self.hidden),
            ("the biases of relative positions", self.buckets.into(), self.heads),
            ("the encoder's activations", tokens(workload.batch, workload.sequence), widest),
            ("the decoder's activations", tokens(workload.batch, Self::target(workload)), widest),
        ])
    }
}
