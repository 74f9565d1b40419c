//! Whether experts may lie as a strategy has them.

use ithaca_ir::{Diagnostic, Dim, Mesh, Module};

use super::legality::legal_degrees;
use super::roles::Roles;
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
    let axes: Vec<String> =
        placement.experts.iter().map(|&a| format!("{}={}", mesh.axes[a].name, mesh.size(a))).collect();
    if placement.experts.is_empty() {
        return Ok(());
    }
    if roles.experts.is_empty() {
        let message = format!("the program has no experts to split over {}", axes.join(" × "));
        return Err(Diagnostic::new("P28", message).help("leave `ep` out of the strategy"));
    }
    for &dim in &roles.experts {
        let Dim { name, size, .. } = &module.space.dims[dim];
        if size % degree != 0 {
            let message = format!(
                "{size} experts ({name}) do not divide by the expert degree {degree} ({})",
                axes.join(" × ")
            );
            return Err(
                Diagnostic::new("P28", message).help(legal_degrees(*size, "expert", |p| size % p == 0))
            );
        }
    }
    Ok(())
}
