// What joins parts of an attention, each an output o [rows, width] and the logarithms lse [rows] of its sums of
// exponentials. A part of no keys is o = 0 and lse = minus infinity; what is merged with it stays as it was.
#pragma once

#include "pack.cuh"

namespace ithaca::kernel {

// Calls body(size, i, row, is_first) for the packs of a tensor [rows, width].
template <int kN, typename Body>
__device__ inline void for_packs_of_rows(int64_t n, int64_t width, bool is_wide, const Body& body) {
    for_packs<kN>(n, is_wide && width % kN == 0, [&](auto size, int64_t i) {
        const Division at = divide(i, width);
        body(size, i, at.quotient, at.remainder == 0);
    });
}

template <typename T, typename L>
__global__ void merge(const T* o, const L* lse, const T* more_o, const L* more_lse, T* z, L* z_lse, int64_t width, int64_t n) {
    using A = Acc<L>;
    for_packs_of_rows<kWide<T>>(n, width, are_aligned(o, more_o, z), [&](auto size, int64_t i, int64_t row, bool is_first) {
        constexpr int kN = decltype(size)::value;
        const A first = widen(lse[row]), second = widen(more_lse[row]), all = log_add_exp(first, second);
        const A own = share(first, all), other = share(second, all);
        auto sum = load<kN>(o + i);
        const auto more = load<kN>(more_o + i);
        ITHACA_UNROLL
        for (int k = 0; k < kN; ++k) sum.at[k] = own * sum.at[k] + other * more.at[k];
        store(z + i, sum);
        if (is_first) z_lse[row] = narrow<L>(all);
    });
}

// The parts along the first of the dimensions [parts, rows, width].
template <typename T, typename L>
__global__ void merge_parts(const T* o, const L* lse, T* z, L* z_lse, int64_t parts, int64_t width, int64_t n) {
    using A = Acc<L>;
    const int64_t rows = n / width;
    for_packs_of_rows<kWide<T>>(n, width, are_aligned(o, z), [&](auto size, int64_t i, int64_t row, bool is_first) {
        constexpr int kN = decltype(size)::value;
        A all = neg_infinity<A>();
        for (int64_t p = 0; p < parts; ++p) all = log_add_exp(all, static_cast<A>(widen(lse[p * rows + row])));
        Pack<Acc<T>, kN> sum = {};
        for (int64_t p = 0; p < parts; ++p) {
            const auto weight = static_cast<Acc<T>>(share(static_cast<A>(widen(lse[p * rows + row])), all));
            const auto part = load<kN>(o + p * n + i);
            ITHACA_UNROLL
            for (int k = 0; k < kN; ++k) sum.at[k] += weight * part.at[k];
        }
        store(z + i, sum);
        if (is_first) z_lse[row] = narrow<L>(all);
    });
}

// A logit for each head enters the denominator; the walk goes over rows and says where the logit of a row is.
template <typename T, typename L>
__global__ void sink(const T* o, const L* lse, Reals logits, T* z, L* z_lse, Walk<1> logit_of, int64_t width, int64_t n) {
    using A = Acc<L>;
    for_packs_of_rows<kWide<T>>(n, width, are_aligned(o, z), [&](auto size, int64_t i, int64_t row, bool is_first) {
        constexpr int kN = decltype(size)::value;
        int64_t at[1];
        logit_of.at(row, at);
        const A before = widen(lse[row]), all = log_add_exp(before, static_cast<A>(logits[at[0]])), own = share(before, all);
        auto out = load<kN>(o + i);
        ITHACA_UNROLL
        for (int k = 0; k < kN; ++k) out.at[k] = own * out.at[k];
        store(z + i, out);
        if (is_first) z_lse[row] = narrow<L>(all);
    });
}

}  // namespace ithaca::kernel
