//! The loops, over vectors of any kind.
//!
//! Everything here is inlined into a function with the machine's instructions, so nothing here calls a function that the
//! compiler may leave out of line: loops count with `while`, since the methods of iterators are such functions. One call
//! left in the product spills all accumulators and costs a factor of six.

use super::lanes::{Lanes, WIDEST};

/// The effect of a product on the elements of its result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::cpu) enum Update {
    /// Replaces them.
    Overwrite,
    /// Adds to them.
    Accumulate,
}

/// One small product: `c ← alpha · a b`, or `c ← c + alpha · a b`.
#[derive(Clone, Copy)]
pub(super) struct Product {
    /// Summed products.
    pub(super) k: usize,
    /// The left matrix; the distance of rows is a constant of the loop.
    pub(super) a: *const f32,
    /// From column to column of the left matrix.
    pub(super) a_column: usize,
    /// The panel of the right matrix: rows, one after another, as wide as the panel.
    pub(super) b: *const f32,
    /// The result, whose columns are neighbours.
    pub(super) c: *mut f32,
    /// From row to row of the result.
    pub(super) c_row: usize,
    pub(super) alpha: f32,
    pub(super) update: Update,
}

/// The product of `R` rows, at distance `A_ROW`, with a panel of `P` vectors.
///
/// Each element is one chain of fused products in order of k, whatever R is, so results do not depend on how rows are
/// grouped.
///
/// # Safety
/// The machine has the instructions of `L`; `R` rows and `k` columns of a, `k` rows of the panel and `R` rows of c
/// are valid.
#[inline(always)]
pub(super) unsafe fn product<L: Lanes, const R: usize, const P: usize, const A_ROW: usize>(x: Product) {
    // SAFETY: the function's contract.
    unsafe {
        let mut sums = [[L::splat(0.0); P]; R];
        let (mut a, mut b) = (x.a, x.b);
        let mut k = 0;
        while k < x.k {
            let mut right = [L::splat(0.0); P];
            let mut j = 0;
            while j < P {
                right[j] = L::load(b.add(j * L::N));
                j += 1;
            }
            let mut i = 0;
            while i < R {
                let left = L::splat(*a.add(i * A_ROW));
                let mut j = 0;
                while j < P {
                    sums[i][j] = L::fma(left, right[j], sums[i][j]);
                    j += 1;
                }
                i += 1;
            }
            a = a.add(x.a_column);
            b = b.add(P * L::N);
            k += 1;
        }
        let alpha = L::splat(x.alpha);
        let mut i = 0;
        while i < R {
            let mut j = 0;
            while j < P {
                let c = x.c.add(i * x.c_row + j * L::N);
                let value = match x.update {
                    Update::Overwrite => L::mul(alpha, sums[i][j]),
                    Update::Accumulate => L::fma(alpha, sums[i][j], L::load(c)),
                };
                L::store(c, value);
                j += 1;
            }
            i += 1;
        }
    }
}

/// `2^x` with a relative error of two units in the last place; zero below −150, not a number where x is none.
///
/// # Safety
/// The machine has the instructions of `L`.
#[inline(always)]
unsafe fn exp2<L: Lanes>(x: L::V) -> L::V {
    // SAFETY: the function's contract; the bounds are those of `scale`.
    unsafe {
        // Bounds come first, so that what is not a number stays that.
        let x = L::min(L::splat(128.0), L::max(L::splat(-160.0), x));
        let n = L::round(x);
        let f = L::sub(x, n);
        // The minimax polynomial of Cephes' `exp2f` on [−½, ½].
        let coefficients = [1.339_887_4e-3, 9.618_437e-3, 5.550_332_5e-2, 2.402_264_8e-1, 6.931_472e-1, 1.0];
        let mut p = L::splat(1.535_336_2e-4);
        let mut i = 0;
        while i < coefficients.len() {
            p = L::fma(p, f, L::splat(coefficients[i]));
            i += 1;
        }
        L::scale(p, n)
    }
}

/// Replaces each vector of a row by a function of it, the last filled up.
///
/// A macro, because a closure would be a function of its own, compiled without the machine's instructions.
macro_rules! each {
    ($lanes:ty, $row:expr, $fill:expr, $x:ident => $value:expr) => {{
        let row: &mut [f32] = $row;
        let whole = row.len() / <$lanes>::N * <$lanes>::N;
        let (body, tail) = row.split_at_mut(whole);
        let body = body.as_mut_ptr();
        let mut i = 0;
        while i < whole {
            let $x = <$lanes>::load(body.add(i));
            <$lanes>::store(body.add(i), $value);
            i += <$lanes>::N;
        }
        if !tail.is_empty() {
            let mut buffer = [$fill; WIDEST];
            buffer[..tail.len()].copy_from_slice(tail);
            let $x = <$lanes>::load(buffer.as_ptr());
            <$lanes>::store(buffer.as_mut_ptr(), $value);
            tail.copy_from_slice(&buffer[..tail.len()]);
        }
    }};
}

/// The lanes of a vector.
///
/// # Safety
/// The machine has the instructions of `L`.
#[inline(always)]
unsafe fn lanes<L: Lanes>(v: L::V) -> [f32; WIDEST] {
    let mut out = [0.0; WIDEST];
    // SAFETY: the array is as long as the widest vector.
    unsafe { L::store(out.as_mut_ptr(), v) };
    out
}

/// The greatest element; −∞ of nothing.
///
/// # Safety
/// The machine has the instructions of `L`.
#[inline(always)]
pub(super) unsafe fn max<L: Lanes>(row: &[f32]) -> f32 {
    let whole = row.len() / L::N * L::N;
    let (body, tail) = row.split_at(whole);
    // SAFETY: chunks have the elements of a vector.
    unsafe {
        let mut greatest = L::splat(f32::NEG_INFINITY);
        let mut i = 0;
        while i < whole {
            greatest = L::max(L::load(body.as_ptr().add(i)), greatest);
            i += L::N;
        }
        let lanes = lanes::<L>(greatest);
        lanes[..L::N].iter().chain(tail).copied().fold(f32::NEG_INFINITY, f32::max)
    }
}

/// `x ← 2^(factor · x − shift)`; gives the sum.
///
/// # Safety
/// The machine has the instructions of `L`.
#[inline(always)]
pub(super) unsafe fn exponentials<L: Lanes>(row: &mut [f32], factor: f32, shift: f32) -> f32 {
    // SAFETY: the function's contract.
    unsafe {
        let (factor, minus) = (L::splat(factor), L::splat(-shift));
        let mut sum = L::splat(0.0);
        // What fills the last vector is 2^−∞, zero.
        each!(L, row, f32::NEG_INFINITY, x => {
            let x = exp2::<L>(L::fma(x, factor, minus));
            sum = L::add(sum, x);
            x
        });
        lanes::<L>(sum)[..L::N].iter().sum()
    }
}

/// `x ← factor · x`.
///
/// # Safety
/// The machine has the instructions of `L`.
#[inline(always)]
pub(super) unsafe fn multiply<L: Lanes>(row: &mut [f32], factor: f32) {
    // SAFETY: the function's contract.
    unsafe {
        let factor = L::splat(factor);
        each!(L, row, 0.0, x => L::mul(x, factor));
    }
}

/// Weights and the gradients of scores: `p ← 2^(p − lse)`, `d ← p · (d − delta)`.
///
/// # Safety
/// The machine has the instructions of `L`; both rows are of one length.
#[inline(always)]
pub(super) unsafe fn gradients<L: Lanes>(p: &mut [f32], d: &mut [f32], lse: f32, delta: f32) {
    let whole = p.len() / L::N * L::N;
    // SAFETY: the function's contract; chunks have the elements of a vector, and so have the buffers.
    unsafe {
        let (lse, delta) = (L::splat(lse), L::splat(delta));
        let ((p, p_tail), (d, d_tail)) = (p.split_at_mut(whole), d.split_at_mut(whole));
        let mut i = 0;
        while i < whole {
            gradient::<L>(p.as_mut_ptr().add(i), d.as_mut_ptr().add(i), lse, delta);
            i += L::N;
        }
        if !p_tail.is_empty() {
            let (mut ps, mut ds) = ([0.0; WIDEST], [0.0; WIDEST]);
            ps[..p_tail.len()].copy_from_slice(p_tail);
            ds[..d_tail.len()].copy_from_slice(d_tail);
            gradient::<L>(ps.as_mut_ptr(), ds.as_mut_ptr(), lse, delta);
            p_tail.copy_from_slice(&ps[..p_tail.len()]);
            d_tail.copy_from_slice(&ds[..d_tail.len()]);
        }
    }
}

/// The same for one vector.
///
/// # Safety
/// The machine has the instructions of `L`; the elements of a vector are valid at both pointers.
#[inline(always)]
unsafe fn gradient<L: Lanes>(p: *mut f32, d: *mut f32, lse: L::V, delta: L::V) {
    // SAFETY: the function's contract.
    unsafe {
        let weight = exp2::<L>(L::sub(L::load(p), lse));
        L::store(p, weight);
        L::store(d, L::mul(weight, L::sub(L::load(d), delta)));
    }
}

/// The hyperbolic tangent with an error of a few units in the last place: the rational minimax approximation of Eigen's
/// `ptanh_float`.
///
/// # Safety
/// The machine has the instructions of `L`.
#[inline(always)]
pub(super) unsafe fn tanh<L: Lanes>(row: &mut [f32], factor: f32) {
    const LIMIT: f32 = 7.905_311;
    const UPPER: [f32; 6] =
        [2.000_188e-13, -8.604_672e-11, 5.122_297e-8, 1.485_722_4e-5, 6.372_619_3e-4, 4.893_524_6e-3];
    const LOWER: [f32; 3] = [1.185_347_1e-4, 2.268_434_6e-3, 4.893_525e-3];
    // SAFETY: the function's contract.
    unsafe {
        let factor = L::splat(factor);
        each!(L, row, 0.0, x => {
            let x = L::min(L::splat(LIMIT), L::max(L::splat(-LIMIT), L::mul(x, factor)));
            let square = L::mul(x, x);
            let mut upper = L::splat(-2.760_768_5e-16);
            let mut i = 0;
            while i < UPPER.len() {
                upper = L::fma(upper, square, L::splat(UPPER[i]));
                i += 1;
            }
            let mut lower = L::splat(1.198_258_4e-6);
            let mut i = 0;
            while i < LOWER.len() {
                lower = L::fma(lower, square, L::splat(LOWER[i]));
                i += 1;
            }
            L::div(L::mul(x, upper), lower)
        });
    }
}
