// The command line of an emitted program: load, run, time, write, check.
#include "drive.hpp"

#include "options.hpp"

namespace ithaca {

static constexpr const char* kHelp =
    "usage: %s [options]\n"
    "  --weights PATH       safetensors file, or a directory of them; may be given again\n"
    "  --inputs PATH        safetensors file of inputs\n"
    "  --random-weights N   weights (and inputs, when none are given) from seed N\n"
    "  --output PATH        write the outputs and the updated tensors, assembled on rank 0\n"
    "  --self-check         compare the outputs with one GPU running the whole program; exit 1 when they differ\n"
    "  --tolerance X        largest relative error of the self-check\n"
    "  --steps N            run N times, each with the tensors that the run before updated, and print the time of each\n"
    "  --graph              launch steps from the second on as a CUDA graph, except one that is measured\n"
    "  --profile            measure the tasks of the last step; print rank 0's, and the rate at which it sent\n"
    "  --trace PREFIX       measure the last step and write PREFIX.RANK.json, for Chrome or Perfetto\n"
    "  --timeout SECONDS    end when ranks wait for each other, or for a task, for longer; default 600\n"
    "example: torchrun --no-python --nproc-per-node 8 %s --weights model.safetensors --inputs io.safetensors --self-check\n";

static int run(const Options& options, const Program& program, const Program* reference) {
    const Request request(options, 1);
    Tensors tensors;
    const World self = begin(options, program, program.mesh.ranks(), reference != nullptr, tensors);
    Communicators communicators;
    communicators.open(program.mesh, self, request.seconds);
    std::vector<HostTensor> outputs;
    {
        Device device(program, self.rank, communicators, tensors, request.seconds);
        device.read_inputs(tensors);
        if (self.rank == 0) print_memory(program, device.bytes());
        for (int64_t step = 0; step < request.steps; ++step) request.run(device, "step", step, request.measures(step));
        request.report(device);
        if (request.checks || !request.output.empty()) outputs = gather(device, tensors);
    }
    bool good = true;
    if (self.rank == 0 && !request.output.empty()) write_tensors(request.output, outputs);
    if (self.rank == 0 && request.checks) {
        const Communicators none;
        Device device(*reference, 0, none, tensors, request.seconds);
        device.read_inputs(tensors);
        // A second run gives other outputs only if the first updated something.
        const bool updates = std::any_of(reference->sources.begin(), reference->sources.end(), [](const Source& s) { return s.is_written; });
        const int64_t n = updates ? request.steps : 1;
        Judge judge;
        for (int64_t step = 0; step < n; ++step) {
            device.run();
            judge.after(gather_updated(device, tensors, kGradient));
        }
        judge.expect(gather(device, tensors), reference->reach * static_cast<double>(n));
        good = judge.agrees(outputs, request.tolerance, program.tolerances);
    }
    communicators.close();
    return good ? 0 : 1;
}

int drive(int argc, char** argv, const Program& program, const Program* reference) {
    return with_options(argc, argv, kHelp, [&](const Options& options) { return run(options, program, reference); });
}

}  // namespace ithaca
