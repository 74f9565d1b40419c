// The part of the CUDA runtime that emitted programs use, on the host: memory is memory, streams are synchronous, and a
// launch runs the kernel once as a grid of one thread, which a grid-stride loop makes a loop over everything. A launch with
// shared memory is run block by block, as `thread_block.h` says.
#pragma once

#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>

#define __host__
#define __device__
#define __global__
#define __launch_bounds__(...)

struct dim3 {
    unsigned x = 1, y = 1, z = 1;
    dim3() = default;
    explicit dim3(unsigned x_) : x(x_) {}
};

inline thread_local dim3 blockIdx(0), threadIdx(0), blockDim(1), gridDim(1);

template <typename N>
N atomicMax(N* at, N x) {
    const N before = *at;
    if (x > before) *at = x;
    return before;
}

inline int atomicAdd(int* at, int x) {
    const int before = *at;
    *at += x;
    return before;
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }

struct alignas(16) uint4 {
    unsigned x, y, z, w;
};

enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorMemoryAllocation = 2, cudaErrorNotReady = 600 };
enum cudaMemcpyKind { cudaMemcpyHostToDevice = 1, cudaMemcpyDeviceToHost = 2, cudaMemcpyDeviceToDevice = 3, cudaMemcpyDefault = 4 };
enum { cudaStreamNonBlocking = 1, cudaEventDisableTiming = 2 };

// Handles that are used before creation or after destruction are found by the sanitizers.
struct CUstream_st {
    int alive;
};
struct CUevent_st {
    int recorded;
    std::chrono::steady_clock::time_point time;
};
using cudaStream_t = CUstream_st*;
using cudaEvent_t = CUevent_st*;

inline const char* cudaGetErrorString(cudaError_t e) {
    return e == cudaSuccess ? "no error" : e == cudaErrorInvalidValue ? "invalid argument" : "out of memory";
}
inline cudaError_t cudaGetDeviceCount(int* n) {
    *n = 1024;
    return cudaSuccess;
}
inline cudaError_t cudaSetDevice(int) { return cudaSuccess; }
inline cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }

inline cudaError_t cudaMalloc(void** p, size_t n) {
    *p = std::aligned_alloc(256, (n + 255) / 256 * 256);
    // What was never written must not look like a result.
    if (*p != nullptr) std::memset(*p, 0xFF, n);
    return *p != nullptr ? cudaSuccess : cudaErrorMemoryAllocation;
}
inline constexpr unsigned cudaHostAllocDefault = 0;
inline cudaError_t cudaHostAlloc(void** p, size_t n, unsigned) { return cudaMalloc(p, n); }
inline cudaError_t cudaFreeHost(void* p) {
    std::free(p);
    return cudaSuccess;
}
inline cudaError_t cudaFree(void* p) {
    std::free(p);
    return cudaSuccess;
}
inline cudaError_t cudaMemcpy(void* to, const void* from, size_t n, cudaMemcpyKind) {
    if (n > 0) std::memcpy(to, from, n);
    return cudaSuccess;
}
inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t n, cudaMemcpyKind kind, cudaStream_t) {
    return cudaMemcpy(to, from, n, kind);
}

inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t* s, unsigned) {
    *s = new CUstream_st{1};
    return cudaSuccess;
}
inline cudaError_t cudaStreamDestroy(cudaStream_t s) {
    delete s;
    return cudaSuccess;
}
inline cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }
inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t* e, unsigned) {
    *e = new CUevent_st{0, {}};
    return cudaSuccess;
}
inline cudaError_t cudaEventDestroy(cudaEvent_t e) {
    delete e;
    return cudaSuccess;
}
// From so many records on no event happens, as CUDA_ON_HOST_STOPS says: a device that stops.
inline bool cuda_on_host_stopped = false;
inline bool cuda_on_host_goes_on() {
    static const char* const stops = std::getenv("CUDA_ON_HOST_STOPS");
    static long left = stops != nullptr ? std::atol(stops) : 0;
    if (stops != nullptr && left-- <= 0) cuda_on_host_stopped = true;
    return !cuda_on_host_stopped;
}
inline cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t) {
    e->recorded = cuda_on_host_goes_on() ? 1 : 2;
    e->time = std::chrono::steady_clock::now();
    return cudaSuccess;
}
// A wait on an event that nobody recorded is a fault of the schedule: on a device it would not wait at all.
inline cudaError_t cudaStreamWaitEvent(cudaStream_t, cudaEvent_t e, unsigned) {
    if (e->recorded == 0) std::abort();
    return cudaSuccess;
}

inline cudaError_t cudaEventQuery(cudaEvent_t e) {
    if (e->recorded == 0) std::abort();
    return e->recorded == 1 ? cudaSuccess : cudaErrorNotReady;
}

inline cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t from, cudaEvent_t to) {
    if (from->recorded == 0 || to->recorded == 0) std::abort();
    *ms = std::chrono::duration<float, std::milli>(to->time - from->time).count();
    return cudaSuccess;
}

struct cudaLaunchConfig_t {
    dim3 gridDim, blockDim;
    size_t dynamicSmemBytes = 0;
    cudaStream_t stream = nullptr;
};

#include "thread_block.h"

enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };

// What a kernel may have of shared memory: 48 KiB, or what was asked for, which no device has more of than 227.
inline std::map<const void*, size_t>& most_shared_bytes() {
    static std::map<const void*, size_t> most;
    return most;
}
template <typename... Parameters>
cudaError_t cudaFuncSetAttribute(void (*kernel)(Parameters...), cudaFuncAttribute, int bytes) {
    if (bytes > 227 * 1024) return cudaErrorInvalidValue;
    most_shared_bytes()[reinterpret_cast<const void*>(kernel)] = static_cast<size_t>(bytes);
    return cudaSuccess;
}

template <typename... Parameters, typename... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...), Arguments&&... arguments) {
    const size_t bytes = config->dynamicSmemBytes;
    if (bytes == 0) {
        kernel(static_cast<Parameters>(arguments)...);
        return cudaSuccess;
    }
    const auto& known = most_shared_bytes();
    const auto most = known.find(reinterpret_cast<const void*>(kernel));
    if (bytes > (most == known.end() ? 48 * 1024 : most->second)) return cudaErrorInvalidValue;
    on_host::launch(config->gridDim.x, config->blockDim.x, bytes, [&] { kernel(static_cast<Parameters>(arguments)...); });
    return cudaSuccess;
}

enum cudaDataType_t { CUDA_R_32F = 0, CUDA_R_64F = 1, CUDA_R_16F = 2, CUDA_R_16BF = 14 };
