//! Dimensions of a decoder.

use ithaca_ir::ops::experts::Shared;
use ithaca_ir::{Dim, DimId, Mask, Space};

use crate::shrink::seen;
use crate::spec::{ExpertSpec, Latent, Sizes, Spec};
use crate::workload::{STEP, Workload};

/// A cache of a window has a multiple of this many tokens.
const BLOCK: u64 = 16;

/// The dimensions of a model.
#[derive(Clone, Copy, Debug)]
pub(super) struct Dims {
    pub(super) b: DimId,
    pub(super) s: DimId,
    pub(super) m: DimId,
    pub(super) h: DimId,
    /// `h` itself if there are as many key/value heads.
    pub(super) k: DimId,
    pub(super) d: DimId,
    pub(super) f: DimId,
    pub(super) v: DimId,
    pub(super) p: Option<DimId>,
    /// Tokens of a cache.
    pub(super) c: Option<DimId>,
    /// Of caches in pages.
    pub(super) pages: Option<PageDims>,
    /// A sliding window or chunk, and the tokens of a cache of it, where those are fewer than of other caches.
    pub(super) ring: Option<(u64, DimId)>,
    pub(super) experts: Option<ExpertDims>,
    pub(super) latent: Option<LatentDims>,
}

impl Dims {
    pub(super) fn declare(space: &mut Space, spec: &Spec, workload: &Workload) -> Self {
        let dims = Self::of_sizes(space, &spec.sizes, spec.learned, workload);
        let tokens = [dims.b, dims.s];
        let experts = spec.experts.as_ref().map(|e| ExpertDims::declare(space, tokens, e, workload));
        let latent = spec.latent.as_ref().map(|l| LatentDims::declare(space, l, dims.c.is_some()));
        let ring = dims.ring(space, spec, workload);
        if let Some(Some(_)) = latent.map(|latent| latent.cached) {
            // All heads share what is cached.
            space.dims[dims.h].granule = spec.sizes.heads;
        }
        Self { ring, experts, latent, ..dims }
    }

    /// The cache of layers with a sliding window or chunks, the narrowest; pages are of whole sequences.
    fn ring(&self, space: &mut Space, spec: &Spec, workload: &Workload) -> Option<(u64, DimId)> {
        let capacity = space.size(self.c.filter(|_| self.pages.is_none())?);
        let window = spec.kinds.iter().filter_map(|kind| seen(&kind.mask)).min()?;
        let step = workload.step.unwrap_or(STEP).max(workload.sequence);
        let tokens = (window - 1 + step).next_multiple_of(BLOCK);
        (tokens < capacity).then(|| (window, space.dims.push(Dim::new("kv_window", tokens))))
    }

    /// The tokens of the cache of a layer with this mask, and whether it is a ring.
    pub(super) fn cache_of(&self, mask: &Mask, capacity: DimId) -> (DimId, bool) {
        match self.ring {
            Some((window, ring)) if seen(mask) == Some(window) => (ring, true),
            _ => (capacity, false),
        }
    }

    /// The dimensions that every family has, with as many learned positions.
    pub(super) fn of_sizes(
        space: &mut Space,
        sizes: &Sizes,
        learned: Option<u64>,
        workload: &Workload,
    ) -> Self {
        let Sizes { hidden, heads, kv_heads, head_dim, ffn, vocab, .. } = *sizes;
        let mut dim = |name: &str, size: u64| space.dims.push(Dim::new(name, size));
        let (b, s, m) = (dim("b", workload.batch), dim("s", workload.sequence), dim("m", hidden));
        let h = dim("h", heads);
        let k = if kv_heads == heads { h } else { dim("k", kv_heads) };
        let (d, f, v) = (dim("d", head_dim), dim("f", ffn), dim("v", vocab));
        let p = learned.map(|n| dim("p", n));
        let (c, pages) = cache_dims(space, workload);
        space.dims[h].granule = heads / kv_heads;
        Self { b, s, m, h, k, d, f, v, p, c, pages, ring: None, experts: None, latent: None }
    }
}

/// The tokens of a cache, and its pages if it is in pages.
pub(super) fn cache_dims(space: &mut Space, workload: &Workload) -> (Option<DimId>, Option<PageDims>) {
    let mut dim = |name: &str, size: u64| space.dims.push(Dim::new(name, size));
    let entries = |n: u64| workload.pages.map(|pages| (n.div_ceil(pages.tokens), pages));
    let paged = workload.cache.and_then(entries);
    let c = workload.cache.map(|n| dim("kv", paged.map_or(n, |(entries, of)| entries * of.tokens)));
    let pages = paged.map(|(entries, of)| {
        let count = of.count.unwrap_or(entries * workload.batch);
        let host = of.host.unwrap_or(0).min(count.saturating_sub(1));
        PageDims {
            pages: dim("page", count - host),
            slots: dim("slot", of.tokens),
            entries: dim("entry", entries),
            host: (host > 0).then(|| dim("host_page", host)),
        }
    });
    (c, pages)
}

/// Dimensions of caches in pages.
#[derive(Clone, Copy, Debug)]
pub(super) struct PageDims {
    /// Pages of all sequences, those in host memory left out.
    pub(super) pages: DimId,
    /// Tokens of a page.
    pub(super) slots: DimId,
    /// Pages of a sequence.
    pub(super) entries: DimId,
    /// Pages in host memory.
    pub(super) host: Option<DimId>,
}

/// Dimensions of experts.
#[derive(Clone, Copy, Debug)]
pub(super) struct ExpertDims {
    /// Experts.
    pub(super) e: DimId,
    /// Experts as the router scores them; never sharded, because all scores are compared.
    pub(super) r: DimId,
    /// Experts of a token.
    pub(super) n: DimId,
    /// Width of an expert.
    pub(super) x: DimId,
    /// Width of the shared network.
    pub(super) y: Option<DimId>,
    /// One element, of slots that count as filled, where experts have biases.
    pub(super) one: Option<DimId>,
    /// Groups of tokens, and their slots at an expert.
    pub(super) shared: Shared,
    /// The factor of the even share that an expert has slots for; `None` where it drops further tokens.
    pub(super) bound: Option<f64>,
}

impl ExpertDims {
    pub(super) fn declare(
        space: &mut Space,
        [batch, sequence]: [DimId; 2],
        spec: &ExpertSpec,
        workload: &Workload,
    ) -> Self {
        let mut dim = |name: &str, size: u64| space.dims.push(Dim::new(name, size));
        let (slots, bound) = spec.slots(workload);
        let shared = match workload.capacity {
            Some(capacity) => {
                let (groups, slots) = (dim("g", capacity.groups()), dim("c", slots));
                Shared { batch, batches: batch, sequence, groups, slots }
            }
            // `shard` makes a group of the tokens of each rank.
            None => {
                let (batches, groups, slots) = (dim("p", 1), dim("g", 1), dim("c", slots));
                Shared { batch, batches, sequence, groups, slots }
            }
        };
        Self {
            e: dim("e", spec.count),
            r: dim("r", spec.count),
            n: dim("n", spec.top),
            x: dim("x", spec.ffn),
            y: spec.shared.map(|n| dim("y", n)),
            one: spec.biases.then(|| dim("u", 1)),
            shared,
            bound,
        }
    }
}

/// Dimensions of latents and of the parts of a head.
#[derive(Clone, Copy, Debug)]
pub(super) struct LatentDims {
    /// Latent of queries.
    pub(super) queries: Option<DimId>,
    /// Latent of keys and values.
    pub(super) keys: DimId,
    /// The part of a head that is not rotated.
    pub(super) plain: DimId,
    /// The part of a head that is rotated.
    pub(super) rotated: DimId,
    /// Width of a value.
    pub(super) value: DimId,
    /// The one head of a cache of latents, and its width; where sequences are continued.
    pub(super) cached: Option<[DimId; 2]>,
}

impl LatentDims {
    pub(super) fn declare(space: &mut Space, latent: &Latent, is_cached: bool) -> Self {
        let mut dim = |name: &str, size: u64| space.dims.push(Dim::new(name, size));
        Self {
            queries: latent.queries.map(|n| dim("cq", n)),
            keys: dim("ckv", latent.keys),
            plain: dim("dn", latent.plain),
            rotated: dim("dr", latent.rotated),
            value: dim("dv", latent.value),
            cached: is_cached.then(|| [dim("k", 1), dim("dc", latent.keys + latent.rotated)]),
        }
    }
}
