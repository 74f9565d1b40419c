//! GPT-NeoX and Pythia: queries, keys and values of a head next to each other in one matrix, partly rotated heads, layer
//! norms, attention and MLP that read the same stream unless `use_parallel_residual` is off.

use ithaca_ir::{DType, Diagnostic, Mask};

use super::sizes::{Sizes, derived_head_dim, read_activation, usual_scale};
use crate::fields::Fields;
use crate::rope::Partial;
use crate::rope::Rope;
use crate::spec::Family;
use crate::spec::check_layers;
use crate::spec::{Biases, Kind, Mlp, Residual, Spec};

pub(super) fn read<'a>(
    fields: &mut Fields<'a>,
    dtype: DType,
    ignore: &'a [String],
) -> Result<Spec, Diagnostic> {
    let hidden = fields.size("hidden_size", 6144)?;
    let heads = fields.size("num_attention_heads", 64)?;
    let layers = fields.count("num_hidden_layers", 44)?;
    let sizes = Sizes {
        hidden,
        heads,
        kv_heads: heads,
        head_dim: derived_head_dim(("hidden_size", hidden), ("num_attention_heads", heads))?,
        ffn: fields.size("intermediate_size", 24_576)?,
        vocab: fields.size("vocab_size", 50_432)?,
        layers: check_layers("num_hidden_layers", layers)?,
        eps: fields.epsilon("layer_norm_eps", 1e-5)?,
        activation: read_activation(fields, "hidden_act", "gelu")?,
        max_positions: fields.size("max_position_embeddings", 2048)?,
        tied: fields.flag("tie_word_embeddings", false)?,
        padding: None,
    };
    let bias = fields.flag("attention_bias", true)?;
    let residual = match fields.flag("use_parallel_residual", true)? {
        true => Residual::Parallel,
        false => Residual::Serial,
    };
    let rope = Rope::read(fields, sizes.rope_context(&["default", "linear"], Partial::Percent), ignore)?;
    let kind = Kind {
        label: "full".to_owned(),
        mask: Mask::Causal,
        scale: usual_scale(sizes.head_dim),
        softcap: None,
        rotary: Some(rope.of_model()?),
        mlp: Mlp::Dense,
    };
    let layers = (0..sizes.layers).map(|_| 0);
    let spec = sizes.spec(Family::GptNeox, dtype, vec![kind], layers);
    Ok(Spec { bias: Biases { qkv: bias, out: bias, mlp: true }, residual, ..spec })
}
