//! Checks the layout of experts.

use std::collections::BTreeSet;

use ithaca_ir::ops::Op;
use ithaca_ir::ops::experts::{Capacity, Experts};
use ithaca_ir::{Diagnostic, Dim, Mesh, Module, Space};
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

/// Groups of tokens that share slots are whole on a rank, and their tokens in order of position, in the space as it will
/// be, so that the same tokens are dropped as in the whole program.
///
/// # Errors
/// `P29`.
pub(super) fn check_groups(
    module: &Module,
    space: &Space,
    placement: &Placement,
    roles: &Roles,
) -> Result<(), Diagnostic> {
    let mut groups = BTreeSet::new();
    for node in module.functions.values().flat_map(|f| &f.nodes) {
        if let Op::Experts(Experts::Dispatch(slots) | Experts::Combine(slots)) = &node.op {
            groups.extend(slots.capacity.map(|Capacity { sequence, groups, .. }| (sequence, groups)));
        }
    }
    for (sequence, groups) in groups {
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
        let axes = placement.residual_sequence();
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
    }
    Ok(())
}
