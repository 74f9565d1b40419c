// The search for NaN.
#pragma once

#include "numeric.cuh"

namespace ithaca::kernel {

// Of the elements of a walk that are no numbers the first: `n - i` for the one that comes i-th. `found` is zero before, and
// where all are numbers.
__global__ void find_nan(Reals x, unsigned long long* found, Walk<1> walk, int64_t n) {
    ITHACA_FOR(i, n) {
        int64_t offset[1];
        walk.at(i, offset);
        const double value = x[offset[0]];
        if (value != value) atomicMax(found, static_cast<unsigned long long>(n - i));
    }
}

}  // namespace ithaca::kernel
