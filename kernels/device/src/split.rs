//! Attention of few queries over many keys: which attention `split_attention.cuh` takes, and how it is split over blocks.

use ithaca_ir::ops::Attention;

use crate::flash::Block;
use crate::structs::{AttentionShape, Splitting};

/// Rows of a block for which there are kernels.
pub(crate) const ROWS: [i64; 4] = [1, 2, 4, 8];

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

/// Blocks that fill a device with more than one on each multiprocessor.
const BLOCKS: i64 = 256;

/// The least keys of a part.
const KEYS: i64 = 128;

/// The most parts of the keys.
const PARTS: i64 = 64;

/// An attention of few queries.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Split {
    /// Rows of a block.
    pub(crate) rows: i64,
    /// The parts.
    pub(crate) by: Splitting,
    /// Blocks.
    pub(crate) blocks: i64,
}

impl Split {
    /// How an attention is split, if its queries are few; `is_wide` where all columns of a thread can be read at once.
    pub(crate) fn of(s: &AttentionShape, is_wide: bool) -> Option<Self> {
        let rows = s.queries * s.group.min(s.heads);
        let width = s.width.max(s.value_width);
        if rows == 0 || rows > MOST_ROWS || width > WIDEST {
            return None;
        }
        let of_block = ROWS.into_iter().find(|&n| n >= rows).unwrap_or(ROWS[ROWS.len() - 1]);
        let row_blocks = (rows + of_block - 1) / of_block;
        let whole = s.front * s.kv_heads * row_blocks;
        let parts = (BLOCKS / whole.max(1)).min((s.keys + KEYS - 1) / KEYS).clamp(1, PARTS);
        let lanes = ((width + COLUMNS - 1) / COLUMNS).cast_unsigned().next_power_of_two();
        let by = Splitting { parts, row_blocks, lanes: i32::try_from(lanes).ok()?, is_wide };
        Some(Self { rows: of_block, by, blocks: whole * parts })
    }

    /// The block of a launch.
    pub(crate) fn block(self) -> Block {
        Block { rows: self.rows, threads: THREADS, shared_bytes: SHARED }
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

/// Assertions in C++ on the constants declared here.
pub(crate) fn checks() -> String {
    format!(
        "static_assert(ithaca::kernel::kSplitThreads == {THREADS} && ithaca::kernel::kColumns == {COLUMNS} && \
         ithaca::kernel::kWidest == {WIDEST} && sizeof(ithaca::kernel::SplitShared<double>) == {SHARED}, \"splits\");\n"
    )
}
