// Tiles of rows in shared memory, and their products on tensor cores. A warp has 16 kM rows of a result, as `mma` lays
// them out: in sum[m][n] row lane / 4 of the m-th 16 rows and columns 2 (lane % 4) and the next of the n-th 8 columns,
// then the same columns 8 rows further.
#pragma once

#include "tensor_core.cuh"

namespace ithaca::tile {

// Elements between rows: 16 bytes more than the row, so that eight rows lie in different banks.
__host__ __device__ constexpr int pitch(int width) { return width + 8; }

// Begins to copy `kRows` rows to shared memory; `at(i)` is where row i is, or none. Rows that are none are zero, and so are
// columns from `width` on. `any` is memory that is not read.
template <typename T, int kWidth, int kRows, int kThreads, typename At>
__device__ inline void fetch(T* to, const T* any, int width, const At& at) {
    constexpr int kPieces = kWidth / 8;
    ITHACA_UNROLL_BY(1)  // addresses of many rows at once would take registers that sums need
    for (int i = threadIdx.x; i < kRows * kPieces; i += kThreads) {
        const int row = i / kPieces, column = i % kPieces * 8;
        const T* const from = at(row);
        const bool is_there = from != nullptr && column < width;
        warp::copy_async(to + row * pitch(kWidth) + column, is_there ? from + column : any, is_there);
    }
}

// sum = a b^T: of 16 kM rows and 8 kN rows, both of `kWidth` elements in shared memory.
template <typename T, int kWidth, int kM, int kN>
__device__ inline void multiply_rows(float (&sum)[kM][kN][4], const T* a, const T* b) {
    const int lane = threadIdx.x % 32;
    // Of a the four matrices are rows 0 and 8, then the same 8 columns further; of b columns 0 and 8, then 8 rows further.
    const T* const from_a = a + (lane % 16) * pitch(kWidth) + lane / 16 * 8;
    const T* const from_b = b + (lane / 16 * 8 + lane % 8) * pitch(kWidth) + lane / 8 % 2 * 8;
    ITHACA_UNROLL
    for (int m = 0; m < kM; ++m)
        ITHACA_UNROLL
        for (int n = 0; n < kN; ++n)
            ITHACA_UNROLL
            for (int i = 0; i < 4; ++i) sum[m][n][i] = 0;
    ITHACA_UNROLL
    for (int k = 0; k < kWidth; k += 16) {
        uint32_t left[kM][4];
        ITHACA_UNROLL
        for (int m = 0; m < kM; ++m) warp::load_matrices(left[m], from_a + m * 16 * pitch(kWidth) + k);
        ITHACA_UNROLL
        for (int n = 0; n < kN; n += 2) {
            uint32_t right[4];
            warp::load_matrices(right, from_b + n * 8 * pitch(kWidth) + k);
            ITHACA_UNROLL
            for (int m = 0; m < kM; ++m) {
                warp::Element<T>::multiply(sum[m][n], left[m], right[0], right[1]);
                warp::Element<T>::multiply(sum[m][n + 1], left[m], right[2], right[3]);
            }
        }
    }
}

// sum += a b: a has 16 kM rows and 8 kK columns in registers, as `multiply_rows` leaves them, b has 8 kK rows of `kWidth`
// elements in shared memory.
template <typename T, int kWidth, int kM, int kK>
__device__ inline void add_weighed(float (&sum)[kM][kWidth / 8][4], const float (&a)[kM][kK][4], const T* b) {
    const int lane = threadIdx.x % 32;
    const T* const from_b = b + (lane % 16) * pitch(kWidth) + lane / 16 * 8;
    ITHACA_UNROLL
    for (int k = 0; k < kK; k += 2) {
        uint32_t left[kM][4];
        ITHACA_UNROLL
        for (int m = 0; m < kM; ++m) {
            left[m][0] = warp::Element<T>::pack(a[m][k][0], a[m][k][1]);
            left[m][1] = warp::Element<T>::pack(a[m][k][2], a[m][k][3]);
            left[m][2] = warp::Element<T>::pack(a[m][k + 1][0], a[m][k + 1][1]);
            left[m][3] = warp::Element<T>::pack(a[m][k + 1][2], a[m][k + 1][3]);
        }
        ITHACA_UNROLL
        for (int n = 0; n < kWidth / 8; n += 2) {
            uint32_t right[4];
            warp::load_transposed(right, from_b + k * 8 * pitch(kWidth) + n * 8);
            ITHACA_UNROLL
            for (int m = 0; m < kM; ++m) {
                warp::Element<T>::multiply(sum[m][n], left[m], right[0], right[1]);
                warp::Element<T>::multiply(sum[m][n + 1], left[m], right[2], right[3]);
            }
        }
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
