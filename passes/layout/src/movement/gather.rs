//! `gather`: every rank receives all keys and values, at once or in groups of heads.

use ithaca_ir::Diagnostic;
use ithaca_ir::ops::MAX_PARTS;

use super::{Movement, Reach, Site, Visits};

/// The all-gather of Megatron's context parallelism and of Llama 3.
pub(super) struct Gather;

/// The option for the number of groups of heads.
const GROUPS: &str = "groups";

impl Movement for Gather {
    fn name(&self) -> &'static str {
        "gather"
    }
    fn summary(&self) -> &'static str {
        "keys and values are gathered, their gradients reduce-scattered (Llama 3, arXiv 2407.21783, section 3.3.2); in groups of key/value heads, one after another, where asked"
    }
    fn legality(&self) -> &'static str {
        "tokens % P = 0; zigzag: tokens % 2P = 0; all keys of a layer fit on a rank, or with groups=N those of 1/N of its heads; key/value heads of a rank % N = 0"
    }
    fn options(&self) -> &'static [(&'static str, &'static str)] {
        &[(
            GROUPS,
            "in how many groups of the key/value heads of a rank keys are gathered, one after another; 1 when left out",
        )]
    }
    fn reach(&self) -> Reach {
        Reach::AnyAxes
    }
    fn check(&self, site: &Site<'_>) -> Result<(), Diagnostic> {
        check_groups(site, site.option(GROUPS).unwrap_or(1))
    }
    fn visits(&self, site: &Site<'_>) -> Visits {
        match site.option(GROUPS) {
            None | Some(1) => Visits::Gather,
            Some(groups) => Visits::GatherGroups(groups),
        }
    }
}

/// Checks that `groups` divides the key/value heads of every rank.
fn check_groups(site: &Site<'_>, groups: u64) -> Result<(), Diagnostic> {
    if groups == 1 {
        return Ok(());
    }
    if groups == 0 {
        return Err(Diagnostic::new("P47", "movement `gather` has 1 group of heads or more, not 0")
            .help("write `gather` for all heads at once"));
    }
    let dim = &site.space.dims[site.attention.kv_heads];
    let degree = site.space.mesh.degree(site.head_axes);
    if !dim.divides_evenly(degree) {
        let message = format!(
            "{} key/value heads are not the same number on each of {degree} ranks, so they have no {groups} equal groups",
            dim.size / dim.granule
        );
        return Err(Diagnostic::new("P47", message)
            .help("write `movement=gather`, or use a head degree that divides"));
    }
    let held = dim.size / dim.granule / degree;
    let legal = |n: u64| n != 0 && n <= MAX_PARTS as u64 && held.is_multiple_of(n);
    if legal(groups) {
        return Ok(());
    }
    let message = format!(
        "movement `gather` in {groups} groups needs a multiple of {groups} key/value heads on a rank, and there are {held}"
    );
    let numbers: Vec<String> =
        (1..=held.min(MAX_PARTS as u64)).filter(|&n| legal(n)).map(|n| n.to_string()).collect();
    Err(Diagnostic::new("P47", message).help(format!("legal numbers of groups: {}", numbers.join(", "))))
}
