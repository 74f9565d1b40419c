// Tiles of rows in shared memory, and their products on tensor cores. Of every 16 kM rows of a result a warp has some, as
// `row_of` says; in sum[m][n] row lane / 4 of the m-th 16 rows and columns 2 (lane % 4) and the next of the n-th 8
// columns, then the same columns 8 rows further.
#pragma once

#include "tensor_core.cuh"

namespace ithaca::tile {

// Elements of a tile: rows in chunks of 64 columns, so 128 bytes, one chunk after another.
__host__ __device__ constexpr int elements(int rows, int width) { return rows * ((width + 63) / 64 * 64); }

// Where piece `piece` of 8 columns of a row begins: the pieces of a row of a chunk are permuted by the number of the row, so
// that those of eight rows lie in different banks (the 128-byte swizzle of PTX ISA, "Shared memory matrix layout").
template <int kRows>
__device__ inline int place(int row, int piece) {
    return (piece / 8 * kRows + row) * 64 + (piece % 8 ^ row % 8) * 8;
}

// The first of the m-th 16 rows that are this warp's, of the rows of `kWarps` warps.
template <int kWarps>
__device__ inline int row_of(int m) {
    return (m * kWarps + static_cast<int>(threadIdx.x) / 32) * 16;
}

// Begins to copy `kRows` rows to shared memory; `at(i)` is where row i is, or none. Rows that are none are zero, and so are
// columns from `width` on. `any` is memory that is not read.
template <typename T, int kWidth, int kRows, int kThreads, typename At>
__device__ inline void fetch(T* to, const T* any, int width, const At& at) {
    constexpr int kPieces = kWidth / 8;
    ITHACA_UNROLL_BY(1)  // addresses of many rows at once would take registers that sums need
    for (int i = threadIdx.x; i < kRows * kPieces; i += kThreads) {
        const int row = i / kPieces, piece = i % kPieces;
        const T* const from = at(row);
        const bool is_there = from != nullptr && piece * 8 < width;
        warp::copy_async(to + place<kRows>(row, piece), is_there ? from + piece * 8 : any, is_there);
    }
}

// The same of the first `n` rows, `step` elements apart.
template <typename T, int kWidth, int kRows, int kThreads>
__device__ inline void fetch_rows(T* to, const T* from, int64_t step, int n, int width) {
    constexpr int kPieces = kWidth / 8, kAtOnce = kThreads / kPieces;
    const int first = threadIdx.x / kPieces, piece = threadIdx.x % kPieces;
    if (first >= kAtOnce) return;
    const T* at = from + first * step + piece * 8;
    if (!ITHACA_UNLIKELY(n != kRows || width != kWidth)) {
        T* const z = to + place<kRows>(first, piece);
        ITHACA_UNROLL
        for (int row = 0; row < kRows; row += kAtOnce) {
            if (kRows % kAtOnce != 0 && row + first >= kRows) break;
            warp::copy_async(kAtOnce % 8 == 0 ? z + row * 64 : to + place<kRows>(row + first, piece), at);
            at += kAtOnce * step;
        }
        return;
    }
    if (piece * 8 >= width) n = 0;
    ITHACA_UNROLL_BY(1)
    for (int row = first; row < kRows; row += kAtOnce) {
        warp::copy_async(to + place<kRows>(row, piece), row < n ? at : from, row < n);
        at += kAtOnce * step;
    }
}

template <int kM, int kN>
__device__ inline void clear(float (&sum)[kM][kN][4]) {
    ITHACA_UNROLL
    for (int m = 0; m < kM; ++m)
        ITHACA_UNROLL
        for (int n = 0; n < kN; ++n)
            ITHACA_UNROLL
            for (int i = 0; i < 4; ++i) sum[m][n][i] = 0;
}

// Sums of 16 columns as the left operand of a product.
template <typename T>
__device__ inline void pack_rows(uint32_t (&z)[4], const float (&x)[4], const float (&y)[4]) {
    z[0] = warp::Element<T>::pack(x[0], x[1]);
    z[1] = warp::Element<T>::pack(x[2], x[3]);
    z[2] = warp::Element<T>::pack(y[0], y[1]);
    z[3] = warp::Element<T>::pack(y[2], y[3]);
}

// Warpgroup products (wgmma) are asynchronous: they complete in order, and a sum is valid after `wait`. Warp products (mma) are
// synchronous.
#ifdef ITHACA_WARPGROUPS

// sum = a b^T: of `kARows` rows, 64 for each m, and `kBRows` rows, both of `kWidth` elements in shared memory. A group for
// each m.
template <typename T, int kWidth, int kARows, int kBRows, int kM, int kN>
__device__ inline void begin_rows(float (&sum)[kM][kN][4], const T* a, const T* b) {
    static_assert(kARows == 64 * kM && kBRows == 8 * kN, "a warpgroup computes all rows");
    const uint32_t from_a = warp::in_shared(a, 16), from_b = warp::in_shared(b, 16);
    ITHACA_UNROLL
    for (int m = 0; m < kM; ++m) {
        warp::begin_products(sum[m]);
        ITHACA_UNROLL
        for (int k = 0; k < kWidth; k += 16)
            // Descriptors count in 16 bytes: chunks of 64 columns, then 16 columns; of a, 64 rows.
            warp::Element<T>::multiply_rows(sum[m], from_a + (k / 64 * kARows + m * 64) * 8 + k % 64 / 8,
                                            from_b + k / 64 * kBRows * 8 + k % 64 / 8, k > 0);
        warp::commit_products();
    }
}

// sum[m] += a[m] b: a has 16 rows a warp and 8 kK columns in registers, as `begin_rows` leaves them, b has 8 kK rows of
// `kWidth` elements in shared memory. A group; of each m in turn.
template <typename T, int kWidth, int kM, int kK>
__device__ inline void begin_weighed(float (&sum)[kM][kWidth / 8][4], const float (&a)[kM][kK][4], int m, const T* b) {
    uint32_t left[kK / 2][4];
    ITHACA_UNROLL
    for (int k = 0; k < kK; k += 2) pack_rows<T>(left[k / 2], a[m][k], a[m][k + 1]);
    const uint32_t from_b = warp::in_shared(b, 8 * kK * 128);
    warp::begin_products(sum[m]);
    ITHACA_UNROLL
    for (int k = 0; k < kK / 2; ++k) {
        constexpr int kWhole = kWidth / 128 * 128, kRest = kWidth - kWhole;
        ITHACA_UNROLL
        for (int n = 0; n < kWhole; n += 128)
            warp::Element<T>::add_weighed(warp::columns<16>(sum[m], n / 8), left[k], from_b + n / 64 * 8 * kK * 8 + k * 128);
        if constexpr (kRest > 0)
            warp::Element<T>::add_weighed(warp::columns<kRest / 8>(sum[m], kWhole / 8), left[k],
                                          from_b + kWhole / 64 * 8 * kK * 8 + k * 128);
    }
    warp::commit_products();
}

// Waits for all groups of products except the last `kLeft`; `sum` is the result of an earlier group.
template <int kLeft, int kN>
__device__ inline void wait(float (&sum)[kN][4]) {
    warp::wait_for_products<kLeft>();
    warp::hold(sum);
}

#else

template <typename T, int kWidth, int kARows, int kBRows, int kM, int kN>
__device__ inline void begin_rows(float (&sum)[kM][kN][4], const T* a, const T* b) {
    constexpr int kWarps = kARows / (16 * kM);
    const int lane = threadIdx.x % 32;
    // Of a the four matrices are rows 0 and 8, then the same 8 columns further; of b columns 0 and 8, then 8 rows further.
    const int row_a = lane % 16, piece_a = lane / 16, row_b = lane / 16 * 8 + lane % 8, piece_b = lane / 8 % 2;
    clear(sum);
    ITHACA_UNROLL
    for (int k = 0; k < kWidth; k += 16) {
        uint32_t left[kM][4];
        ITHACA_UNROLL
        for (int m = 0; m < kM; ++m)
            warp::load_matrices(left[m], a + row_of<kWarps>(m) * 64 + place<kARows>(row_a, k / 8 + piece_a));
        ITHACA_UNROLL
        for (int n = 0; n < kN; n += 2) {
            uint32_t right[4];
            warp::load_matrices(right, b + n * 8 * 64 + place<kBRows>(row_b, k / 8 + piece_b));
            ITHACA_UNROLL
            for (int m = 0; m < kM; ++m) {
                warp::Element<T>::multiply(sum[m][n], left[m], right[0], right[1]);
                warp::Element<T>::multiply(sum[m][n + 1], left[m], right[2], right[3]);
            }
        }
    }
}

// All rows with the last m, for they share what is read of b.
template <typename T, int kWidth, int kM, int kK>
__device__ inline void begin_weighed(float (&sum)[kM][kWidth / 8][4], const float (&a)[kM][kK][4], int last, const T* b) {
    if (last < kM - 1) return;
    const int lane = threadIdx.x % 32, row_b = lane % 16, piece_b = lane / 16;
    ITHACA_UNROLL
    for (int k = 0; k < kK; k += 2) {
        uint32_t left[kM][4];
        ITHACA_UNROLL
        for (int m = 0; m < kM; ++m) pack_rows<T>(left[m], a[m][k], a[m][k + 1]);
        ITHACA_UNROLL
        for (int n = 0; n < kWidth / 8; n += 2) {
            uint32_t right[4];
            warp::load_transposed(right, b + k * 8 * 64 + place<8 * kK>(row_b, n + piece_b));
            ITHACA_UNROLL
            for (int m = 0; m < kM; ++m) {
                warp::Element<T>::multiply(sum[m][n], left[m], right[0], right[1]);
                warp::Element<T>::multiply(sum[m][n + 1], left[m], right[2], right[3]);
            }
        }
    }
}

template <int kLeft, int kN>
__device__ inline void wait(float (&)[kN][4]) {}

#endif

// Over the four lanes that share rows of a result.
__device__ inline float sum_of_row(float x) {
    x += warp::other_lane(x, 1);
    return x + warp::other_lane(x, 2);
}
__device__ inline float highest_of_row(float x) {
    x = fmaxf(x, warp::other_lane(x, 1));
    return fmaxf(x, warp::other_lane(x, 2));
}

}  // namespace ithaca::tile
