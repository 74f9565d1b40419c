// Movement of elements: strided boxes, look-ups, repetition, positions. `Bits` is any type of the element's size.
#pragma once

#include "numeric.cuh"

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

// Rows of a table, of which this rank has `n_rows` from `first_row`; other rows contribute zeros.
template <typename T>
__global__ void embed(const T* table, const int32_t* ids, T* z, int64_t n, int64_t width, int64_t first_row,
                      int64_t n_rows) {
    ITHACA_FOR(i, n) {
        const int64_t row = ids[i / width] - first_row;
        z[i] = row >= 0 && row < n_rows ? table[row * width + i % width] : narrow<T>(0.0f);
    }
}

__global__ inline void positions(int32_t* z, int64_t n, int64_t start, int64_t valid) {
    ITHACA_FOR(i, n) { z[i] = start + i < valid ? static_cast<int32_t>(start + i) : 0; }
}

}  // namespace ithaca::kernel
