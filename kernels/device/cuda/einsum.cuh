// Sums of products of any shape, a thread for each element of the result. For the products that are no matrix products;
// the others go to cuBLAS.
#pragma once

#include "numeric.cuh"

namespace ithaca::kernel {

// `kept` goes over the result (tensors x, y, z), `summed` over the dimensions that the result lacks (tensors x, y).
template <typename T>
__device__ Acc<T> sum_of_products(const T* x, const T* y, const Walk<2>& summed, int64_t n_summed) {
    Acc<T> sum = 0;
    for (int64_t j = 0; j < n_summed; ++j) {
        int64_t along[2];
        summed.at(j, along);
        sum += widen(x[along[0]]) * widen(y[along[1]]);
    }
    return sum;
}

// z of type R is T or the type of sums; what is before, if anything, is added and may be z.
template <typename T, typename R>
__global__ void einsum(const T* x, const T* y, const R* before, R* z, Walk<3> kept, Walk<2> summed, int64_t n, int64_t n_summed) {
    ITHACA_FOR(i, n) {
        int64_t at[3];
        kept.at(i, at);
        const Acc<T> sum = sum_of_products(x + at[0], y + at[1], summed, n_summed);
        z[at[2]] = narrow<R>(before == nullptr ? sum : widen(before[at[2]]) + sum);
    }
}

}  // namespace ithaca::kernel
