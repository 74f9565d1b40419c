//! The steps of rings and of balanced causal attention.

use ithaca_ir::layout::Move;

use super::{RankOffset, Site, Step};

/// Every offset once: home first, then backwards, so a rank receives the previous rank's block first; with several axes
/// the innermost ring rotates fastest.
pub(super) fn rotate<'s>(site: &'s Site<'_>) -> impl Iterator<Item = RankOffset> + 's {
    let sizes: Vec<u64> = site.axes.iter().map(|&a| site.space.mesh.size(a)).collect();
    (0..site.blocks()).map(move |i| {
        let mut rest = i;
        let mut by: Vec<u64> = Vec::with_capacity(sizes.len());
        for &n in sizes.iter().rev() {
            by.insert(0, (n - rest % n) % n);
            rest /= n;
        }
        site.offset(&by)
    })
}

/// The load-balanced schedule of DistFlashAttn: ranks with less causal work compute blocks for ranks with more.
pub(super) fn balance(site: &Site<'_>) -> Vec<Step> {
    let n = site.blocks();
    let mut steps = vec![Step::default()];
    let Some(&axis) = site.axes.first() else { return steps };
    let offset =
        |by: u64, only: (u64, u64)| RankOffset::from_slice(&[Move { axis, by: by % n, only: Some(only) }]);
    for t in 1..=n / 2 {
        // Ranks from t on compute with the keys of the t-th rank before them.
        steps.push(Step::keys(offset(n - t, (t, n))));
        // The first t ranks have no such keys; they compute with the queries of rank + n − t, unless another rank
        // computes this pair in the same step.
        if 2 * t < n {
            steps.push(Step::queries(offset(n - t, (0, t))));
        }
    }
    steps
}
