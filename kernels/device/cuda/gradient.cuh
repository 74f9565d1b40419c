// Gradients of functions of elements, of repetitions, look-ups and sinks. Sums have an order.
#pragma once

#include "columns.cuh"
#include "elementwise.cuh"
#include "rows.cuh"

namespace ithaca::kernel {

// The derivative of a function of one element.
template <typename A>
__device__ inline A slope(Unary f, A x) {
    switch (f) {
        case Unary::Silu: {
            const A s = sigmoid(x);
            return s * (A(1) + x * (A(1) - s));
        }
        case Unary::Gelu:
            return A(0.5) * complementary_error_function(x * A(-0.70710678118654752440)) +
                   x * A(0.39894228040143267794) * exponential(A(-0.5) * x * x);
        case Unary::GeluTanh: {
            const A s = gelu_sigmoid(x);
            return s * (A(1) + x * (A(1) - s) * A(1.59576912160573071176) * (A(1) + A(0.134145) * x * x));
        }
        case Unary::QuickGelu: {
            const A s = sigmoid(A(1.702) * x);
            return s * (A(1) + A(1.702) * x * (A(1) - s));
        }
        case Unary::Relu:
            return x > A(0) ? A(1) : A(0);
        case Unary::Tanh: {
            const A tanh = hyperbolic_tangent(x);
            return A(1) - tanh * tanh;
        }
        case Unary::Relu2:
            return x > A(0) ? x + x : A(0);
        case Unary::Symlog:
            return A(1) / (A(1) + (x < A(0) ? -x : x));
    }
    return A(0);
}

template <typename T>
__global__ void unary_backward(Unary f, const T* x, const T* d, T* z, int64_t n) {
    with_known(f, [&](auto known) { map(n, [&](Acc<T> x, Acc<T> d) { return d * slope(decltype(known)::value, x); }, z, x, d); });
}

template <typename T>
__global__ void clamp_backward(double min, double max, const T* x, const T* d, T* z, int64_t n) {
    const Acc<T> low = static_cast<Acc<T>>(min), high = static_cast<Acc<T>>(max);
    map(n, [&](Acc<T> x, Acc<T> d) { return x < low || x > high ? Acc<T>(0) : d; }, z, x, d);
}

// The gradients of x and y in f(x) * (y + c). The tensors are dense.
template <typename T>
__global__ void gated_backward(Unary f, double limit, const T* x, const T* y, const T* d, const T* c, T* dx, T* dy, int64_t n) {
    const auto bounds = gate(limit, c);
    with_known(f, [&](auto known) {
        constexpr Unary kF = decltype(known)::value;
        for_packs<kWide<T>>(n, are_aligned(x, y, d, dx, dy), [&](auto size, int64_t i) {
            constexpr int kN = decltype(size)::value;
            const auto of = load<kN>(x + i);
            auto to_x = load<kN>(d + i), to_y = load<kN>(y + i);
            ITHACA_UNROLL
            for (int k = 0; k < kN; ++k) {
                const Acc<T> gradient = to_x.at[k], x = of.at[k], y = to_y.at[k], at = bounds.input(x);
                to_x.at[k] = x > bounds.limit ? Acc<T>(0) : gradient * bounds.factor(y) * slope(kF, at);
                to_y.at[k] = y > bounds.limit || y < -bounds.limit ? Acc<T>(0) : gradient * apply(kF, at);
            }
            store(dx + i, to_x);
            store(dy + i, to_y);
        });
    });
}

// The gradient of `repeat`: [outer, n_from, inner] to [outer, n_to, inner], where global elements g copies .. (g + 1) copies of the
// operand, as far as they are held, add up to element g.
template <typename T>
__global__ void sum_copies(const T* x, T* z, int64_t n, int64_t n_from, int64_t n_to, int64_t inner, int64_t copies,
                           int64_t from_start, int64_t to_start) {
    for_packs<kWide<T>>(n, inner % kWide<T> == 0 && are_aligned(x, z), [&](auto size, int64_t i) {
        constexpr int kN = decltype(size)::value;
        const Division at = divide(i, inner), row = divide(at.quotient, n_to);
        const int64_t first = (to_start + row.remainder) * copies - from_start;
        Pack<Acc<T>, kN> sum = {};
        for (int64_t j = first < 0 ? 0 : first; j < first + copies && j < n_from; ++j) {
            const auto one = load<kN>(x + (row.quotient * n_from + j) * inner + at.remainder);
            ITHACA_UNROLL
            for (int k = 0; k < kN; ++k) sum.at[k] += one.at[k];
        }
        store(z + i, sum);
    });
}

// The rows of a table that a rank has, and the tokens that ask for them. The row `padding` learns nothing; none is that where
// it is negative.
struct Lookup {
    const int32_t* ids;
    int64_t n_tokens, first_row, n_rows, padding;

    // The row of a token; negative where another rank has it, or where it learns nothing.
    __device__ int64_t row_of(int64_t token) const {
        const int64_t row = ids[token] - first_row;
        return row < n_rows && ids[token] != padding ? row : -1;
    }
};

// Before a row of the gradient is computed its memory has the tokens that ask for it, as many as there is room for: their
// number, then the tokens in any order.
__device__ inline int32_t* asked_of(void* z, int64_t row, int64_t row_bytes) {
    return reinterpret_cast<int32_t*>(static_cast<unsigned char*>(z) + row * row_bytes);
}
__global__ void no_tokens(void* z, int64_t row_bytes, int64_t n) {
    ITHACA_FOR(row, n) { *asked_of(z, row, row_bytes) = 0; }
}
__global__ void list_tokens(Lookup lookup, void* z, int64_t row_bytes, int64_t room, int64_t n) {
    ITHACA_FOR(token, n) {
        const int64_t row = lookup.row_of(token);
        if (row < 0) continue;
        int32_t* const asked = asked_of(z, row, row_bytes);
        const int32_t at = atomicAdd(asked, 1);
        if (at < room) asked[1 + at] = static_cast<int32_t>(token);
    }
}

// A block takes a row of the table: it sums what the tokens bring that ask for it, in their order. Where they are more than
// the `room` for their list, or where there is no list, it looks at all tokens. `tokens` and `columns` say where the gradient
// has each token and each column.
template <typename T>
__launch_bounds__(kMostLanes)
__global__ void embed_backward(Lookup lookup, const T* __restrict__ d, T* z, Walk<1> tokens, Walk<1> columns, int64_t width,
                               int64_t room) {
    using A = Acc<T>;
    ITHACA_SHARED(memory);
    int32_t* const listed = reinterpret_cast<int32_t*>(memory);
    int32_t* const sorted = listed + room;
    const int threads = static_cast<int>(blockDim.x), own = static_cast<int>(threadIdx.x);
    const bool is_wide = has_packs(columns, kWide<T>) && tokens.is_multiple(0, kWide<T>) && are_aligned(d, z);
    for (int64_t row = blockIdx.x; row < lookup.n_rows; row += gridDim.x) {
        const int32_t* const asked = asked_of(z, row, width * sizeof(T));
        const int64_t n = room > 0 ? *asked : lookup.n_tokens;
        const bool is_listed = n <= room;
        for (int i = own; i < n && is_listed; i += threads) listed[i] = asked[1 + i];
        __syncthreads();
        for (int i = own; i < n && is_listed; i += threads) {
            int before = 0;
            for (int j = 0; j < n; ++j) before += listed[j] < listed[i];
            sorted[before] = listed[i];
        }
        __syncthreads();
        in_packs<kWide<T>>(is_wide, [&](auto size) {
            constexpr int kN = decltype(size)::value;
            for (int64_t column = own * kN; column < width; column += threads * kN) {
                int64_t along[1], at[1];
                columns.at(column, along);
                Pack<A, kN> sum = {};
                const auto add = [&](int64_t token) {
                    tokens.at(token, at);
                    const auto one = load<kN>(d + at[0] + along[0]);
                    ITHACA_UNROLL
                    for (int k = 0; k < kN; ++k) sum.at[k] += one.at[k];
                };
                if (is_listed) {
                    ITHACA_UNROLL_BY(4)
                    for (int i = 0; i < n; ++i) add(sorted[i]);
                } else {
                    for (int64_t token = 0; token < lookup.n_tokens; ++token)
                        if (lookup.row_of(token) == row) add(token);
                }
                store(z + row * width + column, sum);
            }
        });
        __syncthreads();
    }
}

// exp(before - after) of a row of o is its own, what the sink takes goes to lse.
template <typename T, typename L>
__launch_bounds__(kMostLanes)
__global__ void sink_backward(const T* __restrict__ o, const T* __restrict__ d_o, const L* __restrict__ before,
                              const L* __restrict__ after, T* __restrict__ z, L* __restrict__ d_before, int64_t width,
                              int64_t n_rows, int lanes) {
    using A = Acc<L>;
    in_packs<kWide<T>>(width % kWide<T> == 0 && are_aligned(o, d_o, z), [&](auto size) {
        constexpr int kN = decltype(size)::value;
        for_rows(n_rows, lanes, width, [&](const Team& team, int64_t row, int64_t extent, bool is_there) {
            const A own = share<A>(widen(before[row]), widen(after[row]));
            A product = 0;
            for_row<kN>(team, extent, [&](int64_t i) {
                auto d = load<kN>(d_o + row * width + i);
                const auto x = load<kN>(o + row * width + i);
                ITHACA_UNROLL
                for (int k = 0; k < kN; ++k) {
                    product += static_cast<A>(d.at[k]) * static_cast<A>(x.at[k]);
                    d.at[k] = own * static_cast<A>(d.at[k]);
                }
                store(z + row * width + i, d);
            });
            product = team.sum(product);
            if (is_there && team.lane == 0) d_before[row] = narrow<L>((A(1) - own) * product);
        });
    });
}

}  // namespace ithaca::kernel
