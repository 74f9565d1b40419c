//! Experts, and attention through latents.

use ithaca_ir::ops::experts::{ExpertGroups, Gates, Scoring};
use ithaca_ir::{Diagnostic, Dim};

use super::limits::{check_elements, check_heads, tokens};
use crate::workload::Workload;

/// What stands behind attention in a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mlp {
    /// One network for all tokens.
    Dense,
    /// Experts, of which each token has a few.
    Experts,
}

/// The experts of a model.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ExpertSpec {
    /// Number of experts.
    pub(crate) count: u64,
    /// Experts of a token.
    pub(crate) top: u64,
    /// Width of an expert.
    pub(crate) ffn: u64,
    /// Width of what all tokens share beside their experts; none where there is none.
    pub(crate) shared: Option<u64>,
    /// What makes scores of logits.
    pub(crate) scoring: Scoring,
    /// What gates are.
    pub(crate) gates: Gates,
    /// Factor of the gates.
    pub(crate) scale: f64,
    /// Groups of experts.
    pub(crate) groups: Option<ExpertGroups>,
}

impl ExpertSpec {
    pub(super) fn check(&self, hidden: u64, workload: &Workload) -> Result<(), Diagnostic> {
        if self.top > self.count {
            return Err(Diagnostic::new(
                "M07",
                format!("`num_experts_per_tok` is {}, but there are {} experts", self.top, self.count),
            ));
        }
        if let Some(capacity) = workload.capacity
            && !workload.sequence.is_multiple_of(capacity.groups)
        {
            let message = format!(
                "a sequence of {} tokens does not divide into {} groups that share slots",
                workload.sequence, capacity.groups
            );
            return Err(Diagnostic::new("M10", message).help("as in `--capacity FACTOR/GROUPS`"));
        }
        let wide = check_heads(self.count, self.ffn)?;
        check_elements(&[
            ("the experts", wide.into(), hidden),
            (
                "the slots of experts",
                tokens(workload.batch, workload.sequence) * u128::from(self.count),
                hidden.max(self.ffn),
            ),
        ])
    }
}

/// Widths of latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Latent {
    /// Width of the latent of queries; they come from the stream itself where there is none.
    pub(crate) queries: Option<u64>,
    /// Width of the latent of keys and values.
    pub(crate) keys: u64,
    /// Elements of a head that are not rotated.
    pub(crate) plain: u64,
    /// Elements of a head that are rotated; of keys, all heads share them.
    pub(crate) rotated: u64,
    /// Width of a value.
    pub(crate) value: u64,
}

impl Latent {
    pub(super) fn check(&self, heads: u64, hidden: u64) -> Result<(), Diagnostic> {
        let wide =
            self.plain.checked_add(self.value).filter(|&n| n <= Dim::MAX_SIZE).unwrap_or(Dim::MAX_SIZE);
        let wide = check_heads(heads, wide)?;
        check_elements(&[
            ("the latents' projections", wide.into(), self.keys.max(self.queries.unwrap_or(1))),
            ("the latents", u128::from(self.keys) + u128::from(self.rotated), hidden),
        ])
    }
}
