//! Kernels by themselves, on dense tensors: what is timed against other libraries.

use super::gemm::{self, View};
use super::threads::Threads;

/// The product of `a [m k]` and `b [k n]`, `[m n]`, written over `c`.
///
/// # Panics
/// When a slice is shorter than its matrix.
pub fn matmul((m, k, n): (usize, usize, usize), a: &[f32], b: &[f32], c: &mut [f32], threads: Threads) {
    let view = |row: usize| View { start: 0, row, column: 1 };
    gemm::multiply((m, k, n), 1.0, a, view(k), b, view(n), c, view(n), gemm::Into::Replace, threads);
}
