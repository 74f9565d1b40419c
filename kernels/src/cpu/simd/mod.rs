//! Small products and loops over rows, compiled for each kind of machine and chosen when the program runs.
//!
//! This is the one place of the runtime with instructions of a machine in it. Everything above works with panels of
//! [`Simd::columns`] columns and groups of [`Simd::rows`] rows and does not ask which machine it is on.

mod generic;
mod lanes;

#[cfg(test)]
mod tests;

use std::sync::OnceLock;

use generic::Product;
pub(super) use generic::Update;

/// The distance of rows in a tile of scores, elements: the widest tile, and a cache line so that rows do not meet in the
/// same sets of a cache.
pub(super) const STRIDE: usize = WIDTH + 16;

/// The widest tile of scores.
pub(super) const WIDTH: usize = 256;

/// The rows of a left matrix.
#[derive(Clone, Copy)]
pub(super) enum LhsLayout<'a> {
    /// Neighbours in memory; from one column to the next it is as far as said.
    Neighbours(&'a [f32], usize),
    /// [`STRIDE`] from one row to the next; columns are neighbours.
    Tile(&'a [f32]),
}

/// The functions of a machine.
pub(super) struct Simd {
    /// The name of its instructions.
    pub(super) name: &'static str,
    /// Rows of a small product, at most.
    pub(super) rows: usize,
    /// Columns of a panel.
    pub(super) columns: usize,
    neighbours: unsafe fn(usize, Product),
    tile: unsafe fn(usize, Product),
    max: unsafe fn(&[f32]) -> f32,
    exponentials: unsafe fn(&mut [f32], f32, f32) -> f32,
    multiply: unsafe fn(&mut [f32], f32),
    gradients: unsafe fn(&mut [f32], &mut [f32], f32, f32),
    tanh: unsafe fn(&mut [f32], f32),
}

/// Makes functions that are compiled with the attributes of a machine.
macro_rules! loops {
    ($attributes:tt $($name:ident($($x:ident: $ty:ty),*) -> $result:ty = $value:expr;)*) => {
        $(loops!(@one $attributes $name($($x: $ty),*) -> $result = $value);)*
    };
    (@one [$($attribute:tt)*] $name:ident($($x:ident: $ty:ty),*) -> $result:ty = $value:expr) => {
        $($attribute)*
        unsafe fn $name($($x: $ty),*) -> $result {
            // SAFETY: the caller's contract.
            unsafe { $value }
        }
    };
}

/// Makes the functions of one kind of machine.
macro_rules! machine {
    ($module:ident, $name:literal, $lanes:ty, $vectors:literal, [$($r:literal)*] $(, $feature:literal)?) => {
        mod $module {
            use super::generic::{self, Product};
            use super::lanes::{self, Lanes};
            use super::{Simd, STRIDE};

            type Vector = $lanes;

            loops! { [$(#[target_feature(enable = $feature)])?]
                neighbours(rows: usize, x: Product) -> () = match rows {
                    $($r => generic::product::<Vector, $r, $vectors, 1>(x),)*
                    _ => unreachable!("a small product has at most as many rows as the machine says"),
                };
                tile(rows: usize, x: Product) -> () = match rows {
                    $($r => generic::product::<Vector, $r, $vectors, STRIDE>(x),)*
                    _ => unreachable!("a small product has at most as many rows as the machine says"),
                };
                max(row: &[f32]) -> f32 = generic::max::<Vector>(row);
                exponentials(row: &mut [f32], factor: f32, shift: f32) -> f32 =
                    generic::exponentials::<Vector>(row, factor, shift);
                multiply(row: &mut [f32], factor: f32) -> () = generic::multiply::<Vector>(row, factor);
                gradients(p: &mut [f32], d: &mut [f32], lse: f32, delta: f32) -> () =
                    generic::gradients::<Vector>(p, d, lse, delta);
                tanh(row: &mut [f32], factor: f32) -> () = generic::tanh::<Vector>(row, factor);
            }

            const ROWS: &[usize] = &[$($r),*];

            pub(super) static FUNCTIONS: Simd = Simd {
                name: $name,
                rows: ROWS.len(),
                columns: $vectors * <Vector as Lanes>::N,
                neighbours,
                tile,
                max,
                exponentials,
                multiply,
                gradients,
                tanh,
            };
        }
    };
}

// Accumulators, the panel's vectors and a broadcast fill the registers: 12 · 2 + 2 + 1 of 32, 6 · 2 + 2 + 1 of 16.
#[cfg(target_arch = "x86_64")]
machine!(avx512, "avx512f", lanes::x86::Avx512, 2, [1 2 3 4 5 6 7 8 9 10 11 12], "avx512f");
#[cfg(target_arch = "x86_64")]
machine!(avx2, "avx2+fma", lanes::x86::Avx2, 2, [1 2 3 4 5 6], "avx2,fma");
machine!(portable, "portable", lanes::Portable, 2, [1 2 3 4 5 6]);

impl Simd {
    /// The functions for this machine.
    pub(super) fn of_machine() -> &'static Simd {
        static CHOSEN: OnceLock<&'static Simd> = OnceLock::new();
        CHOSEN.get_or_init(|| Simd::available()[0])
    }

    /// All that this machine can run, the fastest first.
    pub(super) fn available() -> Vec<&'static Simd> {
        let mut available: Vec<&'static Simd> = Vec::new();
        #[cfg(target_arch = "x86_64")]
        {
            if std::arch::is_x86_feature_detected!("avx512f") {
                available.push(&avx512::FUNCTIONS);
            }
            if std::arch::is_x86_feature_detected!("avx2") && std::arch::is_x86_feature_detected!("fma") {
                available.push(&avx2::FUNCTIONS);
            }
        }
        available.push(&portable::FUNCTIONS);
        available
    }

    /// `c ← alpha · a b` or `c ← c + alpha · a b`, for `rows` rows of a, `k` of its columns and one panel of b; rows of
    /// c are `c_row` apart.
    ///
    /// # Panics
    /// When a matrix does not lie in its slice: a bug of the caller.
    #[expect(
        clippy::too_many_arguments,
        reason = "a product has two sizes, three matrices and what becomes of it"
    )]
    #[inline]
    pub(super) fn product(
        &self,
        (rows, k): (usize, usize),
        alpha: f32,
        a: LhsLayout<'_>,
        b: &[f32],
        c: &mut [f32],
        c_row: usize,
        update: Update,
    ) {
        if rows == 0 {
            return;
        }
        assert!(rows <= self.rows && b.len() >= k * self.columns, "the panel has its rows");
        assert!(c.len() >= (rows - 1) * c_row + self.columns, "the result lies in its slice");
        let (left, a_column, function) = match a {
            LhsLayout::Neighbours(a, column) => (a, column, self.neighbours),
            LhsLayout::Tile(a) => (a, 1, self.tile),
        };
        let reach = match a {
            LhsLayout::Neighbours(..) => k.saturating_sub(1) * a_column + rows,
            LhsLayout::Tile(_) => (rows - 1) * STRIDE + k,
        };
        assert!(k == 0 || left.len() >= reach, "the left matrix lies in its slice");
        let (a, b, c) = (left.as_ptr(), b.as_ptr(), c.as_mut_ptr());
        // SAFETY: the assertions show that all elements lie in their slices, c is borrowed alone, and these functions
        // are handed out only where the machine has their instructions.
        unsafe { function(rows, Product { k, a, a_column, b, c, c_row, alpha, update }) }
    }

    /// The greatest element; −∞ of nothing. What is not a number may be passed over.
    pub(super) fn max(&self, row: &[f32]) -> f32 {
        // SAFETY: these functions are handed out only where the machine has their instructions.
        unsafe { (self.max)(row) }
    }

    /// `x ← 2^(factor · x − shift)`, zero where that is below 2^−150; gives the sum.
    pub(super) fn exponentials(&self, row: &mut [f32], factor: f32, shift: f32) -> f32 {
        // SAFETY: these functions are handed out only where the machine has their instructions.
        unsafe { (self.exponentials)(row, factor, shift) }
    }

    /// `x ← factor · x`.
    pub(super) fn multiply(&self, row: &mut [f32], factor: f32) {
        // SAFETY: these functions are handed out only where the machine has their instructions.
        unsafe { (self.multiply)(row, factor) }
    }

    /// `p ← 2^(p − lse)`, `d ← p · (d − delta)`.
    ///
    /// # Panics
    /// When the rows differ in length: a bug of the caller.
    pub(super) fn gradients(&self, p: &mut [f32], d: &mut [f32], lse: f32, delta: f32) {
        assert_eq!(p.len(), d.len(), "each weight has a gradient");
        // SAFETY: these functions are handed out only where the machine has their instructions.
        unsafe { (self.gradients)(p, d, lse, delta) }
    }

    /// `x ← tanh(factor · x)`.
    pub(super) fn tanh(&self, row: &mut [f32], factor: f32) {
        // SAFETY: these functions are handed out only where the machine has their instructions.
        unsafe { (self.tanh)(row, factor) }
    }
}
