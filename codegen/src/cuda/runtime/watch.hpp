// Waiting for streams by looking: whether they come past their tasks, whether a communicator failed in the background, and
// how long nothing has gone on. What goes wrong is put down to a task; communicators are aborted and the process ends.
#pragma once

#include <csignal>
#include <unistd.h>

#include <deque>
#include <string>
#include <vector>

#include "check.hpp"
#include "communicators.hpp"
#include "patience.hpp"
#include "task.hpp"

namespace ithaca {

class Watch {
  public:
    // A stream is given at most so many tasks before the first of them ends: a queue that is full is waited for by the
    // driver, and there nobody looks.
    static constexpr size_t kAhead = 128;
    // How long communicators may take to end when the process has to.
    static constexpr unsigned kGraceSeconds = 2;

    // Something has to go on at least every so many seconds.
    Watch(int64_t rank, double seconds, std::vector<ncclComm_t> communicators)
        : rank_(rank), seconds_(seconds), communicators_(std::move(communicators)) {
        current() = this;
        ending() = {[] { return current()->where(); }, [] { current()->abort(); }};
    }
    ~Watch() {
        for (cudaEvent_t event : events_) cudaEventDestroy(event);
        current() = nullptr;
        ending() = {};
    }
    Watch(const Watch&) = delete;
    Watch& operator=(const Watch&) = delete;

    // The task that is issued now.
    void begin(const TaskOf& task, int64_t layer) { here_ = {task, layer, nullptr, ++n_issued_}; }

    // It has been issued.
    void issued(Queue queue, cudaStream_t stream) {
        Mark mark = here_;
        if (spare_.empty()) {
            cudaEvent_t made = nullptr;
            ITHACA_CUDA(cudaEventCreateWithFlags(&made, cudaEventDisableTiming));
            events_.push_back(made);
            spare_.push_back(made);
        }
        mark.done = spare_.back();
        spare_.pop_back();
        ITHACA_CUDA(cudaEventRecord(mark.done, stream));
        marks_[queue].push_back(mark);
        if (marks_[queue].size() >= kAhead) wait([&] { return marks_[queue].size() < kAhead; });
    }

    // Waits until what was asked of a communicator is issued: events that are recorded before do not wait for it.
    void settle(ncclComm_t comm) {
        if (is_busy(comm)) wait([&] { return !is_busy(comm); });
    }

    // Waits until all that was given to the two streams has ended, what belongs to no task included.
    void wait(const cudaStream_t (&streams)[2]) {
        begin({}, 0);
        for (Queue queue : {kCompute, kComm}) issued(queue, streams[queue]);
        wait([&] { return marks_[kCompute].empty() && marks_[kComm].empty(); });
    }

  private:
    struct Mark {
        TaskOf task = {};  // of no frame where it is none
        int64_t layer = 0;
        cudaEvent_t done = nullptr;
        int64_t number = 0;  // in order of issue
    };

    static Watch*& current() {
        static Watch* watch = nullptr;
        return watch;
    }

    template <typename Reached>
    void wait(const Reached& reached) {
        Patience patience(seconds_);
        for (;;) {
            const bool went_on = look();
            for (ncclComm_t comm : communicators_) {
                const ncclResult_t state = state_of(comm);
                if (!has_failed(state)) continue;
                at_oldest(kComm);
                fail(__FILE__, __LINE__, "ncclCommGetAsyncError", ncclGetErrorString(state));
            }
            if (reached()) return;
            if (went_on) patience.renew();
            if (!patience.pause()) {
                at_oldest(kCompute);
                fail(__FILE__, __LINE__, "waiting", patience.complaint().c_str());
            }
        }
    }

    // Forgets the tasks that streams have come past; whether there are any.
    bool look() {
        bool went_on = false;
        for (std::deque<Mark>& marks : marks_)
            while (!marks.empty()) {
                const cudaError_t status = cudaEventQuery(marks.front().done);
                if (status == cudaErrorNotReady) break;
                if (status != cudaSuccess) {
                    at_oldest(kCompute);
                    fail(__FILE__, __LINE__, "cudaEventQuery", cudaGetErrorString(status));
                }
                spare_.push_back(marks.front().done);
                marks.pop_front();
                went_on = true;
            }
        return went_on;
    }

    // A failure is that of the first task that has not ended, or of the one that is being issued where all have: tasks wait for
    // those before them only. One of `queue` comes before others where that is the communication stream.
    void at_oldest(Queue queue) {
        const std::deque<Mark>&compute = marks_[kCompute], &comm = marks_[kComm];
        if (!comm.empty() && (queue == kComm || compute.empty() || comm.front().number < compute.front().number))
            here_ = comm.front();
        else if (!compute.empty()) here_ = compute.front();
    }

    std::string where() const {
        const std::string rank = "rank " + std::to_string(rank_) + " failed";
        if (here_.task.frame == nullptr) return rank;
        return rank + " at task " + std::to_string(here_.task.number) + " of `" + here_.task.frame + "` at layer " +
               std::to_string(here_.layer) + " (" + here_.task.name + ")";
    }

    // Ends what other ranks wait for; where that takes too long the process ends without.
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
