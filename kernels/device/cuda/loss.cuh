// Cross-entropy of labels and its pieces. Padding counts for nothing, of the vocabulary and of tokens. A thread takes a
// row, or an element of the gradient.
#pragma once

#include "sequence.cuh"

namespace ithaca::kernel {

// Which rows are tokens of padding: for each dimension that has some, where a row lies along it.
struct Padding {
    int n = 0;
    Sequence positions[2] = {};
    int64_t valid[2] = {}, step[2] = {}, extent[2] = {};

    __device__ bool has(int64_t row) const {
        for (int d = 0; d < n; ++d)
            if (position_of(positions[d], row / step[d] % extent[d]) >= valid[d]) return true;
        return false;
    }
};

struct Labels {
    const int32_t* data;
    int64_t ignore;
    Padding padding;

    __device__ bool counts(int64_t row) const { return data[row] != ignore && !padding.has(row); }
};

// The part of the vocabulary that a rank holds: labels `first .. first + extent`, of which `columns` are no padding.
struct Vocabulary {
    int64_t first, extent, columns, stride;
};

// log of the sum of exponentials of `columns` elements, `stride` apart; minus infinity of nothing.
template <typename T>
__device__ inline Acc<T> log_sum_exp(const T* x, int64_t columns, int64_t stride) {
    using A = Acc<T>;
    A highest = nothing<A>(), sum = 0;
    for (int64_t j = 0; j < columns; ++j) {
        const A value = widen(x[j * stride]);
        if (value > highest) highest = value;
    }
    for (int64_t j = 0; j < columns; ++j) sum += share(static_cast<A>(widen(x[j * stride])), highest);
    return sum > A(0) ? highest + logarithm(sum) : nothing<A>();
}

template <typename T>
__global__ void cross_entropy(const T* x, Labels labels, Acc<T>* nll, Acc<T>* lse, Walk<1> rows, Vocabulary v, int64_t n) {
    ITHACA_FOR(row, n) {
        int64_t at[1];
        rows.at(row, at);
        const Acc<T> all = log_sum_exp(x + at[0], v.columns, v.stride);
        const int64_t label = labels.data[row] - v.first;
        const bool counts = labels.counts(row) && label >= 0 && label < v.columns;
        nll[row] = counts ? all - widen(x[at[0] + label * v.stride]) : Acc<T>(0);
        lse[row] = all;
    }
}

// (exp(x - lse) - [v = label]) d.
template <typename T>
__global__ void cross_entropy_backward(const T* x, Labels labels, const Acc<T>* lse, const Acc<T>* d, T* z, Walk<1> rows,
                                       Vocabulary v, int64_t n) {
    using A = Acc<T>;
    ITHACA_FOR(i, n) {
        const int64_t row = i / v.extent, column = i % v.extent;
        int64_t at[1];
        rows.at(row, at);
        const int64_t element = at[0] + column * v.stride;
        A gradient = 0;
        if (column < v.columns && labels.counts(row)) {
            gradient = exponential(widen(x[element]) - lse[row]);
            if (labels.data[row] - v.first == column) gradient -= A(1);
            gradient *= d[row];
        }
        z[element] = narrow<T>(gradient);
    }
}

// The label's element; zero where it is ignored, or another rank has it.
template <typename T>
__global__ void pick(const T* x, Labels labels, Acc<T>* z, Walk<1> rows, Vocabulary v, int64_t n) {
    ITHACA_FOR(row, n) {
        int64_t at[1];
        rows.at(row, at);
        const int64_t label = labels.data[row] - v.first;
        const bool held = labels.counts(row) && label >= 0 && label < v.columns;
        z[row] = held ? widen(x[at[0] + label * v.stride]) : Acc<T>(0);
    }
}

template <typename T>
__global__ void valid(Labels labels, T* z, int64_t n) {
    ITHACA_FOR(row, n) { z[row] = narrow<T>(labels.counts(row) ? 1.0f : 0.0f); }
}

// The logarithm of the sum of exponentials along each line.
template <typename T>
__global__ void row_lse(const T* x, Acc<T>* z, Walk<1> lines, int64_t columns, int64_t stride, int64_t n) {
    ITHACA_FOR(i, n) {
        int64_t at[1];
        lines.at(i, at);
        z[i] = log_sum_exp(x + at[0], columns, stride);
    }
}

}  // namespace ithaca::kernel
