// Errors. Every call is checked. A failure prints the task, the place in the source and the cause, and ends the process
// with status 1.
#pragma once

#include <cublasLt.h>
#include <cuda_runtime.h>
#include <nccl.h>

#include <unistd.h>

#include <chrono>
#include <csignal>
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

// Parts that travel the other way round a ring have a stream of their own. Weights and gradients have a stream of their own, and so have copies from host memory and copies to it. Each stage of a
// pipeline sends on streams of its own, by direction and by the parity of the stage; those to a stage of equal parity are on a
// third.
enum Queue {
    kCompute, kComm, kDown, kWeights, kHost, kToHost, kForwardEven, kForwardOdd, kBackwardEven, kBackwardOdd, kForwardWrap,
    kBackwardWrap, kQueues
};
inline constexpr const char* kQueueNames[kQueues] = {
    "compute", "comm", "down", "weights", "host", "to_host", "forward_even", "forward_odd", "backward_even", "backward_odd",
    "forward_wrap", "backward_wrap"};

// A task of a frame.
struct Task {
    const char* frame = nullptr;  // null: no task
    int64_t layer = 0;
    Queue queue = kCompute;
    int number = 0;  // in its frame
    const char *name = "", *kind = "";  // kind: compute, copy, pack, unpack, or the name of a collective
};

// The rank and the task that a failure names, and the communicators that it aborts, which releases waiting ranks.
struct Current {
    int64_t rank = 0;
    Task task;
    std::vector<ncclComm_t> communicators;
};
inline Current current;

// Limit of ncclCommAbort before the process exits without it.
inline constexpr unsigned kGraceSeconds = 2;

[[noreturn]] inline void fail(const char* file, int line, const char* call, const char* why) {
    const Task& task = current.task;
    std::string where = "rank " + std::to_string(current.rank) + " failed";
    if (task.frame != nullptr)
        where += " at task " + std::to_string(task.number) + " of `" + task.frame + "` at layer " +
                 std::to_string(task.layer) + " (" + task.name + ")";
    std::fprintf(stderr, "error: %s: %s:%d: %s: %s\n", where.c_str(), file, line, call, why);
    std::fflush(stderr);
    std::signal(SIGALRM, [](int) { ::_exit(1); });
    ::alarm(kGraceSeconds);
    for (ncclComm_t comm : current.communicators) ncclCommAbort(comm);
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
