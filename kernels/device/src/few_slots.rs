//! The kernels of products of few slots of experts, `expert_products.cuh`, and their blocks.

use crate::flash::Block;

/// Slots and columns of a block, and its warps: the kernel's `kExpertRows`, `kExpertColumns` and `kExpertWarps`.
pub(crate) const ROWS: i64 = 16;
pub(crate) const COLUMNS: i64 = 64;
const WARPS: i64 = 8;

/// The block of threads: sums, and whether a warp has found a filled slot.
pub(crate) const BLOCK: Block = Block {
    rows: ROWS,
    threads: 32 * WARPS as u32,
    shared_bytes: (WARPS * (4 + ROWS * (COLUMNS + 4) * 4)) as u32,
};

/// Elements that are read at once.
pub(crate) const PACK: i64 = 8;

/// The kernel for weights whose rows, or whose columns, have neighbours in memory.
pub(crate) fn kernel(t: &str, is_in_rows: bool) -> String {
    format!("expert_products<{t}, {is_in_rows}>")
}

/// All kernels for elements of `t`, which has 16 bits.
pub(crate) fn kernels(t: &str) -> [String; 2] {
    [true, false].map(|is_in_rows| kernel(t, is_in_rows))
}

/// Assertions in C++ on the constants declared here.
pub(crate) fn checks() -> String {
    format!(
        "static_assert(ithaca::kernel::kExpertThreads == {} && ithaca::kernel::kExpertRows == {ROWS} && \
         ithaca::kernel::kExpertColumns == {COLUMNS} && sizeof(ithaca::kernel::ExpertShared) == {}, \"expert products\");\n",
        BLOCK.threads, BLOCK.shared_bytes
    )
}
