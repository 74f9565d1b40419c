//! The built-in movements: one table, one implementation.

use ithaca_ir::Diagnostic;

use super::steps::{balance, rotate};
use super::{Movement, Orders, Reach, Site, Step, Visits, legality};

/// A row of the table.
struct Known {
    name: &'static str,
    summary: &'static str,
    legality: &'static str,
    orders: Orders,
    prunes: bool,
    reach: Reach,
    options: &'static [(&'static str, &'static str)],
    check: fn(&Site<'_>) -> Result<(), Diagnostic>,
    visits: fn(&Site<'_>) -> Visits,
}

/// The movement that gathers all keys; the values that most rows share.
const GATHER: Known = Known {
    name: "gather",
    summary: "keys and values are gathered, their gradients reduce-scattered (Llama 3, arXiv 2407.21783, section 3.3.2); in groups of key/value heads, one after another, where asked",
    legality: "tokens % P = 0; zigzag: tokens % 2P = 0; all keys of a layer fit on a rank, or with groups=N those of 1/N of its heads; key/value heads of a rank % N = 0",
    orders: Orders::Balanced,
    prunes: false,
    reach: Reach::AnyAxes,
    options: &[(
        legality::GROUPS,
        "in how many groups of the key/value heads of a rank keys are gathered, one after another; 1 when left out",
    )],
    check: legality::groups,
    visits: |site| match site.option(legality::GROUPS) {
        None | Some(1) => Visits::Gather,
        Some(groups) => Visits::GatherGroups(groups),
    },
};

/// A movement by steps along the axes of the queries, for any mask and order.
const ROTATE: Known = Known {
    name: "rotate",
    summary: "blocks of keys and values pass around a ring, results merge by online softmax (Ring Attention, arXiv 2310.01889); over two axes an inner ring turns inside an outer one (LoongTrain, arXiv 2406.18485)",
    legality: "tokens % P = 0; zigzag: tokens % 2P = 0",
    prunes: true,
    reach: Reach::SameAxes,
    options: &[],
    check: |_| Ok(()),
    visits: |site| Visits::Steps(rotate(site).map(Step::keys).collect()),
    ..GATHER
};

/// A movement of the keys that the mask leaves visible.
const FETCH: Known = Known {
    name: "fetch",
    summary: "every rank gets the keys and values that its queries see, token by token; gradients return the same way (block-sparse, documents: MagiAttention's group-cast)",
    legality: "tokens % P = 0; any mask and order",
    orders: Orders::Local,
    visits: |_| Visits::Fetch,
    ..ROTATE
};

/// Every movement, in the order of the documentation.
pub const MOVEMENTS: &[&dyn Movement] = &[
    &GATHER,
    &ROTATE,
    &Known {
        name: "rotate-q",
        summary: "queries and their partial results pass around a ring, keys stay: cheaper where many query heads share few keys, or queries are few (pass-Q: Context Parallelism for Scalable Million-Token Inference, arXiv 2411.01783)",
        visits: |site| Visits::Steps(rotate(site).map(Step::queries).collect()),
        ..ROTATE
    },
    &Known {
        name: "two-pass",
        summary: "keys pass around to complete whole rows of scores, then values pass around; no online softmax (RSA: Li et al., arXiv 2105.13120)",
        legality: "tokens % P = 0; rows of scores fit on a rank; no learned bias and no dropout of scores",
        prunes: false,
        check: legality::two_pass,
        visits: |site| Visits::TwoPass(rotate(site).map(Step::keys).collect()),
        ..ROTATE
    },
    &Known {
        name: "balance",
        summary: "causal blocks in ⌊P/2⌋ + 1 steps: early ranks compute blocks for late ones and return the partial results (DistFlashAttn, arXiv 2310.03294)",
        legality: "contiguous order; one axis; no query sees a later block of keys; tokens % P = 0",
        orders: Orders::Contiguous,
        check: legality::balance,
        visits: |site| Visits::Steps(balance(site)),
        ..ROTATE
    },
    &FETCH,
    &Known {
        name: "halo",
        summary: "as fetch, where a sliding window leaves the ends of neighbours' shards: ⌈(W − 1)/T⌉ neighbours of T tokens (Longformer, arXiv 2004.05150)",
        legality: "a mask that is a sliding window alone, without documents; contiguous order; tokens % P = 0",
        orders: Orders::Contiguous,
        check: legality::halo,
        ..FETCH
    },
    &Known {
        name: "streaming",
        summary: "as fetch, where the mask is a window and the first tokens: rank 0's sinks go to all, the rest to neighbours (StreamingLLM, arXiv 2309.17453)",
        legality: "a mask of sinks and a sliding window; contiguous order; tokens % P = 0",
        orders: Orders::Contiguous,
        check: legality::streaming,
        ..FETCH
    },
    &Known {
        name: "reduce",
        summary: "every rank attends to the keys it holds; partial (o, lse) travel by head and merge (Tree Attention, arXiv 2408.04093; vLLM's decode context parallelism; Helix, arXiv 2507.07120)",
        legality: "a key sequence other than that of the queries (a cache, an encoder), split by an axis that the queries are not; its tokens % P = 0",
        prunes: false,
        reach: Reach::AnyAxes,
        check: legality::reduce,
        visits: |_| Visits::Reduce,
        ..FETCH
    },
];

impl Movement for Known {
    fn name(&self) -> &'static str {
        self.name
    }
    fn summary(&self) -> &'static str {
        self.summary
    }
    fn legality(&self) -> &'static str {
        self.legality
    }
    fn orders(&self) -> Orders {
        self.orders
    }
    fn prunes(&self) -> bool {
        self.prunes
    }
    fn options(&self) -> &'static [(&'static str, &'static str)] {
        self.options
    }
    fn reach(&self) -> Reach {
        self.reach
    }
    fn check(&self, site: &Site<'_>) -> Result<(), Diagnostic> {
        (self.check)(site)
    }
    fn visits(&self, site: &Site<'_>) -> Visits {
        (self.visits)(site)
    }
}
