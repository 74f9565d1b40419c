// Normalisation. Over one dimension a thread takes a row: simple, and far from the memory bound when rows are few.
#pragma once

#include "numeric.cuh"

namespace ithaca::kernel {

// x / sqrt(mean(x^2) + eps) * (offset + weight). The walk goes over rows; tensor 0 is x and the result, tensor 1 the weight.
template <typename T>
__global__ void rms_norm(const T* x, const T* weight, T* z, Walk<2> rows, int64_t n_rows, int64_t width,
                         int64_t x_stride, int64_t w_stride, double eps, double offset) {
    using A = Acc<T>;
    ITHACA_FOR(row, n_rows) {
        int64_t at[2];
        rows.at(row, at);
        A squares = 0;
        for (int64_t i = 0; i < width; ++i) {
            const A value = widen(x[at[0] + i * x_stride]);
            squares += value * value;
        }
        const A root = A(1) / square_root(squares / static_cast<A>(width) + static_cast<A>(eps));
        for (int64_t i = 0; i < width; ++i) {
            const int64_t j = at[0] + i * x_stride;
            z[j] = narrow<T>(widen(x[j]) * root * (static_cast<A>(offset) + widen(weight[at[1] + i * w_stride])));
        }
    }
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

// (x - mean) / sqrt(variance + eps) * weight + bias; tensor 2 of the walk is the bias.
template <typename T>
__global__ void layer_norm(const T* x, const T* weight, const T* bias, T* z, Walk<3> rows, int64_t n_rows,
                           int64_t width, int64_t x_stride, int64_t w_stride, int64_t b_stride, double eps) {
    using A = Acc<T>;
    ITHACA_FOR(row, n_rows) {
        int64_t at[3];
        rows.at(row, at);
        A sum = 0;
        for (int64_t i = 0; i < width; ++i) sum += widen(x[at[0] + i * x_stride]);
        const A mean = sum / static_cast<A>(width);
        A squares = 0;
        for (int64_t i = 0; i < width; ++i) {
            const A value = widen(x[at[0] + i * x_stride]) - mean;
            squares += value * value;
        }
        const A root = A(1) / square_root(squares / static_cast<A>(width) + static_cast<A>(eps));
        for (int64_t i = 0; i < width; ++i) {
            const int64_t j = at[0] + i * x_stride;
            z[j] = narrow<T>((widen(x[j]) - mean) * root * widen(weight[at[1] + i * w_stride]) +
                             widen(bias[at[2] + i * b_stride]));
        }
    }
}

// exp(x) / sum(exp(x)), a thread a line.
template <typename T>
__global__ void softmax(const T* x, T* z, Walk<1> lines, int64_t n_lines, int64_t width, int64_t stride) {
    using A = Acc<T>;
    ITHACA_FOR(line, n_lines) {
        int64_t at[1];
        lines.at(line, at);
        A highest = nothing<A>(), sum = 0;
        for (int64_t i = 0; i < width; ++i) {
            const A value = widen(x[at[0] + i * stride]);
            if (value > highest) highest = value;
        }
        for (int64_t i = 0; i < width; ++i) sum += exponential(widen(x[at[0] + i * stride]) - highest);
        for (int64_t i = 0; i < width; ++i) {
            const int64_t j = at[0] + i * stride;
            z[j] = narrow<T>(exponential(widen(x[j]) - highest) / sum);
        }
    }
}

}  // namespace ithaca::kernel
