//! What families with experts share: kinds of block by whether a layer has experts.

use ithaca_ir::ops::experts::{ExpertGroups, Gates, Scoring};
use ithaca_ir::{Diagnostic, Mask};
use serde_json::json;

use super::sizes::{Sizes, usual_scale};
use crate::fields::Fields;
use crate::rope::Rope;
use crate::spec::{ExpertSpec, Kind, Mlp, window};

/// The kinds of block of layers with experts where `has_experts` says so, and the kind of each layer. All have the same
/// window, if there is one.
pub(super) fn kinds(
    sizes: &Sizes,
    width: Option<u64>,
    rope: &Rope<'_>,
    has_experts: impl Fn(u64) -> bool,
) -> Result<(Vec<Kind>, Vec<usize>), Diagnostic> {
    let mask = width.map_or(Mask::Causal, window);
    let mut present: Vec<Mlp> = Vec::new();
    let mut layers = Vec::new();
    for layer in 0..sizes.layers {
        let mlp = if has_experts(layer) { Mlp::Experts } else { Mlp::Dense };
        let kind = present.iter().position(|&p| p == mlp).unwrap_or_else(|| {
            present.push(mlp);
            present.len() - 1
        });
        layers.push(kind);
    }
    let mut kinds = Vec::new();
    for mlp in present {
        let label = match mlp {
            Mlp::Dense => "dense",
            Mlp::Experts => "experts",
        };
        kinds.push(Kind {
            label: label.to_owned(),
            mask: mask.clone(),
            scale: usual_scale(sizes.head_dim),
            softcap: None,
            rotary: Some(rope.of_model()?),
            mlp,
        });
    }
    Ok((kinds, layers))
}

/// Experts whose gates are softmax scores, or shares of these.
pub(super) fn by_softmax(count: u64, top: u64, ffn: u64, gates: Gates) -> ExpertSpec {
    ExpertSpec { count, top, ffn, shared: None, scoring: Scoring::Softmax, gates, scale: 1.0, groups: None }
}

/// Groups of experts, where the choice among them leaves any out.
///
/// # Errors
/// `M07` when groups do not divide the experts, are too small to be judged by two, or hold too few experts.
pub(super) fn groups(
    (count, top): (u64, u64),
    groups: (&str, u64),
    kept: (&str, u64),
) -> Result<Option<ExpertGroups>, Diagnostic> {
    let (n, n_kept) = (groups.1, kept.1);
    let size = count / n;
    let problem = if !count.is_multiple_of(n) {
        format!("{count} experts do not divide into `{}` {n}", groups.0)
    } else if n_kept > n {
        format!("`{}` is {n_kept}, but `{}` is {n}", kept.0, groups.0)
    } else if size < 2 {
        format!(
            "`{}` of {n} leaves {size} of {count} experts in a group; a group is judged by its two best",
            groups.0
        )
    } else if top > size * n_kept {
        format!("{top} experts for a token, but {n_kept} groups of {size} to choose from")
    } else {
        return Ok((n_kept < n).then_some(ExpertGroups { count: n, kept: n_kept }));
    };
    Err(Diagnostic::new("M07", problem))
}

/// Fields of the loss that keeps experts busy, which reach no logits.
pub(super) fn read_loss(fields: &mut Fields<'_>) -> Result<(), Diagnostic> {
    fields.neutral("output_router_logits", &[json!(false)])?;
    fields.number("router_aux_loss_coef").map(|_| ())
}
