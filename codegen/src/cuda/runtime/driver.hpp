// The command line of an emitted program: load, run, time, write, check.
#pragma once

#include <set>

#include "compare.hpp"

namespace ithaca {

struct Options {
    std::vector<std::string> weights;
    std::string inputs, output, trace;
    int64_t seed = -1, steps = 1, seconds = 600;
    double tolerance = -1;  // negative: by element type
    bool self_check = false, profile = false;
};

inline constexpr const char* kHelp =
    "usage: %s [options]\n"
    "  --weights PATH       safetensors file, or a directory of them; may be given again\n"
    "  --inputs PATH        safetensors file of inputs\n"
    "  --random-weights N   weights (and inputs, when none are given) from seed N\n"
    "  --output PATH        write the outputs and the updated tensors, assembled on rank 0\n"
    "  --self-check         compare the outputs with one GPU running the whole program; exit 1 when they differ\n"
    "  --tolerance X        largest relative error of the self-check\n"
    "  --steps N            run N times, each with the tensors that the run before updated, and print the time of each\n"
    "  --profile            measure the tasks of the last step; print rank 0's, and the rate at which it sent\n"
    "  --trace PREFIX       measure the last step and write PREFIX.RANK.json, for Chrome or Perfetto\n"
    "  --timeout SECONDS    end when ranks wait for each other, or for a task, for longer; default 600\n"
    "example: torchrun --no-python --nproc-per-node 8 %s --weights model.safetensors --inputs io.safetensors --self-check\n";

inline constexpr const char* kOptions[] = {"--weights", "--inputs", "--random-weights", "--output", "--self-check",
                                           "--tolerance", "--steps", "--profile", "--trace", "--timeout", "--help"};

inline double number_of(const std::string& option, const char* text) {
    char* end = nullptr;
    const double value = std::strtod(text, &end);
    if (end == text || *end != '\0' || !(value >= 0) || value > 1e15)
        throw Error(option + " takes a number that is not negative, not `" + text + "`");
    return value;
}

inline int64_t integer_of(const std::string& option, const char* text, int64_t least) {
    char* end = nullptr;
    errno = 0;
    const long long value = *text >= '0' && *text <= '9' ? std::strtoll(text, &end, 10) : 0;
    if (end == nullptr || *end != '\0' || errno != 0 || value < least)
        throw Error(option + " takes a whole number from " + std::to_string(least) + " on, not `" + text + "`");
    return value;
}

inline Options parse(int argc, char** argv) {
    Options options;
    std::set<std::string> given;
    for (int i = 1; i < argc; ++i) {
        const std::string option = argv[i];
        if (option == "--help" || option == "-h") {
            std::printf(kHelp, argv[0], argv[0]);
            std::exit(0);
        }
        if (std::find(std::begin(kOptions), std::end(kOptions), option) == std::end(kOptions)) {
            std::string all;
            for (const char* known : kOptions) all += (all.empty() ? "" : ", ") + std::string(known);
            throw Error("unknown option `" + option + "`; there are " + all);
        }
        if (!given.insert(option).second && option != "--weights") throw Error(option + " is given twice");
        options.self_check |= option == "--self-check";
        options.profile |= option == "--profile";
        if (option == "--self-check" || option == "--profile") continue;
        if (i + 1 == argc) throw Error(option + " takes a value");
        const char* value = argv[++i];
        if (option == "--weights") options.weights.push_back(value);
        else if (option == "--inputs") options.inputs = value;
        else if (option == "--output") options.output = value;
        else if (option == "--trace") options.trace = value;
        else if (option == "--random-weights") options.seed = integer_of(option, value, 0);
        else if (option == "--steps") options.steps = integer_of(option, value, 1);
        else if (option == "--timeout") options.seconds = integer_of(option, value, 1);
        else options.tolerance = number_of(option, value);
    }
    if (options.tolerance >= 0 && !options.self_check) throw Error("--tolerance is that of --self-check, which is not given");
    return options;
}

inline int run(const Options& options, const Program& program, const Program* reference) {
    const World self = world_of_environment();
    const auto seconds = static_cast<double>(options.seconds);
    const int64_t n_ranks = program.mesh.ranks();
    if (self.size != n_ranks)
        throw Error("the program is for " + std::to_string(n_ranks) + " ranks, but " + std::to_string(self.size) + " were started");
    if (options.self_check && reference == nullptr) throw Error("the program was emitted without a reference to check against");
    Tensors tensors;
    for (const std::string& path : options.weights) tensors.weights.add(path);
    if (!options.inputs.empty()) tensors.inputs.add(options.inputs);
    tensors.seed = options.seed;
    tensors.id_bound = program.id_bound;

    int n_devices = 0;
    ITHACA_CUDA(cudaGetDeviceCount(&n_devices));
    if (n_devices == 0) throw Error("no GPU");
    if (self.local_rank >= n_devices && std::getenv("NCCL_MULTI_RANK_GPU_ENABLE") == nullptr)
        throw Error("local rank " + std::to_string(self.local_rank) + " has no GPU: the machine has " + std::to_string(n_devices));
    ITHACA_CUDA(cudaSetDevice(static_cast<int>(self.local_rank % n_devices)));

    Communicators communicators;
    communicators.open(program.mesh, self, seconds);
    std::vector<HostTensor> outputs;
    {
        Device device(program, self.rank, communicators, tensors, seconds);
        if (self.rank == 0)
            std::printf("%lld ranks, %.1f MiB on rank 0\n", static_cast<long long>(n_ranks), static_cast<double>(device.bytes()) / (1 << 20));
        for (int64_t step = 0; step < options.steps; ++step) {
            const bool measured = step + 1 == options.steps && (options.profile || !options.trace.empty());
            if (measured) device.profile.start(device.streams[kCompute]);
            const auto start = std::chrono::steady_clock::now();
            device.run();
            const std::chrono::duration<double, std::milli> time = std::chrono::steady_clock::now() - start;
            if (self.rank == 0) std::printf("step %lld: %.3f ms\n", static_cast<long long>(step), time.count());
            if (measured) device.profile.stop();
        }
        if (self.rank == 0 && options.profile) device.profile.print();
        if (!options.trace.empty()) device.profile.write_trace(options.trace + "." + std::to_string(self.rank) + ".json", self.rank);
        if (options.self_check || !options.output.empty()) outputs = gather(device, tensors);
    }
    bool good = true;
    if (self.rank == 0 && !options.output.empty()) write_tensors(options.output, outputs);
    if (self.rank == 0 && options.self_check) {
        const Communicators none;
        Device device(*reference, 0, none, tensors, seconds);
        // A second run gives other outputs only if the first updated something.
        const bool updates = std::any_of(reference->sources.begin(), reference->sources.end(), [](const Source& s) { return s.is_written; });
        const int64_t steps = updates ? options.steps : 1;
        SmallestGradients smallest;
        for (int64_t step = 0; step < steps; ++step) {
            device.run();
            smallest.after(gather_updated(device, tensors, kGradient));
        }
        const double reach = reference->reach * static_cast<double>(steps);
        good = agree(outputs, gather(device, tensors), reach, smallest, options.tolerance, program.tolerances);
    }
    communicators.close();
    return good ? 0 : 1;
}

// Status 2: the command line, the environment or a file is wrong. Status 1: a check or a call failed.
inline int drive(int argc, char** argv, const Program& program, const Program* reference) {
    try {
        const int status = run(parse(argc, argv), program, reference);
        std::fflush(stdout);
        return status;
    } catch (const std::exception& error) {
        std::fprintf(stderr, "error: %s\n", error.what());
        std::fflush(stderr);
        std::_Exit(2);
    }
}

}  // namespace ithaca
