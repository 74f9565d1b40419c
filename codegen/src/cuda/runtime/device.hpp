// One rank's device: memory, streams, events.
#pragma once

#include <array>
#include <string>
#include <vector>

#include "boxes.hpp"
#include "check.hpp"
#include "communicators.hpp"
#include "kernels/copy.cuh"
#include "source.hpp"
#include "task.hpp"
#include "watch.hpp"

namespace ithaca {

// The result buffers of a frame, or its arguments.
using Pointers = std::vector<char*>;

struct OutputOf {
    const char* name;
    const Type& type;
    int64_t offset;  // from the start of the frame of main, bytes
};

// A dimension of a tensor whose positions kernels ask for.
struct SequenceOf {
    const Type& type;
    size_t dim;  // counted in the type
};

// An end of a collective.
enum Side { kSent = 0, kReceived = 1 };

// What the ranks of a place need of memory for their buffers, bytes.
struct ArenaOf {
    int64_t bytes;
    At at = {};
};

class Device;

// A schedule, as the generated source states it.
struct Program {
    const Space& space;
    std::vector<ArenaOf> arenas;
    int n_events;
    std::vector<const Source*> sources;
    std::vector<std::vector<double>> tables;  // constants that kernels read: rotary frequencies, masks
    std::vector<SequenceOf> sequences;
    std::vector<const Transfer*> transfers;
    std::vector<OutputOf> outputs;
    int64_t id_bound;  // token ids lie below
    double reach;      // how far a step of an optimizer may move an element of a weight; zero without one
    void (*run)(const Device& device, char* frame);
};

constexpr int64_t kAlignment = 256;
inline int64_t aligned(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

// What a rank needs to run a program: everything is allocated here, nothing while it runs.
class Device {
  public:
    // Ranks wait for each other at most so many seconds.
    Device(const Program& program, int64_t rank, const Communicators& communicators, const Tensors& tensors, double seconds)
        : program_(program), rank_(rank), communicators_(communicators), watch_(rank, seconds, communicators.all()) {
        for (cudaStream_t& stream : streams_) ITHACA_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
        events_.resize(static_cast<size_t>(program.n_events) + 2);
        for (cudaEvent_t& event : events_) ITHACA_CUDA(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
        ITHACA_CUBLAS(cublasCreate(&blas_));
        for (const Transfer* transfer : program.transfers) {
            exchanges_.push_back(exchange_of(program.space, *transfer, rank));
        }
        list_runs();
        list_pieces();
        allocate();
        load(tensors);
        ITHACA_CUDA(cudaDeviceSynchronize());
    }

    ~Device() {
        cublasDestroy(blas_);
        for (cudaEvent_t event : events_) cudaEventDestroy(event);
        for (cudaStream_t stream : streams_) cudaStreamDestroy(stream);
        cudaFree(memory_);
    }
    Device(const Device&) = delete;
    Device& operator=(const Device&) = delete;

    const Space& space() const { return program_.space; }
    int64_t rank() const { return rank_; }
    cudaStream_t stream(Queue queue) const { return streams_[queue]; }
    const Communicators& communicators() const { return communicators_; }
    const Exchange& exchange(size_t transfer) const { return exchanges_[transfer]; }
    const Transfer& transfer(size_t transfer) const { return *program_.transfers[transfer]; }
    // Whether this rank is one of a place's.
    bool is_at(const At& at) const { return space().is_at(at, rank_); }
    char* arena() const { return memory_; }
    int64_t bytes() const { return bytes_; }

    // Products on a stream.
    cublasHandle_t blas(Queue queue) const {
        ITHACA_CUBLAS(cublasSetStream(blas_, streams_[queue]));
        return blas_;
    }

    // A weight or an input, of a layer; null where other ranks have it.
    char* source(size_t i, int64_t layer) const {
        const Source& source = *program_.sources[i];
        const bool per_layer = std::strstr(source.name, "{layer}") != nullptr;
        const int64_t offset = offsets_[i][per_layer ? static_cast<size_t>(layer - layers_of(source).start) : 0];
        return offset < 0 ? nullptr : memory_ + offset;
    }
    const double* table(size_t i) const { return reinterpret_cast<const double*>(memory_ + tables_[i]); }

    // The positions of the tokens that this rank holds.
    kernel::Sequence sequence(size_t i) const {
        return {integers(sequences_[i]), static_cast<int64_t>(lists_[sequences_[i]].size()) / 3};
    }
    // The pieces of a fetch or its adjoint, and the dimension of its tensors that they cut.
    kernel::Pieces pieces(size_t transfer, Side side) const {
        const size_t list = pieces_[transfer][side];
        return {integers(list), static_cast<int64_t>(lists_[list].size()) / 3};
    }
    size_t fetched_at(size_t transfer) const { return fetched_at_[transfer]; }

    void wait(Queue queue, int event) const { ITHACA_CUDA(cudaStreamWaitEvent(streams_[queue], events_[event], 0)); }
    void record(Queue queue, int event) const { ITHACA_CUDA(cudaEventRecord(events_[event], streams_[queue])); }

    // Both streams have done what was issued before either goes on.
    void meet() const {
        const int last = program_.n_events;
        for (Queue queue : {kCompute, kComm}) record(queue, last + queue);
        wait(kCompute, last + kComm);
        wait(kComm, last + kCompute);
    }

    Profile& profile() const { return profile_; }

    void run() const { program_.run(*this, memory_); }
    void synchronize() const { watch_.wait(streams_); }
    Watch& watch() const { return watch_; }

  private:
    void list_runs() {
        for (const SequenceOf& of : program_.sequences) {
            const Range held = space().local_box(of.type, rank_)[of.dim];
            std::vector<int64_t> list;
            for (const Run& run : space().position_runs(of.type.dims[of.dim], held))
                list.insert(list.end(), {run.index - held.start, run.position, run.len});
            sequences_.push_back(lists_.size());
            lists_.push_back(list);
        }
    }

    void list_pieces() {
        for (size_t i = 0; i < exchanges_.size(); ++i) {
            const Transfer& x = *program_.transfers[i];
            pieces_.push_back({0, 0});
            fetched_at_.push_back(0);
            if (!x.is_fetch()) continue;
            const std::vector<int>& dims = x.sums() ? x.from.dims : x.to.dims;
            fetched_at_[i] = static_cast<size_t>(std::find(dims.begin(), dims.end(), x.fetched) - dims.begin());
            for (Side side : {kSent, kReceived}) {
                const Exchange& e = exchanges_[i];
                pieces_[i][side] = lists_.size();
                lists_.push_back(side == kSent ? pieces_of(e.send, e.mine, fetched_at_[i])
                                               : pieces_of(e.recv, e.wanted, fetched_at_[i]));
            }
        }
    }

    const int64_t* integers(size_t list) const {
        return reinterpret_cast<const int64_t*>(memory_ + offsets_of_lists_[list]);
    }

    // One allocation: the arena, then weights and inputs, then tables.
    void allocate() {
        for (const ArenaOf& arena : program_.arenas)
            if (is_at(arena.at)) bytes_ = std::max(bytes_, aligned(arena.bytes));
        for (const Source* source : program_.sources) {
            const int64_t each = aligned(elements(space().local_box(source->type, rank_)) * bytes_of(source->type.dtype));
            const Range layers = layers_of(*source);
            offsets_.push_back({});
            for (int64_t l = layers.start; l < layers.end; ++l) {
                const bool here = has_layer(space(), *source, l, rank_);
                offsets_.back().push_back(here ? bytes_ : -1);
                if (here) bytes_ += each;
            }
        }
        for (const auto& table : program_.tables) {
            tables_.push_back(bytes_);
            bytes_ += aligned(static_cast<int64_t>(table.size() * sizeof(double)));
        }
        for (const auto& list : lists_) {
            offsets_of_lists_.push_back(bytes_);
            bytes_ += aligned(static_cast<int64_t>(list.size() * sizeof(int64_t)));
        }
        ITHACA_CUDA(cudaMalloc(reinterpret_cast<void**>(&memory_), static_cast<size_t>(std::max<int64_t>(bytes_, 1))));
    }

    void load(const Tensors& tensors) {
        for (size_t i = 0; i < program_.sources.size(); ++i) {
            const Source& source = *program_.sources[i];
            for (size_t l = 0; l < offsets_[i].size(); ++l) {
                if (offsets_[i][l] < 0) continue;
                const int64_t layer = layers_of(source).start + static_cast<int64_t>(l);
                const std::vector<char> host = load_source(space(), source, layer, rank_, tensors);
                ITHACA_CUDA(cudaMemcpy(memory_ + offsets_[i][l], host.data(), host.size(), cudaMemcpyHostToDevice));
            }
        }
        for (size_t i = 0; i < tables_.size(); ++i) {
            const std::vector<double>& table = program_.tables[i];
            ITHACA_CUDA(cudaMemcpy(memory_ + tables_[i], table.data(), table.size() * sizeof(double),
                                   cudaMemcpyHostToDevice));
        }
        for (size_t i = 0; i < lists_.size(); ++i)
            ITHACA_CUDA(cudaMemcpy(memory_ + offsets_of_lists_[i], lists_[i].data(), lists_[i].size() * sizeof(int64_t),
                                   cudaMemcpyHostToDevice));
    }

    const Program& program_;
    int64_t rank_;
    const Communicators& communicators_;
    cudaStream_t streams_[2] = {};
    std::vector<cudaEvent_t> events_;
    cublasHandle_t blas_ = nullptr;
    std::vector<Exchange> exchanges_;
    std::vector<std::vector<int64_t>> offsets_;
    std::vector<int64_t> tables_;
    // Lists of integers that depend on the rank, where they lie, and who they are for.
    std::vector<std::vector<int64_t>> lists_;
    std::vector<int64_t> offsets_of_lists_;
    std::vector<size_t> sequences_, fetched_at_;
    std::vector<std::array<size_t, 2>> pieces_;
    char* memory_ = nullptr;
    int64_t bytes_ = 0;
    mutable Profile profile_;
    mutable Watch watch_;
};

// While it lives, what is issued to a stream belongs to a task.
class Task {
  public:
    Task(const Device& device, Queue queue, const TaskOf& task, int64_t layer)
        : device_(device), queue_(queue), range_(task.name) {
        device_.watch().begin(task, layer);
        if (device_.profile().is_on()) device_.profile().begin(task, layer, queue_, device_.stream(queue_));
    }
    ~Task() {
        if (device_.profile().is_on()) device_.profile().end(device_.stream(queue_));
        device_.watch().issued(queue_, device_.stream(queue_));
    }
    Task(const Task&) = delete;
    Task& operator=(const Task&) = delete;

  private:
    const Device& device_;
    Queue queue_;
    NamedRange range_;
};

}  // namespace ithaca
