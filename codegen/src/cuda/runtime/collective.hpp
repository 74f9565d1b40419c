// Collectives: packing, NCCL, unpacking. Blocks lie in wires in order of the members of the group, the own one included.
#pragma once

#include "kernels/copy.cuh"
#include "launch.hpp"

namespace ithaca {

inline ncclDataType_t nccl_type(DType dtype) {
    switch (dtype) {
        case DType::F64: return ncclFloat64;
        case DType::F32: return ncclFloat32;
        case DType::F16: return ncclFloat16;
        case DType::BF16: return ncclBfloat16;
        case DType::I32: return ncclInt32;
        case DType::Bool: return ncclInt8;
    }
    return ncclInt8;
}

// Copies blocks between a tensor that lies in `box` and a wire, on which block i lies at element `places[i]`. Blocks of
// one shape at even distances, as those of an even split are, take one kernel.
enum class Direction { ToWire, FromWire };
inline void move_placed(const Device& device, Queue queue, DType dtype, const Region& box, const std::vector<Region>& blocks,
                        const std::vector<int64_t>& places, Direction direction, char* tensor, char* wire) {
    std::vector<int64_t> extents;
    for (const Range& r : box) extents.push_back(r.size());
    const std::vector<int64_t> strides = row_major(extents);
    auto offset_of = [&](const Region& block) {
        int64_t at = 0;
        for (size_t d = 0; d < block.size(); ++d) at += (block[d].start - box[d].start) * strides[d];
        return at;
    };
    auto same_shape = [](const Region& a, const Region& b) {
        for (size_t d = 0; d < a.size(); ++d)
            if (a[d].size() != b[d].size()) return false;
        return true;
    };
    const int64_t width = bytes_of(dtype);
    for (size_t i = 0; i < blocks.size();) {
        const int64_t n = elements(blocks[i]);
        if (n == 0) {
            ++i;
            continue;
        }
        const int64_t at = offset_of(blocks[i]);
        size_t run = 1;
        int64_t step = 0, wire_step = n;
        while (i + run < blocks.size() && same_shape(blocks[i], blocks[i + run])) {
            const int64_t distance = offset_of(blocks[i + run]) - offset_of(blocks[i + run - 1]);
            const int64_t wire_distance = places[i + run] - places[i + run - 1];
            if (run > 1 && (distance != step || wire_distance != wire_step)) break;
            step = distance;
            wire_step = wire_distance;
            ++run;
        }
        const int wire_at = direction == Direction::ToWire ? 0 : 1;
        Walk<2> walk;
        walk.n = static_cast<int>(box.size()) + 1;
        walk.extent[0] = static_cast<int64_t>(run);
        walk.stride[wire_at][0] = wire_step;
        walk.stride[1 - wire_at][0] = step;
        int64_t dense = n;
        for (size_t d = 0; d < box.size(); ++d) {
            walk.extent[d + 1] = blocks[i][d].size();
            dense /= blocks[i][d].size();
            walk.stride[wire_at][d + 1] = dense;
            walk.stride[1 - wire_at][d + 1] = strides[d];
        }
        char* const there = wire + places[i] * width;
        char* const here = tensor + at * width;
        with_bits(dtype, [&](auto t) {
            using T = decltype(t);
            const bool packing = direction == Direction::ToWire;
            const int64_t all = n * static_cast<int64_t>(run);
            launch(kernel::copy_box<T>, all, device.stream(queue), as<T>(packing ? here : there), as<T>(packing ? there : here),
                   walk, all);
        });
        i += run;
    }
}

// The same for blocks that lie one after another on the wire.
inline void move_blocks(const Device& device, Queue queue, DType dtype, const Region& box,
                        const std::vector<Region>& blocks, Direction direction, char* tensor, char* wire) {
    std::vector<int64_t> places;
    int64_t end = 0;
    for (const Region& block : blocks) {
        places.push_back(end);
        end += elements(block);
    }
    move_placed(device, queue, dtype, box, blocks, places, direction, tensor, wire);
}

// The regions of blocks that are one region each, or none.
inline std::vector<Region> regions_of(const std::vector<Block>& blocks) {
    std::vector<Region> out;
    for (const Block& block : blocks) out.insert(out.end(), block.begin(), block.end());
    return out;
}

// Extents around dimension `at` of a box.
inline kernel::PiecesShape pieces_shape(const Region& box, size_t at) {
    kernel::PiecesShape s{1, box[at].size(), 1};
    for (size_t d = 0; d < box.size(); ++d) {
        if (d < at) s.outer *= box[d].size();
        if (d > at) s.inner *= box[d].size();
    }
    return s;
}

// Copies the pieces of a fetch between a tensor and a wire, in one kernel however many they are.
inline void move_pieces(const Device& device, Queue queue, DType dtype, const kernel::Pieces& pieces, const Region& box,
                        size_t at, Direction direction, char* tensor, char* wire, int64_t n) {
    const kernel::PiecesShape s = pieces_shape(box, at);
    with_bits(dtype, [&](auto t) {
        using T = decltype(t);
        if (direction == Direction::ToWire)
            launch(kernel::gather_pieces<T>, n, device.stream(queue), as<T>(tensor), as<T>(wire), pieces, s, n);
        else
            launch(kernel::scatter_pieces<T>, n, device.stream(queue), as<T>(wire), as<T>(tensor), pieces, s, n);
    });
}

inline int64_t elements_of(const std::vector<Block>& blocks) {
    int64_t n = 0;
    for (const Block& block : blocks) n += elements(block);
    return n;
}

inline void pack(const Device& device, Queue queue, size_t transfer, char* tensor, char* wire) {
    const Exchange& e = device.exchange(transfer);
    const Transfer& x = device.transfer(transfer);
    if (x.is_fetch()) {
        const kernel::Pieces pieces = device.pieces(transfer, kSent);
        move_pieces(device, queue, x.from.dtype, pieces, e.mine, device.fetched_at(transfer), Direction::ToWire, tensor, wire,
                    elements_of(e.send));
        return;
    }
    move_blocks(device, queue, x.from.dtype, e.mine, regions_of(e.send), Direction::ToWire, tensor, wire);
}

inline void unpack(const Device& device, Queue queue, size_t transfer, char* wire, char* tensor) {
    const Exchange& e = device.exchange(transfer);
    const Transfer& x = device.transfer(transfer);
    const DType dtype = x.to.dtype;
    if (!x.is_fetch()) {
        move_blocks(device, queue, dtype, e.wanted, regions_of(e.recv), Direction::FromWire, tensor, wire);
        return;
    }
    const kernel::Pieces pieces = device.pieces(transfer, kReceived);
    const size_t at = device.fetched_at(transfer);
    if (!x.sums()) {
        move_pieces(device, queue, dtype, pieces, e.wanted, at, Direction::FromWire, tensor, wire, elements_of(e.recv));
        return;
    }
    const int64_t n = elements(e.wanted);
    with_any(dtype, [&](auto t) {
        using T = decltype(t);
        launch(kernel::sum_pieces<T>, n, device.stream(queue), as<T>(wire), as<T>(tensor), pieces, pieces_shape(e.wanted, at), n);
    });
}

// Keeps this rank's part; nothing is sent.
inline void slice(const Device& device, Queue queue, View x, View z) {
    const Region from = device.space().local_box(x.type, device.rank());
    const Region to = device.space().local_box(z.type, device.rank());
    move_blocks(device, queue, x.type.dtype, from, {to}, Direction::ToWire, x.data, z.data);
}

// How many elements a rank sends to and receives from each member of a group, has, and will have.
struct Load {
    std::vector<int64_t> group, send, recv;
    int64_t mine = 0, wanted = 0;
};

inline Load load_of(const Exchange& e) {
    Load load{e.group, {}, {}, elements(e.mine), elements(e.wanted)};
    for (size_t i = 0; i < e.group.size(); ++i) {
        load.send.push_back(elements(e.send[i]));
        load.recv.push_back(elements(e.recv[i]));
    }
    return load;
}

inline bool all_equal(const std::vector<int64_t>& counts) {
    return std::all_of(counts.begin(), counts.end(), [&](int64_t n) { return n == counts.front(); });
}

// A communicator with the numbers that the members of a group have in it.
struct Peers {
    ncclComm_t comm;
    std::vector<int> numbers;
};

// Along one axis its communicator, else the world.
inline Peers peers_of(const Device& device, const Transfer& x, const Load& load) {
    const Communicators& comms = device.communicators();
    Peers peers{x.axes.size() == 1 ? comms.axes[x.axes[0]] : comms.world, {}};
    for (size_t i = 0; i < load.group.size(); ++i)
        peers.numbers.push_back(static_cast<int>(x.axes.size() == 1 ? static_cast<int64_t>(i) : load.group[i]));
    return peers;
}

// Sends blocks that lie one after another and receives others so; the own block is copied. Ranks that exchange nothing
// issue nothing.
inline void exchange_blocks(const Device& device, Queue queue, const Load& load, DType dtype, const Peers& peers,
                            char* from, char* to) {
    const int64_t width = bytes_of(dtype);
    const ncclDataType_t type = nccl_type(dtype);
    const cudaStream_t stream = device.stream(queue);
    char *own_from = nullptr, *own_to = nullptr;
    int64_t own = 0;
    ITHACA_NCCL(ncclGroupStart());
    for (size_t i = 0; i < load.group.size(); ++i) {
        const int peer = peers.numbers[i];
        const int64_t n_send = load.send[i], n_recv = load.recv[i];
        if (load.group[i] == device.rank()) {
            own_from = from;
            own_to = to;
            own = n_send;
        } else {
            if (n_send > 0) ITHACA_NCCL(ncclSend(from, static_cast<size_t>(n_send), type, peer, peers.comm, stream));
            if (n_recv > 0) ITHACA_NCCL(ncclRecv(to, static_cast<size_t>(n_recv), type, peer, peers.comm, stream));
        }
        from += n_send * width;
        to += n_recv * width;
    }
    ITHACA_NCCL(ncclGroupEnd());
    device.watch().settle(peers.comm);
    if (own > 0)
        ITHACA_CUDA(cudaMemcpyAsync(own_to, own_from, static_cast<size_t>(own * width), cudaMemcpyDeviceToDevice, stream));
}

// Sends its one block to every member that wants it, and receives the blocks in order.
inline void gather_blocks(const Device& device, Queue queue, const Load& load, DType dtype, const Peers& peers, char* from,
                          char* to) {
    const cudaStream_t stream = device.stream(queue);
    const ncclDataType_t type = nccl_type(dtype);
    const int64_t own = load.mine, width = bytes_of(dtype);
    ITHACA_NCCL(ncclGroupStart());
    for (size_t i = 0; i < load.group.size(); ++i) {
        const int peer = peers.numbers[i];
        const int64_t n = load.recv[i];
        if (load.group[i] == device.rank()) {
            if (n > 0)
                ITHACA_CUDA(cudaMemcpyAsync(to, from, static_cast<size_t>(n * width), cudaMemcpyDeviceToDevice, stream));
        } else {
            if (own > 0 && load.send[i] > 0)
                ITHACA_NCCL(ncclSend(from, static_cast<size_t>(own), type, peer, peers.comm, stream));
            if (n > 0) ITHACA_NCCL(ncclRecv(to, static_cast<size_t>(n), type, peer, peers.comm, stream));
        }
        to += n * width;
    }
    ITHACA_NCCL(ncclGroupEnd());
    device.watch().settle(peers.comm);
}

// Elements that a rank sends to others; a sum over all counts what is sent where each member sums its share and then
// hands it to the others.
inline int64_t elements_sent(const Device& device, Collective kind, const Load& load) {
    const auto members = static_cast<int64_t>(load.group.size());
    const auto self = std::find(load.group.begin(), load.group.end(), device.rank()) - load.group.begin();
    int64_t n = 0;
    if (kind == Collective::AllReduce) {
        const int64_t own = load.mine * (self + 1) / members - load.mine * self / members;
        return load.mine - own + own * (members - 1);
    }
    for (int64_t i = 0; i < members; ++i)
        if (i != self) n += load.send[static_cast<size_t>(i)];
    return n;
}

// Communicates what `load` says, by the collective and along the axes of `x`.
inline void communicate(const Device& device, Queue queue, const Transfer& x, const Load& load, char* from, char* to) {
    device.profile().sends(elements_sent(device, x.kind, load) * bytes_of(x.from.dtype));
    const Peers peers = peers_of(device, x, load);
    const ncclComm_t comm = peers.comm;
    const DType dtype = x.from.dtype;
    const cudaStream_t stream = device.stream(queue);
    switch (x.kind) {
        case Collective::AllToAll:
        case Collective::Fetch:
        case Collective::FetchSum:
            return exchange_blocks(device, queue, load, dtype, peers, from, to);
        case Collective::Travel:
        case Collective::Relocate:
        case Collective::Permute:
            return gather_blocks(device, queue, load, dtype, peers, from, to);
        case Collective::AllGather:
            if (!all_equal(load.recv)) return gather_blocks(device, queue, load, dtype, peers, from, to);
            ITHACA_NCCL(ncclAllGather(from, to, static_cast<size_t>(load.mine), nccl_type(dtype), comm, stream));
            return device.watch().settle(comm);
        case Collective::ReduceScatter:
            if (all_equal(load.send)) {
                ITHACA_NCCL(ncclReduceScatter(from, to, static_cast<size_t>(load.wanted), nccl_type(dtype), ncclSum, comm,
                                              stream));
                return device.watch().settle(comm);
            }
            ITHACA_NCCL(ncclGroupStart());
            for (size_t i = 0; i < load.group.size(); ++i) {
                const int64_t n = load.send[i];
                if (n > 0)
                    ITHACA_NCCL(ncclReduce(from, to, static_cast<size_t>(n), nccl_type(dtype), ncclSum,
                                           static_cast<int>(i), comm, stream));
                from += n * bytes_of(dtype);
            }
            ITHACA_NCCL(ncclGroupEnd());
            return device.watch().settle(comm);
        case Collective::AllReduce:
            ITHACA_NCCL(ncclAllReduce(from, to, static_cast<size_t>(load.mine), nccl_type(dtype), ncclSum, comm, stream));
            return device.watch().settle(comm);
    }
}

// Communicates one tensor: `from` is it or its packed blocks, `to` the blocks received or the tensor itself.
inline void exchange(const Device& device, Queue queue, size_t transfer, char* from, char* to) {
    communicate(device, queue, device.transfer(transfer), load_of(device.exchange(transfer)), from, to);
}

}  // namespace ithaca
