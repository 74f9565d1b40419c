//! `reduce`: several ranks have the same queries and different keys; their partial results are merged.

use ithaca_ir::Diagnostic;

use super::{Movement, Orders, Reach, Site, Visits};

/// Decoding with a sharded key/value cache, and cross-attention whose keys have their own axis.
pub(super) struct Reduce;

impl Movement for Reduce {
    fn name(&self) -> &'static str {
        "reduce"
    }
    fn summary(&self) -> &'static str {
        "every rank attends to the keys it holds; partial (o, lse) travel by head and merge (Tree Attention, arXiv 2408.04093; vLLM's decode context parallelism; Helix, arXiv 2507.07120)"
    }
    fn legality(&self) -> &'static str {
        "a key sequence other than that of the queries (a cache, an encoder), split by an axis that the queries are not; its tokens % P = 0"
    }
    fn orders(&self) -> Orders {
        Orders::Local
    }
    fn reach(&self) -> Reach {
        Reach::AnyAxes
    }
    fn check(&self, site: &Site<'_>) -> Result<(), Diagnostic> {
        let name = &site.space.dims[site.attention.keys].name;
        if site.attention.queries == site.attention.keys {
            let message = format!(
                "movement `reduce` needs a cache of keys, but `{name}` is the sequence of the queries too"
            );
            return Err(Diagnostic::new("P45", message)
                .help("strategies `ring` and `megatron-cp-allgather` split both"));
        }
        let shared = site.axes.iter().all(|axis| site.query_axes.contains(axis));
        if !shared || site.axes.is_empty() {
            return Ok(());
        }
        let message = format!(
            "movement `reduce` needs ranks with the same queries and other keys, but all axes of `{name}`, {}, split the queries too",
            site.axes_text()
        );
        Err(Diagnostic::new("P45", message)
            .help("movement `gather` serves queries on any axes")
            .help("or give one of the sequences an axis of its own: `--sequence-axes`"))
    }
    fn visits(&self, _site: &Site<'_>) -> Visits {
        Visits::Reduce
    }
}
