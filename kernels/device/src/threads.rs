//! The threads of kernels that share rows or columns: `rows.cuh` and `columns.cuh`. Constants of the headers are asserted by
//! [`checks`].

use ithaca_ir::DType;

use crate::flash::{ALIGNMENT, Block};
use crate::structs::Walk;

/// Packs that a thread keeps of a row: the kernels' `kCachedPacks`.
const CACHED_PACKS: i64 = 4;

/// The most threads of a block that share a row: the kernels' `kMostLanes`.
pub(crate) const MOST_LANES: i32 = 512;

/// Threads of a block that takes several rows.
const THREADS_OF_ROWS: u32 = 128;

/// Shared memory of such a block: a number of each warp.
const SHARED_OF_ROWS: u32 = 32 * 8;

/// Packs of [`ALIGNMENT`] bytes that `n` elements are.
pub(crate) fn packs(n: i64, dtype: DType) -> i64 {
    let each = (ALIGNMENT / dtype.bytes()).cast_signed();
    (n + each - 1) / each
}

/// Threads that share a row.
pub(crate) fn lanes(width: i64, dtype: DType) -> i32 {
    let packs = packs(width, dtype).cast_unsigned().div_ceil(CACHED_PACKS.cast_unsigned());
    i32::try_from(packs.next_power_of_two()).unwrap_or(i32::MAX).clamp(1, MOST_LANES)
}

/// The block for rows of so many threads: several rows, or one of more threads than a warp has.
pub(crate) fn block_of_rows(lanes: i32) -> Block {
    let threads = if lanes > 32 { lanes.unsigned_abs() } else { THREADS_OF_ROWS };
    Block { rows: i64::from(threads) / i64::from(lanes), threads, shared_bytes: SHARED_OF_ROWS }
}

/// The parts in which rows are summed.
#[derive(Clone, Copy)]
pub(crate) enum Chunks {
    /// One.
    One,
    /// At most so many.
    UpTo(i64),
}

/// Sums along columns: the threads that share the rows of a block, and the blocks.
#[derive(Clone, Copy)]
pub(crate) struct Columns {
    /// Threads of a block that take neighbouring packs of columns.
    pub(crate) lanes: i32,
    /// Blocks for all columns, where packs are neighbours and where they are single elements.
    pub(crate) packs: i64,
    singles: i64,
    /// Parts of the rows.
    pub(crate) chunks: i64,
}

/// A block that sums columns: its shared memory has two packs of sums for each thread, of which 16 bytes of storage become 32.
pub(crate) const BLOCK_OF_COLUMNS: Block = Block { rows: 1, threads: 256, shared_bytes: 256 * 2 * 32 };

/// Blocks that fill a device.
const MANY_BLOCKS: i64 = 1024;

impl Columns {
    /// The columns that `kept` goes over, of the rows that `summed` goes over; tensor 0 of both is read.
    pub(crate) fn of<const K: usize>(kept: &Walk<K>, summed: &Walk<K>, dtype: DType, chunks: Chunks) -> Self {
        let [n, rows] = [kept, summed].map(Walk::size);
        let is_along = |walk: &Walk<K>| {
            let last = usize::try_from(walk.n).unwrap_or(0).checked_sub(1);
            last.is_some_and(|last| walk.stride[0][last] == 1)
        };
        // Neighbouring threads read neighbours: columns, or rows.
        let lanes = if is_along(summed) && !is_along(kept) {
            1
        } else {
            8.min(n.cast_unsigned().next_power_of_two())
        };
        let packs = (packs(n, dtype) + lanes.cast_signed() - 1) / lanes.cast_signed();
        let singles = (n + lanes.cast_signed() - 1) / lanes.cast_signed();
        let threads = i64::from(BLOCK_OF_COLUMNS.threads) / lanes.cast_signed();
        let chunks = match chunks {
            Chunks::One => 1,
            Chunks::UpTo(most) => (MANY_BLOCKS / packs.max(1)).min(rows / (8 * threads)).min(most).max(1),
        };
        Self { lanes: i32::try_from(lanes).unwrap_or(1), packs, singles, chunks }
    }

    /// The same for a kernel that reads single elements.
    pub(crate) fn single(self) -> Self {
        Self { packs: self.singles, ..self }
    }
}

/// Assertions in C++ on the constants declared here.
pub(crate) fn checks() -> String {
    format!(
        "static_assert(ithaca::kCachedPacks == {CACHED_PACKS} && ithaca::kMostLanes == {MOST_LANES}, \"rows\");\n"
    )
}
