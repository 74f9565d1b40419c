// The device of one rank: its memory, streams and events, and the calls by which frames issue work to it.
#pragma once

#include <array>
#include <cmath>
#include <numeric>

#include "products.hpp"
#include "source.hpp"
#include "watch.hpp"

namespace ithaca {

using Addresses = std::vector<Address>;

struct Output {
    const char* name;
    Tensor tensor;
    int64_t (*offset)(int64_t rank);  // in the arena, bytes; negative where other ranks hold it
};

// Lists of numbers that kernels read.
struct Tables {
    std::vector<std::vector<char>> lists;

    template <typename T>
    void add(const std::vector<T>& numbers) {
        const char* const bytes = reinterpret_cast<const char*>(numbers.data());
        lists.emplace_back(bytes, bytes + numbers.size() * sizeof(T));
    }
};

// The bound of experts: an expert has `slots` slots for the tokens of a group, and an even share of them. Zero without one.
struct ExpertBound {
    int64_t tokens = 0, slots = 0;
    double share = 0;
};

// The pages of caches, which the sequences of a group share. Zero without any.
struct Pages {
    int64_t tokens = 0, count = 0, groups = 1;
    int64_t host = 0;  // further pages, in host memory
};

// A schedule, as main.cu states it.
struct Program {
    Mesh mesh;
    int64_t (*arena)(int64_t rank);  // bytes
    int n_events;
    double tolerances[4];  // of the self-check, for f64, f32, f16 and bf16
    std::vector<Source> sources;
    std::vector<Output> outputs;
    int64_t id_bound;  // of token ids
    double reach;      // the largest step of the optimizer for one element; zero without one
    ExpertBound bound;
    void (*tables)(int64_t rank, Tables& tables);
    void (*run)(class Device& device, Address arena);
    int64_t counts = 0;     // bytes of the counts of filled rows of a collective
    int64_t capacity = 0;   // tokens that a cache has room for; zero without one
    int64_t workspace = 0;  // bytes that the kernels of a task share
    Pages pages = {};
};

// All memory of a program is allocated before it runs. Programs that run in turns on a device share the arena, and the weights
// and states of which they have the same part.
class Device : NotCopied {
  public:
    Device(const Program& program, int64_t rank, const Communicators& communicators, const Tensors& tensors, double seconds,
           const Device* other = nullptr)
        : program(program), rank(rank), communicators(communicators), watch(seconds, communicators) {
        for (cudaStream_t& stream : streams) ITHACA_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
        events.resize(program.n_events + kQueues);
        for (cudaEvent_t& event : events) ITHACA_CUDA(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
        load(tensors, other);
        ITHACA_CUDA(cudaDeviceSynchronize());
    }
    ~Device() {
        if (graph_ != nullptr) cudaGraphExecDestroy(graph_);
        for (cudaEvent_t event : events) cudaEventDestroy(event);
        for (cudaStream_t stream : streams) cudaStreamDestroy(stream);
        cudaFree(memory_.at);
        if (host_memory_.at != nullptr) cudaFreeHost(host_memory_.at);
    }

    int64_t bytes() const { return bytes_; }
    Address arena() const { return arena_; }
    Address table(size_t i) const { return memory_ + tables_[i]; }
    // Eight bytes that `deal` sets where tokens exceed the bound of an expert.
    Address overflow() const { return memory_ + overflow_; }
    // Counts of the filled rows that are sent and received in a collective.
    Address counts() const { return memory_ + counts_; }
    Address workspace() const { return memory_ + workspace_; }
    // The part of a source of a layer; null where other ranks have it.
    Address source(size_t i, int64_t layer) const {
        const auto found = sources_[i].find(layer);
        return found == sources_[i].end() ? Address{} : found->second;
    }
    // Reads inputs; no work runs.
    void read_inputs(const Tensors& tensors) {
        for (size_t i = 0; i < sources_.size(); ++i)
            if (program.sources[i].file == File::Inputs) read(i, tensors);
    }

    // Writes a state of integers, of which one device has all; no work runs.
    void write(const std::string& state, const std::vector<int32_t>& data) {
        for (size_t i = 0; i < sources_.size(); ++i)
            if (state == program.sources[i].name)
                ITHACA_CUDA(cudaMemcpy(source(i, 0), data.data(), data.size() * sizeof(int32_t), cudaMemcpyHostToDevice));
    }

    // Makes all states zero, as they are before the first step; no work runs.
    void clear_states() {
        for (size_t i = 0; i < sources_.size(); ++i)
            for (const auto& [layer, at] : sources_[i])
                if (program.sources[i].file == File::States) ITHACA_CUDA(cudaMemset(at, 0, bytes_of_part(program.sources[i])));
    }

    void synchronize() { watch.wait(streams); }
    // Runs a step; by a graph, which is recorded once. A first step without one has allocated all that products need.
    void run(bool by_graph = false) {
        if (by_graph && graph_ == nullptr) record();
        if (by_graph) ITHACA_CUDA(cudaGraphLaunch(graph_, streams[kCompute]));
        else program.run(*this, arena_);
        synchronize();
        check_bounds();
    }

    const Program& program;
    const int64_t rank;
    const Communicators& communicators;
    cudaStream_t streams[kQueues] = {};
    std::vector<cudaEvent_t> events;  // those that join the streams, one for each, come last
    Products products;
    Watch watch;

  private:
    // All streams start from the compute stream, and end in it.
    void record() {
        const cudaStream_t origin = streams[kCompute];
        const cudaEvent_t* const join_events = &events[program.n_events];
        watch.records = true;
        ITHACA_CUDA(cudaStreamBeginCapture(origin, cudaStreamCaptureModeThreadLocal));
        ITHACA_CUDA(cudaEventRecord(join_events[kCompute], origin));
        for (int queue = kComm; queue < kQueues; ++queue) ITHACA_CUDA(cudaStreamWaitEvent(streams[queue], join_events[kCompute], 0));
        program.run(*this, arena_);
        for (int queue = kComm; queue < kQueues; ++queue) {
            ITHACA_CUDA(cudaEventRecord(join_events[queue], streams[queue]));
            ITHACA_CUDA(cudaStreamWaitEvent(origin, join_events[queue], 0));
        }
        cudaGraph_t graph = nullptr;
        ITHACA_CUDA(cudaStreamEndCapture(origin, &graph));
        ITHACA_CUDA(cudaGraphInstantiate(&graph_, graph, 0));
        ITHACA_CUDA(cudaGraphDestroy(graph));
        watch.records = false;
    }
    int64_t bytes_of_part(const Source& source) const {
        int64_t bytes = bytes_of(source.tensor.dtype);
        for (const DimPart& dim : source.tensor.part(rank)) bytes *= dim.end - dim.start;
        return bytes;
    }
    bool has_bounds() const { return program.bound.slots > 0 || program.capacity > 0; }
    void check_bounds() const {
        if (!has_bounds()) return;
        uint64_t found = 0;
        ITHACA_CUDA(cudaMemcpy(&found, overflow(), sizeof found, cudaMemcpyDeviceToHost));
        if (found == 0) return;
        const ExpertBound& bound = program.bound;
        const uint64_t demand = found >> 32 & 0x7fffffff;
        char text[256];
        if (found >> 63 != 0) {
            std::snprintf(text, sizeof text, "a sequence of %llu tokens in a cache of %llu", static_cast<unsigned long long>(demand),
                          static_cast<unsigned long long>(found & 0xffffffff));
            fail(__FILE__, __LINE__, "appending to caches", text);
        }
        if (found >> 62 != 0) {
            std::snprintf(text, sizeof text, "token %llu of sequence %llu has no page in the table that the rank has",
                          static_cast<unsigned long long>(demand & 0x3fffffff), static_cast<unsigned long long>(found & 0xffffffff));
            fail(__FILE__, __LINE__, "appending to pages", text);
        }
        std::snprintf(text, sizeof text,
                      "expert %llu was chosen by %llu of %lld tokens and has slots for %lld; `--expert-bound %.2f` has slots for all of "
                      "them, `--capacity` drops tokens",
                      static_cast<unsigned long long>(found & 0xffffffff), static_cast<unsigned long long>(demand),
                      static_cast<long long>(bound.tokens), static_cast<long long>(bound.slots),
                      std::ceil(static_cast<double>(demand) / bound.share * 100) / 100);
        fail(__FILE__, __LINE__, "dealing slots of experts", text);
    }
    // Where the other device has the same part of a source; null where it has none.
    Address shared(const Device* other, const Source& source, int64_t layer) const {
        if (other == nullptr || source.file == File::Inputs) return {};
        for (size_t i = 0; i < other->sources_.size(); ++i)
            if (is_same(other->program.sources[i], other->rank, source, rank)) return other->source(i, layer);
        return {};
    }
    void read(size_t i, const Tensors& tensors) {
        for (const auto& [layer, at] : sources_[i]) {
            const std::vector<char> data = load_source(program.sources[i], layer, rank, tensors);
            ITHACA_CUDA(cudaMemcpy(at, data.data(), data.size(), cudaMemcpyHostToDevice));
        }
    }
    // One allocation, and one of pinned memory of the host for caches that are there: the arena, then sources, then tables, then the word of bounds, counts, and the workspace. Inputs are read later.
    void load(const Tensors& tensors, const Device* other) {
        const auto reserve = [&](int64_t bytes) {
            const int64_t offset = bytes_;
            bytes_ += (bytes + 255) / 256 * 256;
            return offset;
        };
        const bool has_arena = other == nullptr || other->program.arena(rank) < program.arena(rank);
        if (has_arena) reserve(program.arena(rank));
        int64_t host_bytes = 0;
        const auto reserve_for = [&](const Source& source, int64_t bytes) {
            if (!source.is_on_host) return reserve(bytes);
            const int64_t offset = host_bytes;
            host_bytes += (bytes + 255) / 256 * 256;
            return offset;
        };
        std::vector<std::map<int64_t, int64_t>> own;  // offsets of the sources that are not shared
        for (const Source& source : program.sources) {
            const int64_t bytes = bytes_of_part(source);
            sources_.emplace_back();
            own.emplace_back();
            for (int64_t layer = source.start; layer < source.end; ++layer) {
                if (!source.is_held(rank, layer)) continue;
                if (const Address at = shared(other, source, layer); at.at != nullptr) sources_.back()[layer] = at;
                else own.back()[layer] = reserve_for(source, bytes);
            }
        }
        Tables tables;
        program.tables(rank, tables);
        for (const std::vector<char>& list : tables.lists) tables_.push_back(reserve(static_cast<int64_t>(list.size())));
        if (has_bounds()) overflow_ = reserve(sizeof(uint64_t));
        counts_ = reserve(program.counts);
        workspace_ = reserve(program.workspace);
        ITHACA_CUDA(cudaMalloc(reinterpret_cast<void**>(&memory_.at), static_cast<size_t>(std::max<int64_t>(bytes_, 1))));
        // Kernels read and write pinned memory at the address that it has on the host.
        if (host_bytes > 0)
            ITHACA_CUDA(cudaHostAlloc(reinterpret_cast<void**>(&host_memory_.at), static_cast<size_t>(host_bytes), cudaHostAllocDefault));
        const auto upload = [&](Address to, const std::vector<char>& data) {
            ITHACA_CUDA(cudaMemcpy(to, data.data(), data.size(), cudaMemcpyDefault));
        };
        arena_ = has_arena ? memory_ : other->arena_;
        for (size_t i = 0; i < sources_.size(); ++i) {
            for (const auto& [layer, offset] : own[i]) {
                const Source& source = program.sources[i];
                const Address at = (source.is_on_host ? host_memory_ : memory_) + offset;
                sources_[i][layer] = at;
                if (source.file != File::Inputs) upload(at, load_source(source, layer, rank, tensors));
            }
        }
        for (size_t i = 0; i < tables_.size(); ++i) upload(memory_ + tables_[i], tables.lists[i]);
        if (has_bounds()) upload(memory_ + overflow_, std::vector<char>(sizeof(uint64_t)));
    }

    Address memory_, host_memory_, arena_;
    cudaGraphExec_t graph_ = nullptr;
    int64_t bytes_ = 0, overflow_ = 0, counts_ = 0, workspace_ = 0;
    std::vector<std::map<int64_t, Address>> sources_;  // by layer
    std::vector<int64_t> tables_;
};

// Blocks for `n` peers, or from them: those of the first, and the distances to the next.
struct Blocks {
    int64_t peer;
    Address at;
    int64_t count, n = 1, peer_step = 1, byte_step = 0;
};

// Runs of a member's block: `adjacent` of them side by side, the next ones `again` runs after those; the next member's `member` further.
struct RunPlaces {
    int64_t adjacent, again, member;
    int64_t of(int64_t member_number, int64_t run) const {
        return member_number * member + run / adjacent * again + run % adjacent;
    }
};

// What a frame is called with.
struct Scope {
    Device& device;
    Address frame;  // its part of the arena
    Addresses arguments, results;
    int64_t layer;
};

// One run of a frame: issues its tasks.
class Frame : NotCopied {
  public:
    Frame(const Scope& scope, const char* name) : device_(scope.device) {
        task_.frame = name;
        task_.layer = scope.layer;
    }
    ~Frame() { end(); }
    // What is issued from now on belongs to this task.
    void task(Queue queue, int number, const char* name, const char* kind) {
        end();
        task_ = {task_.frame, task_.layer, queue, number, name, kind};
        is_open_ = true;
        device_.watch.begin(task_, stream());
    }
    void wait(Queue queue, int event) {
        end();
        ITHACA_CUDA(cudaStreamWaitEvent(device_.streams[queue], device_.events[event], 0));
    }
    void record(Queue queue, int event) {
        end();
        ITHACA_CUDA(cudaEventRecord(device_.events[event], device_.streams[queue]));
    }
    // Each of these streams waits for the others; the compute stream comes first.
    void join_streams(std::initializer_list<Queue> queues = {kCompute, kComm}) {
        const int n = device_.program.n_events;
        for (Queue queue : queues)
            if (queue != kCompute) record(queue, n + queue), wait(kCompute, n + queue);
        record(kCompute, n + kCompute);
        for (Queue queue : queues)
            if (queue != kCompute) wait(queue, n + kCompute);
    }
    void call(void (*frame)(const Scope&), Address at, const Addresses& arguments, const Addresses& results, int64_t layer) {
        end(), frame({device_, at, arguments, results, layer});
    }
    // Kernels take any grid: one that fills the device, but no larger than needed.
    template <typename... Parameters, typename... Arguments>
    void launch(void (*kernel)(Parameters...), int64_t threads, Arguments... arguments) {
        launch_blocks(kernel, (threads + 255) / 256, 256, 0, arguments...);
    }
    // A kernel whose threads work together takes any number of blocks, but these threads and this shared memory.
    template <typename... Parameters, typename... Arguments>
    void launch_blocks(void (*kernel)(Parameters...), int64_t blocks, int threads, int shared_bytes, Arguments... arguments) {
        if (blocks <= 0) return;
        const auto attribute = cudaFuncAttributeMaxDynamicSharedMemorySize;
        if (shared_bytes > 0) ITHACA_CUDA(cudaFuncSetAttribute(kernel, attribute, shared_bytes));
        cudaLaunchConfig_t config{};
        config.gridDim = dim3(static_cast<unsigned>(std::min(blocks, int64_t{1} << 20)));
        config.blockDim = dim3(static_cast<unsigned>(threads));
        config.dynamicSmemBytes = shared_bytes;
        config.stream = stream();
        ITHACA_CUDA(cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...));
    }
    // c = f(before + a b + bias) for `batch` matrices `rows x inner` and `inner x columns`; before may be c, or nothing.
    void product(Types of, int64_t rows, int64_t columns, int64_t inner, int64_t batch, const Matrix& a, const Matrix& b,
                 const Matrix& c, Address before, const Epilogue& end = {}) {
        Matrix added = c;
        if (before.at != nullptr) added.at = before;
        device_.products.multiply(task_.queue, stream(), of, rows, columns, inner, batch, {a, b, added, c}, before.at != nullptr, end);
    }
    void product(Types of, int64_t rows, int64_t columns, int64_t inner, int64_t batch, const Matrix& a, const Matrix& b,
                 const Matrix& c, const Epilogue& end = {}) {
        product(of, rows, columns, inner, batch, a, b, c, Address{}, end);
    }
    // Two products {a, b, c} of one shape: a batch if the matrices of one are all at or behind those of the other.
    void pair(Types of, int64_t rows, int64_t columns, int64_t inner, std::array<Matrix, 3> first, std::array<Matrix, 3> second) {
        const auto leads = [](const std::array<Matrix, 3>& a, const std::array<Matrix, 3>& b) {
            return a[0].at.at <= b[0].at.at && a[1].at.at <= b[1].at.at && a[2].at.at <= b[2].at.at;
        };
        if (leads(second, first)) std::swap(first, second);
        const bool is_batch = leads(first, second);
        for (size_t i = 0; i < 3 && is_batch; ++i)
            first[i].step = (second[i].at.at - first[i].at.at) / static_cast<int64_t>(bytes_of(i < 2 ? of.operands : of.result));
        product(of, rows, columns, inner, is_batch ? 2 : 1, first[0], first[1], first[2]);
        if (!is_batch) product(of, rows, columns, inner, 1, second[0], second[1], second[2]);
    }
    void copy(Address to, Address from, int64_t bytes) {
        if (bytes > 0 && from.at != to.at) ITHACA_CUDA(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream()));
    }
    // Sends and receives blocks, as one group; the rank's own blocks are left out.
    void exchange(int group, DType dtype, std::initializer_list<Blocks> sent, std::initializer_list<Blocks> received) {
        collective(group, dtype, sent_to_others(group, sent), [&](ncclComm_t comm, ncclDataType_t type) {
            each(sent, [&](int peer, Address at, size_t count) {
                if (peer != number(group)) ITHACA_NCCL(ncclSend(at, count, type, peer, comm, stream()));
            });
            each(received, [&](int peer, Address at, size_t count) {
                if (peer != number(group)) ITHACA_NCCL(ncclRecv(at, count, type, peer, comm, stream()));
            });
        });
    }
    // Sums blocks of different sizes, each to its peer.
    void reduce(int group, DType dtype, std::initializer_list<Blocks> blocks, Address to) {
        collective(group, dtype, sent_to_others(group, blocks), [&](ncclComm_t comm, ncclDataType_t type) {
            each(blocks, [&](int peer, Address at, size_t count) {
                ITHACA_NCCL(ncclReduce(at, to, count, type, ncclSum, peer, comm, stream()));
            });
        });
    }
    // Even collectives: `count` elements of each member.
    void all_to_all(int group, DType dtype, Address from, Address to, int64_t count) {
        const int64_t n = size(group), bytes = count * bytes_of(dtype), own = number(group) * bytes;
        copy(to + own, from + own, bytes);
        exchange(group, dtype, {{0, from, count, n, 1, bytes}}, {{0, to, count, n, 1, bytes}});
    }
    // An all-to-all of filled rows: `runs` runs of `rows` rows for each member, of which the first are filled. The host reads the
    // counts, which members have exchanged; the rows that do not arrive are zero already.
    void filled_rows(int group, DType dtype, Address from, Address to, Address outgoing, Address incoming, int64_t runs, int64_t rows,
                     int64_t width, RunPlaces sends, RunPlaces receives) {
        const int64_t n = size(group) * runs, own = number(group), first = own * runs, run = rows * width * bytes_of(dtype);
        const int64_t together = std::gcd(sends.adjacent, receives.adjacent);
        for (int64_t i = 0; i < runs; i += together) copy(to + receives.of(own, i) * run, from + sends.of(own, i) * run, together * run);
        device_.watch.reach(stream());
        const auto counts = [&](Address at) {
            std::vector<int32_t> read(n);
            ITHACA_CUDA(cudaMemcpy(read.data(), at, n * sizeof(int32_t), cudaMemcpyDeviceToHost));
            for (int64_t i = first; i < first + runs; ++i) read[i] = 0;  // its own rows stay
            return read;
        };
        const std::vector<int32_t> sent = counts(outgoing), received = counts(incoming);
        int64_t filled = 0;
        for (int32_t count : sent) filled += count;
        collective(group, dtype, filled * width, [&](ncclComm_t comm, ncclDataType_t type) {
            for (int64_t i = 0; i < n; ++i) {
                const int peer = static_cast<int>(i / runs);
                const Address at = from + sends.of(peer, i % runs) * run, into = to + receives.of(peer, i % runs) * run;
                if (sent[i] > 0) ITHACA_NCCL(ncclSend(at, sent[i] * width, type, peer, comm, stream()));
                if (received[i] > 0) ITHACA_NCCL(ncclRecv(into, received[i] * width, type, peer, comm, stream()));
            }
        });
    }
    void all_gather(int group, DType dtype, Address from, Address to, int64_t count) {
        collective(group, dtype, count * (size(group) - 1), [&](ncclComm_t comm, ncclDataType_t type) {
            ITHACA_NCCL(ncclAllGather(from, to, count, type, comm, stream()));
        });
    }
    void reduce_scatter(int group, DType dtype, Address from, Address to, int64_t count) {
        collective(group, dtype, count * (size(group) - 1), [&](ncclComm_t comm, ncclDataType_t type) {
            ITHACA_NCCL(ncclReduceScatter(from, to, count, type, ncclSum, comm, stream()));
        });
    }
    // Counted as a reduce-scatter of nearly equal chunks, the first ones longer, and an all-gather.
    void all_reduce(int group, DType dtype, Address from, Address to, int64_t count) {
        const int64_t n = size(group), own = count / n + (number(group) < count % n ? 1 : 0);
        collective(group, dtype, count - own + (n - 1) * own, [&](ncclComm_t comm, ncclDataType_t type) {
            ITHACA_NCCL(ncclAllReduce(from, to, count, type, ncclSum, comm, stream()));
        });
    }

  private:
    cudaStream_t stream() const { return device_.streams[task_.queue]; }
    int64_t size(int group) const { return device_.communicators.all[group].size; }
    int64_t number(int group) const { return device_.communicators.all[group].number; }

    void end() {
        if (!is_open_) return;
        is_open_ = false;
        device_.watch.issued(task_.queue, stream());
    }
    // `sent` counts the elements for other ranks.
    template <typename Issue>
    void collective(int group, DType dtype, int64_t sent, const Issue& issue) {
        static constexpr ncclDataType_t types[] = {ncclFloat64, ncclFloat32, ncclFloat16, ncclBfloat16, ncclInt32, ncclInt8};
        const ncclComm_t comm = device_.communicators.all[group].comm;
        device_.watch.sends(sent * bytes_of(dtype));
        ITHACA_NCCL(ncclGroupStart());
        issue(comm, types[int(dtype)]);
        ITHACA_NCCL(ncclGroupEnd());
        device_.watch.settle(comm);
    }
    int64_t sent_to_others(int group, std::initializer_list<Blocks> blocks) const {
        int64_t sent = 0;
        each(blocks, [&](int peer, Address, int64_t count) { sent += peer == number(group) ? 0 : count; });
        return sent;
    }
    template <typename Call>
    void each(std::initializer_list<Blocks> blocks, const Call& call) const {
        for (const Blocks& b : blocks)
            for (int64_t i = 0; i < b.n && b.count > 0; ++i)
                call(static_cast<int>(b.peer + i * b.peer_step), b.at + i * b.byte_step, b.count);
    }

    Device& device_;
    Task task_;
    bool is_open_ = false;
};

}  // namespace ithaca
