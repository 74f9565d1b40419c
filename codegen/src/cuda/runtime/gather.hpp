// Outputs, and the weights and states that a program updates, whole on rank 0.
#pragma once

#include "device.hpp"

namespace ithaca {

// The bytes at `mine` of a rank, on rank 0; nothing on other ranks.
inline std::vector<char> fetch_part(Device& device, int64_t rank, Address mine, size_t count) {
    const ncclComm_t comm = device.communicators.world;
    const bool is_remote = rank != 0;
    const auto settle = [&] { device.watch.settle(comm), device.synchronize(); };
    if (device.rank == rank && is_remote) {
        ITHACA_NCCL(ncclSend(mine, count, ncclInt8, 0, comm, device.streams[kCompute]));
        settle();
    }
    if (device.rank != 0) return {};
    void* from = mine;
    if (is_remote) {
        ITHACA_CUDA(cudaMalloc(&from, count));
        ITHACA_NCCL(ncclRecv(from, count, ncclInt8, static_cast<int>(rank), comm, device.streams[kCompute]));
        settle();
    }
    std::vector<char> host(count);
    ITHACA_CUDA(cudaMemcpy(host.data(), from, count, cudaMemcpyDeviceToHost));
    if (is_remote) ITHACA_CUDA(cudaFree(from));
    return host;
}

// Fetches each distinct part of a tensor from the first rank that holds it, and calls `put` on rank 0 with the place and the
// value of each element.
template <typename Holds, typename PlacesOf, typename Put>
void gather_parts(Device& device, const Tensor& tensor, Address mine, const Holds& holds, const PlacesOf& places_of, const Put& put) {
    const Mesh& mesh = device.program.mesh;
    for (int64_t rank = 0; rank < mesh.ranks(); ++rank) {
        bool is_first = holds(rank);
        for (int axis : tensor.copies)
            for (int64_t c = mesh.coordinate(rank, axis), before = rank; c-- > 0;) is_first &= !holds(before -= mesh.stride(axis));
        const std::vector<int64_t> places = is_first ? places_of(rank) : std::vector<int64_t>{};
        if (places.empty()) continue;
        const std::vector<char> host = fetch_part(device, rank, mine, places.size() * static_cast<size_t>(bytes_of(tensor.dtype)));
        for (size_t i = 0; i < places.size() && device.rank == 0; ++i)
            if (places[i] >= 0) put(static_cast<size_t>(places[i]), load_element(tensor.dtype, host.data(), static_cast<int64_t>(i)));
    }
}

// The stored tensors that the program updates, by name, if it has the prefix. Elements that no part covers keep their initial
// value.
inline std::vector<HostTensor> gather_updated(Device& device, const Tensors& tensors, const char* prefix = "") {
    const Program& program = device.program;
    std::map<std::string, HostTensor> updated;
    for (size_t s = 0; s < program.sources.size(); ++s) {
        const Source& source = program.sources[s];
        if (!source.is_written || !has_prefix(source.name, prefix)) continue;
        for (int64_t layer = source.all_layers().start; layer < source.all_layers().end; ++layer) {
            const auto runs = [&](const Layers& l) { return l.start <= layer && layer < l.end; };
            if (std::none_of(source.layers.begin(), source.layers.end(), runs)) continue;
            HostTensor& whole = updated[stored_name(source, layer)];
            if (whole.name.empty()) {
                whole = {stored_name(source, layer), source.tensor.dtype, source.stored_shape(), {}};
                const auto initial = initial_elements(source, layer, tensors);
                const int64_t n = device.rank == 0 ? product_of(whole.shape) : 0;
                for (int64_t i = 0; i < n; ++i) whole.values.push_back(initial(i));
            }
            gather_parts(
                device, source.tensor, device.source(s, layer), [&](int64_t rank) { return source.has_layer(program.mesh, layer, rank); },
                [&](int64_t rank) { return stored_places(source, rank); }, [&](size_t place, double value) { whole.values[place] = value; });
        }
    }
    std::vector<HostTensor> out;
    for (auto& [name, tensor] : updated) {
        const std::vector<std::string> names = members(name, tensor.shape);
        if (names.size() == 1 && names.front() == name) {
            out.push_back(std::move(tensor));
            continue;
        }
        // A stack has its members in a row. Only rank 0 has values.
        const std::vector<int64_t> each(tensor.shape.begin() + 1, tensor.shape.end());
        const auto size = static_cast<std::ptrdiff_t>(tensor.values.size() / std::max<size_t>(names.size(), 1));
        auto first = tensor.values.begin();
        for (const std::string& member : names) {
            out.push_back({member, tensor.dtype, each, {first, first + size}});
            first += size;
        }
    }
    return out;
}

// Outputs, without padding and with partial sums added, then updated tensors.
inline std::vector<HostTensor> gather(Device& device, const Tensors& tensors) {
    std::vector<HostTensor> out;
    for (const Output& output : device.program.outputs) {
        const Tensor& tensor = output.tensor;
        HostTensor whole{output.name, tensor.dtype, tensor.shape, {}};
        if (device.rank == 0) whole.values.assign(static_cast<size_t>(product_of(tensor.shape)), 0);
        gather_parts(
            device, tensor, device.arena() + output.offset(device.rank), [&](int64_t rank) { return device.program.mesh.is_at(output.place, rank); },
            [&](int64_t rank) { return places_of(tensor.part(rank), tensor.shape); }, [&](size_t place, double value) { whole.values[place] += value; });
        out.push_back(std::move(whole));
    }
    for (HostTensor& tensor : gather_updated(device, tensors)) out.push_back(std::move(tensor));
    return out;
}

}  // namespace ithaca
