// Rotary position embedding: elements of the first `width` turn in pairs.
#pragma once

#include "numeric.cuh"

namespace ithaca::kernel {

// The walk goes over rows, all dimensions of x but the rotated one: tensor 0 is x and the result, tensor 1 the
// positions. A thread takes a pair, or an element behind `width`, which passes through; pair i starts at element
// i · spread, and its elements are `apart`: halves of the width, or neighbours. Angles are taken in f64, as a
// position of 10^5 times a frequency leaves an f32 too few digits.
template <typename T>
__global__ void rotary(const T* x, const int32_t* positions, const double* frequencies, T* z, Walk<2> rows,
                       int64_t n_rows, int64_t extent, int64_t stride, int64_t width, int64_t spread, int64_t apart,
                       double amplitude) {
    using A = Acc<T>;
    const int64_t half = width / 2, slots = extent - half;
    ITHACA_FOR(i, n_rows * slots) {
        const int64_t slot = i % slots;
        int64_t at[2];
        rows.at(i / slots, at);
        if (slot >= half) {
            const int64_t behind = at[0] + (slot + half) * stride;
            z[behind] = x[behind];
            continue;
        }
        const int64_t first = at[0] + slot * spread * stride, second = first + apart * stride;
        const double angle = positions[at[1]] * frequencies[slot];
        const A c = static_cast<A>(cos(angle) * amplitude), s = static_cast<A>(sin(angle) * amplitude);
        const A a = widen(x[first]), b = widen(x[second]);
        z[first] = narrow<T>(a * c - b * s);
        z[second] = narrow<T>(b * c + a * s);
    }
}

}  // namespace ithaca::kernel
