//! Llama: biases by flags, no windows.

use ithaca_ir::{DType, Diagnostic, Mask};

use super::{Defaults, Family, HeadDim, Rope, read_sizes, usual_scale};
use crate::import::fields::Fields;
use crate::import::rope::{COMMON, Partial};
use crate::import::spec::{Biases, Kind, Spec};

pub(super) fn read<'a>(
    fields: &mut Fields<'a>,
    dtype: DType,
    ignore: &'a [String],
) -> Result<Spec, Diagnostic> {
    let sizes = read_sizes(
        fields,
        &Defaults {
            vocab: 32_000,
            hidden: 4096,
            ffn: 11_008,
            layers: 32,
            heads: 32,
            kv_heads: None,
            head_dim: HeadDim::Derived,
            max_positions: 2048,
            eps: 1e-6,
        },
    )?;
    let attention = fields.flag("attention_bias", false)?;
    let mlp = fields.flag("mlp_bias", false)?;
    let rope = Rope::read(fields, sizes.rope_context(COMMON, Partial::Whole), ignore)?;
    let kind = Kind {
        label: "full".to_owned(),
        mask: Mask::Causal,
        scale: usual_scale(sizes.head_dim),
        rotary: Some(rope.of_model()?),
    };
    let layers = (0..sizes.layers).map(|_| 0);
    let spec = sizes.spec(Family::Llama, dtype, vec![kind], layers);
    Ok(Spec { bias: Biases { qkv: attention, out: attention, mlp }, ..spec })
}
