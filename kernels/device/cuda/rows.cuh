// Rows that several threads share: a power of two of lanes, up to a warp, or the whole block. Sums do not depend on the
// order of threads.
#pragma once

#include "pack.cuh"
#include "warp.cuh"

namespace ithaca {

// Packs of a row that a thread keeps in registers. What is beyond, in a long row, is read again.
constexpr int kCachedPacks = 4;

// The most threads of a block that share a row, so that each has registers for its packs.
constexpr int kMostLanes = 512;

// The threads that share a row.
struct Team {
    int lanes, lane;

    // What `f` makes of the numbers of all, the same for all. Every thread of the block comes here.
    template <typename A, typename F>
    __device__ A all(A x, const F& f) const {
        for (int bits = lanes < 32 ? lanes / 2 : 16; bits > 0; bits /= 2) x = f(x, warp::other_lane(x, bits));
        if (lanes <= 32) return x;
        ITHACA_SHARED(memory);
        A* const of_warps = reinterpret_cast<A*>(memory);
        __syncthreads();
        if (lane % 32 == 0) of_warps[lane / 32] = x;
        __syncthreads();
        x = of_warps[0];
        for (int w = 1; w < lanes / 32; ++w) x = f(x, of_warps[w]);
        return x;
    }
    template <typename A>
    __device__ A sum(A x) const {
        return all(x, [](A a, A b) { return a + b; });
    }
    template <typename A>
    __device__ A most(A x) const {
        return all(x, [](A a, A b) { return a > b ? a : b; });
    }
};

// Calls body(team, row, width, is_there) for every row; threads without a row come with the first row and a width of zero.
template <typename Body>
__device__ inline void for_rows(int64_t n_rows, int lanes, int64_t width, const Body& body) {
    const int each = static_cast<int>(blockDim.x) / lanes, own = static_cast<int>(threadIdx.x) / lanes;
    const Team team{lanes, static_cast<int>(threadIdx.x) % lanes};
    const int64_t step = static_cast<int64_t>(gridDim.x) * each;
    for (int64_t first = static_cast<int64_t>(blockIdx.x) * each; first < n_rows; first += step) {
        const bool is_there = first + own < n_rows;
        body(team, is_there ? first + own : 0, is_there ? width : 0, is_there);
    }
}

// Calls body(i) for the packs of a row that are this thread's.
template <int kN, typename Body>
__device__ inline void for_row(const Team& team, int64_t width, const Body& body) {
    ITHACA_UNROLL_BY(4)
    for (int64_t i = static_cast<int64_t>(team.lane) * kN; i < width; i += static_cast<int64_t>(team.lanes) * kN) body(i);
}

// The packs of a row that are this thread's, the first of them in registers; X is the type in which kN elements are read.
template <typename X, int kN>
struct RowCache {
    X packs[kCachedPacks];

    // body(i, x) for each pack, where read(i) reads it.
    template <typename Read, typename Body>
    __device__ void first(const Team& team, int64_t width, const Read& read, const Body& body) {
        ITHACA_UNROLL
        for (int s = 0; s < kCachedPacks; ++s)
            if (place(team, s) < width) packs[s] = read(place(team, s));
        again(team, width, read, body);
    }
    // The same another time.
    template <typename Read, typename Body>
    __device__ void again(const Team& team, int64_t width, const Read& read, const Body& body) const {
        ITHACA_UNROLL
        for (int s = 0; s < kCachedPacks; ++s)
            if (place(team, s) < width) body(place(team, s), packs[s]);
        for (int64_t i = place(team, kCachedPacks); i < width; i += static_cast<int64_t>(team.lanes) * kN) body(i, read(i));
    }

  private:
    __device__ static int64_t place(const Team& team, int s) { return (static_cast<int64_t>(s) * team.lanes + team.lane) * kN; }
};

// A pack of a tensor and one of its gradient.
template <typename A, int kN>
struct WithGradient {
    Pack<A, kN> x, d;
};

}  // namespace ithaca
