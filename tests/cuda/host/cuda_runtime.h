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
#include <memory>
#include <vector>

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

enum cudaError_t { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorMemoryAllocation = 2, cudaErrorNotReady = 600,
                   cudaErrorStreamCaptureUnsupported = 900, cudaErrorStreamCaptureUnjoined = 904, cudaErrorStreamCaptureIsolation = 905,
                   cudaErrorCapturedEvent = 907 };
enum cudaMemcpyKind { cudaMemcpyHostToDevice = 1, cudaMemcpyDeviceToHost = 2, cudaMemcpyDeviceToDevice = 3, cudaMemcpyDefault = 4 };
enum { cudaStreamNonBlocking = 1, cudaEventDisableTiming = 2 };

// Handles that are used before creation or after destruction are found by the sanitizers.
struct CUstream_st {
    int alive;
    // While a graph is recorded: whether it has this stream, and what it was asked that the first stream has not waited for.
    bool is_captured = false;
    int asked = 0, joined = 0;
};
struct CUevent_st {
    int recorded;
    std::chrono::steady_clock::time_point time;
    // Recorded in a graph, by a stream that was asked so much.
    CUstream_st* captured = nullptr;
    int asked = 0;
};
// What a stream is asked. A function object of the library's takes a compiler longer.
struct CudaOnHostCall {
    virtual void operator()() = 0;
    virtual ~CudaOnHostCall() = default;
};
template <typename Call>
struct CudaOnHostCallOf : CudaOnHostCall {
    Call call;
    explicit CudaOnHostCallOf(const Call& call_) : call(call_) {}
    void operator()() override { call(); }
};
// A graph is what was asked of streams while it was recorded, when nothing ran. A stream comes in by a wait for one that is in.
struct CUgraph_st {
    std::vector<std::shared_ptr<CudaOnHostCall>> calls;
    std::vector<CUstream_st*> streams;
};
using cudaGraph_t = CUgraph_st*;
using cudaGraphExec_t = CUgraph_st*;
enum cudaStreamCaptureMode { cudaStreamCaptureModeThreadLocal = 1 };
inline CUgraph_st* cuda_on_host_graph = nullptr;
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
inline cudaError_t cuda_on_host_now() { return cuda_on_host_graph == nullptr ? cudaSuccess : cudaErrorStreamCaptureUnsupported; }
inline cudaError_t cudaDeviceSynchronize() { return cuda_on_host_now(); }

// Does what a stream is asked, now or when the graph is launched that is recorded.
inline cudaError_t cuda_on_host_keep(cudaStream_t s, std::shared_ptr<CudaOnHostCall> call) {
    cuda_on_host_graph->calls.push_back(std::move(call));
    if (!s->is_captured) return cudaErrorStreamCaptureIsolation;
    ++s->asked;
    return cudaSuccess;
}
template <typename Call>
cudaError_t cuda_on_host_ask(cudaStream_t s, const Call& call) {
    if (cuda_on_host_graph != nullptr) return cuda_on_host_keep(s, std::shared_ptr<CudaOnHostCall>(static_cast<CudaOnHostCall*>(new CudaOnHostCallOf<Call>(call))));
    Call now = call;
    now();
    return cudaSuccess;
}

inline cudaError_t cudaMalloc(void** p, size_t n) {
    if (cuda_on_host_graph != nullptr) return cudaErrorStreamCaptureUnsupported;
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
    if (cuda_on_host_graph != nullptr) return cudaErrorStreamCaptureUnsupported;
    if (n > 0) std::memcpy(to, from, n);
    return cudaSuccess;
}
inline cudaError_t cudaMemset(void* at, int byte, size_t n) {
    if (cuda_on_host_graph != nullptr) return cudaErrorStreamCaptureUnsupported;
    std::memset(at, byte, n);
    return cudaSuccess;
}
inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t n, cudaMemcpyKind, cudaStream_t s) {
    return cuda_on_host_ask(s, [=] { if (n > 0) std::memcpy(to, from, n); });
}

inline cudaError_t cudaStreamCreateWithFlags(cudaStream_t* s, unsigned) {
    *s = new CUstream_st{1, false, 0, 0};
    return cudaSuccess;
}
inline cudaError_t cudaStreamDestroy(cudaStream_t s) {
    delete s;
    return cudaSuccess;
}
inline cudaError_t cudaStreamSynchronize(cudaStream_t) { return cuda_on_host_now(); }
inline cudaError_t cudaEventCreateWithFlags(cudaEvent_t* e, unsigned) {
    *e = new CUevent_st{0, {}, nullptr, 0};
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
inline cudaError_t cudaEventRecord(cudaEvent_t e, cudaStream_t s) {
    e->captured = s->is_captured ? s : nullptr;
    e->asked = s->asked;
    e->recorded = cuda_on_host_goes_on() ? 1 : 2;
    e->time = std::chrono::steady_clock::now();
    return cudaSuccess;
}
// A wait on an event that nobody recorded is a fault of the schedule: on a device it would not wait at all.
inline cudaError_t cudaStreamWaitEvent(cudaStream_t s, cudaEvent_t e, unsigned) {
    if (e->recorded == 0) std::abort();
    if ((e->captured != nullptr) != (cuda_on_host_graph != nullptr)) return cudaErrorStreamCaptureIsolation;
    if (cuda_on_host_graph == nullptr) return cudaSuccess;
    if (!s->is_captured) cuda_on_host_graph->streams.push_back(s);
    s->is_captured = true;
    if (s == cuda_on_host_graph->streams.front()) e->captured->joined = e->asked + 1;
    return cudaSuccess;
}

inline cudaError_t cudaStreamBeginCapture(cudaStream_t s, cudaStreamCaptureMode) {
    cuda_on_host_graph = new CUgraph_st{{}, {s}};
    s->is_captured = true;
    return cudaSuccess;
}
inline cudaError_t cudaStreamEndCapture(cudaStream_t s, cudaGraph_t* graph) {
    *graph = cuda_on_host_graph;
    cuda_on_host_graph = nullptr;
    cudaError_t error = cudaSuccess;
    for (CUstream_st* stream : (*graph)->streams) {
        if (stream != s && stream->joined != stream->asked + 1) error = cudaErrorStreamCaptureUnjoined;
        stream->is_captured = false;
        stream->asked = stream->joined = 0;
    }
    return error;
}
inline cudaError_t cudaGraphInstantiate(cudaGraphExec_t* launched, cudaGraph_t graph, unsigned long long) {
    *launched = new CUgraph_st(*graph);
    return cudaSuccess;
}
inline cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
    delete graph;
    return cudaSuccess;
}
inline cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) { return cudaGraphDestroy(graph); }
inline cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t) {
    for (const auto& call : graph->calls) (*call)();
    return cudaSuccess;
}

inline cudaError_t cudaEventQuery(cudaEvent_t e) {
    if (e->recorded == 0) std::abort();
    if (e->captured != nullptr) return cudaErrorCapturedEvent;
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

// A kernel of threads that work together.
struct CudaOnHostBlocks : CudaOnHostCall {
    unsigned blocks, threads;
    size_t bytes;
    std::shared_ptr<CudaOnHostCall> thread;
    void operator()() override { on_host::launch(blocks, threads, bytes, *thread); }
};
inline cudaError_t cuda_on_host_launch(const cudaLaunchConfig_t& config, const void* kernel, CudaOnHostCall* thread) {
    std::shared_ptr<CudaOnHostCall> call(thread);
    if (const size_t bytes = config.dynamicSmemBytes; bytes > 0) {
        const auto& known = most_shared_bytes();
        const auto most = known.find(kernel);
        if (bytes > (most == known.end() ? 48 * 1024 : most->second)) return cudaErrorInvalidValue;
        auto blocks = std::make_shared<CudaOnHostBlocks>();
        blocks->blocks = config.gridDim.x, blocks->threads = config.blockDim.x, blocks->bytes = bytes, blocks->thread = call;
        call = blocks;
    }
    if (cuda_on_host_graph != nullptr) return cuda_on_host_keep(config.stream, call);
    (*call)();
    return cudaSuccess;
}
template <typename... Parameters, typename... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...), Arguments&&... arguments) {
    const auto thread = [=] { kernel(static_cast<Parameters>(arguments)...); };
    return cuda_on_host_launch(*config, reinterpret_cast<const void*>(kernel), new CudaOnHostCallOf<decltype(thread)>(thread));
}

enum cudaDataType_t { CUDA_R_32F = 0, CUDA_R_64F = 1, CUDA_R_16F = 2, CUDA_R_16BF = 14 };
