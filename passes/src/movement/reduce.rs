//! `reduce`: queries are on every rank, the cache of keys and values stays split, partial results merge.

use ithaca_ir::Diagnostic;

use super::{Movement, Orders, Site, Visits};

/// Decoding with a split key/value cache.
pub(super) struct Reduce;

impl Movement for Reduce {
    fn name(&self) -> &'static str {
        "reduce"
    }
    fn summary(&self) -> &'static str {
        "every rank attends to the keys it holds; partial (o, lse) travel by head and merge (Tree Attention, arXiv 2408.04093; vLLM's decode context parallelism; Helix, arXiv 2507.07120)"
    }
    fn legality(&self) -> &'static str {
        "a key sequence that is no query sequence (a cache); cached tokens % P = 0"
    }
    fn orders(&self) -> Orders {
        Orders::Local
    }
    fn check(&self, site: &Site<'_>) -> Result<(), Diagnostic> {
        match site.attention.queries == site.attention.keys {
            false => Ok(()),
            true => {
                let name = &site.space.dims[site.attention.keys].name;
                let message = format!(
                    "movement `reduce` needs a cache of keys, but `{name}` is the sequence of the queries too"
                );
                Err(Diagnostic::new("P45", message)
                    .help("strategies `ring` and `megatron-cp-allgather` split both"))
            }
        }
    }
    fn visits(&self, _site: &Site<'_>) -> Visits {
        Visits::Reduce
    }
}
