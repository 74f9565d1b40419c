//! Checks the layout of experts.

use std::collections::{BTreeMap, BTreeSet};

use ithaca_ir::ops::Op;
use ithaca_ir::ops::experts::{Deal, EXPECTED_LOAD, Experts, Shared, bounded_slots, expected_slots};
use ithaca_ir::{Diagnostic, Dim, DimId, Mesh, Module, Space};
use ithaca_pass::roles::Roles;

use super::degrees::legal_degrees;
use super::strategy::Placement;

/// Experts divide by the degree, and there are some.
///
/// # Errors
/// `P28`.
pub(super) fn check(
    module: &Module,
    mesh: &Mesh,
    placement: &Placement,
    roles: &Roles,
) -> Result<(), Diagnostic> {
    let degree = mesh.degree(&placement.experts);
    let axes = mesh.degrees_text(&placement.experts);
    if placement.experts.is_empty() {
        return Ok(());
    }
    if roles.experts.is_empty() {
        let message = format!("the program has no experts to split over {axes}");
        return Err(Diagnostic::new("P28", message).help("leave `ep` out of the strategy"));
    }
    for &dim in &roles.experts {
        let Dim { name, size, .. } = &module.space.dims[dim];
        if size % degree != 0 {
            let message =
                format!("{size} experts ({name}) do not divide by the expert degree {degree} ({axes})");
            return Err(
                Diagnostic::new("P28", message).help(legal_degrees(*size, "expert", |p| size % p == 0))
            );
        }
    }
    Ok(())
}

/// A dimension of groups or of slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupSize {
    /// Its size.
    pub size: u64,
    /// For slots, the number that is expected to be filled.
    pub expected: Option<u64>,
}

/// Every assignment of slots to tokens.
pub(super) fn deals(module: &Module) -> impl Iterator<Item = &Deal> {
    let nodes = module.functions.values().flat_map(|f| &f.nodes);
    nodes.filter_map(|node| match &node.op {
        Op::Experts(Experts::Deal(deal)) => Some(deal),
        _ => None,
    })
}

/// The groups of tokens that share slots, in the space as it will be. With a bound, the tokens of a rank become a group: the
/// sizes of the dimensions, with notes to the user. With a capacity, groups stay as they are: they are whole on a rank, and their tokens in order
/// of position, so that the same tokens are dropped as in the whole program.
///
/// # Errors
/// `P29`.
pub(super) fn groups(
    module: &Module,
    space: &Space,
    placement: &Placement,
    roles: &Roles,
) -> Result<(BTreeMap<DimId, GroupSize>, BTreeSet<String>), Diagnostic> {
    let (axes, batch_axes) = (placement.residual_sequence(), &placement.batch);
    let (mut sizes, mut notes) = (BTreeMap::new(), BTreeSet::new());
    for Deal { experts, top, shared, bound } in deals(module) {
        let Shared { batch, batches, sequence, groups, slots } = *shared;
        if let Some(bound) = *bound {
            let parts = |of, axes: &[_]| if of { space.mesh.degree(axes) } else { 1 };
            let [n_batches, n_groups] = [
                parts(roles.batches.contains(&batch), batch_axes),
                parts(roles.sequences.contains(&sequence), &axes),
            ];
            let tokens = space.size(batch) / n_batches * (space.size(sequence) / n_groups);
            // Padding chooses experts too, wherever it is.
            let padding =
                space.size(batch) / n_batches * (space.size(sequence) - module.space.size(sequence));
            let n_slots = bounded_slots(bound, tokens, space.size(*top), space.size(*experts));
            let n_slots = (n_slots + padding).min(tokens);
            let expected = expected_slots(n_slots, tokens, space.size(*top), space.size(*experts));
            for (dim, size) in [(batches, n_batches), (groups, n_groups)] {
                sizes.insert(dim, GroupSize { size, expected: None });
            }
            sizes.insert(slots, GroupSize { size: n_slots, expected: Some(expected) });
            if n_slots < tokens {
                notes.insert(format!(
                    "each of {} experts has slots for {n_slots} of the {tokens} tokens of a rank (`--expert-bound {bound}`)",
                    space.size(*experts)
                ));
            }
            notes.insert(format!(
                "{expected} of the {n_slots} slots of an expert are expected to be filled: {EXPECTED_LOAD} times the even share, an estimate"
            ));
            continue;
        }
        let (tokens, n) = (module.space.size(sequence), module.space.size(groups));
        let refused = |problem: String| {
            let message =
                format!("{n} groups of {} tokens share slots of experts, but {problem}", tokens / n);
            Diagnostic::new("P29", message).help(
                "with `--capacity FACTOR/GROUPS`, take a multiple of the parts that ranks hold as GROUPS",
            )
        };
        if space.size(sequence) != tokens {
            return Err(refused(format!("the sequence is padded to {}", space.size(sequence))));
        }
        let degree = space.mesh.degree(&axes);
        if roles.sequences.contains(&sequence) && n % degree != 0 {
            return Err(refused(format!("{degree} ranks split a sequence")));
        }
        let each = tokens / n;
        let whole = |n: u64| n.is_multiple_of(each);
        let runs = space.position_runs(sequence, 0..tokens);
        if !runs.iter().all(|run| whole(run.index) && whole(run.position) && whole(run.len)) {
            return Err(refused("the order of tokens over ranks tears them".to_owned()));
        }
        let of_group = each * (space.size(batch) / space.size(batches).max(1));
        let size = space.size(slots);
        let expected = expected_slots(size, of_group, space.size(*top), space.size(*experts));
        sizes.insert(slots, GroupSize { size, expected: Some(expected) });
    }
    Ok((sizes, notes))
}
