//! OLMo 2: as Llama, with queries and keys normalised over all heads of a token together, and norms behind attention and
//! MLP in place of those in front.

use ithaca_ir::{DType, Diagnostic, Mask};

use super::sizes::{Defaults, USUAL, read_sizes, usual_scale};
use crate::fields::Fields;
use crate::rope::Rope;
use crate::rope::{COMMON, Partial};
use crate::spec::Family;
use crate::spec::{Biases, Kind, Mlp, QkNorm, Spec};

pub(super) fn read<'a>(
    fields: &mut Fields<'a>,
    dtype: DType,
    ignore: &'a [String],
) -> Result<Spec, Diagnostic> {
    let sizes = read_sizes(
        fields,
        &Defaults { vocab: 50_304, eps: ("rms_norm_eps", 1e-5), padding: Some(1), ..USUAL },
    )?;
    let bias = fields.flag("attention_bias", false)?;
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
    let spec = sizes.spec(Family::Olmo2, dtype, vec![kind], layers);
    let bias = Biases { qkv: bias, out: bias, mlp: false };
    Ok(Spec { bias, qk_norm: QkNorm::Projection, ..spec })
}
