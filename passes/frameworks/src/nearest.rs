//! The nearest layout that a framework can run: changes until no rule is broken.

use ithaca_import::Facts;

use crate::change::Refusal;
use crate::framework::{Framework, check};
use crate::layout::Layout;

/// Rounds of changes after which a layout is given up.
const ROUNDS: usize = 8;

/// The nearest layout that a framework can run, with the refusals of the choices that it changes.
///
/// # Errors
/// All refusals of a layout that has no such neighbour.
pub fn nearest(
    framework: Framework,
    layout: &Layout,
    facts: &Facts,
) -> Result<(Layout, Vec<Refusal>), Vec<Refusal>> {
    let first = check(framework, layout, facts);
    let (mut layout, mut changed, mut refusals) = (layout.clone(), Vec::new(), first.clone());
    for _ in 0..ROUNDS {
        if refusals.is_empty() {
            return Ok((layout, changed));
        }
        for refusal in refusals {
            let Some(change) = &refusal.change else { return Err(first) };
            layout = change.apply(&layout);
            changed.push(refusal);
        }
        refusals = check(framework, &layout, facts);
    }
    Err(first)
}
