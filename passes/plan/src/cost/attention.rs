//! The time of attention, by the kernel that the cluster assumes.
//!
//! A kernel that computes scores in tiles multiplies the pairs that the mask leaves, and a few keys more for each query
//! (`AttentionRate`). An attention that stores scores computes all pairs in separate products, and reads and writes each
//! score several times in between (`ScoreBytes`); its backward pass finds the scores and does not compute them again. Attention of
//! few queries over a cache takes the time to read the cache (`CachedRate`).

use ithaca_ir::ops::Attention;
use ithaca_ir::{Op, Space, TensorType};

use super::product::TILE_ROWS;
use crate::cluster::{AttentionKernel, AttentionRate, CachedRate, Cluster, ScoreBytes, Sourced};

/// Queries of a step from which on attention over a cache is priced as that of a prefill.
const MANY_QUERIES: u64 = 64;

/// The part of a rank in an attention.
#[derive(Clone, Copy, Debug)]
pub(super) struct LocalAttention {
    /// Pairs of a query and a key that the mask leaves, for one head.
    pub(super) pairs: u128,
    /// Queries of one head.
    pub(super) queries: u64,
    /// Keys of one head.
    pub(super) keys: u64,
    /// Bytes of operands that are read and of results.
    pub(super) bytes: u128,
    /// Bytes of keys and values among them.
    pub(super) of_keys: u128,
}

/// The operand that is the values.
const VALUES: usize = 2;

impl LocalAttention {
    /// That of the busiest rank.
    pub(super) fn most(
        space: &Space,
        attention: &Attention,
        operands: &[&TensorType],
        results: &[&TensorType],
    ) -> Self {
        let (q, k) = (operands[0], operands[1]);
        let read = distinct(attention, operands);
        let bytes = |of: &mut dyn Iterator<Item = &&TensorType>| -> u128 {
            of.map(|ty| u128::from(space.max_local_bytes(ty))).sum()
        };
        let of_keys = keys_among(attention, operands);
        Self {
            pairs: attention.busiest_pairs(space, q, k),
            queries: space.max_extent(attention.queries, q.axes_of(attention.queries)),
            keys: space.max_extent(attention.keys, k.axes_of(attention.keys)),
            bytes: bytes(&mut read.iter().chain(results)),
            of_keys: bytes(&mut of_keys.iter()),
        }
    }

    /// The part of the keys that some query sees.
    fn seen(&self) -> f64 {
        // Each query sees as many keys, up to its own.
        let each = self.pairs.div_ceil(u128::from(self.queries.max(1)));
        let seen = each + u128::from(self.queries.saturating_sub(1));
        (seen as f64 / self.keys.max(1) as f64).min(1.0)
    }

    /// Bytes of a kernel that passes over keys that no query sees, but for those of a ring.
    fn seen_bytes(&self, attention: &Attention) -> f64 {
        let unseen = if attention.wraps { 0.0 } else { 1.0 - self.seen() };
        self.bytes as f64 - self.of_keys as f64 * unseen
    }
}

/// The part of the keys in caches that an attention must read; nothing of another operation.
pub(super) fn seen_keys(space: &Space, op: &Op, operands: &[&TensorType]) -> Option<f64> {
    let seen = |attention: &Attention, operands: &[&TensorType]| {
        attention.starts.then(|| LocalAttention::most(space, attention, operands, &[]).seen())
    };
    match op {
        Op::Attention(attention) => seen(attention, operands),
        Op::AttendPages { attention, pages, slots } => {
            attention.of_gathered(space, [*pages, *slots], operands, |gathered| seen(attention, gathered))
        }
        _ => None,
    }
}

/// The operands without values that are the keys: they are read once.
pub(super) fn distinct<'a>(attention: &Attention, operands: &[&'a TensorType]) -> Vec<&'a TensorType> {
    let is_read = |i: usize| i != VALUES || !attention.latent;
    operands.iter().enumerate().filter(|(i, _)| is_read(*i)).map(|(_, ty)| *ty).collect()
}

/// The keys and the values, where these are others.
pub(super) fn keys_among<'a, 'b>(
    attention: &Attention,
    operands: &'a [&'b TensorType],
) -> &'a [&'b TensorType] {
    &operands[1..if attention.latent { VALUES } else { VALUES + 1 }]
}

/// Bytes that the scores of a kernel take for each score, of a softmax in elements of `operand`.
pub(crate) fn saved_bytes(scores: &ScoreBytes, attention: &Attention, operand: &TensorType) -> f64 {
    let dropout = attention.dropout.as_ref().map_or(0.0, |_| scores.dropout_saved.value);
    (scores.saved.value + dropout) * widths(operand)
}

/// The number of two bytes that an element has.
fn widths(operand: &TensorType) -> f64 {
    operand.dtype.bytes() as f64 / 2.0
}

/// Seconds of an attention or its backward pass, one launch included.
pub(super) fn seconds(
    cluster: &Cluster,
    space: &Space,
    op: &Op,
    operands: &[&TensorType],
    held: LocalAttention,
) -> Option<f64> {
    let accelerator = &cluster.accelerator;
    let AttentionKernel { name: _, forward, backward, cached, scores } = accelerator.assumed_attention();
    let (attention, rate) = match op {
        Op::Attention(attention) => (attention, forward),
        Op::AttentionBackward(attention) => (attention, backward),
        _ => return None,
    };
    let is_backward = matches!(op, Op::AttentionBackward(_));
    let (width, value_width) =
        (space.size(attention.width) as f64, space.size(attention.value_width(operands[2])) as f64);
    let forward_flops = attention.flops_of(1, space, operands) as f64;
    // FLOPs of one product of scores, for each pair.
    let product = forward_flops * width / (width + value_width);
    let number = |n: &Option<Sourced<f64>>| n.as_ref().map_or(0.0, |n| n.value);
    let AttentionRate { efficiency, columns, keys } = rate;
    let per_second = accelerator.peak.of(operands[0].dtype) * efficiency.value;
    let per_pair =
        if is_backward { attention.flops_backward_of(1, space, operands) as f64 } else { forward_flops };
    if let (Some(cached), true) = (cached, attention.starts && held.queries < MANY_QUERIES) {
        let CachedRate { efficiency, memory } = cached;
        // Queries of the heads that share a key/value head are rows of one tile.
        let shared = space.size(attention.heads) / space.size(attention.kv_heads).max(1) * held.queries;
        let padded = shared.next_multiple_of(TILE_ROWS) as f64 / shared.max(1) as f64;
        let per_second = accelerator.peak.of(operands[0].dtype) * efficiency.value;
        let computed = held.pairs as f64 * forward_flops * padded / per_second;
        let read = held.seen_bytes(attention) / (accelerator.memory_bandwidth.value * memory.value);
        // Keys are split over the device, and another kernel merges the parts.
        return Some(2.0 * cluster.launch_seconds() + computed.max(read));
    }
    let narrow = 1.0 + number(columns) / f64::midpoint(width, value_width);
    let some = if held.pairs > 0 { 1.0 } else { 0.0 };
    let seconds = match scores {
        None => {
            let pairs = held.pairs as f64 + some * number(keys) * held.queries as f64;
            (pairs * per_pair * narrow / per_second).max(cluster.stream_seconds(held.bytes as f64))
        }
        Some(scores) => {
            let pairs = some * held.queries as f64 * (held.keys as f64 + number(keys));
            let per_pair = if is_backward { per_pair - product } else { per_pair };
            let drops = attention.dropout.is_some();
            let bytes = match (is_backward, drops) {
                (false, false) => scores.forward.value,
                (false, true) => scores.forward.value + scores.dropout_forward.value,
                (true, false) => scores.backward.value,
                (true, true) => scores.backward.value + scores.dropout_backward.value,
            };
            let rows = product / (2.0 * width);
            let stored = pairs * rows * bytes * widths(operands[0]);
            pairs * per_pair * narrow / per_second + cluster.stream_seconds(stored + held.bytes as f64)
        }
    };
    Some(cluster.launch_seconds() + seconds)
}
