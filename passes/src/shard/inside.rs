//! Attention whose sequence stays split inside: which movement serves it, and whether it can.

use std::collections::BTreeMap;

use ithaca_ir::mesh::AxisId;
use ithaca_ir::ops::{Attention, Keyed, Op};
use ithaca_ir::{Diagnostic, DimId, Module, Order, Rank, Space};

use super::options::{OrderChoice, Prune};
use super::orders::{self, Split};
use super::placements::Placements;
use super::roles::Roles;
use crate::movement::{Movement, Site};
use crate::registry::Registry;

/// An attention with a movement.
pub(super) struct Inside<'a> {
    attention: &'a Attention,
    /// The axes that split its keys, major to minor.
    pub(super) axes: Vec<AxisId>,
    /// How keys and queries meet.
    pub(super) movement: &'static dyn Movement,
}

/// Every attention with a movement.
///
/// # Errors
/// `P47` for a movement that is not known, `P40` for dropout that the layout would change.
pub(super) fn splits<'a>(
    registry: &Registry,
    module: &'a Module,
    placements: &Placements,
    roles: &Roles,
) -> Result<Vec<Inside<'a>>, Diagnostic> {
    let mut found = Vec::new();
    for function in module.functions.values() {
        let placement = placements.function(&function.name);
        for node in &function.nodes {
            let (Op::Attention(attention) | Op::AttentionBackward(attention)) = &node.op else { continue };
            let mut axes = placement.attention_sequence().to_vec();
            if roles.caches.contains(&attention.keys) {
                axes.extend(placement.cache.iter().copied());
            }
            let spread =
                !axes.is_empty() || !placement.attention_heads().is_empty() || !placement.batch.is_empty();
            if spread && attention.dropout.is_some_and(|d| d.keyed == Keyed::Stream) {
                let message = format!(
                    "attention of function `{}` drops weights by a generator that is keyed by the order of computation; \
                     split over ranks it would drop others",
                    function.name
                );
                return Err(Diagnostic::new("P40", message)
                    .help("key the generator by position: `dropout=uniform(…, keyed=position)`"));
            }
            if let Some(name) = placement.movement.as_deref()
                && (!axes.is_empty() || !placement.cache.is_empty())
            {
                found.push(Inside { attention, axes, movement: registry.movement(name)? });
            }
        }
    }
    Ok(found)
}

/// The token orders of the sequences that stay split.
///
/// # Errors
/// See [`orders::decide`].
pub(super) fn orders(
    space: &Space,
    inside: &[Inside<'_>],
    asked: Option<OrderChoice>,
) -> Result<BTreeMap<DimId, Order>, Diagnostic> {
    let split = |i: &'_ Inside<'_>| -> bool { space.mesh.degree(&i.axes) > 1 };
    let splits: Vec<Split<'_>> = inside
        .iter()
        .filter(|i| split(i))
        .map(|i| Split { attention: i.attention, axes: &i.axes, orders: i.movement.orders() })
        .collect();
    orders::decide(space, &splits, asked)
}

/// Whether every movement can serve its attention, in the space as it will be.
///
/// # Errors
/// What the movement refuses; `P49` where it must leave out what the mask leaves empty and cannot.
pub(super) fn check(space: &Space, inside: &[Inside<'_>], prune: Prune) -> Result<(), Diagnostic> {
    for Inside { attention, axes, movement } in inside {
        let site = Site { space, attention, axes };
        movement.check(&site)?;
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
    let n = site.space.mesh.group_along(Rank(0), site.axes).len() as u64;
    (0..n).any(|q| (0..n).any(|k| site.pairs(q, k) == 0))
}
