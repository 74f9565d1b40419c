//! What the importer understands of a model, in one form for all families.

use std::ops::Range;

use ithaca_ir::ops::structure::MAX_LAYERS;
use ithaca_ir::ops::{Scaling, Unary};
use ithaca_ir::{DType, Diagnostic, Dim, Mask};

use super::Workload;
use super::family::Family;

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
    /// Rows of the table of learned positions.
    pub(super) learned: Option<u64>,
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

    /// Checks that heads, widths and sizes fit each other and the workload.
    pub(super) fn check(&self, workload: &Workload) -> Result<(), Diagnostic> {
        self.check_sizes(workload)?;
        match self.learned {
            Some(n) if workload.sequence > n => Err(Diagnostic::new(
                "M08",
                format!(
                    "a sequence of {} tokens, but `n_positions` is {n}: positions beyond have no embedding",
                    workload.sequence
                ),
            )
            .help(format!("ask for at most {n} tokens"))
            .repairs([format!("--seq {n}")])),
            _ => Ok(()),
        }
    }

    /// Bounds every tensor, so that counts of elements, bytes and FLOPs stay far from overflow.
    fn check_sizes(&self, workload: &Workload) -> Result<(), Diagnostic> {
        const MAX_ELEMENTS: u128 = 1 << 48;
        let wide = self.heads.saturating_mul(self.head_dim);
        if wide > Dim::MAX_SIZE {
            return Err(Diagnostic::new(
                "M04",
                format!("{} heads of {} elements are more than {}", self.heads, self.head_dim, Dim::MAX_SIZE),
            ));
        }
        let tokens = u128::from(workload.batch) * u128::from(workload.sequence);
        let widest = self.hidden.max(wide).max(self.ffn).max(self.vocab);
        for (what, rows, columns) in [
            ("the attention's projections", u128::from(wide), self.hidden),
            ("the MLP's projections", u128::from(self.ffn), self.hidden),
            ("the embedding", u128::from(self.vocab), self.hidden),
            ("the positions", u128::from(self.learned.unwrap_or(1)), self.hidden),
            ("the activations", tokens, widest),
        ] {
            let elements = rows * u128::from(columns);
            if elements > MAX_ELEMENTS {
                return Err(Diagnostic::new(
                    "M04",
                    format!("{what} are {rows} × {columns} elements, more than {MAX_ELEMENTS}"),
                ));
            }
        }
        Ok(())
    }
}

/// The number of layers, checked.
pub(super) fn check_layers(field: &str, n: u64) -> Result<u64, Diagnostic> {
    match n {
        1..=MAX_LAYERS => Ok(n),
        _ => Err(Diagnostic::new("M04", format!("`{field}` is {n}; expected 1 to {MAX_LAYERS} layers"))),
    }
}
