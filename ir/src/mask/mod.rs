//! Attention masks: which key positions a query position may see.
//!
//! A [`Mask`] is a relation between positions, built from closed forms and tables by intersection and union. Kernels,
//! pruning, balance and cost ask it the same questions: which keys does a row see ([`Mask::runs`]), which keys do these
//! rows need ([`Mask::reach`]), is a tile empty, partial or full ([`Mask::tile`]), and how many pairs does it keep
//! ([`Mask::pairs`])? All are exact. Each is answered from *strips*: ranges of queries on which the kept keys are the
//! same few intervals, with ends that are constant or move with the query. Closed forms have a bounded number of strips
//! however long the sequence is; documents have one each, block tables one for each row of blocks.

mod check;
mod forms;
mod positions;
mod strip;
mod table;
mod text;

#[cfg(test)]
mod tests;

use std::ops::Range;

pub(crate) use check::check;
pub use positions::Positions;
pub use strip::{Bound, Run, Strip};

use crate::ops::declare::words;

/// A relation between query and key positions.
///
/// | text | keeps |
/// |---|---|
/// | `full` | every pair |
/// | `causal` | keys up to the query's own position |
/// | `causal(queries=4, keys=9)` | the same, with the last query at the last key |
/// | `window(left=3, right=0)` | keys from `left` before to `right` after the query |
/// | `prefix(4)` | the first keys, for every query; `causal \| prefix(4)` is a prefix language model |
/// | `sinks(4)` | the first keys, once they are past: `window(left=63, right=0) \| sinks(4)` is StreamingLLM |
/// | `global(2)` | the first tokens see all and are seen by all |
/// | `global_at(0, 7, 31)` | the tokens at these positions see all and are seen by all |
/// | `chunks(8192)` | pairs within one chunk of so many tokens; `causal & chunks(8192)` is the attention of Llama 4 |
/// | `documents(0, 7, 16)` | pairs within one document |
/// | `documents(queries=[0, 3, 8], keys=[0, 5, 9])` | the same, for queries and keys of different lengths |
/// | `documents(queries=[0, 3, 8], keys=[0, 5, 9], causal=end)` | and causal within each, with the last query at the last key |
/// | `blocks(size=64, rows=[[0], [0, 1]])` | the listed blocks of keys, for each block of queries |
/// | `a & b`, `a \| b` | what all keep, what any keeps; `&` binds more tightly |
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Mask {
    /// Every key is seen.
    Full,
    /// A query sees its own position and those before. Between sequences of different lengths the verifier refuses it,
    /// because it does not say which ends are aligned.
    Causal,
    /// Causal with the last of `queries` at the last of `keys`: a query at `i` sees keys up to `i + keys - queries`.
    /// Where there are more queries than keys the first ones see nothing.
    CausalAtEnd {
        /// Number of queries.
        queries: u64,
        /// Number of keys.
        keys: u64,
    },
    /// A query at `i` sees keys from `i - left` to `i + right`; `None` is unbounded.
    Window {
        /// Positions before the query.
        left: Option<u64>,
        /// Positions after the query.
        right: Option<u64>,
    },
    /// Every query sees the first keys, as many as stated.
    Prefix(u64),
    /// Attention sinks (Xiao et al., arXiv 2309.17453): the first keys, as many as stated, as far as they are not after
    /// the query.
    Sinks(u64),
    /// Global tokens (Zaheer et al., arXiv 2007.14062): the first tokens, as many as stated, see every key and are seen
    /// by every query.
    Global(u64),
    /// Global tokens at these positions, ascending: they see every key and are seen by every query.
    GlobalAt(Vec<u64>),
    /// Chunks of so many tokens, the last of which may be shorter: a query sees the keys of its own chunk.
    Chunks(u64),
    /// Packed sequences: a query sees the keys of its own document. The bounds are cumulative lengths, from 0 to the
    /// length of the sequence; position `i` is in document `d` where `bounds[d] <= i < bounds[d + 1]`.
    Documents(Vec<u64>),
    /// Packed sequences whose queries and keys have bounds of their own (`cu_seqlens_q` and `cu_seqlens_k` of
    /// FlashAttention's `varlen` functions): a query sees the keys of the document of the same number.
    DocumentPairs {
        /// Cumulative lengths of queries, from 0.
        queries: Vec<u64>,
        /// Cumulative lengths of keys, from 0; as many documents.
        keys: Vec<u64>,
        /// Where the pairs of a document are aligned that are causal besides; every pair is kept when absent.
        causal: Option<Align>,
    },
    /// Block-sparse attention by a table.
    Blocks {
        /// Tokens of a block, of queries and of keys.
        size: u64,
        /// For each block of queries the blocks of keys it sees, ascending; blocks of queries after the last row see
        /// nothing.
        rows: Vec<Vec<u64>>,
    },
    /// The intersection: pairs that every mask keeps.
    All(Vec<Mask>),
    /// The union: pairs that some mask keeps.
    Any(Vec<Mask>),
}

words! {
    /// Which ends of queries and keys face each other where their lengths differ.
    #[derive(Hash)]
    pub enum Align {
        /// The first query is at the first key.
        Start = "start",
        /// The last query is at the last key, as FlashAttention aligns since its version 2.1.
        End = "end",
    }
}

impl Align {
    /// The highest `key - query` that is kept between these queries and keys.
    fn offset(self, queries: Range<u64>, keys: Range<u64>) -> i128 {
        let between = |q: u64, k: u64| i128::from(k) - i128::from(q);
        match self {
            Align::Start => between(queries.start, keys.start),
            Align::End => between(queries.end, keys.end),
        }
    }
}

/// The pairs of a tile that a mask keeps.
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
    /// Whether the query at `q` sees the key at `k`.
    pub fn allows(&self, q: u64, k: u64) -> bool {
        match self {
            Mask::Full | Mask::Causal | Mask::CausalAtEnd { .. } | Mask::Window { .. } => {
                let offset = i128::from(k) - i128::from(q);
                let (low, high) = self.offsets().unwrap_or((None, None));
                low.is_none_or(|low| low <= offset) && high.is_none_or(|high| offset <= high)
            }
            Mask::Prefix(n) => k < *n,
            Mask::Sinks(n) => k < *n && k <= q,
            Mask::Global(n) => k < *n || q < *n,
            Mask::GlobalAt(at) => [q, k].iter().any(|i| at.binary_search(i).is_ok()),
            Mask::Chunks(size) => q.checked_div(*size).is_some_and(|chunk| chunk == k / size),
            Mask::Documents(bounds) => {
                let of = |i: u64| bounds.partition_point(|&b| b <= i);
                (1..bounds.len()).contains(&of(q)) && of(q) == of(k)
            }
            Mask::DocumentPairs { queries, keys, causal } => {
                let [of_q, of_k] = [(queries, q), (keys, k)].map(|(b, i)| b.partition_point(|&b| b <= i));
                let both = (1..queries.len().min(keys.len())).contains(&of_q) && of_q == of_k;
                let document = |bounds: &[u64]| bounds[of_q - 1]..bounds[of_q];
                both && causal.is_none_or(|align| {
                    i128::from(k) - i128::from(q) <= align.offset(document(queries), document(keys))
                })
            }
            Mask::Blocks { size, rows } => {
                let block = |i: u64| i.checked_div(*size).unwrap_or(u64::MAX);
                let row = usize::try_from(block(q)).ok().and_then(|i| rows.get(i));
                row.is_some_and(|row| row.binary_search(&block(k)).is_ok())
            }
            Mask::All(masks) => masks.iter().all(|m| m.allows(q, k)),
            Mask::Any(masks) => masks.iter().any(|m| m.allows(q, k)),
        }
    }

    /// The keys of `keys` that the query at `q` sees: ascending intervals that neither touch nor are empty.
    pub fn runs(&self, q: u64, keys: Range<u64>) -> Vec<Range<u64>> {
        // No range of one starts after the last position, and no sequence is that long.
        let strips = self.strips(q..q.saturating_add(1), keys);
        strip::joined(strips.iter().flat_map(|s| s.runs.iter().map(|r| r.at(i128::from(q)))))
    }

    /// The keys of `keys` that some query of `queries` sees: ascending intervals that neither touch nor are empty. A rank
    /// that holds these queries needs these keys and no others.
    pub fn reach(&self, queries: Range<u64>, keys: Range<u64>) -> Vec<Range<u64>> {
        if let Some((low, high)) = self.offsets() {
            return band_reach((low, high), queries, keys).into_iter().collect();
        }
        let strips = self.strips(queries, keys);
        strip::joined(strips.iter().flat_map(|s| s.runs.iter().filter_map(|r| s.reach(r))))
    }

    /// The pairs that are kept of the tile `queries × keys`; a tile without pairs is empty.
    pub fn tile(&self, queries: Range<u64>, keys: Range<u64>) -> Tile {
        let all = u128::from(queries.end.saturating_sub(queries.start))
            * u128::from(keys.end.saturating_sub(keys.start));
        match self.pairs(queries, keys) {
            0 => Tile::Empty,
            n if n == all => Tile::Full,
            _ => Tile::Partial,
        }
    }

    /// Number of pairs kept in the tile `queries × keys`.
    pub fn pairs(&self, queries: Range<u64>, keys: Range<u64>) -> u128 {
        self.strips(queries, keys).iter().map(Strip::pairs).sum()
    }

    /// The lowest and highest `key - query` that are kept, `None` being unbounded, where that is all there is to the
    /// mask: one band along the diagonal.
    pub fn offsets(&self) -> Option<(Option<i128>, Option<i128>)> {
        match self {
            Mask::Full => Some((None, None)),
            Mask::Causal => Some((None, Some(0))),
            Mask::CausalAtEnd { queries, keys } => {
                Some((None, Some(i128::from(*keys) - i128::from(*queries))))
            }
            Mask::Window { left, right } => Some((left.map(|l| -i128::from(l)), right.map(i128::from))),
            Mask::All(masks) => masks.iter().try_fold((None, None), |(low, high), mask| {
                let (l, h) = mask.offsets()?;
                // `None` is below every bound from below, but has to be above every bound from above.
                Some((low.max(l), [high, h].into_iter().flatten().min()))
            }),
            Mask::Prefix(_)
            | Mask::Sinks(_)
            | Mask::Global(_)
            | Mask::GlobalAt(_)
            | Mask::Chunks(_)
            | Mask::Documents(_)
            | Mask::DocumentPairs { .. }
            | Mask::Blocks { .. }
            | Mask::Any(_) => None,
        }
    }
}

/// The keys that queries see whose `key - query` is between two bounds.
fn band_reach(
    (low, high): (Option<i128>, Option<i128>),
    queries: Range<u64>,
    keys: Range<u64>,
) -> Option<Range<u64>> {
    let is_band = low.zip(high).is_none_or(|(low, high)| low <= high);
    if queries.is_empty() || !is_band {
        return None;
    }
    let at = |bound: i128| u64::try_from(bound.clamp(i128::from(keys.start), i128::from(keys.end))).ok();
    let start = low.map_or(Some(keys.start), |low| at(i128::from(queries.start) + low))?;
    let end = high.map_or(Some(keys.end), |high| at(i128::from(queries.end) + high))?;
    (start < end).then_some(start..end)
}
