//! Vectors of `f32`: the instructions that every loop here is written in, for each kind of machine.

/// A vector of `f32` and what is done with it.
///
/// # Safety
/// Every function may only be called where the machine has the instructions that the implementation names, and pointers
/// must be valid for [`Lanes::N`] elements.
pub(super) trait Lanes {
    /// The vector.
    type V: Copy;
    /// Elements of a vector; at most [`WIDEST`].
    const N: usize;

    /// `x` in every lane.
    unsafe fn splat(x: f32) -> Self::V;
    /// The elements from `at` on.
    unsafe fn load(at: *const f32) -> Self::V;
    /// Writes the elements from `at` on.
    unsafe fn store(at: *mut f32, v: Self::V);
    /// `a + b`.
    unsafe fn add(a: Self::V, b: Self::V) -> Self::V;
    /// `a − b`.
    unsafe fn sub(a: Self::V, b: Self::V) -> Self::V;
    /// `a · b`.
    unsafe fn mul(a: Self::V, b: Self::V) -> Self::V;
    /// `a / b`.
    unsafe fn div(a: Self::V, b: Self::V) -> Self::V;
    /// `a · b + c`, rounded once where the machine can.
    unsafe fn fma(a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// The greater; b where either is not a number.
    unsafe fn max(a: Self::V, b: Self::V) -> Self::V;
    /// The lesser; b where either is not a number.
    unsafe fn min(a: Self::V, b: Self::V) -> Self::V;
    /// The nearest integer.
    unsafe fn round(a: Self::V) -> Self::V;
    /// `a · 2^n`, n being integers from −160 to 128.
    unsafe fn scale(a: Self::V, n: Self::V) -> Self::V;
}

/// The most elements of a vector.
pub(super) const WIDEST: usize = 16;

#[cfg(target_arch = "x86_64")]
pub(super) mod x86 {
    //! AVX-512 and AVX2 with FMA.

    use std::arch::x86_64::*;

    use super::Lanes;

    /// Rounding to the nearest integer, without exceptions.
    const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;

    /// AVX-512F.
    pub(in super::super) struct Avx512;

    /// AVX2 and FMA.
    pub(in super::super) struct Avx2;

    /// The functions of a machine, each by its instruction.
    macro_rules! lanes {
        ($machine:ident, $vector:ty, $n:literal, $($name:ident($($x:ident: $ty:ty),*) -> $result:ty = $value:expr;)*) => {
            // SAFETY: callers are compiled with the target feature and run only where the machine has it.
            impl Lanes for $machine {
                type V = $vector;
                const N: usize = $n;

                $(#[inline(always)]
                unsafe fn $name($($x: $ty),*) -> $result {
                    // SAFETY: the trait's contract.
                    unsafe { $value }
                })*
            }
        };
    }

    lanes! { Avx512, __m512, 16,
        splat(x: f32) -> __m512 = _mm512_set1_ps(x);
        load(at: *const f32) -> __m512 = _mm512_loadu_ps(at);
        store(at: *mut f32, v: __m512) -> () = _mm512_storeu_ps(at, v);
        add(a: __m512, b: __m512) -> __m512 = _mm512_add_ps(a, b);
        sub(a: __m512, b: __m512) -> __m512 = _mm512_sub_ps(a, b);
        mul(a: __m512, b: __m512) -> __m512 = _mm512_mul_ps(a, b);
        div(a: __m512, b: __m512) -> __m512 = _mm512_div_ps(a, b);
        max(a: __m512, b: __m512) -> __m512 = _mm512_max_ps(a, b);
        min(a: __m512, b: __m512) -> __m512 = _mm512_min_ps(a, b);
        fma(a: __m512, b: __m512, c: __m512) -> __m512 = _mm512_fmadd_ps(a, b, c);
        round(a: __m512) -> __m512 = _mm512_roundscale_ps::<NEAREST>(a);
        scale(a: __m512, n: __m512) -> __m512 = _mm512_scalef_ps(a, n);
    }

    lanes! { Avx2, __m256, 8,
        splat(x: f32) -> __m256 = _mm256_set1_ps(x);
        load(at: *const f32) -> __m256 = _mm256_loadu_ps(at);
        store(at: *mut f32, v: __m256) -> () = _mm256_storeu_ps(at, v);
        add(a: __m256, b: __m256) -> __m256 = _mm256_add_ps(a, b);
        sub(a: __m256, b: __m256) -> __m256 = _mm256_sub_ps(a, b);
        mul(a: __m256, b: __m256) -> __m256 = _mm256_mul_ps(a, b);
        div(a: __m256, b: __m256) -> __m256 = _mm256_div_ps(a, b);
        max(a: __m256, b: __m256) -> __m256 = _mm256_max_ps(a, b);
        min(a: __m256, b: __m256) -> __m256 = _mm256_min_ps(a, b);
        fma(a: __m256, b: __m256, c: __m256) -> __m256 = _mm256_fmadd_ps(a, b, c);
        round(a: __m256) -> __m256 = _mm256_round_ps::<NEAREST>(a);
        // In two steps, as 2^n itself may be no normal number.
        scale(a: __m256, n: __m256) -> __m256 = {
            let n = _mm256_cvtps_epi32(n);
            let half = _mm256_srai_epi32::<1>(n);
            let power = |n| {
                let exponent = _mm256_add_epi32(n, _mm256_set1_epi32(127));
                _mm256_castsi256_ps(_mm256_slli_epi32::<23>(exponent))
            };
            let a = _mm256_mul_ps(a, power(half));
            _mm256_mul_ps(a, power(_mm256_sub_epi32(n, half)))
        };
    }
}

/// Arrays that the compiler makes vectors of, on any machine.
pub(super) struct Portable;

impl Lanes for Portable {
    type V = [f32; 4];
    const N: usize = 4;

    #[inline(always)]
    unsafe fn splat(x: f32) -> [f32; 4] {
        [x; 4]
    }
    #[inline(always)]
    unsafe fn load(at: *const f32) -> [f32; 4] {
        // SAFETY: the trait's contract; an array of `f32` needs no more alignment than its elements.
        unsafe { at.cast::<[f32; 4]>().read() }
    }
    #[inline(always)]
    unsafe fn store(at: *mut f32, v: [f32; 4]) {
        // SAFETY: the trait's contract; an array of `f32` needs no more alignment than its elements.
        unsafe { at.cast::<[f32; 4]>().write(v) }
    }
    #[inline(always)]
    unsafe fn add(a: [f32; 4], b: [f32; 4]) -> [f32; 4] {
        std::array::from_fn(|i| a[i] + b[i])
    }
    #[inline(always)]
    unsafe fn sub(a: [f32; 4], b: [f32; 4]) -> [f32; 4] {
        std::array::from_fn(|i| a[i] - b[i])
    }
    #[inline(always)]
    unsafe fn mul(a: [f32; 4], b: [f32; 4]) -> [f32; 4] {
        std::array::from_fn(|i| a[i] * b[i])
    }
    #[inline(always)]
    unsafe fn div(a: [f32; 4], b: [f32; 4]) -> [f32; 4] {
        std::array::from_fn(|i| a[i] / b[i])
    }
    #[inline(always)]
    unsafe fn fma(a: [f32; 4], b: [f32; 4], c: [f32; 4]) -> [f32; 4] {
        // A fused product is a call of a function on machines without the instruction.
        std::array::from_fn(|i| a[i] * b[i] + c[i])
    }
    #[inline(always)]
    unsafe fn max(a: [f32; 4], b: [f32; 4]) -> [f32; 4] {
        std::array::from_fn(|i| if a[i] > b[i] { a[i] } else { b[i] })
    }
    #[inline(always)]
    unsafe fn min(a: [f32; 4], b: [f32; 4]) -> [f32; 4] {
        std::array::from_fn(|i| if a[i] < b[i] { a[i] } else { b[i] })
    }
    #[inline(always)]
    unsafe fn round(a: [f32; 4]) -> [f32; 4] {
        a.map(f32::round_ties_even)
    }
    #[inline(always)]
    unsafe fn scale(a: [f32; 4], n: [f32; 4]) -> [f32; 4] {
        std::array::from_fn(|i| {
            let n = n[i] as i32;
            let power = |n: i32| f32::from_bits(((n + 127) << 23).cast_unsigned());
            a[i] * power(n >> 1) * power(n - (n >> 1))
        })
    }
}
