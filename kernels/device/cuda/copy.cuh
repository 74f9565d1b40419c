// Movement of elements: strided boxes, look-ups, repetition, positions. `Bits` is any type of the element's
// size, or of several neighbours' where they move together: extents and strides then count those.
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
        const Division at = divide(i, inner), row = divide(at.quotient, n_to);
        const int64_t j = divide(to_start + row.remainder, copies).quotient - from_start;
        z[i] = x[(row.quotient * n_from + j) * inner + at.remainder];
    }
}

// Rows of a table, of which this rank has `n_rows` from `first_row`; other rows contribute zeros.
template <typename Bits>
__global__ void embed(const Bits* table, const int32_t* ids, Bits* z, int64_t n, int64_t width, int64_t first_row,
                      int64_t n_rows) {
    ITHACA_FOR(i, n) {
        const Division at = divide(i, width);
        const int64_t row = ids[at.quotient] - first_row;
        z[i] = row >= 0 && row < n_rows ? table[row * width + at.remainder] : Bits{};
    }
}

// Positions of indices, and a number for padding.
template <typename I>
__global__ void positions(I* z, int64_t n, Sequence sequence, int64_t valid, int64_t padding) {
    ITHACA_FOR(i, n) {
        const int64_t position = position_of(sequence, i);
        z[i] = static_cast<I>(position < valid ? position : padding);
    }
}

}  // namespace ithaca::kernel
