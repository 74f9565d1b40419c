//! What emitted kernels are told of mixtures of experts.

use ithaca_ir::ops::experts::{Experts, Gates, Route, Scoring, Slots};
use ithaca_ir::{Diagnostic, Space};

use super::names;

/// The initializer of what a kernel takes beside tensors.
///
/// # Errors
/// `S40` for groups that do not divide their sequence, which a verified schedule does not have.
pub(super) fn describe(space: &Space, op: &Experts) -> Result<String, Diagnostic> {
    match op {
        Experts::Route(route) | Experts::RouteBackward(route) => Ok(describe_route(space, route)),
        Experts::Dispatch(slots) | Experts::Combine(slots) | Experts::Products(slots) => {
            describe_slots(space, slots)
        }
    }
}

fn describe_route(space: &Space, route: &Route) -> String {
    let (groups, kept) = route.groups.map_or((0, 0), |g| (g.count, g.kept));
    format!(
        "kernel::Route{{{}, {}, {}, {}, {}, {groups}, {kept}}}",
        space.size(route.over),
        space.size(route.top),
        route.scoring == Scoring::Sigmoid,
        route.gates == Gates::Shares,
        names::double(route.scale),
    )
}

fn describe_slots(space: &Space, slots: &Slots) -> Result<String, Diagnostic> {
    let Some(capacity) = slots.capacity else { return Ok("Capacity{1, 1}".to_owned()) };
    let tokens = capacity.tokens(space).ok_or_else(|| {
        Diagnostic::new("S40", "the schedule has groups of tokens that do not divide their sequence")
    })?;
    Ok(format!("Capacity{{{tokens}, {}}}", space.size(capacity.slots)))
}
