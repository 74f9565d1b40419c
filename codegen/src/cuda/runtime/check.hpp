// Errors: every call is checked, and a failure says which task, where and why, and ends the process with status 1.
#pragma once

#include <cublas_v2.h>
#include <cuda_runtime.h>
#include <nccl.h>

#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>

namespace ithaca {

// A user's mistake or a broken file; `main` prints it and exits with status 2.
struct Error : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// What the program knows of a failure's place, and what it does before it ends.
struct Ending {
    std::string (*where)() = nullptr;
    void (*abort)() = nullptr;
};
inline Ending& ending() {
    static Ending at_hand;
    return at_hand;
}

[[noreturn]] inline void fail(const char* file, int line, const char* call, const char* why) {
    const Ending how = ending();
    // What fails on the way out ends it.
    ending() = {};
    if (how.where != nullptr) std::fprintf(stderr, "error: %s: ", how.where().c_str());
    std::fprintf(stderr, "%s:%d: %s: %s\n", file, line, call, why);
    std::fflush(stderr);
    if (how.abort != nullptr) how.abort();
    // Other ranks may be inside a collective: leave at once, and the launcher ends them.
    std::_Exit(1);
}

inline const char* describe(cublasStatus_t status) {
    switch (status) {
        case CUBLAS_STATUS_SUCCESS: return "success";
        case CUBLAS_STATUS_NOT_INITIALIZED: return "cuBLAS is not initialized";
        case CUBLAS_STATUS_ALLOC_FAILED: return "out of memory";
        case CUBLAS_STATUS_INVALID_VALUE: return "invalid value";
        case CUBLAS_STATUS_ARCH_MISMATCH: return "not supported by this device";
        case CUBLAS_STATUS_EXECUTION_FAILED: return "execution failed";
        case CUBLAS_STATUS_NOT_SUPPORTED: return "not supported";
        default: return "cuBLAS error";
    }
}

// What goes on in the background is looked at where it is waited for.
inline bool has_failed(ncclResult_t status) { return status != ncclSuccess && status != ncclInProgress; }

}  // namespace ithaca

#define ITHACA_CUDA(call)                                                                                     \
    do {                                                                                                      \
        const cudaError_t status_ = (call);                                                                   \
        if (status_ != cudaSuccess) ::ithaca::fail(__FILE__, __LINE__, #call, cudaGetErrorString(status_));   \
    } while (0)

#define ITHACA_CUBLAS(call)                                                                                   \
    do {                                                                                                      \
        const cublasStatus_t status_ = (call);                                                                \
        if (status_ != CUBLAS_STATUS_SUCCESS)                                                                 \
            ::ithaca::fail(__FILE__, __LINE__, #call, ::ithaca::describe(status_));                           \
    } while (0)

#define ITHACA_NCCL(call)                                                                                     \
    do {                                                                                                      \
        const ncclResult_t status_ = (call);                                                                  \
        if (::ithaca::has_failed(status_))                                                                    \
            ::ithaca::fail(__FILE__, __LINE__, #call, ncclGetErrorString(status_));                           \
    } while (0)
