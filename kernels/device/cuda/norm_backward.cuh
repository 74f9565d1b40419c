// Gradients of norms: of x along rows, of weights along columns.
#pragma once

#include "columns.cuh"
#include "norm.cuh"

namespace ithaca::kernel {

// The moments of rows lie where memory that is to be written next is aligned for them.
template <typename A>
__device__ inline Moments<A>* moments_in(void* memory) {
    return reinterpret_cast<Moments<A>*>((reinterpret_cast<uint64_t>(memory) + 15) & ~uint64_t{15});
}

template <typename T>
__launch_bounds__(kMostLanes)
__global__ void norm_moments(const T* x, void* memory, Walk<1> rows, int64_t n_rows, int64_t width, int64_t stride,
                             double eps, Centre centre, int lanes) {
    using A = Acc<T>;
    const bool is_wide = stride == 1 && width % kWide<T> == 0 && are_aligned(x) && rows.is_multiple(0, kWide<T>);
    in_packs<kWide<T>>(is_wide, [&](auto size) {
        constexpr int kN = decltype(size)::value;
        using X = Pack<A, kN>;
        for_rows(n_rows, lanes, width, [&](const Team& team, int64_t row, int64_t own, bool is_there) {
            int64_t at[1];
            rows.at(row, at);
            RowCache<X, kN> cache;
            const auto read = [&](int64_t i) { return load<kN>(x + at[0], i, stride); };
            const auto itself = [](const X& value) { return value; };
            const Moments<A> m = moments_of<A>(team, cache, own, read, read, itself, eps, centre);
            if (is_there && team.lane == 0) moments_in<A>(memory)[row] = m;
        });
    });
}

// With g = d (offset + weight), u = (x - mean) / r: dx = (g - mean(g) - u mean(g u)) / r, without mean(g) where there is
// no mean. Tensor 0 of the walk is x, d and dx, tensor 1 the weight.
template <typename T>
__launch_bounds__(kMostLanes)
__global__ void norm_backward(const T* __restrict__ x, const T* __restrict__ weight, const T* __restrict__ d,
                              T* __restrict__ dx, Walk<2> rows, int64_t n_rows, int64_t width, int64_t x_stride,
                              int64_t w_stride, double eps, double offset, Centre centre, int lanes) {
    using A = Acc<T>;
    const bool is_wide = x_stride == 1 && w_stride == 1 && width % kWide<T> == 0 && are_aligned(x, weight, d, dx) &&
                         rows.is_multiple(0, kWide<T>) && rows.is_multiple(1, kWide<T>);
    in_packs<kWide<T>>(is_wide, [&](auto size) {
        constexpr int kN = decltype(size)::value;
        using X = WithGradient<A, kN>;
        for_rows(n_rows, lanes, width, [&](const Team& team, int64_t row, int64_t own, bool) {
            int64_t at[2];
            rows.at(row, at);
            const auto read = [&](int64_t i) {
                X v{load<kN>(x + at[0], i, x_stride), load<kN>(d + at[0], i, x_stride)};
                const auto scale = load<kN>(weight + at[1], i, w_stride);
                ITHACA_UNROLL
                for (int k = 0; k < kN; ++k) v.d.at[k] *= static_cast<A>(offset) + scale.at[k];
                return v;
            };
            RowCache<X, kN> cache;
            const auto of_x = [](const X& v) { return v.x; };
            const Moments<A> m = moments_of<A>(team, cache, own, read, read, of_x, eps, centre);
            A sum = 0, product = 0;
            cache.again(team, own, read, [&](int64_t, const X& v) {
                ITHACA_UNROLL
                for (int k = 0; k < kN; ++k) {
                    sum += v.d.at[k];
                    product += v.d.at[k] * (v.x.at[k] - m.mean) * m.inverse;
                }
            });
            sum = centre == Centre::Mean ? team.sum(sum) / static_cast<A>(own) : A(0);
            product = team.sum(product) / static_cast<A>(own);
            cache.again(team, own, read, [&](int64_t i, const X& v) {
                Pack<A, kN> out;
                ITHACA_UNROLL
                for (int k = 0; k < kN; ++k)
                    out.at[k] = (v.d.at[k] - sum - (v.x.at[k] - m.mean) * m.inverse * product) * m.inverse;
                store(dx + at[0], i, x_stride, out);
            });
        });
    });
}

// d_weight = sum d u, d_bias = sum d where it is asked for, of each of the `chunks` parts of the rows, one behind the other.
// `kept` goes over the weight, `summed` over the dimensions of x that it lacks: tensor 0 is x, tensor 1 the number of the row.
template <typename T, typename Z>
__global__ void norm_backward_weight(const T* __restrict__ x, const T* __restrict__ d, void* memory,
                                     Z* __restrict__ d_weight, Z* __restrict__ d_bias, Walk<2> kept, Walk<2> summed,
                                     int64_t n, int64_t n_summed, int64_t chunks, int lanes) {
    using A = Acc<T>;
    constexpr int kPacks = kWide<T>;
    const Moments<A>* const moments = moments_in<A>(memory);
    // The rows of a pack are one row, for the dimension that is normalised is the last.
    const bool is_wide = has_packs(kept, kPacks) && summed.is_multiple(0, kPacks) && kept.stride[1][kept.n - 1] == 0 &&
                         are_aligned(x, d, d_weight, d_bias);
    in_packs<kPacks>(is_wide, [&](auto size) {
        constexpr int kN = decltype(size)::value;
        using Sums = Pack<A, kN>[2];
        const auto add = [&](int64_t column, int64_t row, Sums& sums) {
            int64_t at[2], along[2];
            kept.at(column, at);
            summed.at(row, along);
            const Moments<A> m = moments[at[1] + along[1]];
            const auto value = load<kN>(x + at[0] + along[0]), gradient = load<kN>(d + at[0] + along[0]);
            ITHACA_UNROLL
            for (int k = 0; k < kN; ++k) {
                sums[0].at[k] += gradient.at[k] * (value.at[k] - m.mean) * m.inverse;
                sums[1].at[k] += gradient.at[k];
            }
        };
        sum_columns<A, kN, 2>(n, n_summed, lanes, chunks, add, [&](int64_t column, int64_t chunk, const Sums& sums) {
            store(d_weight + chunk * n + column, sums[0]);
            if (d_bias != nullptr) store(d_bias + chunk * n + column, sums[1]);
        });
    });
}

// x / sqrt(squares / count + eps) * weight. Walks go over the result (x, the squares, the weight) and over what it lacks.
enum class ScaleResult { X, Squares, Weight };

template <typename T, typename Z>
__global__ void rms_scale_backward(ScaleResult result, const T* x, const Acc<T>* squares, const T* weight, const T* d, Z* z,
                                   Walk<3> kept, Walk<3> summed, int64_t n, int64_t n_summed, double count, double eps,
                                   int lanes) {
    using A = Acc<T>;
    using Sums = Pack<A, 1>[1];
    const auto add = [&](int64_t column, int64_t row, Sums& sums) {
        int64_t at[3], along[3];
        kept.at(column, at);
        summed.at(row, along);
        const int64_t e = at[0] + along[0];
        const A inverse = A(1) / square_root(squares[at[1] + along[1]] / static_cast<A>(count) + static_cast<A>(eps));
        const A gradient = widen(d[e]), scale = widen(weight[at[2] + along[2]]), value = widen(x[e]);
        switch (result) {
            case ScaleResult::X: sums[0].at[0] += gradient * scale * inverse; break;
            case ScaleResult::Squares:
                sums[0].at[0] -= gradient * scale * value * inverse * inverse * inverse / (A(2) * static_cast<A>(count));
                break;
            case ScaleResult::Weight: sums[0].at[0] += gradient * value * inverse; break;
        }
    };
    sum_columns<A, 1, 1>(n, n_summed, lanes, 1, add, [&](int64_t column, int64_t, const Sums& sums) { store(z + column, sums[0]); });
}

}  // namespace ithaca::kernel
