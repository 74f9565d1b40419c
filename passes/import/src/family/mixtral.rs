//! Mixtral: as Mistral with experts in every layer, gates being shares of softmax scores.

use ithaca_ir::ops::experts::Gates;
use ithaca_ir::{DType, Diagnostic};
use serde_json::json;

use super::experts::{by_softmax, kinds, read_loss};
use super::sizes::{Defaults, USUAL, read_sizes};
use crate::fields::Fields;
use crate::rope::Rope;
use crate::rope::{COMMON, Partial, RopeContext};
use crate::spec::Family;
use crate::spec::Spec;

/// Fields that other families must leave neutral.
pub(super) const OWN: &[&str] = &["num_local_experts", "num_experts", "num_experts_per_tok"];

pub(super) fn read<'a>(
    fields: &mut Fields<'a>,
    dtype: DType,
    ignore: &'a [String],
) -> Result<Spec, Diagnostic> {
    let defaults = Defaults {
        ffn: 14_336,
        kv_heads: Some(8),
        max_positions: 4096 * 32,
        eps: ("rms_norm_eps", 1e-5),
        ..USUAL
    };
    let sizes = read_sizes(fields, &defaults)?;
    // The library's class has no biases; descriptions made for others say so.
    fields.neutral("attention_bias", &[json!(false)])?;
    fields.neutral("mlp_bias", &[json!(false)])?;
    // Noise of the router, in training only.
    fields.neutral("router_jitter_noise", &[json!(0.0)])?;
    read_loss(fields)?;
    let count = fields.aliased_size(["num_local_experts", "num_experts"], 8)?;
    let top = fields.size("num_experts_per_tok", 2)?;
    let width = fields.nullable_size("sliding_window", None)?;
    let cx = RopeContext { theta: 1e6, ..sizes.rope_context(COMMON, Partial::Whole) };
    let rope = Rope::read(fields, cx, ignore)?;
    let (kinds, layers) = kinds(&sizes, width, &rope, |_| true)?;
    let experts = by_softmax(count, top, sizes.ffn, Gates::Shares);
    Ok(Spec { experts: Some(experts), ..sizes.spec(Family::Mixtral, dtype, kinds, layers) })
}
