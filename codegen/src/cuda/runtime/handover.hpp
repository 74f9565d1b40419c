// States that steps of prompts leave, moved to where steps of a token read them: to other parts of the same ranks, or to a pool of
// ranks of their own.
#pragma once

#include "decode.hpp"

namespace ithaca {

// A part of a state in the memory of a device. Of a cache with a place for each token, the tokens that it has.
struct StatePart {
    Address at;
    std::vector<int64_t> shape;
    DType dtype;
    std::vector<int64_t> tokens;
};

// Caches have places for `capacity` tokens; those of a window are rings of fewer.
inline StatePart part_of(const Device& device, const std::string& name, int64_t micro_batch, int64_t capacity) {
    for (size_t i = 0; i < device.program.sources.size(); ++i) {
        const Source& source = device.program.sources[i];
        for (int64_t layer = source.start; source.file == File::States && layer < source.end; ++layer) {
            const int64_t own = source.window.empty() ? -1 : source.window[1].start;
            if (stored_name(source, layer) != name || own != micro_batch || device.source(i, layer).at == nullptr) continue;
            StatePart part{device.source(i, layer), {}, source.tensor.dtype, {}};
            const Part dims = source.tensor.part(device.rank);
            for (const DimPart& dim : dims) part.shape.push_back(dim.end - dim.start);
            const bool has_tokens = dims.size() > 2 && device.program.pages.tokens == 0 && source.tensor.shape[1] == capacity;
            if (has_tokens) part.tokens = dims[1].positions();
            return part;
        }
    }
    throw Error("the program has no state `" + name + "`");
}

// The elements of a move in one of the parts, row-major: rows of equal bytes at these offsets. Of caches only the places of the first
// tokens move, of which the longest prompt has so many.
struct Rows {
    std::vector<int64_t> offsets;
    int64_t bytes;

    Rows(const Move& move, int side, const StatePart& part, int64_t longest) : offsets{0}, bytes(bytes_of(part.dtype)) {
        std::vector<std::vector<Pieces>> dims = move.dims;
        std::vector<int64_t> shape = part.shape;
        const auto are_tokens = [&](size_t d) { return d == 1 && !part.tokens.empty(); };
        // Whole dimensions at the end are part of a row, and so is a piece of the one before.
        const auto is_whole = [&] {
            const std::vector<Pieces>& of = dims.back();
            return of.size() == 1 && of[0].count == 1 && of[0].first[side] == 0 && of[0].length == shape.back();
        };
        for (; !dims.empty() && !are_tokens(dims.size() - 1) && is_whole(); dims.pop_back(), shape.pop_back()) bytes *= shape.back();
        int64_t unit = 0;
        if (!dims.empty()) for (const Pieces& pieces : dims.back()) unit = std::gcd(unit, are_tokens(dims.size() - 1) ? 1 : pieces.length);
        for (size_t d = 0; d < dims.size(); ++d) {
            const int64_t step = d + 1 == dims.size() ? unit : 1;
            std::vector<int64_t> next;
            for (int64_t before : offsets)
                for (const Pieces& p : dims[d])
                    for (int64_t i = 0; i < p.count; ++i)
                        for (int64_t j = 0; j < p.length; j += step) {
                            const int64_t index = p.first[side] + i * p.steps[side] + j;
                            if (!are_tokens(d) || part.tokens[index] < longest) next.push_back(before * shape[d] + index);
                        }
            offsets = std::move(next);
        }
        for (int64_t& offset : offsets) offset *= bytes;
        bytes *= std::max<int64_t>(unit, 1);
    }
    int64_t all() const { return static_cast<int64_t>(offsets.size()) * bytes; }
};

// Rows that are one behind another in `packed` from, or to, their places in `part`.
template <typename T>
__global__ void copy_rows(char* packed, char* part, const int64_t* offsets, int64_t rows, int64_t bytes, bool packs) {
    const int64_t each = bytes / static_cast<int64_t>(sizeof(T)), threads = int64_t{gridDim.x} * blockDim.x;
    for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < rows * each; i += threads) {
        T* const at = reinterpret_cast<T*>(part + offsets[i / each]) + i % each;
        T* const wire = reinterpret_cast<T*>(packed) + i;
        if (packs) *wire = *at;
        else *at = *wire;
    }
}

// Memory of a device.
class Room : NotCopied {
  public:
    explicit Room(int64_t bytes) { ITHACA_CUDA(cudaMalloc(reinterpret_cast<void**>(&at.at), static_cast<size_t>(std::max<int64_t>(bytes, 1)))); }
    ~Room() { cudaFree(at.at); }
    Address at;
};

// Moves states, one after another; no other work runs. A process may have the device of one program, or of both.
class StateMover : NotCopied {
  public:
    // Both sides must agree on the places that move, so the capacity is that of both programs.
    StateMover(const Handover& handover, int64_t process, int64_t capacity, ncclComm_t all, double seconds)
        : handover_(handover), process_(process), capacity_(capacity), all_(all), seconds_(seconds) {
        ITHACA_CUDA(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
        ITHACA_CUDA(cudaEventCreateWithFlags(&done_, cudaEventDisableTiming));
    }
    ~StateMover() { cudaEventDestroy(done_), cudaStreamDestroy(stream_); }

    void run(int64_t round, int64_t longest, const Device* prompts, const Device* tokens) {
        for (const Moved& moved : handover_.states) {
            const auto sent = messages(moved, round, longest, 0, prompts), received = messages(moved, round, longest, 1, tokens);
            const Room outgoing(end_of(sent)), incoming(end_of(received));
            for (const char* name : moved.names) {
                // All is packed before anything is written: a part of prompts may have memory of one of tokens.
                if (!sent.empty()) copy(sent, outgoing.at, part_of(*prompts, name, moved.micro_batches[0], capacity_).at, true);
                ITHACA_NCCL(ncclGroupStart());
                for (const auto& m : sent)
                    if (m->peer != process_ && m->rows.all() > 0) ITHACA_NCCL(ncclSend(outgoing.at + m->at, m->rows.all(), ncclInt8, static_cast<int>(m->peer), all_, stream_));
                for (const auto& m : received)
                    if (m->peer != process_ && m->rows.all() > 0) ITHACA_NCCL(ncclRecv(incoming.at + m->at, m->rows.all(), ncclInt8, static_cast<int>(m->peer), all_, stream_));
                ITHACA_NCCL(ncclGroupEnd());
                wait(name);
                // Messages of a process to itself are packed in the order in which they are written.
                auto own = sent.begin();
                for (const auto& m : received) {
                    if (m->peer != process_) continue;
                    own = std::find_if(own, sent.end(), [&](const auto& s) { return s->peer == process_; });
                    ITHACA_CUDA(cudaMemcpyAsync(incoming.at + m->at, outgoing.at + (*own++)->at, m->rows.all(), cudaMemcpyDefault, stream_));
                }
                if (!received.empty()) copy(received, incoming.at, part_of(*tokens, name, moved.micro_batches[1], capacity_).at, false);
                wait(name);
            }
        }
    }
    // Numbers of a process, on another.
    void send(int64_t from, int64_t to, std::vector<double>& numbers) {
        if (from == to || (process_ != from && process_ != to)) return;
        auto n = static_cast<double>(numbers.size());
        share(&n, 1, from, to);
        numbers.resize(static_cast<size_t>(n));
        share(numbers.data(), numbers.size(), from, to);
    }

  private:
    // To a process, or from it: at an offset of the buffer.
    struct Message {
        int64_t peer, at;
        Rows rows;
        Room table;
    };
    using Messages = std::vector<std::unique_ptr<Message>>;

    Messages messages(const Moved& moved, int64_t round, int64_t longest, int side, const Device* device) const {
        Messages all;
        for (const Move& move : moved.rounds[round]) {
            if (device == nullptr || move.ranks[side] != device->rank) continue;
            const StatePart part = part_of(*device, moved.names.front(), moved.micro_batches[side], capacity_);
            Rows rows(move, side, part, longest);
            const auto bytes = static_cast<int64_t>(rows.offsets.size() * sizeof(int64_t));
            const int64_t peer = handover_.processes[1 - side][move.ranks[1 - side]];
            all.push_back(std::unique_ptr<Message>(new Message{peer, end_of(all), std::move(rows), Room(bytes)}));
            ITHACA_CUDA(cudaMemcpy(all.back()->table.at, all.back()->rows.offsets.data(), bytes, cudaMemcpyHostToDevice));
        }
        return all;
    }
    static int64_t end_of(const Messages& all) { return all.empty() ? 0 : all.back()->at + (all.back()->rows.all() + 255) / 256 * 256; }
    void copy(const Messages& all, Address packed, Address part, bool packs) const {
        for (const auto& m : all) {
            if (m->rows.all() == 0) continue;
            int64_t unit = std::gcd(m->rows.bytes, int64_t{16});
            for (const int64_t offset : m->rows.offsets) unit = std::gcd(unit, offset);
            const auto kernel = unit == 16 ? copy_rows<uint4> : unit % 4 == 0 ? copy_rows<int32_t> : copy_rows<char>;
            const auto rows = static_cast<int64_t>(m->rows.offsets.size());
            cudaLaunchConfig_t config{};
            config.gridDim = dim3(static_cast<unsigned>(std::min<int64_t>((m->rows.all() + 4095) / 4096, 1024)));
            config.blockDim = dim3(256);
            config.stream = stream_;
            char *const wire = packed + m->at, *const at = part;
            const int64_t* const table = m->table.at;
            ITHACA_CUDA(cudaLaunchKernelEx(&config, kernel, wire, at, table, rows, m->rows.bytes, packs));
        }
    }
    void share(double* numbers, size_t n, int64_t from, int64_t to) const {
        const size_t bytes = n * sizeof(double);
        const Room room(static_cast<int64_t>(bytes));
        if (process_ == from) ITHACA_CUDA(cudaMemcpy(room.at, numbers, bytes, cudaMemcpyHostToDevice));
        ITHACA_NCCL(ncclGroupStart());
        if (process_ == from) ITHACA_NCCL(ncclSend(room.at, n, ncclFloat64, static_cast<int>(to), all_, stream_));
        else ITHACA_NCCL(ncclRecv(room.at, n, ncclFloat64, static_cast<int>(from), all_, stream_));
        ITHACA_NCCL(ncclGroupEnd());
        wait("tokens");
        if (process_ == to) ITHACA_CUDA(cudaMemcpy(numbers, room.at, bytes, cudaMemcpyDeviceToHost));
    }
    void wait(const char* what) const {
        while_busy(what, [&] { return is_busy(all_); });
        ITHACA_CUDA(cudaEventRecord(done_, stream_));
        while_busy(what, [&] { return cudaEventQuery(done_) == cudaErrorNotReady; });
        ITHACA_CUDA(cudaStreamSynchronize(stream_));
    }
    template <typename Busy>
    void while_busy(const char* what, const Busy& busy) const {
        for (const Deadline deadline(seconds_); busy();)
            if (!deadline.pause()) fail(__FILE__, __LINE__, what, deadline.message().c_str());
    }

    const Handover& handover_;
    const int64_t process_, capacity_;
    const ncclComm_t all_;
    const double seconds_;
    cudaStream_t stream_ = nullptr;
    cudaEvent_t done_ = nullptr;
};

}  // namespace ithaca
