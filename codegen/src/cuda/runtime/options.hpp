// Options of an emitted program, and what every command line does with them.
#pragma once

#include "compare.hpp"

namespace ithaca {

class Options {
  public:
    Options(int argc, char** argv) {
        // Those that take a value come first.
        static const std::vector<std::string> known = {"--weights", "--inputs", "--random-weights", "--output", "--tolerance", "--steps",
                                                       "--trace", "--timeout", "--self-check", "--graph", "--profile", "--help", "-h"};
        for (int i = 1; i < argc; ++i) {
            const std::string option = argv[i];
            const auto found = std::find(known.begin(), known.end(), option);
            if (found == known.end()) {
                std::string all;
                for (const std::string& name : known) all += (all.empty() ? "" : ", ") + name;
                throw Error("unknown option `" + option + "`; there are " + all);
            }
            const bool is_flag = found - known.begin() >= 8;
            if (has(option) && option != "--weights") throw Error(option + " is given twice");
            if (!is_flag && i + 1 == argc) throw Error(option + " takes a value");
            given_[option].push_back(is_flag ? "" : argv[++i]);
        }
        if (has("--tolerance") && !has("--self-check")) throw Error("--tolerance is that of --self-check, which is not given");
    }
    bool has(const std::string& option) const { return given_.count(option) != 0; }
    std::vector<std::string> all(const std::string& option) const { return has(option) ? given_.at(option) : std::vector<std::string>{}; }
    std::string text(const std::string& option) const { return has(option) ? given_.at(option).front() : ""; }
    // `otherwise` without the option.
    double number(const std::string& option, double otherwise) const {
        if (!has(option)) return otherwise;
        const std::string text = this->text(option);
        char* end = nullptr;
        const double value = std::strtod(text.c_str(), &end);
        if (text.empty() || *end != '\0' || !(value >= 0) || value > 1e15)
            throw Error(option + " takes a number that is not negative, not `" + text + "`");
        return value;
    }
    int64_t integer(const std::string& option, int64_t otherwise, int64_t least) const {
        int64_t value = otherwise;
        if (has(option) && (!parse_integer(text(option), value) || value < least))
            throw Error(option + " takes a whole number from " + std::to_string(least) + " on, not `" + text(option) + "`");
        return value;
    }

  private:
    std::map<std::string, std::vector<std::string>> given_;
};

// What options ask of every program.
struct Request {
    Request(const Options& options, int64_t least_steps)
        : seconds(static_cast<double>(options.integer("--timeout", 600, 1))), steps(options.integer("--steps", 1, least_steps)),
          tolerance(options.number("--tolerance", -1)), checks(options.has("--self-check")), graph(options.has("--graph")), prints(options.has("--profile")),
          trace(options.text("--trace")), output(options.text("--output")) {}

    bool measures(int64_t step) const { return step + 1 == steps && (prints || !trace.empty()); }
    // Runs a step, and prints how long it took.
    void run(Device& device, const char* name, int64_t number, bool is_measured) const {
        if (graph && device.program.counts > 0)
            throw Error("--graph: the host reads how many rows of experts are filled, which no graph has; "
                        "a plan made with --runtime graph,nccl,all-slots sends all rows");
        if (is_measured) device.watch.measure(device.streams[kCompute]);
        const auto start = std::chrono::steady_clock::now();
        device.run(graph && number > 0 && !is_measured);
        const std::chrono::duration<double, std::milli> time = std::chrono::steady_clock::now() - start;
        if (device.rank == 0) std::printf("%s %lld: %.3f ms\n", name, static_cast<long long>(number), time.count());
    }
    void report(Device& device) const {
        if (device.rank == 0 && prints) print_profile(device.watch.measured());
        if (!trace.empty()) write_trace(device.watch.measured(), trace + "." + std::to_string(device.rank) + ".json", device.rank);
    }

    double seconds;
    int64_t steps;
    double tolerance;  // negative: by element type
    bool checks, graph, prints;
    std::string trace, output;
};

// Opens the files, and the GPU of this process.
inline World begin(const Options& options, const Program& program, int64_t n_ranks, bool has_reference, Tensors& tensors) {
    tensors.seed = options.integer("--random-weights", -1, 0);
    tensors.id_bound = program.id_bound;
    const World self = world_of_environment();
    current.rank = self.rank;
    if (self.size != n_ranks)
        throw Error("the program is for " + std::to_string(n_ranks) + " ranks, but " + std::to_string(self.size) + " were started");
    if (options.has("--self-check") && !has_reference) throw Error("the program was emitted without a reference to check against");
    for (const std::string& path : options.all("--weights")) tensors.weights.add(path);
    if (options.has("--inputs")) tensors.inputs.add(options.text("--inputs"));

    // A queue of the device for each stream: no stream may wait behind a collective of another.
    setenv("CUDA_DEVICE_MAX_CONNECTIONS", "16", 0);
    int n_devices = 0;
    ITHACA_CUDA(cudaGetDeviceCount(&n_devices));
    if (n_devices == 0) throw Error("no GPU");
    if (self.local_rank >= n_devices && std::getenv("NCCL_MULTI_RANK_GPU_ENABLE") == nullptr)
        throw Error("local rank " + std::to_string(self.local_rank) + " has no GPU: the machine has " + std::to_string(n_devices));
    ITHACA_CUDA(cudaSetDevice(static_cast<int>(self.local_rank % n_devices)));
    return self;
}

inline void print_memory(const Program& program, int64_t bytes) {
    std::printf("%lld ranks, %.1f MiB on rank 0\n", static_cast<long long>(program.mesh.ranks()), static_cast<double>(bytes) / (1 << 20));
}

// Status 2: the command line, the environment or a file is wrong. Status 1: a check or a call failed.
template <typename Run>
int with_options(int argc, char** argv, const char* help, const Run& run) {
    try {
        const Options options(argc, argv);
        if (options.has("--help") || options.has("-h")) return std::printf("%s", replaced(help, "%s", argv[0]).c_str()), 0;
        const int status = run(options);
        std::fflush(stdout);
        return status;
    } catch (const std::exception& error) {
        std::fprintf(stderr, "error: %s\n", error.what());
        std::fflush(stderr);
        std::_Exit(2);
    }
}

}  // namespace ithaca
