//! `gather`: every rank gets all keys and values.

use super::{Movement, Site, Visits};

/// The movement of Megatron's context parallelism by all-gather, and of Llama 3.
pub(super) struct Gather;

impl Movement for Gather {
    fn name(&self) -> &'static str {
        "gather"
    }
    fn summary(&self) -> &'static str {
        "keys and values are gathered, their gradients reduce-scattered (Llama 3, arXiv 2407.21783, section 3.3.2)"
    }
    fn legality(&self) -> &'static str {
        "tokens % P = 0; zigzag: tokens % 2P = 0; all keys of a layer fit on a rank"
    }
    fn visits(&self, _site: &Site<'_>) -> Visits {
        Visits::Gather
    }
}
