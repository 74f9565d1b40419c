// Outputs, and the weights and states that a program keeps, whole on rank 0. Not part of what is timed.
#pragma once

#include <map>

#include "device.hpp"

namespace ithaca {

// Of ranks that hold the same part of a type, whether this is the first; `holds` says which hold any.
template <typename Holds>
bool holds_first(const Space& space, const Type& type, int64_t rank, Holds holds) {
    if (!holds(rank)) return false;
    for (size_t a = 0; a < space.axes.size(); ++a) {
        const int axis = static_cast<int>(a);
        auto uses = [&](const std::vector<int>& axes) { return std::count(axes.begin(), axes.end(), axis) > 0; };
        if (uses(type.partial) || std::any_of(type.split.begin(), type.split.end(), uses)) continue;
        for (int64_t c = 0; c < space.coordinate(rank, axis); ++c)
            if (holds(space.with_coordinate(rank, axis, c))) return false;
    }
    return true;
}

// The bytes that `rank` has at `mine`, on rank 0; nothing on the others.
inline std::vector<char> fetch_part(const Device& device, int64_t rank, char* mine, size_t count) {
    const ncclComm_t comm = device.communicators().world;
    if (device.rank() == rank && rank != 0) {
        ITHACA_NCCL(ncclSend(mine, count, ncclInt8, 0, comm, device.stream(kCompute)));
        device.watch().settle(comm);
        device.synchronize();
    }
    if (device.rank() != 0) return {};
    char* from = mine;
    if (rank != 0) {
        ITHACA_CUDA(cudaMalloc(reinterpret_cast<void**>(&from), count));
        ITHACA_NCCL(ncclRecv(from, count, ncclInt8, static_cast<int>(rank), comm, device.stream(kCompute)));
        device.watch().settle(comm);
        device.synchronize();
    }
    std::vector<char> host(count);
    ITHACA_CUDA(cudaMemcpy(host.data(), from, count, cudaMemcpyDeviceToHost));
    if (rank != 0) ITHACA_CUDA(cudaFree(from));
    return host;
}

// Each distinct part is sent once and put where it belongs, by position; pending sums are taken, padding is cut off.
inline HostTensor gather_output(const Space& space, const Device& device, const OutputOf& output, int64_t n_ranks) {
    const Type& type = output.type;
    const int64_t width = bytes_of(type.dtype);
    std::vector<int64_t> shape;
    int64_t n = 1;
    for (int d : type.dims) {
        shape.push_back(space.dims[d].valid);
        n *= shape.back();
    }
    const std::vector<int64_t> strides = row_major(shape);
    HostTensor whole{output.name, type.dtype, shape, {}};
    if (device.rank() == 0) whole.values.assign(static_cast<size_t>(n), 0);
    for (int64_t rank = 0; rank < n_ranks; ++rank) {
        const Region box = space.local_box(type, rank);
        const int64_t size = elements(box);
        const bool first = holds_first(space, type, rank, [&](int64_t r) { return space.holds(type, r); });
        if (!first || size == 0) continue;
        const std::vector<char> host =
            fetch_part(device, rank, device.arena() + output.offset, static_cast<size_t>(size * width));
        if (device.rank() != 0) continue;
        std::vector<std::vector<int64_t>> places;
        for (size_t d = 0; d < box.size(); ++d) places.push_back(space.own_positions(type.dims[d], box[d]));
        std::vector<size_t> index(box.size(), 0);
        for (int64_t i = 0; i < size; ++i) {
            int64_t at = 0;
            bool padding = false;
            for (size_t d = 0; d < box.size(); ++d) {
                const int64_t place = places[d][index[d]];
                padding = padding || place >= shape[d];
                at += place * strides[d];
            }
            if (!padding) whole.values[static_cast<size_t>(at)] += load_element(type.dtype, host.data() + i * width);
            for (size_t d = box.size(); d-- > 0 && ++index[d] == places[d].size();) index[d] = 0;
        }
    }
    return whole;
}

// Whether some weight or state is written.
inline bool keeps(const Program& program) {
    return std::any_of(program.sources.begin(), program.sources.end(), [](const Source* s) { return s->is_written; });
}

// The stored tensors that sources write parts of, by name, if that begins with `prefix`; what no part covers is what it was
// before.
inline std::vector<HostTensor> gather_kept(const Program& program, const Device& device, const Tensors& tensors,
                                           int64_t n_ranks, const char* prefix = "") {
    const Space& space = program.space;
    std::map<std::string, HostTensor> kept;
    for (size_t s = 0; s < program.sources.size(); ++s) {
        const Source& source = *program.sources[s];
        if (!source.is_written || !begins_with(source.name, prefix)) continue;
        const DType dtype = source.type.dtype;
        const size_t width = static_cast<size_t>(bytes_of(dtype));
        const Range layers = layers_of(source);
        for (int64_t layer = layers.start; layer < layers.end; ++layer) {
            auto holds = [&](int64_t rank) { return has_layer(space, source, layer, rank); };
            bool held = false;
            for (int64_t rank = 0; rank < n_ranks; ++rank) held = held || holds(rank);
            if (!held) continue;
            const std::string name = stored_name(source, layer);
            HostTensor& whole = kept[name];
            if (whole.name.empty()) {
                whole = {name, dtype, stored_shape(space, source), {}};
                int64_t n = device.rank() == 0 ? 1 : 0;
                for (int64_t extent : whole.shape) n *= extent;
                const auto before = elements_before(space, source, layer, tensors);
                for (int64_t i = 0; i < n; ++i) whole.values.push_back(before(i));
            }
            for (int64_t rank = 0; rank < n_ranks; ++rank) {
                const std::vector<int64_t> places = stored_places(space, source, rank);
                if (!holds_first(space, source.type, rank, holds) || places.empty()) continue;
                const std::vector<char> host = fetch_part(device, rank, device.source(s, layer), places.size() * width);
                for (size_t i = 0; i < places.size() && device.rank() == 0; ++i) {
                    if (places[i] >= 0)
                        whole.values[static_cast<size_t>(places[i])] = load_element(dtype, host.data() + i * width);
                }
            }
        }
    }
    std::vector<HostTensor> out;
    for (auto& [name, tensor] : kept) {
        const std::vector<std::string> names = members(name, tensor.shape.empty() ? 1 : tensor.shape.front());
        if (names.size() == 1 && names.front() == name) {
            out.push_back(std::move(tensor));
            continue;
        }
        // The members of a stack, one behind the other; only the first rank has values.
        const std::vector<int64_t> each(tensor.shape.begin() + 1, tensor.shape.end());
        const size_t size = tensor.values.size() / names.size();
        for (size_t m = 0; m < names.size(); ++m) {
            const auto first = tensor.values.begin() + static_cast<std::ptrdiff_t>(m * size);
            out.push_back({names[m], tensor.dtype, each, {first, first + static_cast<std::ptrdiff_t>(size)}});
        }
    }
    return out;
}

// Outputs, and behind them what is kept.
inline std::vector<HostTensor> gather(const Program& program, const Device& device, const Tensors& tensors,
                                      int64_t n_ranks) {
    std::vector<HostTensor> out;
    for (const OutputOf& output : program.outputs) out.push_back(gather_output(program.space, device, output, n_ranks));
    for (HostTensor& tensor : gather_kept(program, device, tensors, n_ranks)) out.push_back(std::move(tensor));
    return out;
}

}  // namespace ithaca
