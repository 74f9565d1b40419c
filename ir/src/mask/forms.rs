//! The strips of each form of mask, cut to a tile.

use std::ops::Range;

use super::Mask;
use super::strip::{Bound, How, Run, Strip, between, combine};

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
        Mask::Documents(bounds) => documents(bounds, tile),
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

/// One strip for each document that the tile touches, found by bisection.
fn documents(bounds: &[u64], tile: &Tile) -> Vec<Strip> {
    let first = bounds.partition_point(|&b| i128::from(b) <= tile.queries.start).saturating_sub(1);
    let mut out = Vec::new();
    for document in bounds[first..].windows(2) {
        let [start, end] = [document[0], document[1]].map(i128::from);
        if start >= tile.queries.end {
            break;
        }
        out.extend(tile.between(tile.queries(start, end), &[Bound::At(start)], &[Bound::At(end)]));
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
