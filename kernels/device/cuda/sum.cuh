// Tensors of one number, and sums over dimensions.
#pragma once

#include "columns.cuh"

namespace ithaca::kernel {

template <typename T>
__global__ void fill(double value, T* z, int64_t n) {
    map(n, [&] { return static_cast<Acc<T>>(value); }, z);
}

// `kept` goes over the result, `summed` over the dimensions that it lacks; both say where x has an element.
template <typename T, typename Z>
__global__ void sum(const T* __restrict__ x, Z* __restrict__ z, Walk<1> kept, Walk<1> summed, int64_t n, int64_t n_summed,
                    int lanes) {
    using A = Acc<T>;
    const bool is_wide = has_packs(kept, kWide<T>) && summed.is_multiple(0, kWide<T>) && are_aligned(x, z);
    in_packs<kWide<T>>(is_wide, [&](auto size) {
        constexpr int kN = decltype(size)::value;
        using Sums = Pack<A, kN>[1];
        const auto add = [&](int64_t column, int64_t row, Sums& sums) {
            int64_t at[1], along[1];
            kept.at(column, at);
            summed.at(row, along);
            const auto value = load<kN>(x + at[0] + along[0]);
            ITHACA_UNROLL
            for (int k = 0; k < kN; ++k) sums[0].at[k] += value.at[k];
        };
        sum_columns<A, kN, 1>(n, n_summed, lanes, 1, add, [&](int64_t column, int64_t, const Sums& sums) { store(z + column, sums[0]); });
    });
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
    bool is_wide = are_aligned(z);
    for (int64_t m = 0; m < members.n; ++m) is_wide = is_wide && are_aligned(members.from[m]);
    for_packs<kWide<T>>(n, is_wide, [&](auto size, int64_t i) {
        constexpr int kN = decltype(size)::value;
        Pack<Acc<T>, kN> total = {};
        for (int64_t m = 0; m < members.n; ++m) {
            const auto one = load<kN>(static_cast<const T*>(members.from[m]) + i);
            ITHACA_UNROLL
            for (int k = 0; k < kN; ++k) total.at[k] += one.at[k];
        }
        store(z + i, total);
    });
}

}  // namespace ithaca::kernel
