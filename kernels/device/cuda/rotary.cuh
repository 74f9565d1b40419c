// Rotary position embedding: elements of the first `width` turn in pairs.
#pragma once

#include "numeric.cuh"

namespace ithaca::kernel {

// The walk goes over rows, all dimensions of x but the rotated one: tensor 0 is x, tensor 1 the positions, tensor 2 the
// result, which may have its rows elsewhere. A thread takes a pair, or an element behind `width`, which passes through;
// pair i starts at element i · spread, and its elements are `apart`: halves of the width, or neighbours. Angles are taken
// in f64, as a position of 10^5 times a frequency leaves an f32 too few digits.
template <typename T>
__global__ void rotary(const T* x, const int32_t* positions, const double* frequencies, T* z, Walk<3> rows,
                       int64_t n_rows, int64_t extent, int64_t stride, int64_t width, int64_t spread, int64_t apart,
                       double amplitude) {
    using A = Acc<T>;
    const int64_t half = width / 2, slots = extent - half;
    ITHACA_FOR(i, n_rows * slots) {
        const int64_t slot = i % slots;
        int64_t at[3];
        rows.at(i / slots, at);
        if (slot >= half) {
            const int64_t behind = (slot + half) * stride;
            z[at[2] + behind] = x[at[0] + behind];
            continue;
        }
        const int64_t first = slot * spread * stride, second = first + apart * stride;
        const double angle = positions[at[1]] * frequencies[slot];
        const A c = static_cast<A>(cos(angle) * amplitude), s = static_cast<A>(sin(angle) * amplitude);
        const A a = widen(x[at[0] + first]), b = widen(x[at[0] + second]);
        z[at[2] + first] = narrow<T>(a * c - b * s);
        z[at[2] + second] = narrow<T>(b * c + a * s);
    }
}

}  // namespace ithaca::kernel
