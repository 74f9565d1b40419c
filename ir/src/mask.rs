//! Attention masks: which key positions a query position may see.
//!
//! One question serves kernels, pruning, balance and cost: is a tile of (query, key) positions empty, partial or full,
//! and how many pairs does it keep? The answers are closed forms, in time that does not grow with the sequence.

use std::ops::Range;

/// A relation between query and key positions.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Mask {
    /// Every key is seen.
    Full,
    /// A query sees its own position and those before.
    Causal,
    /// A query at `i` sees keys from `i - left` to `i + right`; `None` is unbounded.
    Window {
        /// Positions before the query.
        left: Option<u64>,
        /// Positions after the query.
        right: Option<u64>,
    },
}

/// What a mask leaves of a tile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tile {
    /// No pair is kept.
    Empty,
    /// Some pairs are kept.
    Partial,
    /// Every pair is kept.
    Full,
}

impl Mask {
    /// The offsets `key - query` that are kept: `-left ..= right`, `None` being unbounded.
    pub fn band(&self) -> (Option<u64>, Option<u64>) {
        match *self {
            Mask::Full => (None, None),
            Mask::Causal => (None, Some(0)),
            Mask::Window { left, right } => (left, right),
        }
    }

    /// Whether the query at `q` sees the key at `k`.
    pub fn allows(&self, q: u64, k: u64) -> bool {
        let (left, right) = self.band();
        left.is_none_or(|l| k.saturating_add(l) >= q) && right.is_none_or(|r| k <= q.saturating_add(r))
    }

    /// What is left of the tile `queries × keys`; an empty tile is empty.
    pub fn tile(&self, queries: Range<u64>, keys: Range<u64>) -> Tile {
        let all = u128::from(queries.end.saturating_sub(queries.start))
            * u128::from(keys.end.saturating_sub(keys.start));
        match self.pairs(queries, keys) {
            0 => Tile::Empty,
            n if n == all => Tile::Full,
            _ => Tile::Partial,
        }
    }

    /// The keys of `keys` that the query at `q` sees; always an interval.
    pub fn keys(&self, q: u64, keys: Range<u64>) -> Range<u64> {
        let (left, right) = self.band();
        let start = left.map_or(keys.start, |l| q.saturating_sub(l)).max(keys.start);
        let end = right.map_or(keys.end, |r| q.saturating_add(r).saturating_add(1)).min(keys.end);
        start..end.max(start)
    }

    /// Number of pairs kept in the tile `queries × keys`.
    pub fn pairs(&self, queries: Range<u64>, keys: Range<u64>) -> u128 {
        if queries.is_empty() || keys.is_empty() {
            return 0;
        }
        // Pairs at or below an offset, then the band as a difference of two such counts.
        let (left, right) = self.band();
        let upto = |offset: i128| pairs_upto(&queries, &keys, offset);
        let all = u128::from(queries.end - queries.start) * u128::from(keys.end - keys.start);
        let below = right.map_or(all, |r| upto(i128::from(r)));
        let cut = left.map_or(0, |l| upto(-i128::from(l) - 1));
        below.saturating_sub(cut)
    }
}

/// Pairs with `key - query <= offset`.
fn pairs_upto(queries: &Range<u64>, keys: &Range<u64>, offset: i128) -> u128 {
    // Query q sees min(max(q + offset + 1 - k0, 0), n_k) keys: zero, then a ramp of slope one, then all.
    let (q0, q1) = (i128::from(queries.start), i128::from(queries.end));
    let (k0, n_k) = (i128::from(keys.start), i128::from(keys.end) - i128::from(keys.start));
    let shift = offset + 1 - k0;
    let ramp_start = (-shift + 1).clamp(q0, q1);
    let ramp_end = (n_k - shift).clamp(ramp_start, q1);
    let n = ramp_end - ramp_start;
    let ramp = if n > 0 { (ramp_start + shift + ramp_end - 1 + shift) * n / 2 } else { 0 };
    let saturated = (q1 - ramp_end) * n_k;
    u128::try_from(ramp + saturated).expect("counts are not negative")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_agree_with_the_dense_mask() {
        let lefts = [None, Some(0), Some(1), Some(3), Some(20)];
        let masks = lefts.iter().flat_map(|&left| lefts.map(|right| Mask::Window { left, right }));
        for mask in masks.chain([Mask::Full, Mask::Causal]) {
            for (q, k) in
                [(0..7, 0..9), (3..5, 0..9), (5..12, 2..4), (0..1, 8..9), (4..4, 0..3), (2..9, 2..9)]
            {
                let dense = q.clone().flat_map(|i| k.clone().map(move |j| (i, j)));
                let expected = dense.filter(|&(i, j)| mask.allows(i, j)).count() as u128;
                assert_eq!(mask.pairs(q.clone(), k.clone()), expected, "{mask:?} on {q:?} x {k:?}");
                let by_row: u64 = q.clone().map(|i| mask.keys(i, k.clone())).map(|r| r.end - r.start).sum();
                assert_eq!(u128::from(by_row), expected, "rows of {mask:?} on {q:?} x {k:?}");
            }
        }
    }
}
