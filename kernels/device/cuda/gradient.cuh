// Gradients of functions of one element, of look-ups and of sinks. No two threads add to one element.
#pragma once

#include "elementwise.cuh"

namespace ithaca::kernel {

// The derivative of a function of one element.
template <typename A>
__device__ inline A slope(Unary f, A x) {
    switch (f) {
        case Unary::Silu: {
            const A s = A(1) / (A(1) + exponential(-x));
            return s * (A(1) + x * (A(1) - s));
        }
        case Unary::Gelu:
            return A(0.5) * (A(1) + error_function(x * A(0.70710678118654752440))) +
                   x * A(0.39894228040143267794) * exponential(A(-0.5) * x * x);
        case Unary::GeluTanh: {
            const A tanh = hyperbolic_tangent(A(0.79788456080286535588) * (x + A(0.044715) * x * x * x));
            return A(0.5) * (A(1) + tanh) +
                   A(0.5) * x * (A(1) - tanh * tanh) * A(0.79788456080286535588) * (A(1) + A(0.134145) * x * x);
        }
        case Unary::QuickGelu: {
            const A s = A(1) / (A(1) + exponential(A(-1.702) * x));
            return s * (A(1) + A(1.702) * x * (A(1) - s));
        }
        case Unary::Relu:
            return x > A(0) ? A(1) : A(0);
        case Unary::Tanh: {
            const A tanh = hyperbolic_tangent(x);
            return A(1) - tanh * tanh;
        }
    }
    return A(0);
}

template <typename T>
__global__ void unary_backward(Unary f, const T* x, const T* d, T* z, int64_t n) {
    ITHACA_FOR(i, n) { z[i] = narrow<T>(widen(d[i]) * slope(f, widen(x[i]))); }
}

// Rows of a table, of which this rank has `n_rows` from `first_row`, set to zero before. A thread takes a token and
// `kTile` columns: the first token that asks for a row adds up what all that do bring. `tokens` and `columns` say where
// the gradient has each token and each column. The row `padding` learns nothing; none is that where it is negative.
template <typename T, int kTile>
__global__ void embed_backward(const int32_t* ids, const T* d, T* z, Walk<1> tokens, Walk<1> columns, int64_t n_tokens,
                               int64_t width, int64_t first_row, int64_t n_rows, int64_t padding, int64_t n) {
    const int64_t tiles = (width + kTile - 1) / kTile;
    ITHACA_FOR(i, n) {
        const int64_t token = i / tiles, column = i % tiles * kTile, row = ids[token] - first_row;
        if (row < 0 || row >= n_rows || ids[token] == padding) continue;
        bool first = true;
        for (int64_t t = 0; t < token && first; ++t) first = ids[t] != ids[token];
        if (!first) continue;
        const int count = static_cast<int>(width - column < kTile ? width - column : kTile);
        Acc<T> sum[kTile];
        for (int c = 0; c < kTile; ++c) sum[c] = 0;
        for (int64_t t = token; t < n_tokens; ++t) {
            if (ids[t] != ids[token]) continue;
            int64_t at[1];
            tokens.at(t, at);
            for (int c = 0; c < count; ++c) {
                int64_t along[1];
                columns.at(column + c, along);
                sum[c] += widen(d[at[0] + along[0]]);
            }
        }
        for (int c = 0; c < count; ++c) z[row * width + column + c] = narrow<T>(sum[c]);
    }
}

// A thread takes a row of o: exp(before - after) of it is its own, what the sink takes goes to lse.
template <typename T, typename L>
__global__ void sink_backward(const T* o, const T* d_o, const L* before, const L* after, T* z, L* d_before, int64_t width,
                              int64_t n_rows) {
    using A = Acc<L>;
    ITHACA_FOR(row, n_rows) {
        const A own = share<A>(widen(before[row]), widen(after[row]));
        A product = 0;
        for (int64_t i = row * width; i < (row + 1) * width; ++i) {
            product += static_cast<A>(widen(d_o[i])) * static_cast<A>(widen(o[i]));
            z[i] = narrow<T>(own * static_cast<A>(widen(d_o[i])));
        }
        d_before[row] = narrow<L>((A(1) - own) * product);
    }
}

}  // namespace ithaca::kernel
