// Sums of products of any shape, a thread for each element of the result. For the products that are no matrix products;
// the others go to cuBLAS.
#pragma once

#include "numeric.cuh"

namespace ithaca::kernel {

// `kept` goes over the result (tensors x, y, z), `summed` over the dimensions that the result lacks (tensors x, y).
template <typename T>
__global__ void einsum(const T* x, const T* y, T* z, Walk<3> kept, Walk<2> summed, int64_t n, int64_t n_summed) {
    ITHACA_FOR(i, n) {
        int64_t at[3];
        kept.at(i, at);
        Acc<T> sum = 0;
        for (int64_t j = 0; j < n_summed; ++j) {
            int64_t along[2];
            summed.at(j, along);
            sum += widen(x[at[0] + along[0]]) * widen(y[at[1] + along[1]]);
        }
        z[at[2]] = narrow<T>(sum);
    }
}

}  // namespace ithaca::kernel
