// Sums of products of any shape, a thread for each element of the result. For the products that are no matrix products;
// the others go to cuBLAS.
#pragma once

#include "elementwise.cuh"
#include "rows.cuh"

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

// Products of rows, each with one of the other tensor, summed by several threads. The walk goes over x, y and z.
template <typename T, typename R>
__launch_bounds__(kMostLanes) __global__ void dots(const T* __restrict__ x, const T* __restrict__ y, R* __restrict__ z, Walk<3> rows,
                                                   int64_t n_rows, int64_t width, int64_t x_stride, int64_t y_stride, int lanes) {
    const bool is_wide = x_stride == 1 && y_stride == 1 && width % kWide<T> == 0 && are_aligned(x, y) &&
                         rows.is_multiple(0, kWide<T>) && rows.is_multiple(1, kWide<T>);
    in_packs<kWide<T>>(is_wide, [&](auto size) {
        constexpr int kN = decltype(size)::value;
        for_rows(n_rows, lanes, width, [&](const Team& team, int64_t row, int64_t own, bool is_there) {
            int64_t at[3];
            rows.at(row, at);
            Acc<T> sum = 0;
            for_row<kN>(team, own, [&](int64_t i) {
                const auto a = load<kN>(x + at[0], i, x_stride), b = load<kN>(y + at[1], i, y_stride);
                ITHACA_UNROLL
                for (int k = 0; k < kN; ++k) sum += a.at[k] * b.at[k];
            });
            sum = team.sum(sum);
            if (is_there && team.lane == 0) z[at[2]] = narrow<R>(sum);
        });
    });
}

}  // namespace ithaca::kernel
