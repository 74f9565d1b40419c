//! Caches in pages: what ranks can have of them.

use ithaca_ir::{Diagnostic, Mesh, Space};
use ithaca_pass::roles::Roles;

use super::strategy::Placement;

/// Checks that ranks can have pages of their sequences, and a part of each page where they split tokens.
///
/// # Errors
/// `P25` for the pages, `P23` for their slots.
pub(super) fn check(
    space: &Space,
    mesh: &Mesh,
    placement: &Placement,
    roles: &Roles,
) -> Result<(), Diagnostic> {
    let degree = mesh.degree(&placement.batch);
    for pages in roles.host_pages.iter().map(|&dim| space.size(dim)) {
        if pages % degree != 0 {
            let message =
                format!("{pages} pages in host memory do not divide by the data-parallel degree {degree}");
            let next = pages.next_multiple_of(degree);
            return Err(Diagnostic::new("P25", message).repairs([format!("--offload cache={next}")]));
        }
    }
    for &[pages, slots] in roles.pages.values() {
        let [pages, slots] = [pages, slots].map(|dim| space.size(dim));
        if pages % degree != 0 {
            let message =
                format!("{pages} pages of caches do not divide by the data-parallel degree {degree}");
            let next = pages.next_multiple_of(degree);
            return Err(Diagnostic::new("P25", message).repairs([format!("--pages {next}")]));
        }
        let tokens = placement.attention_sequence().into_iter().chain(placement.cache.iter().copied());
        let parts = mesh.degree(&Vec::from_iter(tokens));
        if slots % parts != 0 {
            let message = format!("pages of {slots} tokens do not divide over {parts} ranks");
            let next = slots.next_multiple_of(parts);
            return Err(Diagnostic::new("P23", message).repairs([format!("--page {next}")]));
        }
    }
    Ok(())
}
