//! Facts of a model that other frameworks ask for: sizes, and the parts of its computation that they name.

use ithaca_ir::ops::experts::{Gates, Scoring};
use ithaca_ir::ops::{Pairs, Scaling, Unary};
use ithaca_ir::{DType, Diagnostic, Mask};
use serde_json::Value;

use crate::family;
use crate::spec::{
    EmbeddingFactor, Kind, Mlp, MlpLayout, NormForm, QkNorm, Residual, Sizes, Spec, Structure,
};

/// The sizes of a model, and what its layers compute.
#[derive(Clone, Debug, PartialEq)]
pub struct Facts {
    /// The `model_type` of the description.
    pub family: &'static str,
    /// The element type that the description states.
    pub dtype: DType,
    /// Whether the model is a decoder only.
    pub is_decoder: bool,
    /// Layers.
    pub layers: u64,
    /// Width of the residual stream.
    pub hidden: u64,
    /// Width of the MLP.
    pub ffn: u64,
    /// Query heads.
    pub heads: u64,
    /// Key/value heads.
    pub kv_heads: u64,
    /// Width of a head.
    pub head_dim: u64,
    /// Tokens of the vocabulary.
    pub vocab: u64,
    /// The longest sequence in training.
    pub max_positions: u64,
    /// The positions that a decoder has learned: no sequence is longer. `None` where any number of tokens has positions.
    pub learned_positions: Option<u64>,
    /// The epsilon of every norm.
    pub eps: f64,
    /// Whether the head reads the embedding's table.
    pub is_tied: bool,
    /// Dropout of attention weights, in training.
    pub attention_dropout: f64,
    /// Dropout of the outputs of attention and MLP, in training.
    pub hidden_dropout: f64,
    /// Whether keys and values are computed from latents.
    pub is_latent: bool,
    /// Whether some layers have a sliding window.
    pub has_window: bool,
    /// The experts, if there are any.
    pub experts: Option<ExpertFacts>,
    /// The computation, if it is that of a Llama with few variations.
    pub llama: Option<LlamaFacts>,
}

/// The experts of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertFacts {
    /// Number of experts of a layer.
    pub count: u64,
    /// Experts of a token.
    pub top: u64,
    /// Width of an expert.
    pub ffn: u64,
    /// Width of the shared experts.
    pub shared: Option<u64>,
}

/// The variations of a decoder with root-mean-square norms, gated SiLU MLPs, rotary positions and causal masks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LlamaFacts {
    /// Base of the rotary frequencies.
    pub theta: f64,
    /// The divisor of long wavelengths, if frequencies are scaled as in Llama 3.1.
    pub scaling: Option<f64>,
    /// Whether queries, keys and values have a bias.
    pub has_qkv_bias: bool,
    /// Whether queries and keys are normalised, each head by itself.
    pub has_qk_norm: bool,
}

/// The facts of the model that `config` describes; `ignore` are the fields declared without influence.
///
/// # Errors
/// An `M` diagnostic for a description that cannot be imported.
pub fn facts(config: &Value, ignore: &[String]) -> Result<Facts, Diagnostic> {
    let model = family::read(config, ignore)?;
    let (sizes, spec) = match &model.structure {
        Structure::Decoder(spec) => (&spec.sizes, Some(spec)),
        Structure::T5(t5) => (&t5.sizes, None),
        Structure::Bert(bert) => (&bert.sizes, None),
    };
    let Sizes { hidden, heads, kv_heads, head_dim, ffn, vocab, layers, eps, max_positions, tied, .. } =
        *sizes;
    let experts = spec.and_then(|spec| spec.experts.as_ref());
    Ok(Facts {
        family: model.family,
        dtype: model.dtype,
        is_decoder: spec.is_some(),
        layers,
        hidden,
        ffn,
        heads,
        kv_heads,
        head_dim,
        vocab,
        max_positions,
        learned_positions: spec.and_then(|spec| spec.learned),
        eps,
        is_tied: tied,
        attention_dropout: model.dropout.attention,
        hidden_dropout: model.dropout.residual,
        is_latent: spec.is_some_and(|spec| spec.latent.is_some()),
        has_window: spec.is_some_and(|spec| spec.kinds.iter().any(|kind| kind.mask != Mask::Causal)),
        experts: experts.map(|e| ExpertFacts { count: e.count, top: e.top, ffn: e.ffn, shared: e.shared }),
        llama: spec.and_then(|spec| llama(spec)),
    })
}

/// The variations of a decoder from Llama; nothing where it differs otherwise.
fn llama(spec: &Spec) -> Option<LlamaFacts> {
    let [Kind { mask: Mask::Causal, scale, softcap: None, rotary: Some(rotary), mlp, .. }] =
        spec.kinds.as_slice()
    else {
        return None;
    };
    let experts_are_usual = match (mlp, &spec.experts) {
        (Mlp::Dense, None) => true,
        (Mlp::Experts, Some(experts)) => {
            experts.groups.is_none()
                && !experts.biased
                && experts.scale == 1.0
                && (experts.scoring, experts.gates) == (Scoring::Softmax, Gates::Shares)
        }
        (Mlp::Dense | Mlp::Experts, _) => false,
    };
    let is_gated = match spec.layout.mlp {
        MlpLayout::Gated | MlpLayout::GatedRows => spec.sizes.activation == Unary::Silu,
        MlpLayout::Plain(_) => false,
    };
    let norms = &spec.layout.norms;
    let is_usual = experts_are_usual
        && is_gated
        && spec.norm == NormForm::Rms { offset: 0.0 }
        && norms.before_attention.is_some()
        && norms.after_attention.is_none()
        && norms.before_mlp.is_some()
        && norms.after_mlp.is_none()
        && spec.residual == Residual::Serial
        && !(spec.bias.out || spec.bias.mlp)
        && spec.embedding == EmbeddingFactor::Number(1.0)
        && (spec.branch_factor, spec.logit_factor) == (1.0, 1.0)
        && matches!(spec.qk_norm, QkNorm::None | QkNorm::Head)
        && rotary.pairs == Pairs::Halves
        && spec.logit_cap.is_none()
        && spec.learned.is_none()
        && spec.latent.is_none()
        && rotary.width == spec.sizes.head_dim
        && (scale * (spec.sizes.head_dim as f64).sqrt() - 1.0).abs() < 1e-9;
    let scaling = match rotary.scaling {
        Scaling::None => Some(None),
        Scaling::Llama3 { factor, .. } => Some(Some(factor)),
        Scaling::Linear { .. } | Scaling::Yarn { .. } => None,
    };
    is_usual.then_some(LlamaFacts {
        theta: rotary.theta,
        scaling: scaling?,
        has_qkv_bias: spec.bias.qkv,
        has_qk_norm: spec.qk_norm == QkNorm::Head,
    })
}
