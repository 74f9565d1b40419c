// Tasks while they run: the wait for them, and their times for --profile and --trace. Streams are polled, so that failures in the
// background and hangs are found. A failure names its task; the communicators are aborted and the process ends.
#pragma once

#include <algorithm>
#include <deque>
#include <map>

#include "ranks.hpp"

namespace ithaca {

// One run of a task. Times are measured on request.
struct Run {
    Task task;
    int64_t number = 0;  // in order of issue
    cudaEvent_t begin = nullptr, done = nullptr;
    bool communicates = false;
    int64_t bytes = 0;       // sent to other ranks
    float from = 0, to = 0;  // milliseconds since the start of the step
};

class Watch : NotCopied {
  public:
    // Tasks in flight per stream. The driver would block in a full queue, where nothing is polled.
    static constexpr size_t kAhead = 128;
    bool records = false;  // tasks are recorded, and do not run
    Watch(double seconds, const Communicators& communicators) : seconds_(seconds) {
        // Programs that run in turns share communicators, or have some of their own.
        auto& all = current.communicators;
        for (const Communicator& c : communicators.all)
            if (std::find(all.begin(), all.end(), c.comm) == all.end()) all.push_back(c.comm);
    }
    ~Watch() {
        for (cudaEvent_t event : events_) cudaEventDestroy(event);
        current = {current.rank, {}, {}};
    }
    // Tasks issued from now on are measured. Times count from here.
    void measure(cudaStream_t stream) { origin_ = event(stream); }
    // The runs that were measured, in order of their ends on each stream.
    const std::vector<Run>& measured() const { return measured_; }
    // The task that is issued next.
    void begin(const Task& task, cudaStream_t stream) {
        current.task = task;
        here_ = {task, ++n_issued_};
        if (origin_ != nullptr && !records) here_.begin = event(stream);
    }
    // It sends so many bytes to other ranks.
    void sends(int64_t bytes) {
        here_.communicates = true;
        here_.bytes += bytes;
    }
    // It has been issued.
    void issued(Queue queue, cudaStream_t stream) {
        if (records) return;
        here_.done = event(stream);
        runs_[queue].push_back(here_);
        if (runs_[queue].size() >= kAhead) wait([&] { return runs_[queue].size() < kAhead; });
    }
    // Waits until a call of a communicator is issued: an event recorded before would not wait for it.
    void settle(ncclComm_t comm) {
        if (is_busy(comm)) wait([&] { return !is_busy(comm); });
    }
    // Waits until a stream has done all that was issued.
    void reach(cudaStream_t stream) {
        const cudaEvent_t reached = event(stream);
        wait([&] {
            const cudaError_t status = cudaEventQuery(reached);
            if (status != cudaSuccess && status != cudaErrorNotReady) fail(__FILE__, __LINE__, "cudaEventQuery", cudaGetErrorString(status));
            return status == cudaSuccess;
        });
        spare_.push_back(reached);
    }
    // Waits until all streams are idle.
    void wait(const cudaStream_t (&streams)[kQueues]) {
        for (int queue = 0; queue < kQueues; ++queue) {
            here_ = {current.task = {}, ++n_issued_};
            issued(static_cast<Queue>(queue), streams[queue]);
        }
        wait([&] { return std::all_of(std::begin(runs_), std::end(runs_), [](const auto& runs) { return runs.empty(); }); });
    }

  private:
    cudaEvent_t event(cudaStream_t stream) {
        if (spare_.empty()) {
            spare_.push_back(nullptr);
            ITHACA_CUDA(cudaEventCreateWithFlags(&spare_.back(), 0));
            events_.push_back(spare_.back());
        }
        const cudaEvent_t event = spare_.back();
        spare_.pop_back();
        ITHACA_CUDA(cudaEventRecord(event, stream));
        return event;
    }

    template <typename Reached>
    void wait(const Reached& reached) {
        for (Deadline deadline(seconds_);;) {
            if (advance()) deadline.renew();
            for (ncclComm_t comm : current.communicators)
                if (const ncclResult_t state = state_of(comm); has_failed(state))
                    blame(kComm), fail(__FILE__, __LINE__, "ncclCommGetAsyncError", ncclGetErrorString(state));
            if (reached()) return;
            if (!deadline.pause()) blame(kCompute), fail(__FILE__, __LINE__, "waiting", deadline.message().c_str());
        }
    }
    // Forgets finished tasks; whether there were any.
    bool advance() {
        bool advanced = false;
        for (std::deque<Run>& runs : runs_) for (; !runs.empty(); runs.pop_front()) {
                Run& run = runs.front();
                const cudaError_t status = cudaEventQuery(run.done);
                if (status == cudaErrorNotReady) break;
                if (status != cudaSuccess) blame(kCompute), fail(__FILE__, __LINE__, "cudaEventQuery", cudaGetErrorString(status));
                if (run.begin != nullptr) {
                    ITHACA_CUDA(cudaEventElapsedTime(&run.from, origin_, run.begin));
                    ITHACA_CUDA(cudaEventElapsedTime(&run.to, origin_, run.done));
                    measured_.push_back(run);
                    spare_.push_back(run.begin);
                }
                spare_.push_back(run.done);
                advanced = true;
            }
        return advanced;
    }
    // A failure belongs to the first unfinished task, since tasks wait only for earlier ones. For a failure of a
    // communicator, that is the first one on a stream that communicates.
    void blame(Queue queue) {
        const Run* first = nullptr;
        for (int other = queue == kCompute ? kCompute : kComm; other < kQueues; ++other)
            if (!runs_[other].empty() && (first == nullptr || runs_[other].front().number < first->number)) first = &runs_[other].front();
        if (first != nullptr) current.task = first->task;
        else if (!runs_[kCompute].empty()) current.task = runs_[kCompute].front().task;
    }

    double seconds_;
    cudaEvent_t origin_ = nullptr;
    std::vector<cudaEvent_t> events_, spare_;
    std::deque<Run> runs_[kQueues];
    std::vector<Run> measured_;
    Run here_;
    int64_t n_issued_ = 0;
};

// Tasks by name, the longest first; collectives with the rate at which this rank sent, waits included.
inline void print_profile(const std::vector<Run>& runs) {
    struct Sum {
        long long count = 0, bytes = 0;
        double ms = 0;
    };
    std::map<std::string, Sum> tasks, collectives;
    double all = 0;
    for (const Run& run : runs) {
        const auto add = [&](Sum& sum) { sum = {sum.count + 1, sum.bytes + run.bytes, sum.ms + (run.to - run.from)}; };
        add(tasks[std::string(run.task.frame) + ": " + run.task.name]);
        if (run.communicates) add(collectives[run.task.kind]);
        all += run.to - run.from;
    }
    std::vector<std::pair<std::string, Sum>> rows(tasks.begin(), tasks.end());
    std::stable_sort(rows.begin(), rows.end(), [](const auto& a, const auto& b) { return a.second.ms > b.second.ms; });
    std::printf("%10s  %7s  %6s  task\n", "ms", "count", "share");
    for (const auto& [name, sum] : rows)
        std::printf("%10.4f  %7lld  %5.1f%%  %s\n", sum.ms, sum.count, all > 0 ? 100 * sum.ms / all : 0, name.c_str());
    std::printf("%10s  %7s  %14s  %8s  collective\n", "ms", "count", "bytes sent", "GB/s");
    for (const auto& [name, sum] : collectives)
        std::printf("%10.4f  %7lld  %14lld  %8.2f  %s\n", sum.ms, sum.count, sum.bytes,
                    sum.ms > 0 ? static_cast<double>(sum.bytes) / sum.ms * 1e-6 : 0, name.c_str());
}

// The trace event format of Chrome and Perfetto: the process is the rank, the thread the stream. Names of tasks and frames need
// no escapes.
inline void write_trace(const std::vector<Run>& runs, const std::string& path, int64_t rank) {
    std::ofstream out(path);
    const std::string pid = "\"pid\":" + std::to_string(rank), meta = "{\"ph\":\"M\",\"name\":\"";
    out << "{\"displayTimeUnit\":\"ms\",\"otherData\":{\"source\":\"measured\"},\"traceEvents\":[\n" << meta << "process_name\"," << pid
        << ",\"args\":{\"name\":\"rank " << rank << " (measured)\"}},\n" << meta << "process_sort_index\"," << pid
        << ",\"args\":{\"sort_index\":" << rank << "}}";
    for (int stream = 0; stream < kQueues; ++stream)
        if (stream <= kComm || std::any_of(runs.begin(), runs.end(), [&](const Run& run) { return run.task.queue == stream; }))
            out << ",\n" << meta << "thread_name\"," << pid << ",\"tid\":" << stream << ",\"args\":{\"name\":\"" << kQueueNames[stream] << "\"}}";
    for (const Run& run : runs)
        out << ",\n{\"ph\":\"X\",\"name\":\"" << run.task.name << "\",\"cat\":\"" << run.task.kind << "\"," << pid << ",\"tid\":"
            << run.task.queue << ",\"ts\":" << std::to_string(run.from * 1e3) << ",\"dur\":" << std::to_string((run.to - run.from) * 1e3)
            << ",\"args\":{\"frame\":\"" << run.task.frame << "\",\"layer\":" << run.task.layer << ",\"task\":" << run.task.number
            << (run.communicates ? ",\"bytes_sent\":" + std::to_string(run.bytes) : "") << "}}";
    out << "\n]}\n";
    out.close();
    if (!out) throw Error("cannot write " + path);
}

}  // namespace ithaca
