//! Blocks of queries, and the tiles of keys that the mask leaves them.

use std::ops::Range;

use ithaca_ir::Mask;

use crate::cpu::simd::{Simd, WIDTH};
use crate::cpu::threads::Threads;
use crate::oracle::attention::{Extent, joined};

/// Queries of a block: enough to reuse a tile of keys; a multiple of the rows of every machine.
pub(super) const BLOCK: usize = 96;

/// Some queries held, and the keys held that they see.
pub(super) struct Block {
    /// The queries.
    pub(super) queries: Range<usize>,
    /// For each query the keys that it sees, ascending.
    seen: Vec<Vec<Range<usize>>>,
    /// Tiles that are not empty, ascending.
    pub(super) tiles: Vec<Tile>,
}

/// The pairs of a tile that the mask leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MaskCoverage {
    /// Every pair.
    Full,
    /// Some pairs.
    Partial,
}

/// Neighbouring keys of which some query of a block sees each.
pub(super) struct Tile {
    /// The keys.
    pub(super) keys: Range<usize>,
    /// The key of the tile's first column, where a panel of keys starts.
    pub(super) start: usize,
    /// For each group of rows of a small product the columns from the first that one of them sees to the last.
    pub(super) columns: Vec<Range<usize>>,
    /// The pairs that the mask leaves.
    pub(super) coverage: MaskCoverage,
}

impl Block {
    /// The blocks of an attention, in order of queries.
    pub(super) fn all(simd: &Simd, mask: &Mask, x: &Extent, threads: Threads) -> Vec<Block> {
        let queries: Vec<Range<usize>> =
            (0..x.queries).step_by(BLOCK).map(|start| start..(start + BLOCK).min(x.queries)).collect();
        threads.map(
            queries,
            || (),
            |(), queries| Block::new(simd, x.seen_by_each(mask, queries.clone()), queries),
        )
    }

    fn new(simd: &Simd, seen: Vec<Vec<Range<usize>>>, queries: Range<usize>) -> Self {
        let mut tiles = Vec::new();
        for keys in joined(seen.iter().flatten().cloned().collect()) {
            let mut first = keys.start;
            while first < keys.end {
                let start = first - first % simd.columns;
                let end = (start + WIDTH).min(keys.end);
                tiles.push(Tile::new(simd, &seen, first..end, start));
                first = end;
            }
        }
        Self { queries, seen, tiles }
    }

    /// Pairs of a query and a key of a tile, coverage or not.
    pub(super) fn pairs(&self) -> usize {
        self.tiles.iter().map(|tile| tile.keys.len() * self.queries.len()).sum()
    }

    /// The columns of a tile that the row sees, ascending.
    pub(super) fn kept<'a>(&'a self, tile: &'a Tile, row: usize) -> impl Iterator<Item = Range<usize>> + 'a {
        within(&self.seen[row], &tile.keys).map(|keys| keys.start - tile.start..keys.end - tile.start)
    }
}

/// The intersections of ascending ranges with another range.
fn within<'a>(ranges: &'a [Range<usize>], keys: &'a Range<usize>) -> impl Iterator<Item = Range<usize>> + 'a {
    let first = ranges.partition_point(|range| range.end <= keys.start);
    ranges[first..]
        .iter()
        .take_while(|range| range.start < keys.end)
        .map(|range| range.start.max(keys.start)..range.end.min(keys.end))
}

impl Tile {
    fn new(simd: &Simd, seen: &[Vec<Range<usize>>], keys: Range<usize>, start: usize) -> Self {
        let mut coverage = MaskCoverage::Full;
        let mut reach = |rows: &[Vec<Range<usize>>]| {
            let mut all: Option<Range<usize>> = None;
            for row in rows {
                let mut own: Option<Range<usize>> = None;
                let mut pieces = 0;
                for part in within(row, &keys) {
                    pieces += 1;
                    own = Some(own.map_or(part.clone(), |own| own.start..part.end));
                }
                if pieces != 1 || own != Some(keys.clone()) {
                    coverage = MaskCoverage::Partial;
                }
                if let Some(own) = own {
                    all = Some(all.map_or(own.clone(), |all| all.start.min(own.start)..all.end.max(own.end)));
                }
            }
            all.map_or(0..0, |all| all.start - start..all.end - start)
        };
        let columns = seen.chunks(simd.rows).map(&mut reach).collect();
        Self { keys, start, columns, coverage }
    }

    /// The columns that are keys.
    pub(super) fn width(&self) -> Range<usize> {
        self.keys.start - self.start..self.keys.end - self.start
    }
}

/// The parts of `within` that ascending `kept` leave out.
pub(super) fn gaps(
    within: Range<usize>,
    kept: impl Iterator<Item = Range<usize>>,
) -> impl Iterator<Item = Range<usize>> {
    let mut end = within.start;
    let closing = std::iter::once(within.end..within.end);
    kept.chain(closing).filter_map(move |kept| {
        let gap = end..kept.start;
        end = kept.end;
        (!gap.is_empty()).then_some(gap)
    })
}
