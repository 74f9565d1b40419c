// Element by element: functions of one and two elements, scaling, conversion. Memory bound.
#pragma once

#include "pack.cuh"

namespace ithaca::kernel {

// The order is that of the operations' declarations.
enum class Unary { Silu, Gelu, GeluTanh, QuickGelu, Relu, Tanh, Relu2, Symlog };
enum class Binary { Add, Sub, Mul, Div, LogAddExp };

template <typename A>
__device__ inline A sigmoid(A x) {
    return A(1) / (A(1) + exponential(-x));
}

// The factor that the approximation of GELU by a hyperbolic tangent gives x: (1 + tanh(u)) / 2 = sigmoid(2 u), where
// nothing cancels.
template <typename A>
__device__ inline A gelu_sigmoid(A x) {
    return sigmoid(A(1.59576912160573071176) * (x + A(0.044715) * x * x * x));
}

template <typename A>
__device__ inline A apply(Unary f, A x) {
    switch (f) {
        case Unary::Silu:
            return x * sigmoid(x);
        case Unary::Gelu:
            return A(0.5) * x * complementary_error_function(x * A(-0.70710678118654752440));
        case Unary::GeluTanh:
            return x * gelu_sigmoid(x);
        case Unary::QuickGelu:
            return x * sigmoid(A(1.702) * x);
        case Unary::Relu:
            return x > A(0) ? x : A(0);
        case Unary::Tanh:
            return hyperbolic_tangent(x);
        case Unary::Relu2:
            return x > A(0) ? x * x : A(0);
        case Unary::Symlog:
            return x < A(0) ? -logarithm_of_one_and(-x) : logarithm_of_one_and(x);
    }
    return x;
}

template <typename A>
__device__ inline A apply(Binary f, A x, A y) {
    switch (f) {
        case Binary::Add:
            return x + y;
        case Binary::Sub:
            return x - y;
        case Binary::Mul:
            return x * y;
        case Binary::Div:
            return x / y;
        case Binary::LogAddExp:
            return log_add_exp(x, y);
    }
    return x;
}

// A function that the compiler knows.
template <Unary kF>
struct Known {
    static constexpr Unary value = kF;
};

// Calls body(known) for a function, so that no loop of the body decides for each element which one it is.
template <typename Body>
__device__ inline void with_known(Unary f, const Body& body) {
    switch (f) {
        case Unary::Silu: return body(Known<Unary::Silu>{});
        case Unary::Gelu: return body(Known<Unary::Gelu>{});
        case Unary::GeluTanh: return body(Known<Unary::GeluTanh>{});
        case Unary::QuickGelu: return body(Known<Unary::QuickGelu>{});
        case Unary::Relu: return body(Known<Unary::Relu>{});
        case Unary::Tanh: return body(Known<Unary::Tanh>{});
        case Unary::Relu2: return body(Known<Unary::Relu2>{});
        case Unary::Symlog: return body(Known<Unary::Symlog>{});
    }
}

template <typename T>
__global__ void unary(Unary f, const T* x, T* z, int64_t n) {
    with_known(f, [&](auto known) { map(n, [&](Acc<T> x) { return apply(decltype(known)::value, x); }, z, x); });
}

// x and z are dense; y is read by strides, zero where it lacks a dimension of x. In packs of x only the last dimension moves.
template <typename T>
__global__ void binary(Binary f, const T* x, const T* y, T* z, Walk<1> y_of, int64_t n) {
    const int last = static_cast<int>(y_of.n) - 1;
    const int64_t step = last < 0 ? 0 : y_of.stride[0][last];
    if (last == 0 && step == 1) return map(n, [&](Acc<T> x, Acc<T> y) { return apply(f, x, y); }, z, x, y);
    const bool is_wide = are_aligned(x, z) && last >= 0 && y_of.extent[last] % kWide<T> == 0;
    for_packs<kWide<T>>(n, is_wide, [&](auto size, int64_t i) {
        constexpr int kN = decltype(size)::value;
        int64_t offset[1];
        y_of.at(i, offset);
        auto out = load<kN>(x + i);
        ITHACA_UNROLL
        for (int k = 0; k < kN; ++k) out.at[k] = apply(f, out.at[k], widen(y[offset[0] + k * step]));
        store(z + i, out);
    });
}

template <typename T>
__global__ void scale(double factor, const T* x, T* z, int64_t n) {
    map(n, [&](Acc<T> x) { return x * static_cast<Acc<T>>(factor); }, z, x);
}

template <typename T>
__global__ void clamp(double min, double max, const T* x, T* z, int64_t n) {
    const Acc<T> low = static_cast<Acc<T>>(min), high = static_cast<Acc<T>>(max);
    map(n, [&](Acc<T> x) { return x < low ? low : x > high ? high : x; }, z, x);
}

template <typename From, typename To>
__global__ void cast(const From* x, To* z, int64_t n) {
    constexpr int kN = kWide<From> > kWide<To> ? kWide<From> : kWide<To>;
    for_packs<kN>(n, are_aligned(x, z), [&](auto size, int64_t i) { store(z + i, load<decltype(size)::value>(x + i)); });
}

// The bound and the number of a gated activation f(x) * (y + c): x is at most the bound, and so is the magnitude of y.
template <typename A>
struct Gate {
    A limit, plus;

    __device__ A input(A x) const { return x > limit ? limit : x; }
    __device__ A factor(A y) const { return (y < -limit ? -limit : input(y)) + plus; }
};

template <typename T>
__device__ Gate<Acc<T>> gate(double limit, const T* c) {
    return {static_cast<Acc<T>>(limit), c == nullptr ? Acc<T>(0) : widen(*c)};
}

// f(x) * (y + c). The tensors are dense.
template <typename T>
__global__ void gated(Unary f, double limit, const T* x, const T* y, const T* c, T* z, int64_t n) {
    const auto bounds = gate(limit, c);
    with_known(f, [&](auto known) {
        map(n, [&](Acc<T> x, Acc<T> y) { return apply(decltype(known)::value, bounds.input(x)) * bounds.factor(y); }, z, x, y);
    });
}

}  // namespace ithaca::kernel
