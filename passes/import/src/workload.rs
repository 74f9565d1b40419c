//! The workload of a model: sizes, element type and use.

use ithaca_differentiate::{self as differentiate, Training};
use ithaca_ir::{DType, Diagnostic};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::capacity::{Capacity, ExpertBound};
use crate::documents::Documents;

/// Tokens of a step for which caches of sliding windows have room, where nothing else is known.
pub const STEP: u64 = 512;

/// The use of a program.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Mode {
    /// All tokens of a sequence at once, no gradients.
    #[default]
    Prefill,
    /// Forward and backward.
    Train,
    /// One token at a time, against a cache of keys and values.
    Decode,
}

ithaca_ir::spellings! {
    Mode {
        Prefill = "prefill",
        Train = "train",
        Decode = "decode",
    }
}

/// The tokens whose logits a prefill returns.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Logits {
    /// All tokens.
    #[default]
    All,
    /// The last token of each sequence, from which generation continues.
    Last,
}

/// Which label belongs to which token, and which labels count.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Labels {
    /// The label of token `i` is the input's label at `i + ahead`; 1 if the labels are the tokens themselves. Positions
    /// past the end have no label.
    pub ahead: u64,
    /// The label value that is excluded from the loss.
    pub ignore: i64,
}

impl Default for Labels {
    /// Labels aligned with tokens; −100 is excluded, as in the library.
    fn default() -> Self {
        Self { ahead: 0, ignore: -100 }
    }
}

/// Caches in pages, which sequences share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Pages {
    /// Tokens of a page, of all ranks that split it.
    pub tokens: u64,
    /// The number of pages, of all ranks; as many as all sequences may need when left out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub count: Option<u64>,
    /// How many of them are in host memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<u64>,
}

/// The workload of a model.
#[derive(Clone, Debug, PartialEq)]
pub struct Workload {
    /// Sequences.
    pub batch: u64,
    /// Tokens of each sequence; for models with an encoder and a decoder, tokens of the encoder's sequences.
    pub sequence: u64,
    /// Tokens of each decoder sequence, for models with an encoder and a decoder; `sequence` when `None`.
    pub target_sequence: Option<u64>,
    /// Element type of weights and activations; `None` takes the description's (`dtype`, else f32).
    pub dtype: Option<DType>,
    /// The use of a program.
    pub mode: Mode,
    /// The tokens that the cache of a sequence has room for. A prefill with a cache continues sequences by `sequence` tokens at
    /// most; decoding always has one.
    pub cache: Option<u64>,
    /// The most tokens of a step that continues sequences: caches of sliding windows have room for a window and a step. [`STEP`], or
    /// `sequence` if that is more, when `None`.
    pub step: Option<u64>,
    /// The pages that caches are in; each sequence has room of its own when `None`.
    pub pages: Option<Pages>,
    /// Element type of caches; that of activations when `None`.
    pub cache_type: Option<DType>,
    /// The capacity of experts; no token is dropped when `None`.
    pub capacity: Option<Capacity>,
    /// Without a capacity: the tokens that an expert has slots for; all when `None`.
    pub expert_bound: Option<ExpertBound>,
    /// The documents that are packed into each sequence; one document when `None`.
    pub documents: Option<Documents>,
    /// In prefill: the tokens whose logits are returned.
    pub logits: Logits,
    /// In training: the alignment of labels with tokens.
    pub labels: Labels,
    /// In training: the options of a step.
    pub training: Training,
    /// Fields of the description that the importer does not know and the caller declares to have no influence;
    /// `rope_scaling.name` for a field of the rotary parameters.
    pub ignore: Vec<String>,
}

impl Workload {
    /// A step that continues sequences by up to `tokens` tokens each, in caches of `capacity` tokens: the next token of each is
    /// chosen, and logits are those of the last token.
    pub fn cached(batch: u64, tokens: u64, capacity: u64) -> Self {
        Self { cache: Some(capacity), logits: Logits::Last, ..Self::prefill(batch, tokens) }
    }

    /// A step that decodes one token of each sequence.
    pub fn decode(batch: u64, capacity: u64) -> Self {
        Self { mode: Mode::Decode, ..Self::cached(batch, 1, capacity) }
    }

    /// The pages that full caches of so many sequences need, and those that there are, where a number is given.
    pub fn pages_needed(&self, batch: u64) -> Option<(u64, u64)> {
        let (pages, context) = (self.pages?, self.cache?);
        Some((context.div_ceil(pages.tokens.max(1)).saturating_mul(batch), pages.count?))
    }

    /// The part of a step that one of `n` micro-batches is; they share the pages of caches.
    ///
    /// # Errors
    /// `P52` where `n` does not divide the batch.
    pub(crate) fn of_micro_batch(&self, n: u64) -> Result<Self, Diagnostic> {
        if n == 0 || !self.batch.is_multiple_of(n) {
            return Err(differentiate::undivided(self.batch, n, 1).into());
        }
        let pages = self.pages.zip(self.cache).map(|(pages, capacity)| {
            let all = pages.count.unwrap_or(capacity.div_ceil(pages.tokens) * self.batch);
            Pages { count: Some(all), ..pages }
        });
        Ok(Self { batch: self.batch / n, pages, ..self.clone() })
    }

    /// Prefill in the description's element type.
    pub fn prefill(batch: u64, sequence: u64) -> Self {
        Self {
            batch,
            sequence,
            target_sequence: None,
            dtype: None,
            mode: Mode::Prefill,
            cache: None,
            step: None,
            pages: None,
            cache_type: None,
            capacity: None,
            expert_bound: None,
            documents: None,
            logits: Logits::All,
            labels: Labels::default(),
            training: Training::default(),
            ignore: Vec::new(),
        }
    }
}
