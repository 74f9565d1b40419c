//! What the importer understands of a BERT: an encoder, and one of two heads.

use ithaca_ir::ops::Unary;
use ithaca_ir::{DType, Diagnostic};

use super::limits::{check_elements, check_heads, check_no_target, check_positions, tokens};
use crate::workload::Workload;

/// A BERT, without its weights.
#[derive(Clone, Debug)]
pub(crate) struct Bert {
    /// The element type that the description states.
    pub(crate) dtype: DType,
    /// Width of the residual stream; heads together are as wide.
    pub(crate) hidden: u64,
    /// Heads.
    pub(crate) heads: u64,
    /// Width of the MLP.
    pub(crate) ffn: u64,
    /// Tokens of the vocabulary.
    pub(crate) vocab: u64,
    /// The row of the embedding through which no gradient flows.
    pub(crate) padding: Option<u64>,
    /// Types of token.
    pub(crate) types: u64,
    /// Rows of the table of learned positions.
    pub(crate) positions: u64,
    /// Added to the variance in every norm.
    pub(crate) eps: f64,
    /// The function of the MLP, and of the head of the masked language model.
    pub(crate) activation: Unary,
    /// Layers.
    pub(crate) layers: u64,
    /// What reads the encoder's output.
    pub(crate) head: BertHead,
}

/// What reads the encoder's output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BertHead {
    /// The pooler, which reads the first token; the output itself is returned too.
    Pooler,
    /// A score for each token of the vocabulary.
    MaskedLm {
        /// Whether it reads the embedding's table.
        tied: bool,
    },
}

impl Bert {
    /// Width of a head.
    pub(crate) fn head_dim(&self) -> u64 {
        self.hidden / self.heads
    }

    pub(super) fn check(&self, workload: &Workload) -> Result<(), Diagnostic> {
        check_no_target("bert", workload)?;
        let wide = check_heads(self.heads, self.head_dim())?;
        let widest = self.hidden.max(self.ffn).max(self.vocab);
        check_elements(&[
            ("the attention's projections", wide.into(), self.hidden),
            ("the MLP's projections", self.ffn.into(), self.hidden),
            ("the embedding", self.vocab.into(), self.hidden),
            ("the types of token", self.types.into(), self.hidden),
            ("the positions", self.positions.into(), self.hidden),
            ("the activations", tokens(workload.batch, workload.sequence), widest),
        ])?;
        check_positions("max_position_embeddings", self.positions, workload)
    }
}
