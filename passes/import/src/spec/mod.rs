//! The structure of an imported model: one form for all decoders, and one each for T5 and BERT.

mod bert;
mod experts;
mod layout;
mod limits;
mod sizes;
mod t5;

use std::ops::Range;

use ithaca_ir::diagnostic::counted;
use ithaca_ir::ops::{Pairs, Scaling};
use ithaca_ir::{DType, Diagnostic, Mask};

use crate::capacity::ExpertBound;
use crate::workload::{Logits, Mode, Workload};
use limits::{check_no_target, check_positions};

pub(super) use bert::{Bert, BertHead};
pub(super) use experts::{ExpertSpec, Latent, Mlp};
pub(super) use layout::{ExpertTensors, Layout, MlpLayout, Norms, Projections};
pub(super) use limits::check_layers;
pub(super) use sizes::Sizes;
pub(super) use t5::T5;

/// A model, without its weights.
#[derive(Clone, Debug)]
pub(super) struct Model {
    /// The `model_type` of the description.
    pub(super) family: &'static str,
    /// The element type that the description states.
    pub(super) dtype: DType,
    /// The computation.
    pub(super) structure: Structure,
    /// The dropout in training.
    pub(super) dropout: Dropouts,
}

/// The structure of a model.
#[derive(Clone, Debug)]
pub(super) enum Structure {
    /// A decoder only.
    Decoder(Box<Spec>),
    /// An encoder and a decoder with cross attention.
    T5(T5),
    /// An encoder only.
    Bert(Bert),
}

/// The rates of dropout in training; a prefill drops nothing.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Dropouts {
    /// Of attention weights.
    pub(super) attention: f64,
    /// Of the outputs of attention and MLP; for T5 also inside the MLP and after the last norms.
    pub(super) residual: f64,
    /// Of the embedding's output.
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
        // The default is stated for every model.
        let is_stated = |bound: &ExpertBound| *bound != ExpertBound::default();
        if let Some(bound) = workload.expert_bound.filter(is_stated).filter(|_| !has_experts) {
            let message = format!("an expert bound of {}, but the model has no experts", bound.factor());
            return Err(Diagnostic::new("M10", message).help("leave `--expert-bound` out"));
        }
        if workload.cache.is_some() || workload.mode == Mode::Decode {
            self.check_cache(workload)?;
        } else if workload.pages.is_some() {
            return Err(Diagnostic::new("M10", "pages are of the caches of sequences that are continued")
                .help("add `--mode decode`, or omit `--page`"));
        } else if let Some(dtype) = workload.cache_type {
            let message = format!("caches of {dtype}, and no sequence is continued");
            return Err(Diagnostic::new("M10", message).help("add `--mode decode`, or omit `--cache-type`"));
        }
        if let Some(documents) = &workload.documents {
            documents.check(workload.sequence)?;
            self.check_documents(workload)?;
        }
        if workload.logits == Logits::Last {
            let why = match (&self.structure, workload.mode) {
                (Structure::Bert(_), _) => "the model predicts no next token",
                (_, Mode::Train) => "a loss is of all tokens",
                (Structure::Decoder(_) | Structure::T5(_), Mode::Prefill | Mode::Decode) => "",
            };
            if !why.is_empty() {
                let message = format!("logits of the last token only, but {why}");
                return Err(Diagnostic::new("M10", message).help("use `--logits all`"));
            }
        }
        match &self.structure {
            Structure::Decoder(spec) => {
                check_no_target(self.family, workload)?;
                spec.check(workload)
            }
            Structure::T5(t5) => t5.check(workload),
            Structure::Bert(bert) => {
                check_no_target(self.family, workload)?;
                bert.check(workload)
            }
        }
    }

    /// Refuses to continue sequences of models without a cache, and by more tokens than it has room for.
    fn check_cache(&self, workload: &Workload) -> Result<(), Diagnostic> {
        let without = match &self.structure {
            Structure::Decoder(_) | Structure::T5(_) => None,
            Structure::Bert(_) => Some("the model predicts no next token"),
        };
        if let Some(why) = without {
            return Err(Diagnostic::new("M09", format!("sequences cannot be continued: {why}"))
                .help("import the model for prefill")
                .repairs(["--mode prefill".to_owned()]));
        }
        let Some(capacity) = workload.cache else {
            return Err(Diagnostic::new("M09", "the number of tokens that a cache has room for is missing")
                .help("add it, as in `--context 8192`"));
        };
        if workload.documents.is_some() {
            let refusal = Diagnostic::new("M09", "documents packed into sequences that are continued");
            return Err(refusal.help("leave `--documents` out"));
        }
        if workload.mode == Mode::Train {
            let message =
                format!("`--context {capacity}` is for sequences that are continued, and the mode is train");
            return Err(Diagnostic::new("M09", message).help("leave `--context` out, or use `--mode decode`"));
        }
        if workload.logits == Logits::All {
            let message = format!(
                "logits of all tokens of sequences that are continued in caches of {capacity}, `--context`"
            );
            let refusal = Diagnostic::new("M09", message);
            return Err(refusal.repairs(["--logits last".to_owned()]));
        }
        if workload.pages.is_some_and(|pages| pages.host.is_some())
            && matches!(self.structure, Structure::T5(_))
        {
            let message =
                "pages in host memory, but the keys and values of an encoder's tokens are read in every step";
            return Err(Diagnostic::new("M09", message).help("leave `--offload cache` out"));
        }
        if workload.sequence > capacity {
            let message =
                format!("{} of a step in caches of {capacity}", counted(workload.sequence, "token"));
            return Err(Diagnostic::new("M09", message).repairs([format!("--context {}", workload.sequence)]));
        }
        Ok(())
    }

    /// Refuses packed documents for models and labels that would mix them.
    fn check_documents(&self, workload: &Workload) -> Result<(), Diagnostic> {
        let refused = |why: &str, help: &str| {
            Err(Diagnostic::new("M10", format!("documents packed into a sequence, but {why}")).help(help))
        };
        match &self.structure {
            Structure::Decoder(spec) if spec.kinds.iter().any(Kind::counts_positions) => {
                let why = "chunks of attention, and the growth of queries, do not start again in each";
                return refused(why, "leave `--documents` out: other models with rotary positions have them");
            }
            Structure::Decoder(spec) if spec.learned.is_none() => {}
            Structure::Decoder(_) | Structure::Bert(_) => {
                let why = "learned positions do not start again in each";
                return refused(why, "leave `--documents` out: models with rotary positions have them");
            }
            Structure::T5(_) => {
                let why = "cross attention would see all of them";
                return refused(
                    why,
                    "leave `--documents` out: models with an encoder have no packed documents",
                );
            }
        }
        if workload.mode == Mode::Train && workload.labels.ahead > 0 {
            let why = "the label of a document's last token would be the next document's first";
            let help = "leave `--shift-labels` out, and give labels that are shifted, with -100 at ends of documents";
            return refused(why, help);
        }
        Ok(())
    }
}

/// A decoder, without its weights.
#[derive(Clone, Debug)]
pub(super) struct Spec {
    /// The sizes of every family.
    pub(super) sizes: Sizes,
    /// How a small model's description states its sizes.
    pub(super) spelling: Spelling,
    /// The names and the storage of tensors.
    pub(super) layout: &'static Layout,
    /// The form of every norm.
    pub(super) norm: NormForm,
    /// Kinds of block, in order of first appearance.
    pub(super) kinds: Vec<Kind>,
    /// Runs of layers of one kind, an index of `kinds`, in order.
    pub(super) runs: Vec<(usize, Range<u64>)>,
    /// Which projections have a bias.
    pub(super) bias: Biases,
    /// How queries and keys are normalised before rotary.
    pub(super) qk_norm: QkNorm,
    /// Whether attention and MLP read the same input.
    pub(super) residual: Residual,
    /// Bound of the logits, by `cap · tanh(logit / cap)`.
    pub(super) logit_cap: Option<f64>,
    /// Factor of the logits, before their bound.
    pub(super) logit_factor: f64,
    /// Factor of the embedding.
    pub(super) embedding: EmbeddingFactor,
    /// Factor of the outputs of attention and MLP, before they are added to the stream.
    pub(super) branch_factor: f64,
    /// Rows of the table of learned positions.
    pub(super) learned: Option<u64>,
    /// The experts of the kinds that have them.
    pub(super) experts: Option<ExpertSpec>,
    /// Widths of latent attention, if the model has it.
    pub(super) latent: Option<Latent>,
    /// Whether a learned logit for each head enters the softmax of attention.
    pub(super) sinks: bool,
}

/// How a description states the sizes and kinds of layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Spelling {
    /// By the names of most families.
    Usual,
    /// By those names, the type of each layer in `layer_types`.
    LayerTypes,
    /// As [`LayerTypes`](Self::LayerTypes), with a list of layers that have rotary positions, `no_rope_layers`.
    RotatedLayers,
    /// By those names, layers without experts in `mlp_only_layers`.
    DenseLayers,
    /// By those names, with a number of first layers without experts, and widths of latents if the model has them.
    FirstDense,
    /// By those names, the width of a head being a quotient.
    Quotient,
    /// By the names of GPT-2.
    Gpt2,
    /// By the names of Llama 4.
    Llama4,
}

/// Factors of the embedding.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum EmbeddingFactor {
    /// The root of the width, rounded to the element type.
    RootOfWidth,
    /// A number.
    Number(f64),
}

/// The form of a norm.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum NormForm {
    /// By the root of the mean square, times weight + `offset`.
    Rms { offset: f64 },
    /// By mean and variance, with weight and bias.
    Layer,
}

/// A kind of block within a model.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Kind {
    /// The suffix of the function's name if the model has several kinds.
    pub(super) label: String,
    /// Which keys a query sees.
    pub(super) mask: Mask,
    /// Factor of the scores.
    pub(super) scale: f64,
    /// Bound of the scaled scores, by `cap · tanh(score / cap)`.
    pub(super) softcap: Option<f64>,
    /// Rotary positions.
    pub(super) rotary: Option<RotarySpec>,
    /// How queries grow with their positions.
    pub(super) growth: Option<Growth>,
    /// The feed-forward part.
    pub(super) mlp: Mlp,
}

/// Queries at position p are multiplied by `1 + scale · log(1 + floor((p + 1) / step))`, so that attention over many keys
/// stays as sharp (Nakanishi, arXiv 2501.19399).
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Growth {
    /// The factor of the logarithm.
    pub(super) scale: f64,
    /// Tokens between two steps.
    pub(super) step: u64,
}

/// Rotary positions.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct RotarySpec {
    /// Elements of a head that are rotated.
    pub(super) width: u64,
    /// Base of the frequencies.
    pub(super) theta: f64,
    /// Scaling of the frequencies.
    pub(super) scaling: Scaling,
    /// Which elements form a pair.
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
    /// Each head by itself, behind rotary positions and without weights, in layers that have such positions.
    Rotated,
}

/// The input of a block's MLP.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Residual {
    /// The stream after attention.
    Serial,
    /// The block's input, as for attention.
    Parallel,
}

/// Which projections have a bias.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Biases {
    /// Queries, keys and values.
    pub(super) qkv: bool,
    /// The output of attention.
    pub(super) out: bool,
    /// The MLP.
    pub(super) mlp: bool,
}

impl Biases {
    /// All projections of attention, if `bias`.
    pub(super) fn of_attention(bias: bool) -> Self {
        Self { qkv: bias, out: bias, mlp: false }
    }
}

/// The mask of a sliding window of `width` keys, the query's own included.
pub(super) fn window(width: u64) -> Mask {
    Mask::Window { left: Some(width - 1), right: Some(0) }
}

/// The mask of causal attention within chunks of so many tokens.
pub(super) fn chunks(size: u64) -> Mask {
    Mask::All(vec![Mask::Causal, Mask::Chunks(size)])
}

impl Kind {
    /// Whether attention depends on positions, and not only on how far tokens are apart.
    fn counts_positions(&self) -> bool {
        self.growth.is_some() || self.mask.band_in_chunks().is_some()
    }

    /// A kind with usual scores and one MLP for all tokens.
    pub(super) fn new(
        label: impl Into<String>,
        mask: Mask,
        rotary: impl Into<Option<RotarySpec>>,
        sizes: &Sizes,
    ) -> Self {
        let scale = usual_scale(sizes.head_dim);
        Self {
            label: label.into(),
            mask,
            scale,
            softcap: None,
            rotary: rotary.into(),
            growth: None,
            mlp: Mlp::Dense,
        }
    }
}

/// The scale of scores in most families: 1/√head_dim.
pub(super) fn usual_scale(head_dim: u64) -> f64 {
    1.0 / (head_dim as f64).sqrt()
}

impl Spec {
    /// A model of the usual structure with these kinds of block and the kind of each layer.
    pub(super) fn new(sizes: Sizes, kinds: Vec<Kind>, layers: impl IntoIterator<Item = usize>) -> Self {
        let mut runs: Vec<(usize, Range<u64>)> = Vec::new();
        for (i, kind) in (0..).zip(layers) {
            match runs.last_mut() {
                Some((last, range)) if *last == kind => range.end = i + 1,
                _ => runs.push((kind, i..i + 1)),
            }
        }
        Self {
            sizes,
            spelling: Spelling::Usual,
            layout: &Layout::USUAL,
            norm: NormForm::Rms { offset: 0.0 },
            kinds,
            runs,
            bias: Biases::default(),
            qk_norm: QkNorm::None,
            residual: Residual::Serial,
            logit_cap: None,
            logit_factor: 1.0,
            embedding: EmbeddingFactor::Number(1.0),
            branch_factor: 1.0,
            learned: None,
            experts: None,
            latent: None,
            sinks: false,
        }
    }

    fn check(&self, workload: &Workload) -> Result<(), Diagnostic> {
        let Sizes { hidden, heads, .. } = self.sizes;
        self.sizes.check(self.learned, workload)?;
        if let Some(experts) = &self.experts {
            experts.check(hidden, workload)?;
        }
        if let Some(latent) = &self.latent {
            latent.check(heads, hidden)?;
        }
        match self.learned {
            Some(n) => check_positions("n_positions", n, workload),
            None => Ok(()),
        }
    }
}
