// Errors. Every call is checked. A failure prints the task, the place in the source and the cause, and ends the process
// with status 1.
#pragma once

#include <cublasLt.h>
#include <cuda_runtime.h>
#include <nccl.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace ithaca {

// A user's mistake or a broken file. `main` prints it and exits with status 2.
struct Error : std::runtime_error {
    using std::runtime_error::runtime_error;
};

struct NotCopied {
    NotCopied() = default;
    NotCopied(const NotCopied&) = delete;
    NotCopied& operator=(const NotCopied&) = delete;
};

// How a failure is reported: `where` names the rank and the task, `abort` releases ranks that wait for this one.
struct FailureHandler {
    std::string (*where)() = nullptr;
    void (*abort)() = nullptr;
};
inline FailureHandler failure_handler;

[[noreturn]] inline void fail(const char* file, int line, const char* call, const char* why) {
    const FailureHandler handler = failure_handler;
    failure_handler = {};  // a failure inside the handler ends the process
    if (handler.where != nullptr) std::fprintf(stderr, "error: %s: ", handler.where().c_str());
    std::fprintf(stderr, "%s:%d: %s: %s\n", file, line, call, why);
    std::fflush(stderr);
    if (handler.abort != nullptr) handler.abort();
    // Other ranks may be inside a collective. The launcher ends them.
    std::_Exit(1);
}

// Calls in progress are checked where they are waited for.
inline bool has_failed(ncclResult_t status) { return status != ncclSuccess && status != ncclInProgress; }

// A wait with a timeout. The library calls are polled, because a blocking call could not be given up.
class Deadline {
  public:
    explicit Deadline(double seconds) : seconds_(seconds) {}

    void renew() { since_ = Clock::now(); }
    // Sleeps before the next poll; false after the timeout. For the first 20 ms it polls without sleep.
    bool pause() const {
        const double waited = this->waited();
        if (waited > seconds_) return false;
        if (waited < 0.02) std::this_thread::yield();
        else std::this_thread::sleep_for(std::chrono::microseconds(100));
        return true;
    }

    std::string message() const { return "it has not ended after " + std::to_string(waited()) + " s"; }

  private:
    using Clock = std::chrono::steady_clock;
    double waited() const { return std::chrono::duration<double>(Clock::now() - since_).count(); }

    double seconds_;
    Clock::time_point since_ = Clock::now();
};

}  // namespace ithaca

#define ITHACA_CHECK(call, type, is_failure, message)                                         \
    do {                                                                                      \
        const type status_ = (call);                                                          \
        if (is_failure) ::ithaca::fail(__FILE__, __LINE__, #call, message(status_));          \
    } while (0)
#define ITHACA_CUDA(call) ITHACA_CHECK(call, cudaError_t, status_ != cudaSuccess, cudaGetErrorString)
#define ITHACA_CUBLAS(call) ITHACA_CHECK(call, cublasStatus_t, status_ != CUBLAS_STATUS_SUCCESS, cublasLtGetStatusString)
#define ITHACA_NCCL(call) ITHACA_CHECK(call, ncclResult_t, ::ithaca::has_failed(status_), ncclGetErrorString)
