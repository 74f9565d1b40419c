// Element by element: functions of one and two elements, scaling, conversion; what is no number. Memory bound; reads are coalesced.
#pragma once

#include "numeric.cuh"

namespace ithaca::kernel {

// The order is that of the operations' declarations.
enum class Unary { Silu, Gelu, GeluTanh, QuickGelu, Relu, Tanh, Relu2 };
enum class Binary { Add, Sub, Mul, Div, LogAddExp };

// The factor that the approximation of GELU by a hyperbolic tangent gives x: (1 + tanh(u)) / 2 = sigmoid(2 u), where
// nothing cancels.
template <typename A>
__device__ inline A gelu_sigmoid(A x) {
    return A(1) / (A(1) + exponential(A(-1.59576912160573071176) * (x + A(0.044715) * x * x * x)));
}

template <typename A>
__device__ inline A apply(Unary f, A x) {
    switch (f) {
        case Unary::Silu:
            return x / (A(1) + exponential(-x));
        case Unary::Gelu:
            return A(0.5) * x * complementary_error_function(x * A(-0.70710678118654752440));
        case Unary::GeluTanh:
            return x * gelu_sigmoid(x);
        case Unary::QuickGelu:
            return x / (A(1) + exponential(A(-1.702) * x));
        case Unary::Relu:
            return x > A(0) ? x : A(0);
        case Unary::Tanh:
            return hyperbolic_tangent(x);
        case Unary::Relu2:
            return x > A(0) ? x * x : A(0);
    }
    return x;
}

// The derivative of a function of one element.
template <typename A>
__device__ inline A slope(Unary f, A x) {
    switch (f) {
        case Unary::Silu: {
            const A s = A(1) / (A(1) + exponential(-x));
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
            const A s = A(1) / (A(1) + exponential(A(-1.702) * x));
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
    }
    return A(0);
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

template <typename T>
__global__ void unary(Unary f, const T* x, T* z, int64_t n) {
    ITHACA_FOR(i, n) { z[i] = narrow<T>(apply(f, widen(x[i]))); }
}

// x and z are dense; y is read by strides, zero where it lacks a dimension of x.
template <typename T>
__global__ void binary(Binary f, const T* x, const T* y, T* z, Walk<1> y_of, int64_t n) {
    ITHACA_FOR(i, n) {
        int64_t offset[1];
        y_of.at(i, offset);
        z[i] = narrow<T>(apply(f, widen(x[i]), widen(y[offset[0]])));
    }
}

template <typename T>
__global__ void scale(double factor, const T* x, T* z, int64_t n) {
    ITHACA_FOR(i, n) { z[i] = narrow<T>(widen(x[i]) * static_cast<Acc<T>>(factor)); }
}

template <typename From, typename To>
__global__ void cast(const From* x, To* z, int64_t n) {
    ITHACA_FOR(i, n) { z[i] = narrow<To>(widen(x[i])); }
}

// Of the elements of a walk that are no numbers the first: `n - i` for the one that comes i-th. `found` is zero before, and
// where all are numbers.
__global__ void find_nan(Reals x, unsigned long long* found, Walk<1> walk, int64_t n) {
    ITHACA_FOR(i, n) {
        int64_t offset[1];
        walk.at(i, offset);
        const double value = x[offset[0]];
        if (value != value) atomicMax(found, static_cast<unsigned long long>(n - i));
    }
}

}  // namespace ithaca::kernel
