//! Attention of few queries over many keys: which attention `split_attention.cuh` and `split_products.cuh` take, and how it is
//! split over blocks.

use std::fmt::Write as _;

use ithaca_ir::DType;
use ithaca_ir::ops::Attention;

use crate::argument::Pointer;
use crate::flash::Block;
use crate::structs::{AttentionShape, Splitting};

/// Rows of a block for which there are kernels of sums by threads.
pub(crate) const ROWS: [i64; 4] = [1, 2, 4, 8];

/// Rows of a block and columns for which there are kernels of products on tensor cores, in the order in which they are tried. The
/// last takes any number of rows, by several blocks: a block of 16 wide rows has too few registers.
pub(crate) const TILES: [[i64; 2]; 5] = [[8, 64], [8, 128], [16, 64], [16, 128], [8, WIDEST]];

/// The most rows, queries of the heads that share a key, for which keys are read as often as blocks need them. Above it
/// tensor cores are worth their tiles of queries.
const MOST_ROWS: i64 = Attention::FEW_ROWS.cast_signed();

/// The widest rows of keys and values: the kernels' `kWidest`.
const WIDEST: i64 = Attention::WIDEST_ROW.cast_signed();

/// Columns of a thread: the kernels' `kColumns`.
pub(crate) const COLUMNS: i64 = 8;

/// Threads of a block, and its shared memory: sums in double precision, and rows of five numbers.
const THREADS: u32 = 128;
const SHARED: u32 = 4 * (256 + 3) * 8 + 8 * 5 * 8;

/// Blocks that fill a device with more than one on each multiprocessor: of sums by threads, and of products, whose blocks wait for
/// memory only and are short where there are more of them.
const BLOCKS: i64 = 256;
const TILE_BLOCKS: i64 = 512;

/// The least keys of a part.
const KEYS: i64 = 128;

/// The most parts of the keys.
const PARTS: i64 = 128;

/// An attention of few queries.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Split {
    /// Rows of a block.
    rows: i64,
    /// Columns of a block on tensor cores.
    width: Option<i64>,
    /// The parts.
    pub(crate) by: Splitting,
    /// Blocks.
    pub(crate) blocks: i64,
}

impl Split {
    /// How an attention of elements of this type is split, if its queries are few; `is_wide` where all columns of a thread can be
    /// read at once.
    pub(crate) fn of(s: &AttentionShape, is_wide: bool, dtype: DType) -> Option<Self> {
        let rows = s.queries * s.group.min(s.heads);
        let width = s.width.max(s.value_width);
        if rows == 0 || rows > MOST_ROWS || width > WIDEST {
            return None;
        }
        let takes = |&&[n, of]: &&[i64; 2]| of >= width && (n >= rows || of == WIDEST);
        let on_tensor_cores = is_wide && dtype.bytes() == 2 && s.mask.strips == Pointer::NONE;
        let tile = TILES.iter().find(takes).filter(|_| on_tensor_cores);
        let of_block = match tile {
            Some(&[rows, _]) => rows,
            None => ROWS.into_iter().find(|&n| n >= rows).unwrap_or(ROWS[ROWS.len() - 1]),
        };
        let row_blocks = (rows + of_block - 1) / of_block;
        let whole = s.front * s.kv_heads * row_blocks;
        let blocks = if tile.is_some() { TILE_BLOCKS } else { BLOCKS };
        let parts = (blocks / whole.max(1)).min((s.keys + KEYS - 1) / KEYS).clamp(1, PARTS);
        let lanes = ((width + COLUMNS - 1) / COLUMNS).cast_unsigned().next_power_of_two();
        let by = Splitting { parts, row_blocks, lanes: i32::try_from(lanes).ok()?, is_wide };
        Some(Self { rows: of_block, width: tile.map(|&[_, width]| width), by, blocks: whole * parts })
    }

    /// The kernel from elements of `t` to results of `o`.
    pub(crate) fn kernel(self, t: &str, o: &str) -> String {
        match self.width {
            Some(width) => products(t, o, [self.rows, width]),
            None => sums(t, o, self.rows),
        }
    }

    /// The block of a launch.
    pub(crate) fn block(self) -> Block {
        let shared_bytes = self.width.map_or(SHARED, |width| tile_bytes([self.rows, width]));
        Block { rows: self.rows, threads: THREADS, shared_bytes }
    }

    /// Numbers that the parts leave: an output and a logarithm for each row.
    pub(crate) fn numbers(self, s: &AttentionShape) -> i64 {
        if self.by.parts == 1 {
            0
        } else {
            self.by.parts * s.front * s.queries * s.heads * (s.value_width + 1)
        }
    }
}

/// Shared memory of a block on tensor cores: numbers of teams, and for each row five numbers and two numbers and the sums of each of
/// four warps.
fn tile_bytes([rows, width]: [i64; 2]) -> u32 {
    u32::try_from(4 * 8 + rows * (5 * 8 + 2 * 4 * 4 + 4 * (width + 4) * 4)).unwrap_or(u32::MAX)
}

fn sums(t: &str, o: &str, rows: i64) -> String {
    format!("split_attention<{t}, {o}, {rows}>")
}

fn products(t: &str, o: &str, [rows, width]: [i64; 2]) -> String {
    format!("split_products<{t}, {o}, {rows}, {width}>")
}

/// All kernels from elements of `t` to results of `o`.
pub(crate) fn kernels(t: &str, o: &str, is_half: bool) -> Vec<String> {
    let tiles = TILES.into_iter().filter(|_| is_half).map(|tile| products(t, o, tile));
    ROWS.map(|rows| sums(t, o, rows)).into_iter().chain(tiles).collect()
}

/// Assertions in C++ on the constants declared here.
pub(crate) fn checks() -> String {
    let mut checks = format!(
        "static_assert(ithaca::kernel::kSplitThreads == {THREADS} && ithaca::kernel::kColumns == {COLUMNS} && \
         ithaca::kernel::kWidest == {WIDEST} && sizeof(ithaca::kernel::SplitShared<double>) == {SHARED}, \"splits\");\n"
    );
    for tile @ [rows, width] in TILES {
        // Writing to a string cannot fail.
        let _ = writeln!(
            checks,
            "static_assert(sizeof(ithaca::kernel::SplitTiles<{rows}, {width}>) == {}, \"tiles\");",
            tile_bytes(tile)
        );
    }
    checks
}
