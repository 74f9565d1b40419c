//! How a family of decoders names and stores its tensors.

/// The names of a decoder's tensors, and the matrices that share a tensor.
#[derive(Debug)]
pub(crate) struct Layout {
    /// The table of the embedding.
    pub(crate) embedding: &'static str,
    /// The prefix of a layer's tensors.
    pub(crate) layer: &'static str,
    /// The norms of a layer.
    pub(crate) norms: Norms,
    /// How queries, keys and values are stored.
    pub(crate) projections: Projections,
    /// The output projection of attention.
    pub(crate) attention_out: &'static str,
    /// The module of a dense MLP with gates.
    pub(crate) gated: &'static str,
    /// The matrices of a dense MLP.
    pub(crate) mlp: MlpLayout,
    /// The module of the experts.
    pub(crate) experts: &'static str,
    /// The tensors of the experts.
    pub(crate) expert: ExpertTensors,
    /// The bias of the choice of experts, within their module.
    pub(crate) bias_of_choice: &'static str,
    /// The module of the network that all tokens share beside experts.
    pub(crate) shared: &'static str,
    /// The last norm.
    pub(crate) last_norm: &'static str,
    /// The matrix of the logits, unless it is the embedding's table.
    pub(crate) head: &'static str,
    /// Whether matrices are stored `[input, output]`.
    pub(crate) input_major: bool,
}

/// The names of a layer's norms, `None` where it has none.
#[derive(Debug)]
pub(crate) struct Norms {
    pub(crate) before_attention: Option<&'static str>,
    pub(crate) after_attention: Option<&'static str>,
    pub(crate) before_mlp: Option<&'static str>,
    pub(crate) after_mlp: Option<&'static str>,
}

/// How queries, keys and values are stored.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Projections {
    /// One matrix each.
    Apart,
    /// Rows of one matrix: all queries, all keys, all values.
    Rows(&'static str),
    /// Rows of one matrix: queries, keys and values of a head are adjacent, head after head.
    HeadRows(&'static str),
    /// Thirds of the columns of one input-major matrix.
    Columns(&'static str),
}

/// The matrices of a dense MLP.
#[derive(Clone, Copy, Debug)]
pub(crate) enum MlpLayout {
    /// `gate_proj`, `up_proj` and `down_proj`.
    Gated,
    /// Gate and up are rows of `gate_up_proj`.
    GatedRows,
    /// No gate: the names of up and down.
    Plain([&'static str; 2]),
}

/// How the experts and their router are stored.
#[derive(Clone, Copy, Debug)]
pub(crate) enum ExpertTensors {
    /// Matrices of each expert: the names of gate, up and down. The router is `gate`.
    Each([&'static str; 3]),
    /// `gate_up_proj`, whose columns are gate and up by turns, and `down_proj`: input-major tensors of all experts, with biases. The
    /// router is `router`.
    Alternating,
    /// `gate_up_proj`, the first half of whose columns is gate and the other up, and `down_proj`: input-major tensors of all experts.
    /// The router is `router`.
    Halves,
}

impl ExpertTensors {
    /// The name of the router.
    pub(crate) fn router(self) -> &'static str {
        match self {
            ExpertTensors::Each(_) => "gate",
            ExpertTensors::Alternating | ExpertTensors::Halves => "router",
        }
    }
}

impl Layout {
    /// The layout of most families.
    pub(crate) const USUAL: Layout = Layout {
        embedding: "model.embed_tokens.weight",
        layer: "model.layers.{layer}",
        norms: Norms::BEFORE,
        projections: Projections::Apart,
        attention_out: "self_attn.o_proj",
        gated: "mlp",
        mlp: MlpLayout::Gated,
        experts: "mlp",
        expert: ExpertTensors::Each(["gate_proj", "up_proj", "down_proj"]),
        bias_of_choice: "gate.e_score_correction_bias",
        shared: "mlp.shared_experts",
        last_norm: "model.norm",
        head: "lm_head.weight",
        input_major: false,
    };
}

impl Norms {
    /// Norms before attention and MLP only.
    pub(crate) const BEFORE: Norms = Norms {
        before_attention: Some("input_layernorm"),
        after_attention: None,
        before_mlp: Some("post_attention_layernorm"),
        after_mlp: None,
    };
}
