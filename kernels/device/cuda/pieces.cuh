// Pieces of a sequence on a wire, and their sums.
#pragma once

#include "pack.cuh"

namespace ithaca::kernel {

// Parts of a tensor [outer, tokens, inner] that lie one after another on a wire. Three numbers for each: its offset on
// the wire, its first token, its number of tokens; by ascending offset.
struct Pieces {
    const int64_t* table;
    int64_t n;
};
struct PiecesShape {
    int64_t outer, tokens, inner;
};

// Where the tensor has the element that the wire has at `i`.
__device__ inline int64_t in_tensor(const Pieces& pieces, const PiecesShape& s, int64_t i) {
    int64_t low = 0, high = pieces.n - 1;  // the last piece that starts at or before i
    while (low < high) {
        const int64_t middle = (low + high + 1) / 2;
        if (pieces.table[3 * middle] <= i) low = middle;
        else high = middle - 1;
    }
    const int64_t* piece = pieces.table + 3 * low;
    const Division at = divide(i - piece[0], s.inner), row = divide(at.quotient, piece[2]);
    return (row.quotient * s.tokens + piece[1] + row.remainder) * s.inner + at.remainder;
}

template <typename Bits>
__global__ void gather_pieces(const Bits* tensor, Bits* wire, Pieces pieces, PiecesShape s, int64_t n) {
    ITHACA_FOR(i, n) { wire[i] = tensor[in_tensor(pieces, s, i)]; }
}

template <typename Bits>
__global__ void scatter_pieces(const Bits* wire, Bits* tensor, Pieces pieces, PiecesShape s, int64_t n) {
    ITHACA_FOR(i, n) { tensor[in_tensor(pieces, s, i)] = wire[i]; }
}

// Each element of the tensor becomes the sum, in order of the pieces, of what the wire has for it.
template <typename T>
__global__ void sum_pieces(const T* wire, T* tensor, Pieces pieces, PiecesShape s, int64_t n) {
    for_packs<kWide<T>>(n, s.inner % kWide<T> == 0 && are_aligned(wire, tensor), [&](auto size, int64_t i) {
        constexpr int kN = decltype(size)::value;
        const Division at = divide(i, s.inner), row = divide(at.quotient, s.tokens);
        Pack<Acc<T>, kN> sum = {};
        for (int64_t p = 0; p < pieces.n; ++p) {
            const int64_t* piece = pieces.table + 3 * p;
            const int64_t t = row.remainder - piece[1];
            if (t < 0 || t >= piece[2]) continue;
            const auto one = load<kN>(wire + piece[0] + (row.quotient * piece[2] + t) * s.inner + at.remainder);
            ITHACA_UNROLL
            for (int k = 0; k < kN; ++k) sum.at[k] += one.at[k];
        }
        store(tensor + i, sum);
    });
}

}  // namespace ithaca::kernel
