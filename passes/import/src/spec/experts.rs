//! Experts, and latent attention.

use ithaca_ir::ops::experts::{ExpertGroups, Gates, Scoring, bounded_slots};
use ithaca_ir::{Diagnostic, Dim};

use super::limits::{check_elements, check_width, tokens};
use crate::workload::Workload;

/// The feed-forward part of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mlp {
    /// One network for all tokens.
    Dense,
    /// A mixture of experts; each token uses a few of them.
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
    /// Width of the shared experts, `None` without shared experts.
    pub(crate) shared: Option<u64>,
    /// The function from logits to scores.
    pub(crate) scoring: Scoring,
    /// The function from scores to gates.
    pub(crate) gates: Gates,
    /// Factor of the gates.
    pub(crate) scale: f64,
    /// Groups of experts.
    pub(crate) groups: Option<ExpertGroups>,
    /// Whether a bias takes part in the choice.
    pub(crate) biased: bool,
    /// Whether the router computes in f32.
    pub(crate) wide_router: bool,
    /// Whether gates have the element type of the tokens.
    pub(crate) rounded_gates: bool,
    /// Whether gates are factors of what experts read, and not of what they compute; each token then has one expert.
    pub(crate) gated_inputs: bool,
    /// Whether the router and the experts add biases.
    pub(crate) biases: bool,
    /// The bound of gate and up before the activation; up is then counted from −1.
    pub(crate) limit: Option<f64>,
}

impl ExpertSpec {
    pub(super) fn check(&self, hidden: u64, workload: &Workload) -> Result<(), Diagnostic> {
        if self.top > self.count {
            let message =
                format!("`num_experts_per_tok` is {}, but there are {} experts", self.top, self.count);
            return Err(Diagnostic::new("M07", message));
        }
        if let Some(capacity) = workload.capacity
            && !workload.sequence.is_multiple_of(capacity.groups())
        {
            let message = format!(
                "a sequence of {} tokens is not divisible by {} groups",
                workload.sequence,
                capacity.groups()
            );
            return Err(Diagnostic::new("M10", message)
                .help("choose GROUPS to divide the sequence in `--capacity FACTOR/GROUPS`"));
        }
        let wide = check_width(self.count, "experts", self.ffn)?;
        let slots = u128::from(self.count) * u128::from(self.slots(workload).0);
        if slots > 1 << 31 {
            let message =
                format!("{} experts have {slots} slots for tokens, which 31 bits do not number", self.count);
            return Err(Diagnostic::new("M04", message).help(
                "describe fewer experts, or use a smaller batch, `--seq`, `--expert-bound` or `--capacity`",
            ));
        }
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

impl ExpertSpec {
    /// The slots of an expert for a group of tokens, and the factor of the even share that they are bounded by; no factor where
    /// further tokens are dropped.
    pub(crate) fn slots(&self, workload: &Workload) -> (u64, Option<f64>) {
        if let Some(capacity) = workload.capacity {
            let tokens = workload.sequence / capacity.groups().max(1);
            return (capacity.slots(tokens, self.top, self.count), None);
        }
        let all = self.count as f64 / self.top.max(1) as f64;
        let bound = workload.expert_bound.map_or(all, |bound| bound.factor().min(all));
        (bounded_slots(bound, workload.batch * workload.sequence, self.top, self.count), Some(bound))
    }
}

/// Widths of latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Latent {
    /// Width of the latent of queries; `None` projects queries from the stream itself.
    pub(crate) queries: Option<u64>,
    /// Width of the latent of keys and values.
    pub(crate) keys: u64,
    /// Elements of a head that are not rotated.
    pub(crate) plain: u64,
    /// Elements of a head that are rotated; all heads share the rotated part of keys.
    pub(crate) rotated: u64,
    /// Width of a value.
    pub(crate) value: u64,
}

impl Latent {
    pub(super) fn check(&self, heads: u64, hidden: u64) -> Result<(), Diagnostic> {
        let wide =
            self.plain.checked_add(self.value).filter(|&n| n <= Dim::MAX_SIZE).unwrap_or(Dim::MAX_SIZE);
        let wide = check_width(heads, "heads", wide)?;
        check_elements(&[
            ("the latents' projections", wide.into(), self.keys.max(self.queries.unwrap_or(1))),
            ("the latents", u128::from(self.keys) + u128::from(self.rotated), hidden),
        ])
    }
}
