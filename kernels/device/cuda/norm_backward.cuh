// Gradients of norms. What is summed over rows is a thread for each element of the weight; the gradient of x is a thread
// for each row, as the norm itself.
#pragma once

#include "numeric.cuh"

namespace ithaca::kernel {

// Of a row: its mean, zero for a norm that takes none, and one over its root.
template <typename A>
struct Moments {
    A mean, inverse;
};

enum class Centre { None, Mean };

template <typename T>
__device__ inline Moments<Acc<T>> moments_of(const T* x, int64_t at, int64_t width, int64_t stride, double eps, Centre centre) {
    using A = Acc<T>;
    A mean = 0, squares = 0;
    if (centre == Centre::Mean) {
        for (int64_t i = 0; i < width; ++i) mean += widen(x[at + i * stride]);
        mean /= static_cast<A>(width);
    }
    for (int64_t i = 0; i < width; ++i) {
        const A value = widen(x[at + i * stride]) - mean;
        squares += value * value;
    }
    return {mean, A(1) / square_root(squares / static_cast<A>(width) + static_cast<A>(eps))};
}

template <typename T>
__global__ void norm_moments(const T* x, Moments<Acc<T>>* moments, Walk<1> rows, int64_t n_rows, int64_t width, int64_t stride,
                             double eps, Centre centre) {
    ITHACA_FOR(row, n_rows) {
        int64_t at[1];
        rows.at(row, at);
        moments[row] = moments_of(x, at[0], width, stride, eps, centre);
    }
}

// With g = d (offset + weight), u = (x - mean) / r: dx = (g - mean(g) - u mean(g u)) / r, without mean(g) where there is
// no mean. Tensor 0 of the walk is x, d and dx, tensor 1 the weight.
template <typename T>
__global__ void norm_backward(const T* x, const T* weight, const T* d, T* dx, Walk<2> rows, int64_t n_rows, int64_t width,
                              int64_t x_stride, int64_t w_stride, double eps, double offset, Centre centre) {
    using A = Acc<T>;
    ITHACA_FOR(row, n_rows) {
        int64_t at[2];
        rows.at(row, at);
        const Moments<A> m = moments_of(x, at[0], width, x_stride, eps, centre);
        A sum = 0, product = 0;
        for (int64_t i = 0; i < width; ++i) {
            const int64_t j = at[0] + i * x_stride;
            const A g = widen(d[j]) * (static_cast<A>(offset) + widen(weight[at[1] + i * w_stride]));
            sum += g;
            product += g * (widen(x[j]) - m.mean) * m.inverse;
        }
        sum = centre == Centre::Mean ? sum / static_cast<A>(width) : A(0);
        product /= static_cast<A>(width);
        for (int64_t i = 0; i < width; ++i) {
            const int64_t j = at[0] + i * x_stride;
            const A g = widen(d[j]) * (static_cast<A>(offset) + widen(weight[at[1] + i * w_stride]));
            dx[j] = narrow<T>((g - sum - (widen(x[j]) - m.mean) * m.inverse * product) * m.inverse);
        }
    }
}

// d_weight = sum d u, d_bias = sum d where it is asked for. `kept` goes over the weight, `summed` over the dimensions of x
// that it lacks: tensor 0 is x, tensor 1 the number of the row, tensor 2 where the row of x starts. Moments that are not
// given are computed again.
template <typename T>
__global__ void norm_backward_weight(const T* x, const T* d, const Moments<Acc<T>>* moments, T* d_weight, T* d_bias, Walk<3> kept,
                                     Walk<3> summed, int64_t n, int64_t n_summed, int64_t width, int64_t stride, double eps,
                                     Centre centre) {
    using A = Acc<T>;
    ITHACA_FOR(i, n) {
        int64_t at[3];
        kept.at(i, at);
        A weight = 0, bias = 0;
        for (int64_t j = 0; j < n_summed; ++j) {
            int64_t along[3];
            summed.at(j, along);
            const Moments<A> m = moments != nullptr ? moments[at[1] + along[1]]
                                                    : moments_of(x, at[2] + along[2], width, stride, eps, centre);
            const A gradient = widen(d[at[0] + along[0]]);
            weight += gradient * (widen(x[at[0] + along[0]]) - m.mean) * m.inverse;
            bias += gradient;
        }
        d_weight[i] = narrow<T>(weight);
        if (d_bias != nullptr) d_bias[i] = narrow<T>(bias);
    }
}

// x / sqrt(squares / count + eps) * weight. Walks go over the result (x, the squares, the weight) and over what it lacks.
enum class ScaleResult { X, Squares, Weight };

template <typename T, typename Z>
__global__ void rms_scale_backward(ScaleResult result, const T* x, const Acc<T>* squares, const T* weight, const T* d, Z* z,
                                   Walk<3> kept, Walk<3> summed, int64_t n, int64_t n_summed, double count, double eps) {
    using A = Acc<T>;
    ITHACA_FOR(i, n) {
        int64_t at[3];
        kept.at(i, at);
        A sum = 0;
        for (int64_t j = 0; j < n_summed; ++j) {
            int64_t along[3];
            summed.at(j, along);
            const int64_t e = at[0] + along[0];
            const A inverse = A(1) / square_root(squares[at[1] + along[1]] / static_cast<A>(count) + static_cast<A>(eps));
            const A gradient = widen(d[e]), scale = widen(weight[at[2] + along[2]]);
            switch (result) {
                case ScaleResult::X: sum += gradient * scale * inverse; break;
                case ScaleResult::Squares:
                    sum -= gradient * scale * widen(x[e]) * inverse * inverse * inverse / (A(2) * static_cast<A>(count));
                    break;
                case ScaleResult::Weight: sum += gradient * widen(x[e]) * inverse; break;
            }
        }
        z[i] = narrow<Z>(sum);
    }
}

// y (d - sum(y d)) of the result y of a softmax, a thread a line.
template <typename T>
__global__ void softmax_backward(const T* y, const T* d, T* z, Walk<1> lines, int64_t n_lines, int64_t width, int64_t stride) {
    using A = Acc<T>;
    ITHACA_FOR(line, n_lines) {
        int64_t at[1];
        lines.at(line, at);
        A sum = 0;
        for (int64_t i = 0; i < width; ++i) sum += widen(y[at[0] + i * stride]) * widen(d[at[0] + i * stride]);
        for (int64_t i = 0; i < width; ++i) {
            const int64_t j = at[0] + i * stride;
            z[j] = narrow<T>(widen(y[j]) * (widen(d[j]) - sum));
        }
    }
}

}  // namespace ithaca::kernel
