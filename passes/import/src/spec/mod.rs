//! What the importer understands of a model: one form for all families of decoders, and one each for T5 and BERT.

mod bert;
mod experts;
mod family;
mod limits;
mod t5;

use std::ops::Range;

use ithaca_ir::ops::{Pairs, Scaling, Unary};
use ithaca_ir::{DType, Diagnostic, Mask};

use crate::workload::Workload;
use limits::{check_elements, check_heads, check_no_target, check_positions, tokens};

pub(super) use bert::{Bert, BertHead};
pub(super) use experts::{ExpertSpec, Latent, Mlp};
pub(super) use family::Family;
pub(super) use limits::check_layers;
pub(super) use t5::T5;

/// A model, without its weights.
#[derive(Clone, Debug)]
pub(super) struct Model {
    /// What it computes.
    pub(super) structure: Structure,
    /// What it drops in training.
    pub(super) dropout: Dropouts,
}

/// What a model computes.
#[derive(Clone, Debug)]
pub(super) enum Structure {
    /// A decoder alone.
    Decoder(Box<Spec>),
    /// An encoder and a decoder that attends to it, as T5 has them.
    T5(T5),
    /// An encoder alone, as BERT is one.
    Bert(Bert),
}

/// What a model drops in training; nothing is dropped in a prefill.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Dropouts {
    /// The share of attention weights.
    pub(super) attention: f64,
    /// The share of what blocks add to the stream; T5 drops inside its MLP as well, and behind its last norms.
    pub(super) residual: f64,
    /// The share of what the embedding gives.
    pub(super) embedding: f64,
}

impl Model {
    /// Checks that heads, widths and sizes fit each other and the workload.
    pub(super) fn check(&self, workload: &Workload) -> Result<(), Diagnostic> {
        let has_experts = matches!(&self.structure, Structure::Decoder(spec) if spec.experts.is_some());
        if let Some(capacity) = workload.capacity.filter(|_| !has_experts) {
            let message = format!("a capacity of {capacity}, but the model has no experts");
            return Err(Diagnostic::new("M10", message).help("leave `--capacity` out"));
        }
        match &self.structure {
            Structure::Decoder(spec) => spec.check(workload),
            Structure::T5(t5) => t5.check(workload),
            Structure::Bert(bert) => bert.check(workload),
        }
    }
}

/// A decoder, without its weights.
#[derive(Clone, Debug)]
pub(super) struct Spec {
    /// Whose names and structure it has.
    pub(super) family: Family,
    /// The element type that the description states.
    pub(super) dtype: DType,
    /// Width of the residual stream.
    pub(super) hidden: u64,
    /// Query heads.
    pub(super) heads: u64,
    /// Key/value heads, a divisor of `heads`.
    pub(super) kv_heads: u64,
    /// Width of a head.
    pub(super) head_dim: u64,
    /// Width of the MLP.
    pub(super) ffn: u64,
    /// Tokens of the vocabulary.
    pub(super) vocab: u64,
    /// Added under the root of every norm.
    pub(super) eps: f64,
    /// The function of the MLP.
    pub(super) activation: Unary,
    /// Kinds of block, in order of first appearance.
    pub(super) kinds: Vec<Kind>,
    /// Runs of layers of one kind, an index of `kinds`, in order.
    pub(super) runs: Vec<(usize, Range<u64>)>,
    /// Which projections have a bias.
    pub(super) bias: Biases,
    /// How queries and keys are normalised before rotary.
    pub(super) qk_norm: QkNorm,
    /// Whether attention and MLP both read what comes into the block.
    pub(super) residual: Residual,
    /// Bound of the logits, by `cap · tanh(logit / cap)`.
    pub(super) logit_cap: Option<f64>,
    /// Whether the head reads the embedding's table.
    pub(super) tied: bool,
    /// The row of the embedding through which no gradient flows.
    pub(super) padding: Option<u64>,
    /// Rows of the table of learned positions.
    pub(super) learned: Option<u64>,
    /// The experts of the kinds that have them.
    pub(super) experts: Option<ExpertSpec>,
    /// Widths of latent attention, where queries, keys and values come from latents.
    pub(super) latent: Option<Latent>,
}

/// What tells blocks of one model apart.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Kind {
    /// The end of the function's name, where the model has several kinds.
    pub(super) label: String,
    /// Which keys a query sees.
    pub(super) mask: Mask,
    /// Factor of the scores.
    pub(super) scale: f64,
    /// Bound of the scaled scores, by `cap · tanh(score / cap)`.
    pub(super) softcap: Option<f64>,
    /// Rotary positions.
    pub(super) rotary: Option<RotarySpec>,
    /// What stands behind attention.
    pub(super) mlp: Mlp,
}

/// Rotary positions.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct RotarySpec {
    /// Elements of a head that are rotated.
    pub(super) width: u64,
    /// Base of the frequencies.
    pub(super) theta: f64,
    /// Stretching of the frequencies.
    pub(super) scaling: Scaling,
    /// Which elements turn together.
    pub(super) pairs: Pairs,
}

/// How queries and keys are normalised.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum QkNorm {
    /// Not at all.
    None,
    /// Each head by itself.
    Head,
    /// All heads of a token together.
    Projection,
}

/// What the MLP of a block reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Residual {
    /// The stream after attention was added.
    Serial,
    /// The stream as it came into the block, as attention does.
    Parallel,
}

/// Which projections have a bias.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Biases {
    /// Queries, keys and values.
    pub(super) qkv: bool,
    /// The output of attention.
    pub(super) out: bool,
    /// The MLP.
    pub(super) mlp: bool,
}

/// The mask of a sliding window of `width` keys, the query's own included.
pub(super) fn window(width: u64) -> Mask {
    Mask::Window { left: Some(width - 1), right: Some(0) }
}

/// Runs of equal kind, from the kind of each layer.
pub(super) fn runs(layers: impl IntoIterator<Item = usize>) -> Vec<(usize, Range<u64>)> {
    let mut runs: Vec<(usize, Range<u64>)> = Vec::new();
    for (i, kind) in (0..).zip(layers) {
        match runs.last_mut() {
            Some((last, range)) if *last == kind => range.end = i + 1,
            _ => runs.push((kind, i..i + 1)),
        }
    }
    runs
}

impl Spec {
    /// Number of layers.
    pub(super) fn n_layers(&self) -> u64 {
        self.runs.last().map_or(0, |(_, range)| range.end)
    }

    fn check(&self, workload: &Workload) -> Result<(), Diagnostic> {
        check_no_target(self.family.name(), workload)?;
        let wide = check_heads(self.heads, self.head_dim)?;
        let widest = self.hidden.max(wide).max(self.ffn).max(self.vocab);
        check_elements(&[
            ("the attention's projections", wide.into(), self.hidden),
            ("the MLP's projections", self.ffn.into(), self.hidden),
            ("the embedding", self.vocab.into(), self.hidden),
            ("the positions", self.learned.unwrap_or(1).into(), self.hidden),
            ("the activations", tokens(workload.batch, workload.sequence), widest),
        ])?;
        if let Some(experts) = &self.experts {
            experts.check(self.hidden, workload)?;
        }
        if let Some(latent) = &self.latent {
            latent.check(self.heads, self.hidden)?;
        }
        match self.learned {
            Some(n) => check_positions("n_positions", n, workload),
            None => Ok(()),
        }
    }
}
