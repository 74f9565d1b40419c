//! The kernels of attention on tensor cores: which there are, which attention they take, and the blocks that each is
//! launched on.
//!
//! `kernels/cuda/flash*.cuh` decide all of it. What the host needs of it before anything is compiled is here again, and
//! [`checks`] states it as assertions in C++, which every compilation of the kernels makes.

use std::fmt::Write as _;

use ithaca_ir::DType;

use crate::structs::Rows;

/// Bytes at whose multiples rows and results start.
pub(crate) const ALIGNMENT: u64 = 16;

/// The same in elements of two bytes.
const APART: i64 = 8;

/// Where tensors start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Starts {
    /// All of them at multiples of [`ALIGNMENT`].
    Aligned,
    /// Some of them elsewhere.
    Anywhere,
}

/// A block of threads that work together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Block {
    /// Queries or keys that it is for.
    pub(crate) rows: i64,
    /// Its threads.
    pub(crate) threads: u32,
    /// Bytes of its shared memory.
    pub(crate) shared_bytes: u32,
}

/// Kernels for rows of at most these widths.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Flash {
    /// Elements of a query and of a key.
    width: i64,
    /// Elements of a value.
    value_width: i64,
    /// The forward kernel's block of queries.
    pub(crate) forward: Block,
    /// The block of queries, or of keys, of both backward kernels.
    pub(crate) backward: Block,
    /// Blocks for each block of keys: two where one computes dk and another dv.
    pub(crate) parts: i64,
}

const fn flash(
    [width, value_width]: [i64; 2],
    [rows, threads, shared_bytes]: [u32; 3],
    [back_rows, back_threads, back_shared_bytes, parts]: [u32; 4],
) -> Flash {
    Flash {
        width,
        value_width,
        forward: Block { rows: rows as i64, threads, shared_bytes },
        backward: Block { rows: back_rows as i64, threads: back_threads, shared_bytes: back_shared_bytes },
        parts: parts as i64,
    }
}

/// All, the narrowest first.
pub const ALL: [Flash; 6] = [
    flash([64, 64], [128, 128, 43_200], [64, 128, 52_096, 1]),
    flash([96, 96], [128, 128, 84_160], [64, 128, 101_248, 1]),
    flash([128, 128], [128, 128, 84_160], [64, 128, 101_248, 1]),
    flash([192, 128], [64, 128, 91_584], [64, 128, 83_584, 1]),
    flash([192, 192], [64, 128, 99_776], [64, 128, 99_968, 2]),
    flash([256, 256], [64, 128, 83_136], [64, 128, 99_392, 2]),
];

/// The properties of an attention that decide whether tensor cores take it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Operands<'a> {
    /// Elements of a query and of a key, as this rank holds them.
    pub(crate) width: i64,
    /// Elements of a value.
    pub(crate) value_width: i64,
    /// The element types of all operands that have rows.
    pub(crate) dtypes: &'a [DType],
    /// Whether these and the results start at multiples of 16 bytes.
    pub(crate) starts: Starts,
    /// How far their rows are apart.
    pub(crate) rows: &'a [Rows],
    /// Whether something is added to the scores.
    pub(crate) bias: Bias,
    /// The factor of products.
    pub(crate) scale: f64,
}

/// Whether something is added to scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Bias {
    /// Nothing.
    None,
    /// A table by relative position.
    Learned,
}

/// The kernels for an attention, the narrowest that have room for it; none where the simple ones compute it.
pub(crate) fn kernels_for(operands: &Operands<'_>) -> Option<&'static Flash> {
    let &Operands { width, value_width, dtypes, starts, rows, bias, scale } = operands;
    let is_half = dtypes.iter().all(|&d| d == dtypes[0]) && matches!(dtypes[0], DType::F16 | DType::BF16);
    let is_aligned = starts == Starts::Aligned
        && rows.iter().all(|r| (r.front | r.token | r.head | r.token_block | r.head_block) % APART == 0);
    // The kernels take the maximum of products before they scale it, in single precision.
    let is_scaled = scale as f32 >= f32::MIN_POSITIVE;
    if !is_half || !is_aligned || bias == Bias::Learned || !is_scaled {
        return None;
    }
    for_widths(width, value_width)
}

fn for_widths(width: i64, value_width: i64) -> Option<&'static Flash> {
    if [width, value_width].iter().any(|&w| w <= 0 || w % 8 != 0) {
        return None;
    }
    ALL.iter().find(|flash| width <= flash.width && value_width <= flash.value_width)
}

impl Flash {
    /// The name of one of its kernels, for operands of a C++ type.
    pub(crate) fn kernel(&self, name: &str, t: &str) -> String {
        format!("{name}<{t}, {}, {}>", self.width, self.value_width)
    }

    /// The names of all its kernels.
    pub fn kernels(&self, t: &str) -> [String; 3] {
        ["flash", "flash_backward_queries", "flash_backward_keys"].map(|name| self.kernel(name, t))
    }
}

/// Assertions in C++ that the kernels have the blocks declared here.
pub fn checks() -> String {
    let mut text = String::new();
    let mut check = |is: String| {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "static_assert({is});");
    };
    for flash in &ALL {
        let widths = format!("{}, {}", flash.width, flash.value_width);
        for (kind, block) in [("", flash.forward), ("Backward", flash.backward)] {
            let Block { rows, threads, shared_bytes } = block;
            let tile = format!("ithaca::kernel::Flash{kind}Tile<{widths}>");
            check(format!("{tile}::kRows == {rows} && {tile}::kThreads == {threads}"));
            for t in ["__half", "__nv_bfloat16"] {
                check(format!("sizeof(ithaca::kernel::Flash{kind}Shared<{t}, {widths}>) == {shared_bytes}"));
            }
        }
        check(format!("ithaca::kernel::FlashBackwardTile<{widths}>::kParts == {}", flash.parts));
    }
    // Widths around each bound.
    let some = [0, 4, 8, 40, 64, 72, 96, 100, 128, 136, 192, 200, 256, 264];
    for width in some {
        for value_width in some {
            let found = for_widths(width, value_width).map_or((0, 0), |f| (f.width, f.value_width));
            let widths = format!("ithaca::kernel::flash_widths({width}, {value_width})");
            check(format!("{widths}.width == {} && {widths}.value_width == {}", found.0, found.1));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn operands(width: i64, dtypes: &[DType]) -> Operands<'_> {
        Operands {
            width,
            value_width: width,
            dtypes,
            starts: Starts::Aligned,
            rows: &[],
            bias: Bias::None,
            scale: 1.0,
        }
    }

    #[test]
    fn tensor_cores_take_halves_in_aligned_rows() {
        let half = [DType::BF16; 3];
        let widths = |o: &Operands<'_>| kernels_for(o).map(|f| (f.width, f.value_width));
        assert_eq!(widths(&operands(64, &half)), Some((64, 64)));
        assert_eq!(widths(&operands(80, &[DType::F16; 4])), Some((96, 96)));
        let latent = Operands { value_width: 128, ..operands(192, &half) };
        assert_eq!(widths(&latent), Some((192, 128)));

        let cut = [Rows { token: 64, token_run: 3, token_block: 3 * 64 + 4, ..Rows::default() }];
        let declined = [
            Operands { rows: &cut, ..operands(64, &half) },
            operands(64, &[DType::F32; 3]),
            operands(64, &[DType::BF16, DType::BF16, DType::BF16, DType::F32]),
            operands(60, &half),
            operands(264, &half),
            Operands { starts: Starts::Anywhere, ..operands(64, &half) },
            Operands { bias: Bias::Learned, ..operands(64, &half) },
            Operands { scale: -1.0, ..operands(64, &half) },
            Operands { scale: 1e-60, ..operands(64, &half) },
        ];
        for operands in declined {
            assert_eq!(kernels_for(&operands), None, "{operands:?}");
        }
    }
}
