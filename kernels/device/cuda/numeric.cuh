// Numbers on the device: conversion between storage and accumulation, and walks over strided tensors.
//
// Storage is f64, f32, f16 or bf16; arithmetic is f64 for f64 and f32 for the rest. Every kernel is a loop with the
// stride of the whole grid, so any grid is correct. Indices have 64 bits: tensors exceed 2^31 elements.
#pragma once

#ifndef __CUDACC_RTC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>
#endif

#if defined(__CUDACC__) || defined(__CUDACC_RTC__)
#define ITHACA_PRAGMA(text) _Pragma(#text)
#define ITHACA_UNROLL ITHACA_PRAGMA(unroll)
#define ITHACA_UNROLL_BY(n) ITHACA_PRAGMA(unroll n)
#else
#define ITHACA_UNROLL
#define ITHACA_UNROLL_BY(n)
#endif

// A condition that is rarely true, as a hint for the placement of code.
#define ITHACA_UNLIKELY(x) __builtin_expect(static_cast<bool>(x), false)

#define ITHACA_FOR(i, n)                                                                                      \
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < (n);                   \
         i += static_cast<int64_t>(gridDim.x) * blockDim.x)

namespace ithaca {

template <typename T>
struct Accumulator {
    using type = float;
};
template <>
struct Accumulator<double> {
    using type = double;
};
// What values of storage type T are computed in.
template <typename T>
using Acc = typename Accumulator<T>::type;

__host__ __device__ inline double widen(double x) { return x; }
__host__ __device__ inline float widen(float x) { return x; }
__host__ __device__ inline float widen(__half x) { return __half2float(x); }
__host__ __device__ inline float widen(__nv_bfloat16 x) { return __bfloat162float(x); }
__host__ __device__ inline int32_t widen(int32_t x) { return x; }

template <typename T>
struct Narrow {
    template <typename A>
    __host__ __device__ static T from(A x) {
        return static_cast<T>(x);
    }
};
template <>
struct Narrow<__half> {
    template <typename A>
    __host__ __device__ static __half from(A x) {
        return __float2half(static_cast<float>(x));
    }
};
template <>
struct Narrow<__nv_bfloat16> {
    template <typename A>
    __host__ __device__ static __nv_bfloat16 from(A x) {
        return __float2bfloat16(static_cast<float>(x));
    }
};
// Rounds to storage.
template <typename T, typename A>
__host__ __device__ inline T narrow(A x) {
    return Narrow<T>::from(x);
}

// Real numbers whose storage is known when the kernel runs only: for small tensors and for those that are read once.
enum class Storage { F64, F32, F16, BF16 };
struct Reals {
    const void* data;
    Storage storage;

    __device__ double operator[](int64_t i) const {
        switch (storage) {
            case Storage::F64: return static_cast<const double*>(data)[i];
            case Storage::F32: return static_cast<const float*>(data)[i];
            case Storage::F16: return widen(static_cast<const __half*>(data)[i]);
            case Storage::BF16: return widen(static_cast<const __nv_bfloat16*>(data)[i]);
        }
        return 0;
    }
    // In single precision throughout where the storage is f32.
    __device__ float single(int64_t i) const {
        return storage == Storage::F32 ? static_cast<const float*>(data)[i] : static_cast<float>((*this)[i]);
    }
};

__device__ inline float exponential(float x) { return expf(x); }
__device__ inline double exponential(double x) { return exp(x); }
__device__ inline float complementary_error_function(float x) { return erfcf(x); }
__device__ inline double complementary_error_function(double x) { return erfc(x); }
__device__ inline float hyperbolic_tangent(float x) { return tanhf(x); }
__device__ inline double hyperbolic_tangent(double x) { return tanh(x); }
__device__ inline float logarithm_of_one_and(float x) { return log1pf(x); }
__device__ inline double logarithm_of_one_and(double x) { return log1p(x); }
__device__ inline float logarithm(float x) { return logf(x); }
__device__ inline double logarithm(double x) { return log(x); }
__device__ inline float square_root(float x) { return sqrtf(x); }
__device__ inline double square_root(double x) { return sqrt(x); }

// No weight at all, as a logarithm.
template <typename A>
__device__ inline A neg_infinity() {
    return -static_cast<A>(INFINITY);
}

// log(exp(x) + exp(y)); minus infinity where both are, never a NaN.
template <typename A>
__device__ inline A log_add_exp(A x, A y) {
    const A high = x > y ? x : y, low = x > y ? y : x;
    return low == neg_infinity<A>() ? high : high + logarithm(A(1) + exponential(low - high));
}

// The weight that a part has in a sum of exponentials: exp(part - all), zero for a part of nothing.
template <typename A>
__device__ inline A share(A part, A all) {
    return part == neg_infinity<A>() ? A(0) : exponential(part - all);
}

// Of numbers that are not negative. Division of 32 bits takes a fraction of that of 64.
struct Division {
    int64_t quotient, remainder;
};
__host__ __device__ inline Division divide(int64_t i, int64_t n) {
    if ((i | n) >> 32 != 0) return {i / n, i % n};
    const uint32_t quotient = static_cast<uint32_t>(i) / static_cast<uint32_t>(n);
    return {quotient, static_cast<uint32_t>(i) - quotient * static_cast<uint32_t>(n)};
}

constexpr int kMaxDims = 10;

// Row-major indices of a shape, and where K tensors have each of them, in elements; a stride of zero broadcasts.
template <int K>
struct Walk {
    int64_t n = 0;
    int64_t extent[kMaxDims] = {};
    int64_t stride[K][kMaxDims] = {};

    __host__ __device__ int64_t size() const {
        int64_t size = 1;
        for (int d = 0; d < n; ++d) size *= extent[d];
        return size;
    }

    // Where the K tensors have the element that comes i-th in row-major order.
    __host__ __device__ void at(int64_t i, int64_t (&offset)[K]) const {
        for (int k = 0; k < K; ++k) offset[k] = 0;
        for (int d = static_cast<int>(n) - 1; d >= 0; --d) {
            const Division split = d > 0 ? divide(i, extent[d]) : Division{0, i};
            for (int k = 0; k < K; ++k) offset[k] += split.remainder * stride[k][d];
            i = split.quotient;
        }
    }

    // Whether tensor k has every index at a multiple of `each` elements.
    __host__ __device__ bool is_multiple(int k, int64_t each) const {
        for (int d = 0; d < n; ++d)
            if (stride[k][d] % each != 0) return false;
        return true;
    }
};

}  // namespace ithaca
