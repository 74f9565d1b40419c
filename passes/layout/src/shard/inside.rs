//! Attention whose sequence stays split inside: which movement serves it, and whether it can.

use ithaca_ir::layout::AxisList;
use ithaca_ir::ops::{Attention, Keyed, Op};
use ithaca_ir::{Diagnostic, DimId, Module, Space};
use ithaca_pass::roles::Roles;

use super::options::Prune;
use super::placements::Placements;
use crate::movement::{Movement, Site, admit};
use crate::registry::Registry;

/// An attention with a movement.
pub(super) struct Inside<'a> {
    pub(super) attention: &'a Attention,
    /// The axes that split its keys, major to minor.
    pub(super) axes: AxisList,
    /// The axes that split its queries, major to minor.
    pub(super) query_axes: AxisList,
    /// The axes that split its heads, major to minor.
    pub(super) head_axes: AxisList,
    /// How keys and queries meet.
    pub(super) movement: &'static dyn Movement,
    /// The options of the movement.
    pub(super) options: Vec<(String, u64)>,
}

impl Inside<'_> {
    /// Whether keys are another sequence than queries.
    pub(super) fn is_cross(&self) -> bool {
        self.attention.queries != self.attention.keys
    }

    /// The axes that split sequence `dim`, if it is one of this attention.
    pub(super) fn axes_of(&self, dim: DimId) -> Option<&AxisList> {
        let Attention { queries, keys, .. } = self.attention;
        if dim == *keys { Some(&self.axes) } else { (dim == *queries).then_some(&self.query_axes) }
    }
}

/// Every attention with a movement.
///
/// # Errors
/// `P47` for a movement that is not known or missing, `P40` for dropout that the layout would change.
pub(super) fn splits<'a>(
    registry: &Registry,
    module: &'a Module,
    placements: &Placements,
    roles: &Roles,
) -> Result<Vec<Inside<'a>>, Diagnostic> {
    let mut found = Vec::new();
    for function in module.functions.values() {
        let placement = placements.function(function);
        for node in &function.nodes {
            let (Op::Attention(attention) | Op::AttentionBackward(attention)) = &node.op else { continue };
            let query_axes = placements.attention_sequence(function, attention.queries);
            let axes = placements.key_sequence(function, attention.keys, roles);
            let spread = !axes.is_empty()
                || !query_axes.is_empty()
                || !placement.attention_heads().is_empty()
                || !placement.batch.is_empty();
            if spread && attention.dropout.is_some_and(|d| d.keyed == Keyed::Stream) {
                let message = format!(
                    "attention of function `{}` drops weights by a generator that is keyed by the order of computation; \
                     split over ranks it would drop others",
                    function.name
                );
                return Err(Diagnostic::new("P40", message)
                    .help("key the generator by position: `dropout=uniform(…, keyed=position)`"));
            }
            // Beside attention on caches there is that of an encoder, which has none.
            let has_cache = roles.caches.is_empty() || roles.caches.contains(&attention.keys);
            if axes.is_empty() && (placement.cache.is_empty() || !has_cache) {
                continue;
            }
            match placements.movement(function, attention) {
                Some(by) => found.push(Inside {
                    attention,
                    axes,
                    query_axes,
                    head_axes: placement.attention_heads(),
                    movement: registry.movement(&by.name)?,
                    options: by.options,
                }),
                None if axes.is_empty() => {}
                None => {
                    let name = &module.space.dims[attention.keys].name;
                    let message = format!(
                        "sequence `{name}` stays split inside attention of function `{}`, and the strategy names no movement",
                        function.name
                    );
                    return Err(Diagnostic::new("P47", message)
                        .help("name one, as in `--movement gather` or, for cross-attention, `--cross-movement gather`"));
                }
            }
        }
    }
    Ok(found)
}

/// Whether every movement can serve its attention, in the space as it will be.
///
/// # Errors
/// The refusal of the movement; `P49` where it must omit blocks that the mask leaves empty and cannot.
pub(super) fn check(space: &Space, inside: &[Inside<'_>], prune: Prune) -> Result<(), Diagnostic> {
    for Inside { attention, axes, query_axes, head_axes, movement, options } in inside {
        let site = Site { space, attention, axes, query_axes, head_axes, options };
        admit(*movement, &site)?;
        if prune == Prune::Required && !movement.prunes() && has_empty_tile(&site) {
            let message = format!(
                "movement `{}` moves blocks that the mask leaves empty, and was asked not to",
                movement.name()
            );
            return Err(Diagnostic::new("P49", message)
                .help("strategies `window-halo`, `sparse-fetch` and `ring` leave them out"));
        }
    }
    Ok(())
}

/// Whether some rank's queries see nothing of some rank's keys.
fn has_empty_tile(site: &Site<'_>) -> bool {
    (0..site.query_blocks()).any(|q| (0..site.blocks()).any(|k| site.pairs(q, k) == 0))
}
