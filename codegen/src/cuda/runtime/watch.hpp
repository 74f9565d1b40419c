// Waits for streams by polling, so that failures in the background and hangs are found. A failure names its task; the
// communicators are aborted and the process ends.
#pragma once

#include <csignal>
#include <deque>

#include "communicators.hpp"
#include "profile.hpp"

namespace ithaca {

class Watch : NotCopied {
  public:
    // Tasks in flight per stream. The driver would block in a full queue, where nothing is polled.
    static constexpr size_t kAhead = 128;
    // Limit of ncclCommAbort before the process exits without it.
    static constexpr unsigned kGraceSeconds = 2;

    Watch(int64_t rank, double seconds, std::vector<ncclComm_t> communicators)
        : rank_(rank), seconds_(seconds), communicators_(std::move(communicators)) {
        current = this;
        failure_handler = {[] { return current->where(); }, [] { current->abort(); }};
    }
    ~Watch() {
        for (cudaEvent_t event : events_) cudaEventDestroy(event);
        current = nullptr;
        failure_handler = {};
    }
    // The task that is issued next.
    void begin(const Task& task) { here_ = {task, nullptr, ++n_issued_}; }
    // It has been issued.
    void issued(Queue queue, cudaStream_t stream) {
        if (spare_.empty()) {
            spare_.push_back(nullptr);
            ITHACA_CUDA(cudaEventCreateWithFlags(&spare_.back(), cudaEventDisableTiming));
            events_.push_back(spare_.back());
        }
        Mark mark = here_;
        mark.done = spare_.back();
        spare_.pop_back();
        ITHACA_CUDA(cudaEventRecord(mark.done, stream));
        marks_[queue].push_back(mark);
        if (marks_[queue].size() >= kAhead) wait([&] { return marks_[queue].size() < kAhead; });
    }
    // Waits until a call of a communicator is issued: an event recorded before would not wait for it.
    void settle(ncclComm_t comm) {
        if (is_busy(comm)) wait([&] { return !is_busy(comm); });
    }
    // Waits until both streams are idle.
    void wait(const cudaStream_t (&streams)[2]) {
        begin({});
        for (Queue queue : {kCompute, kComm}) issued(queue, streams[queue]);
        wait([&] { return marks_[kCompute].empty() && marks_[kComm].empty(); });
    }
  private:
    struct Mark {
        Task task;
        cudaEvent_t done = nullptr;
        int64_t number = 0;  // in order of issue
    };
    static inline Watch* current = nullptr;

    template <typename Reached>
    void wait(const Reached& reached) {
        for (Deadline deadline(seconds_);;) {
            if (advance()) deadline.renew();
            for (ncclComm_t comm : communicators_) {
                const ncclResult_t state = state_of(comm);
                if (!has_failed(state)) continue;
                blame(kComm);
                fail(__FILE__, __LINE__, "ncclCommGetAsyncError", ncclGetErrorString(state));
            }
            if (reached()) return;
            if (deadline.pause()) continue;
            blame(kCompute);
            fail(__FILE__, __LINE__, "waiting", deadline.message().c_str());
        }
    }
    // Forgets finished tasks; whether there were any.
    bool advance() {
        bool advanced = false;
        for (std::deque<Mark>& marks : marks_)
            while (!marks.empty()) {
                const cudaError_t status = cudaEventQuery(marks.front().done);
                if (status == cudaErrorNotReady) break;
                if (status != cudaSuccess) {
                    blame(kCompute);
                    fail(__FILE__, __LINE__, "cudaEventQuery", cudaGetErrorString(status));
                }
                spare_.push_back(marks.front().done);
                marks.pop_front();
                advanced = true;
            }
        return advanced;
    }
    // A failure belongs to the first unfinished task, since tasks wait only for earlier ones. For a failure of a
    // communicator, that is the first one on the communication stream.
    void blame(Queue queue) {
        const std::deque<Mark>&compute = marks_[kCompute], &comm = marks_[kComm];
        if (!comm.empty() && (queue == kComm || compute.empty() || comm.front().number < compute.front().number))
            here_ = comm.front();
        else if (!compute.empty()) here_ = compute.front();
    }

    std::string where() const {
        const std::string rank = "rank " + std::to_string(rank_) + " failed";
        if (here_.task.frame == nullptr) return rank;
        return rank + " at task " + std::to_string(here_.task.number) + " of `" + here_.task.frame + "` at layer " +
               std::to_string(here_.task.layer) + " (" + here_.task.name + ")";
    }

    void abort() {
        std::signal(SIGALRM, [](int) { ::_exit(1); });
        ::alarm(kGraceSeconds);
        for (ncclComm_t comm : communicators_) ncclCommAbort(comm);
        communicators_.clear();
    }

    int64_t rank_;
    double seconds_;
    std::vector<ncclComm_t> communicators_;
    std::vector<cudaEvent_t> events_, spare_;
    std::deque<Mark> marks_[2];
    Mark here_;
    int64_t n_issued_ = 0;
};

}  // namespace ithaca
