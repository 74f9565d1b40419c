// Sums along columns: over rows, or over whatever else a result lacks. Sums have an order.
#pragma once

#include "pack.cuh"
#include "warp.cuh"

namespace ithaca {

// Whether tensor 0 of a walk has the indices in packs of `each` neighbours, which start at multiples of it.
template <int K>
__device__ inline bool has_packs(const Walk<K>& walk, int64_t each) {
    const int last = static_cast<int>(walk.n) - 1;
    if (last < 0 || walk.stride[0][last] != 1 || walk.extent[last] % each != 0) return false;
    for (int d = 0; d < last; ++d)
        if (walk.stride[0][d] % each != 0) return false;
    return true;
}

// Columns come in packs of kN, and `lanes` threads of a block take neighbouring ones, the rest of its
// threads other rows of them; each of the `chunks` parts of the rows has blocks of its own. add(column, row, sums) adds a row
// to the kSums packs of a thread, write(column, chunk, sums) takes the sums of a chunk.
template <typename A, int kN, int kSums, typename Add, typename Write>
__device__ inline void sum_columns(int64_t n, int64_t n_rows, int lanes, int64_t chunks, const Add& add, const Write& write) {
    using Sums = Pack<A, kN>[kSums];
    ITHACA_SHARED(memory);
    Sums* const of_threads = reinterpret_cast<Sums*>(memory);
    const int across = static_cast<int>(blockDim.x) / lanes, own = static_cast<int>(threadIdx.x) / lanes;
    const int64_t groups = (n / kN + lanes - 1) / lanes, each = (n_rows + chunks - 1) / chunks;
    for (int64_t block = blockIdx.x; block < groups * chunks; block += gridDim.x) {
        const int64_t chunk = block / groups, last = (chunk + 1) * each < n_rows ? (chunk + 1) * each : n_rows;
        const int64_t column = (block % groups * lanes + threadIdx.x % lanes) * kN;
        Sums sums = {};
        if (column < n) {
            ITHACA_UNROLL_BY(4)
            for (int64_t row = chunk * each + own; row < last; row += across) add(column, row, sums);
        }
        for (int half = across / 2; half > 0; half /= 2) {
            __syncthreads();
            for (int s = 0; s < kSums; ++s) of_threads[threadIdx.x][s] = sums[s];
            __syncthreads();
            if (own >= half) continue;
            for (int s = 0; s < kSums; ++s)
                ITHACA_UNROLL
                for (int k = 0; k < kN; ++k) sums[s].at[k] += of_threads[threadIdx.x + half * lanes][s].at[k];
        }
        if (own == 0 && column < n) write(column, chunk, sums);
    }
}

}  // namespace ithaca
