// Several operations as one kernel. A sum is rounded to its type before it is normalised, as it is where it is used.
#pragma once

#include "elementwise.cuh"

namespace ithaca::kernel {

// f(x) * y. The tensors are dense.
template <typename T>
__global__ void gated(Unary f, const T* x, const T* y, T* z, int64_t n) {
    ITHACA_FOR(i, n) { z[i] = narrow<T>(apply(f, widen(x[i])) * widen(y[i])); }
}

// The gradients of x and y. The tensors are dense.
template <typename T>
__global__ void gated_backward(Unary f, const T* x, const T* y, const T* d, T* dx, T* dy, int64_t n) {
    ITHACA_FOR(i, n) {
        const Acc<T> xi = widen(x[i]), yi = widen(y[i]), di = widen(d[i]);
        dx[i] = narrow<T>(di * yi * slope(f, xi));
        dy[i] = narrow<T>(di * apply(f, xi));
    }
}

// x + y and its rms_norm, a thread a row. Tensor 0 of the walk is x, y and the results, tensor 1 the weight.
template <typename T>
__global__ void add_rms_norm(const T* x, const T* y, const T* weight, T* sum, T* z, Walk<2> rows, int64_t n_rows,
                             int64_t width, int64_t x_stride, int64_t w_stride, double eps, double offset) {
    using A = Acc<T>;
    ITHACA_FOR(row, n_rows) {
        int64_t at[2];
        rows.at(row, at);
        A squares = 0;
        for (int64_t i = 0; i < width; ++i) {
            const int64_t j = at[0] + i * x_stride;
            const T rounded = narrow<T>(widen(x[j]) + widen(y[j]));
            const A value = widen(rounded);
            sum[j] = rounded;
            squares += value * value;
        }
        const A root = A(1) / square_root(squares / static_cast<A>(width) + static_cast<A>(eps));
        for (int64_t i = 0; i < width; ++i) {
            const int64_t j = at[0] + i * x_stride;
            z[j] = narrow<T>(widen(sum[j]) * root * (static_cast<A>(offset) + widen(weight[at[1] + i * w_stride])));
        }
    }
}

// x + y and its layer_norm, a thread a row; tensor 2 of the walk is the bias.
template <typename T>
__global__ void add_layer_norm(const T* x, const T* y, const T* weight, const T* bias, T* sum, T* z, Walk<3> rows,
                               int64_t n_rows, int64_t width, int64_t x_stride, int64_t w_stride, int64_t b_stride,
                               double eps) {
    using A = Acc<T>;
    ITHACA_FOR(row, n_rows) {
        int64_t at[3];
        rows.at(row, at);
        A total = 0;
        for (int64_t i = 0; i < width; ++i) {
            const int64_t j = at[0] + i * x_stride;
            const T rounded = narrow<T>(widen(x[j]) + widen(y[j]));
            sum[j] = rounded;
            total += widen(rounded);
        }
        const A mean = total / static_cast<A>(width);
        A squares = 0;
        for (int64_t i = 0; i < width; ++i) {
            const A value = widen(sum[at[0] + i * x_stride]) - mean;
            squares += value * value;
        }
        const A root = A(1) / square_root(squares / static_cast<A>(width) + static_cast<A>(eps));
        for (int64_t i = 0; i < width; ++i) {
            const int64_t j = at[0] + i * x_stride;
            z[j] = narrow<T>((widen(sum[j]) - mean) * root * widen(weight[at[1] + i * w_stride]) +
                             widen(bias[at[2] + i * b_stride]));
        }
    }
}

}  // namespace ithaca::kernel
