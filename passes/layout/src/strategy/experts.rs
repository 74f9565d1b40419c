//! Expert parallelism: where experts lie, whatever attention does.

use ithaca_ir::mesh::AxisId;

use super::{EXPERT_AXIS, Placement, Search, Strategy};

/// Experts split, tokens split outside of them: the strategy `ep`.
///
/// On an axis of its own tokens are split by sequence wherever attention does not see them, and attention is computed
/// alike on the ranks along the axis. Without one, in a product, experts lie over the ranks among which the other
/// strategies split tokens: `ulysses+ep` on `ulysses=4` has heads on four ranks inside attention, experts on the same four
/// inside the mixture, and a quarter of the tokens on each between.
pub(super) struct Experts;

impl Strategy for Experts {
    fn name(&self) -> &'static str {
        "ep"
    }
    fn summary(&self) -> &'static str {
        "experts split, tokens split outside of them; all-to-all in and out (GShard: Lepikhin et al., arXiv 2006.16668); \
         in a product without axis ep, over the ranks of the others"
    }
    fn legality(&self) -> &'static str {
        "experts % P = 0; tokens % P = 0"
    }
    fn axes(&self) -> &'static [&'static str] {
        &[EXPERT_AXIS]
    }
    fn search(&self) -> Search {
        Search::Experts
    }
    fn shares_axes(&self) -> bool {
        true
    }
    fn place(&self, axes: &[AxisId], placement: &mut Placement) {
        placement.experts_over(axes);
    }
}
