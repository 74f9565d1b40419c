//! Context parallelism as TransformerEngine computes it, which Megatron-LM and NeMo use.

use ithaca_import::Mode;
use ithaca_ir::DType;

use crate::change::Change;
use crate::layout::{Layout, Role, TokenOrder};
use crate::rules::Rules;

/// The `cp_comm_type`; nothing without context parallelism.
pub(crate) fn comm_type(layout: &Layout) -> Option<&'static str> {
    let (heads, tokens) = (layout.degree(Role::Heads), layout.degree(Role::Tokens));
    match (heads > 1, tokens > 1, layout.movement.as_deref()) {
        (false, false, _) => None,
        (true, false, _) => Some("a2a"),
        (false, true, Some("gather")) => Some("all_gather"),
        (false, true, _) => Some("p2p"),
        (true, true, _) => Some("a2a+p2p"),
    }
}

/// The rules of TransformerEngine.
pub(crate) fn check(rules: &mut Rules<'_>) {
    let (layout, title) = (rules.layout, rules.title);
    let (heads, tokens) = (layout.degree(Role::Heads), layout.degree(Role::Tokens));
    if layout.context() == 1 {
        return;
    }
    let movement = layout.movement.clone().unwrap_or_default();
    rules.movement(&["rotate", "gather"], "has a ring (p2p) and all_gather");
    rules.refuse(
        heads > 1 && tokens > 1 && movement == "gather",
        || format!("the plan gathers keys over {tokens} ranks around groups that split heads, and {title} passes them around a ring there"),
        Change::Movement("rotate"),
    );
    rules.refuse(
        layout.token_axes() > 1 && movement == "rotate",
        || format!("the plan has a ring inside a ring, and {title} has one ring of all {tokens} ranks"),
        Change::OneRing,
    );
    // Inside attention the order of ranks that split heads has no effect: every rank has whole sequences.
    let order = match &layout.order {
        TokenOrder::Zigzag => None,
        TokenOrder::Contiguous => Some("contiguous".to_owned()),
        TokenOrder::Striped(_) => Some("striped".to_owned()),
        TokenOrder::Other(text) => Some(text.clone()),
    };
    rules.refuse(
        tokens > 1 && order.is_some(),
        || {
            format!(
                "tokens of the plan are in order {}, and {title} deals them in zigzag",
                order.clone().unwrap_or_default()
            )
        },
        Change::Order(TokenOrder::Zigzag),
    );
    let context = layout.context();
    rules.sequence(2 * context, &format!("2 · context degree {context}"));
    let (tensor, q, kv) = (layout.tensor(), rules.facts.heads, rules.facts.kv_heads);
    let degree = tensor * heads;
    let divides = q.is_multiple_of(degree) && (rules.facts.is_latent || kv.is_multiple_of(degree));
    rules.refuse(
        heads > 1 && !divides,
        || {
            format!(
                "{q} query heads and {kv} key/value heads are not both divisible by {degree}, tensor degree {tensor} times a2a degree \
                 {heads}: {title} copies no key/value heads"
            )
        },
        Change::HeadsToTokens("rotate"),
    );
    let is_ring = tokens > 1 && movement != "gather";
    let window = if heads > 1 { Change::HeadsToTokens("gather") } else { Change::Movement("gather") };
    rules.refuse(
        rules.facts.has_window && is_ring,
        || format!("layers have a sliding window, and {title} has one with a2a and all_gather only"),
        window,
    );
    rules.refuse(
        layout.mode == Mode::Train && layout.dtype == DType::F32,
        || {
            format!(
                "the plan computes in f32, and fused attention of {title} over several ranks in bf16 and f16"
            )
        },
        None,
    );
}
