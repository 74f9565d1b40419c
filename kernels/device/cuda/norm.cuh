// Normalisation of rows. Several threads share a row and keep it in registers.
#pragma once

#include "rows.cuh"

namespace ithaca::kernel {

enum class Centre { None, Mean };

// Of a row: its mean, zero for a norm that takes none, and one over its root.
template <typename A>
struct Moments {
    A mean, inverse;
};

// `read` reads a pack of the row, `reread` one that was read before; value(x) is the pack of numbers.
template <typename A, typename X, int kN, typename Read, typename Reread, typename Value>
__device__ inline Moments<A> moments_of(const Team& team, RowCache<X, kN>& row, int64_t width, const Read& read, const Reread& reread,
                                        const Value& value, double eps, Centre centre) {
    A mean = 0, squares = 0;
    row.first(team, width, read, [&](int64_t, const X& x) {
        ITHACA_UNROLL
        for (int k = 0; k < kN; ++k) centre == Centre::Mean ? mean += value(x).at[k] : squares += value(x).at[k] * value(x).at[k];
    });
    if (centre == Centre::Mean) {
        mean = team.sum(mean) / static_cast<A>(width);
        row.again(team, width, reread, [&](int64_t, const X& x) {
            ITHACA_UNROLL
            for (int k = 0; k < kN; ++k) squares += (value(x).at[k] - mean) * (value(x).at[k] - mean);
        });
    }
    squares = team.sum(squares);
    return {mean, A(1) / square_root(squares / static_cast<A>(width) + static_cast<A>(eps))};
}

// (x - mean) / sqrt(mean((x - mean)^2) + eps) * (offset + weight) + bias, where there is a bias. Where there is a y, its sum
// with x takes the place of x, rounded as it is written. Tensor 0 of the walk is x, y, the sum and the result, tensor 1 the
// weight, tensor 2 the bias.
template <typename T>
__launch_bounds__(kMostLanes)
__global__ void norm(Centre centre, const T* __restrict__ x, const T* __restrict__ y, const T* __restrict__ weight,
                     const T* __restrict__ bias, T* __restrict__ sum, T* __restrict__ z, Walk<3> rows, int64_t n_rows,
                     int64_t width, int64_t x_stride, int64_t w_stride, int64_t b_stride, double eps, double offset,
                     int lanes) {
    using A = Acc<T>;
    const int64_t packs = kWide<T>;
    const bool is_wide = x_stride == 1 && w_stride == 1 && (bias == nullptr || b_stride == 1) && width % packs == 0 &&
                         are_aligned(x, y, weight, bias, sum, z) && rows.is_multiple(0, packs) && rows.is_multiple(1, packs) &&
                         rows.is_multiple(2, packs);
    in_packs<kWide<T>>(is_wide, [&](auto size) {
        constexpr int kN = decltype(size)::value;
        using X = Pack<A, kN>;
        for_rows(n_rows, lanes, width, [&](const Team& team, int64_t row, int64_t own, bool) {
            int64_t at[3];
            rows.at(row, at);
            const auto read = [&](int64_t i) {
                X a = load<kN>(x + at[0], i, x_stride);
                if (y == nullptr) return a;
                const X b = load<kN>(y + at[0], i, x_stride);
                ITHACA_UNROLL
                for (int k = 0; k < kN; ++k) a.at[k] = widen(narrow<T>(a.at[k] + b.at[k]));
                store(sum + at[0], i, x_stride, a);
                return a;
            };
            const auto reread = [&](int64_t i) { return load<kN>((y == nullptr ? x : sum) + at[0], i, x_stride); };
            RowCache<X, kN> cache;
            const auto itself = [](const X& value) { return value; };
            const Moments<A> m = moments_of<A>(team, cache, own, read, reread, itself, eps, centre);
            cache.again(team, own, reread, [&](int64_t i, const X& value) {
                const X scale = load<kN>(weight + at[1], i, w_stride);
                X out = {};
                if (bias != nullptr) out = load<kN>(bias + at[2], i, b_stride);
                ITHACA_UNROLL
                for (int k = 0; k < kN; ++k)
                    out.at[k] += (value.at[k] - m.mean) * m.inverse * (static_cast<A>(offset) + scale.at[k]);
                store(z + at[0], i, x_stride, out);
            });
        });
    });
}

// x / sqrt(squares / count + eps) * weight, an element a thread. Tensor 0 of the walk is x and the result, tensor 1 the
// squares, which are as wide as the arithmetic, tensor 2 the weight.
template <typename T>
__global__ void rms_scale(const T* x, const Acc<T>* squares, const T* weight, T* z, Walk<3> walk, int64_t n, double count,
                          double eps) {
    using A = Acc<T>;
    ITHACA_FOR(i, n) {
        int64_t at[3];
        walk.at(i, at);
        const A root = A(1) / square_root(squares[at[1]] / static_cast<A>(count) + static_cast<A>(eps));
        z[at[0]] = narrow<T>(widen(x[at[0]]) * root * widen(weight[at[2]]));
    }
}

}  // namespace ithaca::kernel
