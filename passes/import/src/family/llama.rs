//! Llama: biases by flags, no windows.

use ithaca_ir::{DType, Diagnostic, Mask};

use super::sizes::{USUAL, read_sizes, usual_scale};
use crate::fields::Fields;
use crate::rope::Rope;
use crate::rope::{COMMON, Partial};
use crate::spec::Family;
use crate::spec::{Biases, Kind, Mlp, Spec};

pub(super) fn read<'a>(
    fields: &mut Fields<'a>,
    dtype: DType,
    ignore: &'a [String],
) -> Result<Spec, Diagnostic> {
    let sizes = read_sizes(fields, &USUAL)?;
    let attention = fields.flag("attention_bias", false)?;
    let mlp = fields.flag("mlp_bias", false)?;
    let rope = Rope::read(fields, sizes.rope_context(COMMON, Partial::Whole), ignore)?;
    let kind = Kind {
        label: "full".to_owned(),
        mask: Mask::Causal,
        scale: usual_scale(sizes.head_dim),
        softcap: None,
        rotary: Some(rope.of_model()?),
        mlp: Mlp::Dense,
    };
    let layers = (0..sizes.layers).map(|_| 0);
    let spec = sizes.spec(Family::Llama, dtype, vec![kind], layers);
    Ok(Spec { bias: Biases { qkv: attention, out: attention, mlp }, ..spec })
}
