// The device of one rank: memory, streams, events, and what frames issue to them.
#pragma once

#include "product.hpp"
#include "source.hpp"
#include "watch.hpp"

namespace ithaca {

using Addresses = std::vector<Address>;

struct Output {
    const char* name;
    Tensor tensor;
    Place place;  // the ranks that hold it
    int64_t (*offset)(int64_t rank);  // in the arena, bytes
};

// Bytes of the arena for the ranks of a place.
struct Arena {
    int64_t bytes;
    Place place = {};
};

// Lists of numbers that kernels read.
struct Tables {
    std::vector<std::vector<char>> lists;

    template <typename T>
    void add(std::initializer_list<T> numbers) {
        const char* const bytes = reinterpret_cast<const char*>(numbers.begin());
        lists.emplace_back(bytes, bytes + numbers.size() * sizeof(T));
    }
    void integers(std::initializer_list<int64_t> numbers) { add(numbers); }
    void reals(std::initializer_list<double> numbers) { add(numbers); }
};

class Device;

// A schedule, as main.cu states it.
struct Program {
    Mesh mesh;
    std::vector<Arena> arenas;
    int n_events;
    std::vector<DType> dtypes;
    std::vector<Source> sources;
    std::vector<Output> outputs;
    int64_t id_bound;  // of token ids
    double reach;      // the largest step of the optimizer for one element; zero without one
    void (*tables)(int64_t rank, Tables& tables);
    void (*run)(Device& device, Address arena);
};

inline int64_t aligned(int64_t bytes) { return (bytes + 255) / 256 * 256; }

// All memory of a program is allocated before it runs.
class Device {
  public:
    Device(const Program& program, int64_t rank, const Communicators& communicators, const Tensors& tensors, double seconds)
        : program(program), rank(rank), communicators(communicators), watch(rank, seconds, communicators.all()) {
        for (cudaStream_t& stream : streams) ITHACA_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
        events_.resize(static_cast<size_t>(program.n_events) + 2);
        for (cudaEvent_t& event : events_) ITHACA_CUDA(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
        load(tensors);
        ITHACA_CUDA(cudaDeviceSynchronize());
    }
    ~Device() {
        for (cudaEvent_t event : events_) cudaEventDestroy(event);
        for (cudaStream_t stream : streams) cudaStreamDestroy(stream);
        cudaFree(memory_.at);
    }
    Device(const Device&) = delete;
    Device& operator=(const Device&) = delete;

    int64_t bytes() const { return bytes_; }
    Address arena() const { return memory_; }
    Address table(size_t i) const { return memory_ + tables_[i]; }

    // The part of a source of a layer; null where other ranks have it.
    Address source(size_t i, int64_t layer) const {
        const std::vector<int64_t>& offsets = offsets_[i];
        const int64_t first = program.sources[i].all_layers().start;
        const int64_t offset = offsets[offsets.size() == 1 ? 0 : static_cast<size_t>(layer - first)];
        return offset < 0 ? Address{} : memory_ + offset;
    }

    void wait(Queue queue, int event) { ITHACA_CUDA(cudaStreamWaitEvent(streams[queue], events_[static_cast<size_t>(event)], 0)); }
    void record(Queue queue, int event) { ITHACA_CUDA(cudaEventRecord(events_[static_cast<size_t>(event)], streams[queue])); }

    // Each stream waits for the other.
    void meet() {
        for (Queue queue : {kCompute, kComm}) record(queue, program.n_events + queue);
        wait(kCompute, program.n_events + kComm);
        wait(kComm, program.n_events + kCompute);
    }
    void run() { program.run(*this, memory_); }
    void synchronize() { watch.wait(streams); }

    const Program& program;
    const int64_t rank;
    const Communicators& communicators;
    cudaStream_t streams[2] = {};
    Products products;
    Profile profile;
    Watch watch;

  private:
    // One allocation: the arena, then sources, then tables.
    void load(const Tensors& tensors) {
        const Mesh& mesh = program.mesh;
        Tables lists;
        program.tables(rank, lists);
        for (const Arena& arena : program.arenas)
            if (mesh.is_at(arena.place, rank)) bytes_ = std::max(bytes_, aligned(arena.bytes));
        for (const Source& source : program.sources) {
            const Range layers = source.all_layers();
            offsets_.emplace_back();
            for (int64_t layer = layers.start; layer < layers.end; ++layer) {
                const bool here = source.has_layer(mesh, layer, rank);
                offsets_.back().push_back(here ? bytes_ : -1);
                if (!here) continue;
                int64_t bytes = bytes_of(source.tensor.dtype);
                for (const std::vector<Run>& runs : source.tensor.part(rank)) bytes *= count_of(runs);
                bytes_ += aligned(bytes);
            }
        }
        for (const std::vector<char>& list : lists.lists) {
            tables_.push_back(bytes_);
            bytes_ += aligned(static_cast<int64_t>(list.size()));
        }
        ITHACA_CUDA(cudaMalloc(reinterpret_cast<void**>(&memory_.at), static_cast<size_t>(std::max<int64_t>(bytes_, 1))));
        const auto upload = [&](int64_t offset, const std::vector<char>& data) {
            ITHACA_CUDA(cudaMemcpy(memory_ + offset, data.data(), data.size(), cudaMemcpyHostToDevice));
        };
        for (size_t i = 0; i < program.sources.size(); ++i)
            for (size_t l = 0; l < offsets_[i].size(); ++l) {
                const int64_t layer = program.sources[i].all_layers().start + static_cast<int64_t>(l);
                if (offsets_[i][l] >= 0) upload(offsets_[i][l], load_source(program.sources[i], layer, rank, tensors));
            }
        for (size_t i = 0; i < tables_.size(); ++i) upload(tables_[i], lists.lists[i]);
    }

    Address memory_;
    int64_t bytes_ = 0;
    std::vector<cudaEvent_t> events_;
    std::vector<std::vector<int64_t>> offsets_;  // of sources, by layer
    std::vector<int64_t> tables_;
};

// Blocks for `n` peers, or from them: those of the first, and the distances to the next.
struct Blocks {
    int64_t peer;
    Address at;
    int64_t count, n = 1, peer_step = 1, byte_step = 0;
};

inline constexpr int kWorld = -1;  // the communicator of all ranks; others are numbered by axis

// One run of a frame: issues its tasks.
class Frame {
  public:
    Frame(Device& device, const char* name, int64_t layer) : device_(device) {
        task_.frame = name;
        task_.layer = layer;
        ITHACA_RANGE_PUSH(name);
    }
    ~Frame() {
        end();
        ITHACA_RANGE_POP();
    }
    Frame(const Frame&) = delete;
    Frame& operator=(const Frame&) = delete;

    // What is issued from now on belongs to this task.
    void task(Queue queue, int number, const char* name, const char* kind) {
        end();
        task_ = {task_.frame, task_.layer, queue, number, name, kind};
        is_open_ = true;
        ITHACA_RANGE_PUSH(name);
        device_.watch.begin(task_);
        device_.profile.begin(task_, stream());
    }
    void wait(Queue queue, int event) { end(), device_.wait(queue, event); }
    void record(Queue queue, int event) { end(), device_.record(queue, event); }
    void meet() { end(), device_.meet(); }
    // Ends the last task: before a call, and at the end.
    void end() {
        if (!is_open_) return;
        is_open_ = false;
        device_.profile.end(stream());
        device_.watch.issued(task_.queue, stream());
        ITHACA_RANGE_POP();
    }

    // Kernels take any grid: one that fills the device, but no larger than needed.
    template <typename... Parameters, typename... Arguments>
    void launch(void (*kernel)(Parameters...), int64_t threads, Arguments... arguments) {
        constexpr int64_t kBlock = 256;
        start((threads + kBlock - 1) / kBlock, kBlock, 0, kernel, static_cast<Parameters>(arguments)...);
    }
    // A kernel whose threads work together takes any number of blocks, but these threads and this shared memory.
    template <typename... Parameters, typename... Arguments>
    void launch_blocks(void (*kernel)(Parameters...), int64_t blocks, int threads, int shared_bytes, Arguments... arguments) {
        if (blocks > 0) ITHACA_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes));
        start(blocks, threads, shared_bytes, kernel, static_cast<Parameters>(arguments)...);
    }

    // c = a b for `batch` matrices `rows x inner` and `inner x columns`.
    void product(DType dtype, int64_t rows, int64_t columns, int64_t inner, int64_t batch, const Matrix& a, const Matrix& b,
                 const Matrix& c) {
        device_.products.multiply(task_.queue, stream(), dtype, {rows, columns, inner, batch}, a, b, c);
    }

    void copy(Address to, Address from, int64_t bytes) {
        if (bytes > 0 && from.at != to.at)
            ITHACA_CUDA(cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyDeviceToDevice, stream()));
    }

    // Sends and receives blocks, as one group.
    void exchange(int axis, DType dtype, std::initializer_list<Blocks> sends, std::initializer_list<Blocks> receives) {
        const ncclComm_t comm = communicator(axis);
        ITHACA_NCCL(ncclGroupStart());
        each(sends, [&](int peer, Address at, int64_t count) {
            device_.profile.sends(count * bytes_of(dtype));
            ITHACA_NCCL(ncclSend(at, static_cast<size_t>(count), nccl_type(dtype), peer, comm, stream()));
        });
        each(receives, [&](int peer, Address at, int64_t count) {
            ITHACA_NCCL(ncclRecv(at, static_cast<size_t>(count), nccl_type(dtype), peer, comm, stream()));
        });
        ITHACA_NCCL(ncclGroupEnd());
        device_.watch.settle(comm);
    }
    // Sums blocks of different sizes, each to its peer.
    void reduce(int axis, DType dtype, std::initializer_list<Blocks> blocks, Address to) {
        const ncclComm_t comm = communicator(axis);
        ITHACA_NCCL(ncclGroupStart());
        each(blocks, [&](int peer, Address at, int64_t count) {
            if (peer != number(axis)) device_.profile.sends(count * bytes_of(dtype));
            ITHACA_NCCL(ncclReduce(at, to, static_cast<size_t>(count), nccl_type(dtype), ncclSum, peer, comm, stream()));
        });
        ITHACA_NCCL(ncclGroupEnd());
        device_.watch.settle(comm);
    }
    // Even collectives: `count` elements of each member.
    void all_to_all(int axis, DType dtype, Address from, Address to, int64_t count) {
        const int64_t bytes = count * bytes_of(dtype), own = number(axis), rest = size(axis) - own - 1;
        copy(to + own * bytes, from + own * bytes, bytes);
        const auto others = [&](Address at) {
            return std::array<Blocks, 2>{Blocks{0, at, count, own, 1, bytes},
                                         Blocks{own + 1, at + (own + 1) * bytes, count, rest, 1, bytes}};
        };
        const auto [send, send_rest] = others(from);
        const auto [receive, receive_rest] = others(to);
        exchange(axis, dtype, {send, send_rest}, {receive, receive_rest});
    }
    void all_gather(int axis, DType dtype, Address from, Address to, int64_t count) {
        sends(dtype, count * (size(axis) - 1));
        ITHACA_NCCL(ncclAllGather(from, to, static_cast<size_t>(count), nccl_type(dtype), communicator(axis), stream()));
        device_.watch.settle(communicator(axis));
    }
    void reduce_scatter(int axis, DType dtype, Address from, Address to, int64_t count) {
        sends(dtype, count * (size(axis) - 1));
        ITHACA_NCCL(ncclReduceScatter(from, to, static_cast<size_t>(count), nccl_type(dtype), ncclSum, communicator(axis), stream()));
        device_.watch.settle(communicator(axis));
    }
    // Counted as a reduce-scatter of nearly equal chunks, the first ones longer, and an all-gather.
    void all_reduce(int axis, DType dtype, Address from, Address to, int64_t count) {
        const int64_t n = size(axis), own = count / n + (number(axis) < count % n ? 1 : 0);
        sends(dtype, count - own + (n - 1) * own);
        ITHACA_NCCL(ncclAllReduce(from, to, static_cast<size_t>(count), nccl_type(dtype), ncclSum, communicator(axis), stream()));
        device_.watch.settle(communicator(axis));
    }

  private:
    cudaStream_t stream() const { return device_.streams[task_.queue]; }
    ncclComm_t communicator(int axis) const {
        return axis == kWorld ? device_.communicators.world : device_.communicators.axes[static_cast<size_t>(axis)];
    }
    const Mesh& mesh() const { return device_.program.mesh; }
    int64_t size(int axis) const { return axis == kWorld ? mesh().ranks() : mesh().axes[static_cast<size_t>(axis)].size; }
    int64_t number(int axis) const { return axis == kWorld ? device_.rank : mesh().coordinate(device_.rank, axis); }
    void sends(DType dtype, int64_t count) { device_.profile.sends(count * bytes_of(dtype)); }

    template <typename Call>
    static void each(std::initializer_list<Blocks> blocks, const Call& call) {
        for (const Blocks& b : blocks)
            for (int64_t i = 0; i < b.n && b.count > 0; ++i)
                call(static_cast<int>(b.peer + i * b.peer_step), b.at + i * b.byte_step, b.count);
    }

    template <typename... Parameters>
    void start(int64_t blocks, int64_t threads, int shared_bytes, void (*kernel)(Parameters...), Parameters... arguments) {
        if (blocks <= 0) return;
        constexpr int64_t kMostBlocks = int64_t{1} << 20;
        cudaLaunchConfig_t config{};
        config.gridDim = dim3(static_cast<unsigned>(std::min(blocks, kMostBlocks)));
        config.blockDim = dim3(static_cast<unsigned>(threads));
        config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
        config.stream = stream();
        ITHACA_CUDA(cudaLaunchKernelEx(&config, kernel, arguments...));
    }

    Device& device_;
    Task task_;
    bool is_open_ = false;
};

}  // namespace ithaca
