// Tensors of one number, and sums over dimensions, a thread for each element of the result.
#pragma once

#include "numeric.cuh"

namespace ithaca::kernel {

template <typename T>
__global__ void fill(double value, T* z, int64_t n) {
    ITHACA_FOR(i, n) { z[i] = narrow<T>(static_cast<Acc<T>>(value)); }
}

// `kept` goes over the result, `summed` over the dimensions that it lacks; both say where x has an element.
template <typename T>
__global__ void sum(const T* x, T* z, Walk<1> kept, Walk<1> summed, int64_t n, int64_t n_summed) {
    ITHACA_FOR(i, n) {
        int64_t at[1];
        kept.at(i, at);
        Acc<T> total = 0;
        for (int64_t j = 0; j < n_summed; ++j) {
            int64_t along[1];
            summed.at(j, along);
            total += widen(x[at[0] + along[0]]);
        }
        z[i] = narrow<T>(total);
    }
}

// The same block in the memory of several ranks on one device.
constexpr int kMostMembers = 64;
struct Members {
    int64_t n;
    const void* from[kMostMembers];
};

// The sum of the blocks, in order of the members.
template <typename T>
__global__ void sum_members(Members members, T* z, int64_t n) {
    ITHACA_FOR(i, n) {
        Acc<T> total = 0;
        for (int64_t m = 0; m < members.n; ++m) total += widen(static_cast<const T*>(members.from[m])[i]);
        z[i] = narrow<T>(total);
    }
}

}  // namespace ithaca::kernel
