// Tasks by name: ranges for profilers, and what was measured of them when asked for.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include "check.hpp"

#if defined(__has_include)
#if __has_include(<nvtx3/nvToolsExt.h>)
#include <nvtx3/nvToolsExt.h>
#define ITHACA_HAS_NVTX 1
#endif
#endif
#ifndef ITHACA_HAS_NVTX
#define ITHACA_HAS_NVTX 0
#endif

namespace ithaca {

enum Queue { kCompute = 0, kComm = 1 };

// A task of a frame, as the generated source names it.
struct TaskOf {
    const char* frame;
    int number;  // in its frame
    const char* name;
    const char* kind;  // compute, copy, pack, unpack, or the name of a collective
};

// A named range of what the host issues, as profilers show it.
class NamedRange {
  public:
    explicit NamedRange([[maybe_unused]] const char* name) {
#if ITHACA_HAS_NVTX
        nvtxRangePushA(name);
#endif
    }
    ~NamedRange() {
#if ITHACA_HAS_NVTX
        nvtxRangePop();
#endif
    }
    NamedRange(const NamedRange&) = delete;
    NamedRange& operator=(const NamedRange&) = delete;
};

// A JSON string.
inline std::string quoted(const std::string& text) {
    std::string out = "\"";
    for (const char c : text) {
        char escaped[8];
        if (c == '"' || c == '\\') out += '\\';
        if (static_cast<unsigned char>(c) >= 0x20) {
            out += c;
            continue;
        }
        std::snprintf(escaped, sizeof escaped, "\\u%04x", static_cast<unsigned>(c));
        out += escaped;
    }
    return out + "\"";
}

// One run of one task.
struct Measured {
    TaskOf task;
    int64_t layer;
    Queue queue;
    cudaEvent_t begin, end;
    bool communicates = false;
    int64_t bytes = 0;       // sent to other ranks
    float from = 0, to = 0;  // milliseconds since the start of the step
};

// What is measured of a step, when it is.
class Profile {
  public:
    Profile() = default;
    ~Profile() { clear(); }
    Profile(const Profile&) = delete;
    Profile& operator=(const Profile&) = delete;

    bool is_on() const { return on_; }

    // Tasks that are issued from now on are measured, times counting from here.
    void start(cudaStream_t stream) {
        clear();
        on_ = true;
        origin_ = event();
        ITHACA_CUDA(cudaEventRecord(origin_, stream));
    }

    void begin(const TaskOf& task, int64_t layer, Queue queue, cudaStream_t stream) {
        runs_.push_back({task, layer, queue, event(), event()});
        ITHACA_CUDA(cudaEventRecord(runs_.back().begin, stream));
    }
    void end(cudaStream_t stream) { ITHACA_CUDA(cudaEventRecord(runs_.back().end, stream)); }

    // The task that was begun last sends so much to other ranks.
    void sends(int64_t bytes) {
        if (!on_ || runs_.empty()) return;
        runs_.back().communicates = true;
        runs_.back().bytes += bytes;
    }

    // Reads the times; both streams must be done.
    void stop() {
        on_ = false;
        for (Measured& run : runs_) {
            ITHACA_CUDA(cudaEventElapsedTime(&run.from, origin_, run.begin));
            ITHACA_CUDA(cudaEventElapsedTime(&run.to, origin_, run.end));
        }
    }

    // Two tables: tasks by name, the longest first, and collectives with the rate at which this rank sent. The time of
    // a collective includes its wait for other ranks.
    void print() const {
        struct Sum {
            int64_t count = 0, bytes = 0;
            double ms = 0;
        };
        std::map<std::string, Sum> tasks, collectives;
        double all = 0;
        auto add = [](Sum& sum, const Measured& run) {
            ++sum.count;
            sum.bytes += run.bytes;
            sum.ms += run.to - run.from;
        };
        for (const Measured& run : runs_) {
            add(tasks[std::string(run.task.frame) + ": " + run.task.name], run);
            all += run.to - run.from;
            if (run.communicates) add(collectives[run.task.kind], run);
        }
        std::vector<std::pair<std::string, Sum>> rows(tasks.begin(), tasks.end());
        std::stable_sort(rows.begin(), rows.end(), [](const auto& a, const auto& b) { return a.second.ms > b.second.ms; });
        std::printf("%10s  %7s  %6s  task\n", "ms", "count", "share");
        for (const auto& [name, sum] : rows)
            std::printf("%10.4f  %7lld  %5.1f%%  %s\n", sum.ms, static_cast<long long>(sum.count),
                        all > 0 ? 100 * sum.ms / all : 0, name.c_str());
        std::printf("%10s  %7s  %14s  %8s  collective\n", "ms", "count", "bytes sent", "GB/s");
        for (const auto& [name, sum] : collectives)
            std::printf("%10.4f  %7lld  %14lld  %8.2f  %s\n", sum.ms, static_cast<long long>(sum.count),
                        static_cast<long long>(sum.bytes), sum.ms > 0 ? static_cast<double>(sum.bytes) / sum.ms * 1e-6 : 0,
                        name.c_str());
    }

    // Writes the step in the trace event format of Chrome and Perfetto: the process is the rank, the thread the stream. Beside
    // it, in `otherData`, the same of the rank as of simulated traces: seconds, how busy its streams are, and each collective
    // with the time in which its compute stream stood still.
    void write_trace(const std::string& path, int64_t rank) const {
        std::ofstream out(path);
        const std::string pid = "\"pid\":" + std::to_string(rank);
        out << "{\"displayTimeUnit\":\"ms\",\"otherData\":{\"source\":\"measured\",\"ranks\":[\n" << summary(rank)
            << "\n]},\"traceEvents\":[\n";
        out << "{\"ph\":\"M\",\"name\":\"process_name\"," << pid << ",\"args\":{\"name\":\"rank " << rank
            << " (measured)\"}},\n{\"ph\":\"M\",\"name\":\"process_sort_index\"," << pid << ",\"args\":{\"sort_index\":" << rank
            << "}}";
        const char* const streams[] = {"compute", "comm"};
        for (int stream : {0, 1})
            out << ",\n{\"ph\":\"M\",\"name\":\"thread_name\"," << pid << ",\"tid\":" << stream
                << ",\"args\":{\"name\":\"" << streams[stream] << "\"}}";
        for (const Measured& run : runs_) {
            out << ",\n{\"ph\":\"X\",\"name\":" << quoted(run.task.name) << ",\"cat\":" << quoted(run.task.kind) << "," << pid
                << ",\"tid\":" << static_cast<int>(run.queue) << ",\"ts\":" << std::to_string(run.from * 1e3)
                << ",\"dur\":" << std::to_string((run.to - run.from) * 1e3) << ",\"args\":{\"frame\":" << quoted(run.task.frame)
                << ",\"layer\":" << run.layer << ",\"task\":" << run.task.number;
            if (run.communicates) out << ",\"bytes_sent\":" << run.bytes;
            out << "}}";
        }
        out << "\n]}\n";
        out.close();
        if (!out) throw Error("cannot write " + path);
    }

  private:
    static std::string json(double x) {
        char text[32];
        std::snprintf(text, sizeof text, "%.9g", x);
        return text;
    }

    // What the step says of the rank, as JSON.
    std::string summary(int64_t rank) const {
        std::vector<const Measured*> streams[2];
        double seconds = 0, busy[2] = {0, 0};
        for (const Measured& run : runs_) {
            streams[run.queue].push_back(&run);
            busy[run.queue] += (run.to - run.from) * 1e-3;
            seconds = std::max(seconds, run.to * 1e-3);
        }
        for (auto& runs : streams)
            std::stable_sort(runs.begin(), runs.end(), [](const Measured* a, const Measured* b) { return a->from < b->from; });
        struct Sum {
            std::string name;
            int64_t count = 0;
            double seconds = 0, exposed = 0;
        };
        std::map<std::pair<std::string, int>, Sum> collectives;
        for (const Measured* run : streams[kComm]) {
            double alone = run->to - run->from;
            for (const Measured* kernel : streams[kCompute])
                alone -= std::max(0.0f, std::min(kernel->to, run->to) - std::max(kernel->from, run->from));
            Sum& sum = collectives[{run->task.frame, run->task.number}];
            sum.name = run->task.name;
            ++sum.count;
            sum.seconds += (run->to - run->from) * 1e-3;
            sum.exposed += std::max(alone, 0.0) * 1e-3;
        }
        const auto part = [&](Queue queue) { return json(seconds > 0 ? busy[queue] / seconds : 0); };
        std::string out = "{\"collectives\":[";
        for (const auto& [place, sum] : collectives) {
            if (out.back() != '[') out += ',';
            out += "{\"count\":" + std::to_string(sum.count) + ",\"exposed_seconds\":" + json(sum.exposed) +
                   ",\"frame\":" + quoted(place.first) + ",\"name\":" + quoted(sum.name) + ",\"seconds\":" + json(sum.seconds) + "}";
        }
        return out + "],\"occupancy\":{\"comm\":" + part(kComm) + ",\"compute\":" + part(kCompute) + "},\"rank\":" +
               std::to_string(rank) + ",\"seconds\":" + json(seconds) + "}";
    }

    cudaEvent_t event() {
        cudaEvent_t made = nullptr;
        ITHACA_CUDA(cudaEventCreateWithFlags(&made, 0));
        events_.push_back(made);
        return made;
    }
    void clear() {
        for (cudaEvent_t event : events_) cudaEventDestroy(event);
        events_.clear();
        runs_.clear();
    }

    bool on_ = false;
    cudaEvent_t origin_ = nullptr;
    std::vector<cudaEvent_t> events_;
    std::vector<Measured> runs_;
};

}  // namespace ithaca
