//! `two-pass`: keys rotate until the rows of scores are complete, then values rotate.

use super::rotate::rounds;
use super::{Movement, Site, Step, Visits};

/// Ring self-attention of ColossalAI.
pub(super) struct TwoPass;

impl Movement for TwoPass {
    fn name(&self) -> &'static str {
        "two-pass"
    }
    fn summary(&self) -> &'static str {
        "keys pass around to complete whole rows of scores, then values pass around; no online softmax (RSA: Li et al., arXiv 2105.13120)"
    }
    fn legality(&self) -> &'static str {
        "tokens % P = 0; rows of scores fit on a rank; no learned bias and no dropout of scores"
    }
    fn check(&self, site: &Site<'_>) -> Result<(), ithaca_ir::Diagnostic> {
        let a = site.attention;
        let found = a.bias.map(|_| "a learned bias").or(a.dropout.map(|_| "dropout"));
        match found {
            None => Ok(()),
            Some(what) => {
                let message =
                    format!("movement `two-pass` keeps plain rows of scores, and this attention has {what}");
                Err(ithaca_ir::Diagnostic::new("P46", message).help("strategy `ring` computes it"))
            }
        }
    }
    fn visits(&self, site: &Site<'_>) -> Visits {
        Visits::TwoPass(rounds(site).into_iter().map(Step::keys).collect())
    }
}
