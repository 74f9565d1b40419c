//! What the importer understands of a BERT: an encoder, and one of two heads.

use ithaca_ir::ops::Unary;
use ithaca_ir::{DType, Diagnostic};

use super::{check_elements, check_heads, check_no_target, check_positions, tokens};
use crate::import::Workload;

/// A BERT, without its weights.
#[derive(Clone, Debug)]
pub(in crate::import) struct Bert {
    /// The element type that the description states.
    pub(in crate::import) dtype: DType,
    /// Width of the residual stream; heads together are as wide.
    pub(in crate::import) hidden: u64,
    /// Heads.
    pub(in crate::import) heads: u64,
    /// Width of the MLP.
    pub(in crate::import) ffn: u64,
    /// Tokens of the vocabulary.
    pub(in crate::import) vocab: u64,
    /// The row of the embedding through which no gradient flows.
    pub(in crate::import) padding: Option<u64>,
    /// Types of token.
    pub(in crate::import) types: u64,
    /// Rows of the table of learned positions.
    pub(in crate::import) positions: u64,
    /// Added to the variance in every norm.
    pub(in crate::import) eps: f64,
    /// The function of the MLP, and of the head of the masked language model.
    pub(in crate::import) activation: Unary,
    /// Layers.
    pub(in crate::import) layers: u64,
    /// What reads the encoder's output.
    pub(in crate::import) head: BertHead,
}

/// What reads the encoder's output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::import) enum BertHead {
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
    pub(in crate::import) fn head_dim(&self) -> u64 {
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
