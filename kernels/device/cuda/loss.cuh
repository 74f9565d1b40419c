// Cross-entropy of labels and its pieces. Padding counts for nothing, of the vocabulary and of tokens. Several threads share
// a row of logits.
#pragma once

#include "sequence.cuh"
#include "softmax.cuh"

namespace ithaca::kernel {

// Which rows are tokens of padding: for each dimension that has some, where a row lies along it.
struct Padding {
    int n = 0;
    Sequence positions[2] = {};
    int64_t valid[2] = {}, step[2] = {}, extent[2] = {};

    __device__ bool has(int64_t row) const {
        ITHACA_UNROLL
        for (int d = 0; d < 2; ++d)
            if (d < n) {
                const int64_t index = divide(divide(row, step[d]).quotient, extent[d]).remainder;
                if (position_of(positions[d], index) >= valid[d]) return true;
            }
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

// Rows of `extent` numbers, of which the first `columns` count.
template <typename T>
struct Logits {
    const T* x;
    const Walk<1>& rows;
    int64_t extent, columns, stride;
    int lanes;

    // Whether packs of a row are neighbours in memory.
    __device__ bool is_wide() const {
        return stride == 1 && extent % kWide<T> == 0 && are_aligned(x) && rows.is_multiple(0, kWide<T>);
    }

    // body(row, start, lse) for each row, which starts at element `start`; its first lane calls it.
    template <typename Body>
    __device__ void for_log_sums(int64_t n, const Body& body) const {
        using A = Acc<T>;
        in_packs<kWide<T>>(is_wide(), [&](auto size) {
            constexpr int kN = decltype(size)::value;
            for_rows(n, lanes, extent, [&](const Team& team, int64_t row, int64_t own, bool is_there) {
                int64_t at[1];
                rows.at(row, at);
                Exponentials<A> all;
                for_row<kN>(team, own, [&](int64_t i) {
                    Pack<A, kN> value = load<kN>(x + at[0], i, stride);
                    ITHACA_UNROLL
                    for (int k = 0; k < kN; ++k)
                        if (i + k >= columns) value.at[k] = neg_infinity<A>();
                    all.add(value);
                });
                all.join(team);
                if (is_there && team.lane == 0) body(row, at[0], all.log());
            });
        });
    }
};

template <typename T>
__launch_bounds__(kMostLanes)
__global__ void cross_entropy(const T* __restrict__ x, Labels labels, Acc<T>* __restrict__ nll, Acc<T>* __restrict__ lse,
                              Walk<1> rows, Vocabulary v, int64_t n, int lanes) {
    const Logits<T> logits{x, rows, v.extent, v.columns, v.stride, lanes};
    logits.for_log_sums(n, [&](int64_t row, int64_t start, Acc<T> all) {
        const int64_t label = labels.data[row] - v.first;
        const bool counts = labels.counts(row) && label >= 0 && label < v.columns;
        nll[row] = counts ? all - widen(x[start + label * v.stride]) : Acc<T>(0);
        lse[row] = all;
    });
}

// (exp(x - lse) - [v = label]) d.
template <typename T>
__launch_bounds__(kMostLanes)
__global__ void cross_entropy_backward(const T* __restrict__ x, Labels labels, const Acc<T>* __restrict__ lse,
                                       const Acc<T>* __restrict__ d, T* __restrict__ z, Walk<1> rows, Vocabulary v,
                                       int64_t n, int lanes) {
    using A = Acc<T>;
    const Logits<T> logits{x, rows, v.extent, v.columns, v.stride, lanes};
    in_packs<kWide<T>>(logits.is_wide() && are_aligned(z), [&](auto size) {
        constexpr int kN = decltype(size)::value;
        for_rows(n, lanes, v.extent, [&](const Team& team, int64_t row, int64_t own, bool) {
            int64_t at[1];
            rows.at(row, at);
            const int64_t label = labels.data[row] - v.first;
            const bool counts = labels.counts(row);
            const A all = lse[row], factor = d[row];
            for_row<kN>(team, own, [&](int64_t i) {
                Pack<A, kN> gradient = {};
                if (counts) gradient = load<kN>(x + at[0], i, v.stride);
                ITHACA_UNROLL
                for (int k = 0; k < kN; ++k) {
                    const A own_label = i + k == label ? A(1) : A(0);
                    gradient.at[k] = counts && i + k < v.columns ? (exponential(gradient.at[k] - all) - own_label) * factor : A(0);
                }
                store(z + at[0], i, v.stride, gradient);
            });
        });
    });
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
__launch_bounds__(kMostLanes)
__global__ void row_lse(const T* __restrict__ x, Acc<T>* __restrict__ z, Walk<1> lines, int64_t columns, int64_t stride,
                        int64_t n, int lanes) {
    const Logits<T> logits{x, lines, columns, columns, stride, lanes};
    logits.for_log_sums(n, [&](int64_t line, int64_t, Acc<T> all) { z[line] = all; });
}

}  // namespace ithaca::kernel
