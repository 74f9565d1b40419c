// Exponentials of rows, relative to the maximum: softmax and its gradient.
#pragma once

#include "rows.cuh"

namespace ithaca {

// The sum of exponentials of numbers that come one after another, relative to the maximum.
template <typename A>
struct Exponentials {
    A row_max = neg_infinity<A>(), sum = 0;

    template <int kN>
    __device__ void add(const Pack<A, kN>& x) {
        A most = row_max;
        ITHACA_UNROLL
        for (int k = 0; k < kN; ++k) most = x.at[k] > most ? x.at[k] : most;
        sum *= share(row_max, most);
        ITHACA_UNROLL
        for (int k = 0; k < kN; ++k) sum += share(x.at[k], most);
        row_max = most;
    }
    // Of a whole row.
    __device__ void join(const Team& team) {
        const A most = team.most(row_max);
        sum = team.sum(sum * share(row_max, most));
        row_max = most;
    }
    // Minus infinity of no numbers.
    __device__ A log() const { return sum > A(0) ? row_max + logarithm(sum) : neg_infinity<A>(); }
};

}  // namespace ithaca

namespace ithaca::kernel {

// exp(x) / sum(exp(x)).
template <typename T>
__launch_bounds__(kMostLanes)
__global__ void softmax(const T* __restrict__ x, T* __restrict__ z, Walk<1> lines, int64_t n_lines, int64_t width,
                        int64_t stride, int lanes) {
    using A = Acc<T>;
    const bool is_wide = stride == 1 && width % kWide<T> == 0 && are_aligned(x, z) && lines.is_multiple(0, kWide<T>);
    in_packs<kWide<T>>(is_wide, [&](auto size) {
        constexpr int kN = decltype(size)::value;
        using X = Pack<A, kN>;
        for_rows(n_lines, lanes, width, [&](const Team& team, int64_t line, int64_t own, bool) {
            int64_t at[1];
            lines.at(line, at);
            RowCache<X, kN> cache;
            Exponentials<A> all;
            const auto read = [&](int64_t i) { return load<kN>(x + at[0], i, stride); };
            cache.first(team, own, read, [&](int64_t, const X& value) { all.add(value); });
            all.join(team);
            cache.again(team, own, read, [&](int64_t i, const X& value) {
                X out;
                ITHACA_UNROLL
                for (int k = 0; k < kN; ++k) out.at[k] = exponential(value.at[k] - all.row_max) / all.sum;
                store(z + at[0], i, stride, out);
            });
        });
    });
}

// y (d - sum(y d)) of the result y of a softmax.
template <typename T>
__launch_bounds__(kMostLanes)
__global__ void softmax_backward(const T* __restrict__ y, const T* __restrict__ d, T* __restrict__ z, Walk<1> lines,
                                 int64_t n_lines, int64_t width, int64_t stride, int lanes) {
    using A = Acc<T>;
    const bool is_wide = stride == 1 && width % kWide<T> == 0 && are_aligned(y, d, z) && lines.is_multiple(0, kWide<T>);
    in_packs<kWide<T>>(is_wide, [&](auto size) {
        constexpr int kN = decltype(size)::value;
        using X = WithGradient<A, kN>;
        for_rows(n_lines, lanes, width, [&](const Team& team, int64_t line, int64_t own, bool) {
            int64_t at[1];
            lines.at(line, at);
            A sum = 0;
            RowCache<X, kN> cache;
            const auto read = [&](int64_t i) { return X{load<kN>(y + at[0], i, stride), load<kN>(d + at[0], i, stride)}; };
            cache.first(team, own, read, [&](int64_t, const X& v) {
                ITHACA_UNROLL
                for (int k = 0; k < kN; ++k) sum += v.x.at[k] * v.d.at[k];
            });
            sum = team.sum(sum);
            cache.again(team, own, read, [&](int64_t i, const X& v) {
                Pack<A, kN> out;
                ITHACA_UNROLL
                for (int k = 0; k < kN; ++k) out.at[k] = v.x.at[k] * (v.d.at[k] - sum);
                store(z + at[0], i, stride, out);
            });
        });
    });
}

}  // namespace ithaca::kernel
