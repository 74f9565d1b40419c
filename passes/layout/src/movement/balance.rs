//! `balance`: ranks with less causal work compute blocks for ranks with more.

use ithaca_ir::Diagnostic;
use ithaca_ir::layout::Move;

use super::{Movement, Orders, Seat, Site, Step, Visits};

/// The load-balanced schedule of DistFlashAttn.
pub(super) struct Balance;

impl Movement for Balance {
    fn name(&self) -> &'static str {
        "balance"
    }
    fn summary(&self) -> &'static str {
        "causal blocks in ⌊P/2⌋ + 1 steps: early ranks compute blocks for late ones and return the partial results (DistFlashAttn, arXiv 2310.03294)"
    }
    fn legality(&self) -> &'static str {
        "contiguous order; one axis; no query sees a later block of keys; tokens % P = 0"
    }
    fn orders(&self) -> Orders {
        Orders::Contiguous
    }
    fn prunes(&self) -> bool {
        true
    }
    fn check(&self, site: &Site<'_>) -> Result<(), Diagnostic> {
        if site.axes.len() > 1 {
            let message = format!("movement `balance` goes along one axis, not along {}", site.axes_text());
            return Err(Diagnostic::new("P41", message).help("strategy `loongtrain` takes two"));
        }
        site.need_contiguous("balance", "strategy `ring` balances by the order itself")?;
        let n = site.blocks();
        let later = (0..n).flat_map(|q| (q + 1..n).map(move |k| (q, k))).find(|&(q, k)| site.pairs(q, k) > 0);
        match later {
            None => Ok(()),
            Some((q, k)) => {
                let message = format!(
                    "movement `balance` is for causal masks, but queries of block {q} see {} pairs of block {k}",
                    site.pairs(q, k)
                );
                Err(Diagnostic::new("P43", message).help("strategy `ring` takes any mask"))
            }
        }
    }
    fn visits(&self, site: &Site<'_>) -> Visits {
        let n = site.blocks();
        let Some(&axis) = site.axes.first() else { return Visits::Steps(vec![Step::default()]) };
        let seat =
            |by: u64, only: (u64, u64)| Seat::from_slice(&[Move { axis, by: by % n, only: Some(only) }]);
        let mut steps = vec![Step::default()];
        for t in 1..=n / 2 {
            // Ranks from t on compute with the keys of the t-th rank before them.
            steps.push(Step::keys(seat(n - t, (t, n))));
            // The first t ranks have no such keys; they compute with the queries of rank + n − t, unless another rank
            // computes this pair in the same step.
            if 2 * t < n {
                steps.push(Step::queries(seat(n - t, (0, t))));
            }
        }
        Visits::Steps(steps)
    }
}
