//! `fetch`: each rank receives only the keys that its queries see.

use ithaca_ir::{Diagnostic, Mask};

use super::{Movement, Orders, Site, Visits};

/// The movement for any mask.
pub(super) struct Fetch;

impl Movement for Fetch {
    fn name(&self) -> &'static str {
        "fetch"
    }
    fn summary(&self) -> &'static str {
        "every rank gets the keys and values that its queries see, token by token; gradients return the same way (block-sparse, documents: MagiAttention's group-cast)"
    }
    fn legality(&self) -> &'static str {
        "tokens % P = 0; any mask and order"
    }
    fn orders(&self) -> Orders {
        Orders::Local
    }
    fn prunes(&self) -> bool {
        true
    }
    fn visits(&self, _site: &Site<'_>) -> Visits {
        Visits::Fetch
    }
}

/// The movement for sliding windows: a rank fetches from its neighbours only.
pub(super) struct Halo;

impl Movement for Halo {
    fn name(&self) -> &'static str {
        "halo"
    }
    fn summary(&self) -> &'static str {
        "as fetch, where a sliding window leaves the ends of neighbours' shards: ⌈(W − 1)/T⌉ neighbours of T tokens (Longformer, arXiv 2004.05150)"
    }
    fn legality(&self) -> &'static str {
        "a mask inside a sliding window; contiguous order; tokens % P = 0"
    }
    fn orders(&self) -> Orders {
        Orders::Contiguous
    }
    fn prunes(&self) -> bool {
        true
    }
    fn check(&self, site: &Site<'_>) -> Result<(), Diagnostic> {
        site.need_contiguous("halo", "strategy `sparse-fetch` takes any order")?;
        match site.attention.mask.offsets() {
            Some((Some(_), Some(_))) => Ok(()),
            _ => Err(Diagnostic::new(
                "P44",
                "movement `halo` needs a mask inside a sliding window, bounded on both sides",
            )
            .help("strategy `sparse-fetch` takes any mask, `streaming` a window with sinks")),
        }
    }
    fn visits(&self, _site: &Site<'_>) -> Visits {
        Visits::Fetch
    }
}

/// The movement for attention sinks with a sliding window.
pub(super) struct Streaming;

impl Movement for Streaming {
    fn name(&self) -> &'static str {
        "streaming"
    }
    fn summary(&self) -> &'static str {
        "as fetch, where the mask is a window and the first tokens: rank 0's sinks go to all, the rest to neighbours (StreamingLLM, arXiv 2309.17453)"
    }
    fn legality(&self) -> &'static str {
        "a mask of sinks and a sliding window; contiguous order; tokens % P = 0"
    }
    fn orders(&self) -> Orders {
        Orders::Contiguous
    }
    fn prunes(&self) -> bool {
        true
    }
    fn check(&self, site: &Site<'_>) -> Result<(), Diagnostic> {
        site.need_contiguous("streaming", "strategy `sparse-fetch` takes any order")?;
        if has_sinks(&site.attention.mask) && has_window(&site.attention.mask) {
            return Ok(());
        }
        Err(Diagnostic::new("P44", "movement `streaming` needs a mask of sinks and a sliding window")
            .help("as `causal & (window(left=1023) | sinks(4))`; strategy `sparse-fetch` takes any mask"))
    }
    fn visits(&self, _site: &Site<'_>) -> Visits {
        Visits::Fetch
    }
}

fn has_sinks(mask: &Mask) -> bool {
    match mask {
        Mask::Sinks(_) | Mask::Prefix(_) => true,
        Mask::All(masks) | Mask::Any(masks) => masks.iter().any(has_sinks),
        _ => false,
    }
}

fn has_window(mask: &Mask) -> bool {
    match mask {
        Mask::Window { left: Some(_), .. } => true,
        Mask::All(masks) | Mask::Any(masks) => masks.iter().any(has_window),
        _ => false,
    }
}
