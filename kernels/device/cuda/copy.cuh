// Movement of elements: strided boxes, pieces of a sequence, look-ups, repetition, positions. `Bits` is any type of the element's size.
#pragma once

#include "sequence.cuh"

namespace ithaca::kernel {

// Copies a box: tensor 0 of the walk is the destination, tensor 1 the source. Packing, unpacking and slicing are this.
template <typename Bits>
__global__ void copy_box(const Bits* from, Bits* to, Walk<2> box, int64_t n) {
    ITHACA_FOR(i, n) {
        int64_t offset[2];
        box.at(i, offset);
        to[offset[0]] = from[offset[1]];
    }
}

// [outer, n_from, inner] to [outer, n_to, inner]: global element g of the result is g / copies of the operand.
template <typename Bits>
__global__ void repeat(const Bits* x, Bits* z, int64_t n, int64_t n_from, int64_t n_to, int64_t inner,
                       int64_t copies, int64_t from_start, int64_t to_start) {
    ITHACA_FOR(i, n) {
        const int64_t column = i % inner, row = i / inner;
        const int64_t j = (to_start + row % n_to) / copies - from_start;
        z[i] = x[(row / n_to * n_from + j) * inner + column];
    }
}

// The adjoint: [outer, n_from, inner] to [outer, n_to, inner], where global elements g copies .. (g + 1) copies of the
// operand, as far as they are held, add up to element g.
template <typename T>
__global__ void sum_copies(const T* x, T* z, int64_t n, int64_t n_from, int64_t n_to, int64_t inner, int64_t copies,
                           int64_t from_start, int64_t to_start) {
    ITHACA_FOR(i, n) {
        const int64_t column = i % inner, row = i / inner;
        const int64_t first = (to_start + row % n_to) * copies - from_start;
        Acc<T> sum = 0;
        for (int64_t j = first < 0 ? 0 : first; j < first + copies && j < n_from; ++j)
            sum += widen(x[(row / n_to * n_from + j) * inner + column]);
        z[i] = narrow<T>(sum);
    }
}

// Rows of a table, of which this rank has `n_rows` from `first_row`; other rows contribute zeros.
template <typename T>
__global__ void embed(const T* table, const int32_t* ids, T* z, int64_t n, int64_t width, int64_t first_row,
                      int64_t n_rows) {
    ITHACA_FOR(i, n) {
        const int64_t row = ids[i / width] - first_row;
        z[i] = row >= 0 && row < n_rows ? table[row * width + i % width] : narrow<T>(0.0f);
    }
}

// Positions of indices; those of padding are zero.
template <typename I>
__global__ void positions(I* z, int64_t n, Sequence sequence, int64_t valid) {
    ITHACA_FOR(i, n) {
        const int64_t position = position_of(sequence, i);
        z[i] = position < valid ? static_cast<I>(position) : 0;
    }
}

// Parts of a tensor [outer, tokens, inner] that lie one after another on a wire. Three numbers for each: where it lies on
// the wire, its first token, its number of tokens; ascending on the wire.
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
    const int64_t j = i - piece[0];
    const int64_t column = j % s.inner, token = j / s.inner % piece[2], row = j / s.inner / piece[2];
    return (row * s.tokens + piece[1] + token) * s.inner + column;
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
    ITHACA_FOR(i, n) {
        const int64_t column = i % s.inner, token = i / s.inner % s.tokens, row = i / s.inner / s.tokens;
        Acc<T> sum = 0;
        for (int64_t p = 0; p < pieces.n; ++p) {
            const int64_t* piece = pieces.table + 3 * p;
            const int64_t t = token - piece[1];
            if (t >= 0 && t < piece[2]) sum += widen(wire[piece[0] + (row * piece[2] + t) * s.inner + column]);
        }
        tensor[i] = narrow<T>(sum);
    }
}

}  // namespace ithaca::kernel
