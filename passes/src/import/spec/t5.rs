//! What the importer understands of a T5: an encoder, and a decoder that attends to it.

use ithaca_ir::ops::Unary;
use ithaca_ir::{DType, Diagnostic};

use super::{check_elements, check_heads, tokens};
use crate::import::Workload;

/// A T5 with the head of a language model, without its weights.
#[derive(Clone, Debug)]
pub(in crate::import) struct T5 {
    /// The element type that the description states.
    pub(in crate::import) dtype: DType,
    /// Width of the residual streams.
    pub(in crate::import) hidden: u64,
    /// Heads of every attention.
    pub(in crate::import) heads: u64,
    /// Width of a head; heads together may be wider or narrower than the stream.
    pub(in crate::import) head_dim: u64,
    /// Width of the MLP.
    pub(in crate::import) ffn: u64,
    /// Tokens of the vocabulary, which both stacks share.
    pub(in crate::import) vocab: u64,
    /// Added under the root of every norm.
    pub(in crate::import) eps: f64,
    /// The function of the MLP.
    pub(in crate::import) activation: Unary,
    /// Whether a second product gates the MLP.
    pub(in crate::import) gated: bool,
    /// Layers of the encoder.
    pub(in crate::import) encoder_layers: u64,
    /// Layers of the decoder.
    pub(in crate::import) decoder_layers: u64,
    /// Buckets of relative positions.
    pub(in crate::import) buckets: u64,
    /// The distance from which on all keys share the last bucket.
    pub(in crate::import) max_distance: u64,
    /// Whether the head reads the embedding's table.
    pub(in crate::import) tied: bool,
    /// Whether the stream is scaled by `hidden^(−1/2)` before the head.
    pub(in crate::import) scaled: bool,
}

impl T5 {
    /// Tokens of the decoder; as many as the encoder's where nothing is said.
    pub(in crate::import) fn target(workload: &Workload) -> u64 {
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
