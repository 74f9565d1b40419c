// Sums of products of any shape, a thread for each element of the result. For the products that are no matrix products;
// the others go to cuBLAS.
#pragma once

#include "elementwise.cuh"

namespace ithaca::kernel {

// `kept` goes over the result (tensors x, y, z, bias), `summed` over the dimensions that the result lacks (tensors x, y).
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

// z of type R is T or the type of sums; a tensor before, which may be z, and a bias are added if there are any, and a function
// that is not negative is applied.
template <typename T, typename R>
__global__ void einsum(const T* x, const T* y, const R* before, const R* bias, int f, R* z, Walk<4> kept, Walk<2> summed, int64_t n,
                       int64_t n_summed) {
    ITHACA_FOR(i, n) {
        int64_t at[4];
        kept.at(i, at);
        Acc<R> sum = sum_of_products(x + at[0], y + at[1], summed, n_summed);
        if (before != nullptr) sum = widen(before[at[2]]) + sum;
        if (bias != nullptr) sum += widen(bias[at[3]]);
        z[at[2]] = narrow<R>(f < 0 ? sum : apply(static_cast<Unary>(f), sum));
    }
}

}  // namespace ithaca::kernel
