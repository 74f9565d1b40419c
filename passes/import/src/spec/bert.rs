//! The structure of a BERT: an encoder and one of two heads.

use ithaca_ir::Diagnostic;

use super::limits::{check_elements, check_positions};
use super::sizes::Sizes;
use crate::workload::Workload;

/// A BERT, without its weights.
#[derive(Clone, Debug)]
pub(crate) struct Bert {
    /// The sizes of every family; `max_positions` is the rows of the table of learned positions, and `tied` is about
    /// the head of a masked language model.
    pub(crate) sizes: Sizes,
    /// Token types.
    pub(crate) types: u64,
    /// The head.
    pub(crate) head: BertHead,
}

/// The head of a BERT.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BertHead {
    /// The pooler, which reads the first token; the encoder's output is returned too.
    Pooler,
    /// The logits of a masked language model.
    MaskedLm,
}

impl Bert {
    pub(super) fn check(&self, workload: &Workload) -> Result<(), Diagnostic> {
        let Sizes { hidden, max_positions, .. } = self.sizes;
        self.sizes.check(Some(max_positions), workload)?;
        check_elements(&[("the token types", self.types.into(), hidden)])?;
        check_positions("max_position_embeddings", max_positions, workload)
    }
}
