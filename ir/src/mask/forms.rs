//! The strips of each form of mask, cut to a tile.

use std::ops::Range;

use crate::mask::strip::{Bound, How, Run, Strip, between, combine};
use crate::mask::{Align, Mask};

impl Mask {
    /// The tile `queries × keys` as strips: ascending ranges of queries with the keys they see. Queries in no strip see
    /// no key of the tile.
    pub fn strips(&self, queries: Range<u64>, keys: Range<u64>) -> Vec<Strip> {
        if queries.is_empty() || keys.is_empty() {
            return Vec::new();
        }
        let tile = Tile {
            queries: i128::from(queries.start)..i128::from(queries.end),
            keys: i128::from(keys.start)..i128::from(keys.end),
        };
        strips(self, &tile)
    }
}

/// A tile that has pairs.
pub(super) struct Tile {
    pub(super) queries: Range<i128>,
    pub(super) keys: Range<i128>,
}

impl Tile {
    /// The keys of the tile from the highest of `starts` to the lowest of `ends`.
    fn between(&self, queries: Range<i128>, starts: &[Bound], ends: &[Bound]) -> Vec<Strip> {
        let starts: Vec<Bound> = starts.iter().copied().chain([Bound::At(self.keys.start)]).collect();
        let ends: Vec<Bound> = ends.iter().copied().chain([Bound::At(self.keys.end)]).collect();
        between(queries, &starts, &ends)
    }

    /// The queries of the tile that are in `start..end`.
    fn queries(&self, start: i128, end: i128) -> Range<i128> {
        start.max(self.queries.start)..end.min(self.queries.end)
    }
}

/// The strips of `mask` in `tile`.
pub(super) fn strips(mask: &Mask, tile: &Tile) -> Vec<Strip> {
    let Tile { queries, .. } = tile;
    match mask {
        Mask::Full | Mask::Causal | Mask::CausalAtEnd { .. } | Mask::Window { .. } => {
            let (low, high) = mask.offsets().unwrap_or((None, None));
            let start: Vec<Bound> = low.into_iter().map(Bound::Beside).collect();
            let end: Vec<Bound> = high.into_iter().map(|offset| Bound::Beside(offset + 1)).collect();
            tile.between(queries.clone(), &start, &end)
        }
        Mask::Prefix(n) => tile.between(queries.clone(), &[], &[Bound::At(i128::from(*n))]),
        Mask::Sinks(n) => tile.between(queries.clone(), &[], &[Bound::At(i128::from(*n)), Bound::Beside(1)]),
        Mask::Global(n) => {
            let n = i128::from(*n);
            let mut out = tile.between(tile.queries(i128::MIN, n), &[], &[]);
            out.extend(tile.between(tile.queries(n, i128::MAX), &[], &[Bound::At(n)]));
            out
        }
        Mask::GlobalAt(at) => global_at(at, tile),
        Mask::Chunks(size) => chunks(i128::from(*size), tile),
        Mask::Documents(bounds) => documents(bounds, bounds, None, tile),
        Mask::DocumentPairs { queries, keys, causal } => documents(queries, keys, *causal, tile),
        Mask::Blocks { size, rows } => blocks(*size, rows, tile),
        Mask::All(masks) => match masks.split_first() {
            None => tile.between(queries.clone(), &[], &[]),
            Some((first, rest)) => rest.iter().fold(strips(first, tile), |kept, mask| {
                if kept.is_empty() { kept } else { combine(&kept, &strips(mask, tile), How::Both) }
            }),
        },
        Mask::Any(masks) => {
            masks.iter().fold(Vec::new(), |kept, mask| combine(&kept, &strips(mask, tile), How::Either))
        }
    }
}

/// All keys for the rows of global tokens, and the keys at `at` for the rows between.
fn global_at(at: &[u64], tile: &Tile) -> Vec<Strip> {
    let positions = |range: &Range<i128>| {
        let from = at.partition_point(|&p| i128::from(p) < range.start);
        let to = at.partition_point(|&p| i128::from(p) < range.end);
        let mut runs: Vec<Range<i128>> = Vec::new();
        // A table that does not ascend is refused elsewhere, and is read up to where it turns back.
        for p in at.get(from..to).unwrap_or(&[]).iter().map(|&p| i128::from(p)).filter(|p| range.contains(p))
        {
            match runs.last_mut() {
                Some(last) if last.end == p => last.end = p + 1,
                Some(last) if last.end > p => break,
                _ => runs.push(p..p + 1),
            }
        }
        runs
    };
    let seen: Vec<Run> = positions(&tile.keys)
        .into_iter()
        .map(|r| Run { start: Bound::At(r.start), end: Bound::At(r.end) })
        .collect();
    let mut out = Vec::new();
    let mut add = |queries: Range<i128>, runs: &[Run]| {
        if !queries.is_empty() && !runs.is_empty() {
            out.push(Strip { queries, runs: runs.to_vec() });
        }
    };
    let every = [Run { start: Bound::At(tile.keys.start), end: Bound::At(tile.keys.end) }];
    let mut next = tile.queries.start;
    for rows in positions(&tile.queries) {
        add(next..rows.start, &seen);
        next = rows.end;
        add(rows, &every);
    }
    add(next..tile.queries.end, &seen);
    out
}

/// One strip for each chunk that has queries and keys of the tile.
fn chunks(size: i128, tile: &Tile) -> Vec<Strip> {
    let Tile { queries, keys } = tile;
    if size == 0 {
        return Vec::new();
    }
    let first = queries.start.max(keys.start) / size;
    let last = (queries.end.min(keys.end) - 1).div_euclid(size);
    let strip = |chunk: i128| {
        let (start, end) = (chunk * size, (chunk + 1) * size);
        let run = Run { start: Bound::At(start.max(keys.start)), end: Bound::At(end.min(keys.end)) };
        Strip { queries: tile.queries(start, end), runs: vec![run] }
    };
    // Queries of a chunk may all be before the tile's, or its keys before the first key.
    let has_pairs = |strip: &Strip| {
        let is_run = |run: &Run| matches!((run.start, run.end), (Bound::At(a), Bound::At(b)) if a < b);
        !strip.queries.is_empty() && strip.runs.iter().all(is_run)
    };
    (first..=last).map(strip).filter(has_pairs).collect()
}

/// The strips of each document whose queries the tile touches, found by bisection: one, or cut where the diagonal of a
/// causal one enters and leaves.
fn documents(queries: &[u64], keys: &[u64], causal: Option<Align>, tile: &Tile) -> Vec<Strip> {
    let first = queries.partition_point(|&b| i128::from(b) <= tile.queries.start).saturating_sub(1);
    let keys = keys.get(first..).unwrap_or(&[]);
    let mut out = Vec::new();
    for (of_q, of_k) in queries[first..].windows(2).zip(keys.windows(2)) {
        let (of_q, of_k) = (of_q[0]..of_q[1], of_k[0]..of_k[1]);
        let [start, end] = [of_q.start, of_q.end].map(i128::from);
        if start >= tile.queries.end {
            break;
        }
        let diagonal = causal.map(|align| Bound::Beside(align.offset(of_q, of_k.clone()) + 1));
        let [from, to] = [of_k.start, of_k.end].map(|k| Bound::At(i128::from(k)));
        let ends: Vec<Bound> = [to].into_iter().chain(diagonal).collect();
        out.extend(tile.between(tile.queries(start, end), &[from], &ends));
    }
    out
}

/// One strip for each row of blocks that the tile touches, neighbouring blocks as one interval.
fn blocks(size: u64, rows: &[Vec<u64>], tile: &Tile) -> Vec<Strip> {
    let size = i128::from(size);
    if size == 0 {
        return Vec::new();
    }
    let index = |block: i128| usize::try_from(block).unwrap_or(usize::MAX).min(rows.len());
    let touched = index(tile.queries.start / size)..index((tile.queries.end - 1) / size + 1);
    let mut out = Vec::new();
    for (row, i) in rows[touched.clone()].iter().zip(touched) {
        let i = i128::try_from(i).expect("an index is no larger than 64 bits");
        let mut runs: Vec<Run> = Vec::new();
        // Blocks that no sequence has may be out of range.
        let position = |block: i128| block.saturating_mul(size);
        let first = row.partition_point(|&block| position(i128::from(block) + 1) <= tile.keys.start);
        for &block in &row[first..] {
            let start = position(i128::from(block)).max(tile.keys.start);
            let end = position(i128::from(block) + 1).min(tile.keys.end);
            if start >= tile.keys.end {
                break;
            }
            match runs.last_mut() {
                Some(last) if last.end == Bound::At(start) => last.end = Bound::At(end),
                _ => runs.push(Run { start: Bound::At(start), end: Bound::At(end) }),
            }
        }
        if !runs.is_empty() {
            out.push(Strip { queries: tile.queries(i * size, (i + 1) * size), runs });
        }
    }
    out
}
