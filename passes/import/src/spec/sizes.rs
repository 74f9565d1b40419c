//! The sizes that most models have.

use ithaca_ir::Diagnostic;
use ithaca_ir::ops::Unary;

use super::limits::{check_elements, check_width, tokens};
use crate::workload::Workload;

/// The sizes and constants that BERT and every family of decoders have.
#[derive(Clone, Debug)]
pub(crate) struct Sizes {
    /// Width of the residual stream.
    pub(crate) hidden: u64,
    /// Query heads.
    pub(crate) heads: u64,
    /// Key/value heads, a divisor of `heads`.
    pub(crate) kv_heads: u64,
    /// Width of a head.
    pub(crate) head_dim: u64,
    /// Width of the MLP.
    pub(crate) ffn: u64,
    /// Tokens of the vocabulary.
    pub(crate) vocab: u64,
    /// Layers.
    pub(crate) layers: u64,
    /// The epsilon of every norm.
    pub(crate) eps: f64,
    /// The activation of the MLP.
    pub(crate) activation: Unary,
    /// The longest sequence in training.
    pub(crate) max_positions: u64,
    /// Whether the head reads the embedding's table.
    pub(crate) tied: bool,
    /// The row of the embedding that receives no gradient.
    pub(crate) padding: Option<u64>,
}

impl Sizes {
    /// Checks the sizes of tensors; `positions` are the rows of a table of learned positions.
    pub(super) fn check(&self, positions: Option<u64>, workload: &Workload) -> Result<(), Diagnostic> {
        let Sizes { hidden, heads, head_dim, ffn, vocab, .. } = *self;
        let wide = check_width(heads, "heads", head_dim)?;
        let widest = hidden.max(wide).max(ffn).max(vocab);
        check_elements(&[
            ("the attention's projections", wide.into(), hidden),
            ("the MLP's projections", ffn.into(), hidden),
            ("the embedding", vocab.into(), hidden),
            ("the positions", positions.unwrap_or(1).into(), hidden),
            ("the activations", tokens(workload.batch, workload.sequence), widest),
        ])
    }
}
