//! Qwen3 with experts: in every `decoder_sparse_step`-th layer but those of `mlp_only_layers`.

use ithaca_ir::ops::experts::Gates;
use ithaca_ir::{DType, Diagnostic};

use super::experts::{by_softmax, kinds, read_loss};
use super::sizes::{Defaults, USUAL, read_sizes};
use crate::fields::Fields;
use crate::rope::Rope;
use crate::rope::{COMMON, Partial};
use crate::spec::Family;
use crate::spec::{Biases, QkNorm, Spec};

/// Fields that other families must leave neutral.
pub(super) const OWN: &[&str] = &[
    "num_local_experts",
    "num_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "decoder_sparse_step",
    "mlp_only_layers",
];

pub(super) fn read<'a>(
    fields: &mut Fields<'a>,
    dtype: DType,
    ignore: &'a [String],
) -> Result<Spec, Diagnostic> {
    let defaults = Defaults {
        vocab: 151_936,
        hidden: 2048,
        ffn: 6144,
        layers: 24,
        kv_heads: Some(4),
        max_positions: 32_768,
        ..USUAL
    };
    let sizes = read_sizes(fields, &defaults)?;
    let bias = fields.flag("attention_bias", false)?;
    let uses_window = fields.flag("use_sliding_window", false)?;
    let width = fields.nullable_size("sliding_window", Some(4096))?.filter(|_| uses_window);
    // The library's class slides in all layers or in none; descriptions hold the field of Qwen3's.
    fields.count("max_window_layers", 0)?;
    read_loss(fields)?;
    let count = fields.aliased_size(["num_experts", "num_local_experts"], 128)?;
    let top = fields.size("num_experts_per_tok", 8)?;
    let ffn = fields.size("moe_intermediate_size", 768)?;
    let gates = if fields.flag("norm_topk_prob", false)? { Gates::Shares } else { Gates::Scores };
    let step = fields.size("decoder_sparse_step", 1)?;
    let dense = fields.counts("mlp_only_layers")?.unwrap_or_default();
    let rope = Rope::read(fields, sizes.rope_context(COMMON, Partial::Whole), ignore)?;
    let has_experts = |layer: u64| !dense.contains(&layer) && (layer + 1).is_multiple_of(step);
    let (kinds, layers) = kinds(&sizes, width, &rope, has_experts)?;
    Ok(Spec {
        experts: Some(by_softmax(count, top, ffn, gates)),
        bias: Biases { qkv: bias, out: bias, mlp: false },
        qk_norm: QkNorm::Head,
        ..sizes.spec(Family::Qwen3Moe, dtype, kinds, layers)
    })
}
