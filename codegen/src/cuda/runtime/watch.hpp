// Tasks while they run: their times, for --profile, --trace and NVTX, and the wait for them. Streams are polled, so that failures
// in the background and hangs are found. A failure names its task; the communicators are aborted and the process ends.
#pragma once

#include <algorithm>
#include <csignal>
#include <deque>
#include <fstream>
#include <map>

#include "ranks.hpp"

#if __has_include(<nvtx3/nvToolsExt.h>)
#include <nvtx3/nvToolsExt.h>
#define ITHACA_RANGE_PUSH(name) nvtxRangePushA(name)
#define ITHACA_RANGE_POP() nvtxRangePop()
#else
#define ITHACA_RANGE_PUSH(name) static_cast<void>(name)
#define ITHACA_RANGE_POP() static_cast<void>(0)
#endif

namespace ithaca {

enum Queue { kCompute = 0, kComm = 1 };

// A task of a frame.
struct Task {
    const char* frame = nullptr;  // null: no task
    int64_t layer = 0;
    Queue queue = kCompute;
    int number = 0;  // in its frame
    const char *name = "", *kind = "";  // kind: compute, copy, pack, unpack, or the name of a collective
};

inline std::string json_string(const std::string& text) {
    std::string out = "\"";
    for (const char c : text) {
        char escaped[8] = {c, 0};
        if (c == '"' || c == '\\') out += '\\';
        if (static_cast<unsigned char>(c) < 0x20) std::snprintf(escaped, sizeof escaped, "\\u%04x", static_cast<unsigned>(c));
        out += escaped;
    }
    return out + "\"";
}

class Profile : NotCopied {
  public:
    ~Profile() { clear(); }
    // Tasks issued from now on are measured. Times count from here.
    void start(cudaStream_t stream) {
        clear();
        on_ = true;
        origin_ = event(stream);
    }
    void begin(const Task& task, cudaStream_t stream) {
        if (on_) runs_.push_back({task, event(stream)});
    }
    void end(cudaStream_t stream) {
        if (on_) runs_.back().end = event(stream);
    }
    // The last task sends so many bytes to other ranks.
    void sends(int64_t bytes) {
        if (!on_) return;
        runs_.back().communicates = true;
        runs_.back().bytes += bytes;
    }
    // Reads the times. Both streams must be idle.
    void stop() {
        on_ = false;
        for (Run& run : runs_) {
            ITHACA_CUDA(cudaEventElapsedTime(&run.from, origin_, run.begin));
            ITHACA_CUDA(cudaEventElapsedTime(&run.to, origin_, run.end));
        }
    }
    // Tasks by name, the longest first; collectives with the rate at which this rank sent, waits included.
    void print() const {
        std::map<std::string, Sum> tasks, collectives;
        double all = 0;
        for (const Run& run : runs_) {
            tasks[std::string(run.task.frame) + ": " + run.task.name].add(run);
            all += run.to - run.from;
            if (run.communicates) collectives[run.task.kind].add(run);
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
    // The trace event format of Chrome and Perfetto: the process is the rank, the thread the stream. `otherData` has the
    // same summary as simulated traces.
    void write_trace(const std::string& path, int64_t rank) const {
        std::ofstream out(path);
        const std::string pid = "\"pid\":" + std::to_string(rank), meta = "{\"ph\":\"M\",\"name\":\"";
        out << "{\"displayTimeUnit\":\"ms\",\"otherData\":{\"source\":\"measured\",\"ranks\":[\n" << summary(rank)
            << "\n]},\"traceEvents\":[\n" << meta << "process_name\"," << pid << ",\"args\":{\"name\":\"rank " << rank
            << " (measured)\"}},\n" << meta << "process_sort_index\"," << pid << ",\"args\":{\"sort_index\":" << rank << "}}";
        for (int stream : {0, 1})
            out << ",\n" << meta << "thread_name\"," << pid << ",\"tid\":" << stream << ",\"args\":{\"name\":\""
                << (stream == 0 ? "compute" : "comm") << "\"}}";
        for (const auto& [task, begin, end, communicates, bytes, from, to] : runs_)
            out << ",\n{\"ph\":\"X\",\"name\":" << json_string(task.name) << ",\"cat\":" << json_string(task.kind) << "," << pid
                << ",\"tid\":" << task.queue << ",\"ts\":" << std::to_string(from * 1e3) << ",\"dur\":"
                << std::to_string((to - from) * 1e3) << ",\"args\":{\"frame\":" << json_string(task.frame) << ",\"layer\":"
                << task.layer << ",\"task\":" << task.number
                << (communicates ? ",\"bytes_sent\":" + std::to_string(bytes) : "") << "}}";
        out << "\n]}\n";
        out.close();
        if (!out) throw Error("cannot write " + path);
    }

  private:
    struct Run {
        Task task;
        cudaEvent_t begin, end = nullptr;
        bool communicates = false;
        int64_t bytes = 0;       // sent to other ranks
        float from = 0, to = 0;  // milliseconds since the start of the step
    };
    struct Sum {
        long long count = 0, bytes = 0;
        double ms = 0, exposed_ms = 0;

        void add(const Run& run) {
            ++count;
            bytes += run.bytes;
            ms += run.to - run.from;
        }
    };
    // Seconds, occupancy of the streams, and the exposed time of each collective.
    std::string summary(int64_t rank) const {
        const auto json = [](double x) {
            char text[32];
            std::snprintf(text, sizeof text, "%.9g", x);
            return std::string(text);
        };
        double end = 0, busy[2] = {0, 0};
        std::map<std::pair<std::string, int>, std::pair<Sum, const char*>> collectives;
        for (const Run& run : runs_) {
            double exposed = run.to - run.from;
            busy[run.task.queue] += exposed;
            end = std::max(end, static_cast<double>(run.to));
            if (run.task.queue == kCompute) continue;
            for (const Run& other : runs_) if (other.task.queue == kCompute)
                    exposed -= std::max(0.0f, std::min(other.to, run.to) - std::max(other.from, run.from));
            auto& [sum, name] = collectives[{run.task.frame, run.task.number}];
            sum.add(run);
            sum.exposed_ms += std::max(exposed, 0.0);
            name = run.task.name;
        }
        std::string out;
        for (const auto& [place, collective] : collectives) {
            const auto& [sum, name] = collective;
            out += std::string(out.empty() ? "" : ",") + "{\"count\":" + std::to_string(sum.count) + ",\"exposed_seconds\":" +
                   json(sum.exposed_ms * 1e-3) + ",\"frame\":" + json_string(place.first) + ",\"name\":" + json_string(name) +
                   ",\"seconds\":" + json(sum.ms * 1e-3) + "}";
        }
        const auto share = [&](Queue queue) { return json(end > 0 ? busy[queue] / end : 0); };
        return "{\"collectives\":[" + out + "],\"occupancy\":{\"comm\":" + share(kComm) + ",\"compute\":" + share(kCompute) +
               "},\"rank\":" + std::to_string(rank) + ",\"seconds\":" + json(end * 1e-3) + "}";
    }

    cudaEvent_t event(cudaStream_t stream) {
        events_.push_back(nullptr);
        ITHACA_CUDA(cudaEventCreateWithFlags(&events_.back(), 0));
        ITHACA_CUDA(cudaEventRecord(events_.back(), stream));
        return events_.back();
    }
    void clear() {
        for (cudaEvent_t event : events_) cudaEventDestroy(event);
        events_.clear();
        runs_.clear();
    }

    bool on_ = false;
    cudaEvent_t origin_ = nullptr;
    std::vector<cudaEvent_t> events_;
    std::vector<Run> runs_;
};

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
        for (std::deque<Mark>& marks : marks_) while (!marks.empty()) {
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
