//! The built-in strategies, a row each: the axes, and the dimensions that each axis splits.

use ithaca_ir::mesh::AxisId;

use super::{Placement, Search, Strategy};

/// A strategy that needs no more than a row.
struct Recipe {
    name: &'static str,
    summary: &'static str,
    legality: &'static str,
    axes: &'static [&'static str],
    search: Search,
    place: fn(&[AxisId], &mut Placement),
}

impl Strategy for Recipe {
    fn name(&self) -> &'static str {
        self.name
    }
    fn summary(&self) -> &'static str {
        self.summary
    }
    fn legality(&self) -> &'static str {
        self.legality
    }
    fn axes(&self) -> &'static [&'static str] {
        self.axes
    }
    fn search(&self) -> Search {
        self.search
    }
    fn shares_axes(&self) -> bool {
        self.axes == [super::EXPERT_AXIS]
    }
    fn place(&self, axes: &[AxisId], placement: &mut Placement) {
        (self.place)(axes, placement);
    }
}

const HEADS: &str =
    "query heads % P = 0; key/value heads % P = 0, or P % key/value heads = 0 with copies; tokens % P = 0";

/// Every strategy, in the order of the documentation.
pub const STRATEGIES: &[&dyn Strategy] = &[
    &Recipe {
        name: "single",
        summary: "one device, nothing is split",
        legality: "one GPU",
        axes: &[],
        search: Search::Candidate,
        place: |_, _| {},
    },
    &Recipe {
        name: "data-parallel",
        summary: "sequences of the batch split, weights whole; nothing is sent in a forward pass",
        legality: "sequences of the batch % P = 0",
        axes: &[super::DATA_AXIS],
        search: Search::Candidate,
        place: |axes, p| p.batch.push(axes[0]),
    },
    &Recipe {
        name: "ulysses",
        summary: "sequence split outside attention, heads inside; all-to-all in and out (Jacobs et al., arXiv 2309.14509)",
        legality: HEADS,
        axes: &["ulysses"],
        search: Search::Candidate,
        place: |axes, p| p.heads_inside(axes[0]),
    },
    &Recipe {
        name: "megatron-tp",
        summary: "heads and feed-forward width split, activations whole; two all-reduces a layer (Shoeybi et al., arXiv 1909.08053)",
        legality: "query heads % P = 0; key/value heads a multiple or a divisor of P; feed-forward width % P = 0",
        axes: &["tp"],
        search: Search::Candidate,
        place: |axes, p| p.weights_by(axes[0]),
    },
    &Recipe {
        name: "megatron-tp-sp",
        summary: "as megatron-tp, the residual stream split by sequence; all-gather in, reduce-scatter out (Korthikanti et al., arXiv 2205.05198)",
        legality: "as megatron-tp; tokens % P = 0",
        axes: &["tp"],
        search: Search::Candidate,
        place: |axes, p| {
            p.weights_by(axes[0]);
            p.residual.push(axes[0]);
        },
    },
    &Recipe {
        name: "ring",
        summary: "sequence split everywhere, keys and values pass around a ring (Liu et al., arXiv 2310.01889); zigzag order balances causal masks",
        legality: "tokens % P = 0; zigzag: tokens % 2P = 0",
        axes: &["ring"],
        search: Search::Candidate,
        place: |axes, p| p.sequence_inside(&[axes[0]], "rotate"),
    },
    &Recipe {
        name: "megatron-cp-allgather",
        summary: "sequence split everywhere, keys and values gathered before attention (Megatron-Core context parallelism, all_gather)",
        legality: "tokens % P = 0; zigzag: tokens % 2P = 0",
        axes: &["cp"],
        search: Search::Candidate,
        place: |axes, p| p.sequence_inside(&[axes[0]], "gather"),
    },
    &Recipe {
        name: "megatron-cp-p2p",
        summary: "sequence split everywhere, keys and values pass around a ring (Megatron-Core context parallelism, p2p)",
        legality: "tokens % P = 0; zigzag: tokens % 2P = 0",
        axes: &["cp"],
        search: Search::Named,
        place: |axes, p| p.sequence_inside(&[axes[0]], "rotate"),
    },
    &Recipe {
        name: "megatron-cp-a2a",
        summary: "sequence split outside attention, heads inside (Megatron-Core context parallelism, a2a)",
        legality: HEADS,
        axes: &["cp"],
        search: Search::Named,
        place: |axes, p| p.heads_inside(axes[0]),
    },
    &Recipe {
        name: "megatron-cp-a2a-p2p",
        summary: "heads inside a group of ranks, a ring across groups (Megatron-Core hierarchical context parallelism, a2a+p2p)",
        legality: "heads as ulysses; tokens % (cp · ulysses) = 0; zigzag: tokens % 2cp = 0",
        axes: &["cp", "ulysses"],
        search: Search::Named,
        place: |axes, p| {
            p.sequence_inside(&[axes[0]], "rotate");
            p.heads_inside(axes[1]);
        },
    },
    &Recipe {
        name: "rsa",
        summary: "keys pass around until rows of scores are whole, then values do; no online softmax (Li et al., arXiv 2105.13120)",
        legality: "tokens % P = 0; no learned bias, no dropout of scores",
        axes: &["ring"],
        search: Search::Named,
        place: |axes, p| p.sequence_inside(&[axes[0]], "two-pass"),
    },
    &Recipe {
        name: "dist-flash",
        summary: "causal blocks in ⌊P/2⌋ + 1 steps, early ranks work for late ones (DistFlashAttn, arXiv 2310.03294)",
        legality: "a causal mask; contiguous order; tokens % P = 0",
        axes: &["ring"],
        search: Search::Named,
        place: |axes, p| p.sequence_inside(&[axes[0]], "balance"),
    },
    &Recipe {
        name: "usp",
        summary: "heads inside groups, a ring across them (Unified Sequence Parallelism: Fang and Zhao, arXiv 2405.07719)",
        legality: "heads as ulysses; tokens % (ring · ulysses) = 0; zigzag: tokens % 2ring = 0",
        axes: &["ring", "ulysses"],
        search: Search::Candidate,
        place: |axes, p| {
            p.sequence_inside(&[axes[0]], "rotate");
            p.heads_inside(axes[1]);
        },
    },
    &Recipe {
        name: "loongtrain",
        summary: "heads inside groups, an inner ring inside an outer one; head-first or context-first is the order of the mesh's axes (Gu et al., arXiv 2406.18485)",
        legality: "heads as ulysses; tokens % (outer · ring · ulysses) = 0; zigzag: tokens % (2 · outer · ring) = 0",
        axes: &["outer", "ring", "ulysses"],
        search: Search::Named,
        place: |axes, p| {
            p.sequence_inside(&axes[..2], "rotate");
            p.heads_inside(axes[2]);
        },
    },
    &Recipe {
        name: "gspmd-2d",
        summary: "sequence over one axis, heads and weights over another, keys gathered, as propagation would choose (GSPMD: Xu et al., arXiv 2105.04663)",
        legality: "as megatron-tp over tp; tokens % cp = 0",
        axes: &["cp", "tp"],
        search: Search::Named,
        place: |axes, p| {
            p.sequence_inside(&[axes[0]], "gather");
            p.weights_by(axes[1]);
        },
    },
    &Recipe {
        name: "window-halo",
        summary: "sequence split everywhere, ends of neighbours' shards are fetched (sliding windows)",
        legality: "a mask that is a sliding window alone, without documents; contiguous order; tokens % P = 0",
        axes: &["ring"],
        search: Search::Named,
        place: |axes, p| p.sequence_inside(&[axes[0]], "halo"),
    },
    &Recipe {
        name: "sparse-fetch",
        summary: "sequence split everywhere, every rank fetches the tokens that its queries see (block-sparse, documents, BigBird)",
        legality: "tokens % P = 0; any mask and order",
        axes: &["ring"],
        search: Search::Sparse,
        place: |axes, p| p.sequence_inside(&[axes[0]], "fetch"),
    },
    &Recipe {
        name: "streaming",
        summary: "sequence split everywhere, sinks and the window's halo are fetched (StreamingLLM, arXiv 2309.17453)",
        legality: "a mask of sinks and a sliding window; contiguous order; tokens % P = 0",
        axes: &["ring"],
        search: Search::Named,
        place: |axes, p| p.sequence_inside(&[axes[0]], "streaming"),
    },
    &Recipe {
        name: "decode-reduce",
        summary: "the cache of keys and values split, queries on every rank, partial results merge (Tree Attention, arXiv 2408.04093; Helix, arXiv 2507.07120)",
        legality: "a cache of keys; cached tokens % P = 0; tp · cp beyond the key/value heads: (query heads / key/value heads) % cp = 0 to share the merge",
        axes: &["cp"],
        search: Search::Caches,
        place: |axes, p| {
            p.cache.push(axes[0]);
            p.moves_by("reduce");
        },
    },
    &Recipe {
        name: "decode-context",
        summary: "weights split as by megatron-tp, the cache of keys and values by its tokens over the same ranks, which gather queries and \
         merge partial results (vLLM's decode context parallelism; Helix, arXiv 2507.07120)",
        legality: "a cache of keys; cached tokens % P = 0; feed-forward width % P = 0; query heads are split over the ranks where key/value \
         heads divide",
        axes: &[super::CONTEXT_AXIS],
        search: Search::Caches,
        place: |axes, p| {
            p.weights.push(axes[0]);
            p.cache.push(axes[0]);
            p.moves_by("reduce");
        },
    },
    &Recipe {
        name: "pass-q",
        summary: "sequence split everywhere, queries and their partial results pass around, keys stay (Yang et al., arXiv 2411.01783)",
        legality: "tokens % P = 0; zigzag: tokens % 2P = 0",
        axes: &["ring"],
        search: Search::Prefix,
        place: |axes, p| p.sequence_inside(&[axes[0]], "rotate-q"),
    },
    &Recipe {
        name: "pipeline",
        summary: "stages of layers run one after another, for several micro-batches at once; nothing is split (GPipe: Huang et al., arXiv 1811.06965; 1F1B: Narayanan et al., arXiv 2104.04473; ZB-H1: Qi et al., arXiv 2401.10241)",
        legality: "P ≤ layers, embedding and head; interleaved: micro-batches % P = 0",
        axes: &["pp"],
        search: Search::Stages,
        place: |axes, p| p.stages.push(axes[0]),
    },
    // On an axis of its own tokens are split by sequence wherever attention does not see them, and ranks along the axis
    // compute the same attention. Without one, in a product, experts are split by the axes along which the other
    // strategies split tokens: `ulysses+ep` on `ulysses=4` has heads on four ranks inside attention, experts on the same
    // four ranks inside the mixture, and a quarter of the tokens on each rank between them.
    &Recipe {
        name: "ep",
        summary: "experts split, tokens split outside of them; all-to-all in and out (GShard: Lepikhin et al., arXiv 2006.16668); \
         in a product without axis ep, over the ranks of the others",
        legality: "experts % P = 0; tokens % P = 0",
        axes: &[super::EXPERT_AXIS],
        search: Search::Experts,
        place: |axes, p| p.experts_over(axes),
    },
    &Recipe {
        name: super::EXPERT_COPIES,
        summary: "sequences of the batch split over dp and ep, experts over ep alone: dp ranks have copies of them (expert \
         parallelism inside data parallelism, Megatron-Core)",
        legality: "sequences of the batch % (dp · ep) = 0; experts % ep = 0",
        axes: &[super::DATA_AXIS, super::EXPERT_AXIS],
        search: Search::Experts,
        place: |axes, p| {
            p.batch.extend(axes.iter().copied());
            p.experts_over(&axes[1..]);
        },
    },
];
