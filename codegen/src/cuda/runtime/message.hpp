// Several tensors as one message. A wire has, for each member of the group in order, the blocks of the tensors one after
// another; where all members are sent the same, or a rank keeps the sum, it has the tensors one after another.
#pragma once

#include "collective.hpp"

namespace ithaca {

// The numbers of transfers that travel as one: of one kind, between the same ranks, of one element type.
using Parcels = std::vector<size_t>;

inline Load load_of(const Device& device, const Parcels& parcels) {
    Load all = load_of(device.exchange(parcels.front()));
    for (size_t k = 1; k < parcels.size(); ++k) {
        const Load load = load_of(device.exchange(parcels[k]));
        for (size_t i = 0; i < all.group.size(); ++i) {
            all.send[i] += load.send[i];
            all.recv[i] += load.recv[i];
        }
        all.mine += load.mine;
        all.wanted += load.wanted;
    }
    return all;
}

// Whether that side of the wire is whole tensors.
inline bool is_shared(Collective kind, Direction direction) {
    switch (kind) {
        case Collective::AllReduce: return true;
        case Collective::AllGather:
        case Collective::Travel:
        case Collective::Relocate:
        case Collective::Permute: return direction == Direction::ToWire;
        case Collective::ReduceScatter: return direction == Direction::FromWire;
        case Collective::AllToAll:
        case Collective::Fetch:
        case Collective::FetchSum: return false;
    }
    return false;
}

// How one tensor of a message lies in its wire.
inline Strided strided(const Device& device, const Parcels& parcels, size_t part, Direction direction) {
    const bool sent = direction == Direction::ToWire;
    const bool shared = is_shared(device.transfer(parcels.front()).kind, direction);
    const Exchange& own = device.exchange(parcels[part]);
    const Region& box = sent ? own.mine : own.wanted;
    // A rank without a part of the tensor has nothing to address.
    const auto block_in = [&](const Exchange& e) -> Region {
        const Block& block = (sent ? e.send : e.recv).front();
        const Region& whole = sent ? e.mine : e.wanted;
        return shared || block.empty() ? whole : block.front();
    };
    Strided out;
    const Region block = block_in(own);
    std::vector<int64_t> extents;
    for (size_t d = 0; d < box.size(); ++d) {
        extents.push_back(block[d].size());
        if (out.cut < 0 && block[d].size() != box[d].size()) out.cut = static_cast<int>(d);
    }
    out.strides = row_major(extents);
    if (out.cut >= 0) out.run = extents[static_cast<size_t>(out.cut)];
    for (size_t k = 0; k < parcels.size(); ++k) {
        const int64_t n = elements(block_in(device.exchange(parcels[k])));
        if (k < part) out.start += n;
        out.block += n;
    }
    return out;
}

// Copies all tensors to the wire, or from it.
inline void move_parcels(const Device& device, Queue queue, const Parcels& parcels, const Pointers& tensors,
                         Direction direction, char* wire) {
    const Transfer& first = device.transfer(parcels.front());
    const bool sent = direction == Direction::ToWire;
    const bool shared = is_shared(first.kind, direction);
    const Load load = load_of(device, parcels);
    // Where the next block for each member goes.
    std::vector<int64_t> ends(shared ? 1 : load.group.size(), 0);
    for (size_t i = 1; i < ends.size(); ++i) ends[i] = ends[i - 1] + (sent ? load.send : load.recv)[i - 1];
    for (size_t k = 0; k < parcels.size(); ++k) {
        const Exchange& e = device.exchange(parcels[k]);
        const Region& box = sent ? e.mine : e.wanted;
        std::vector<Region> blocks;
        std::vector<int64_t> places;
        auto place = [&](const Region& region, int64_t& end) {
            blocks.push_back(region);
            places.push_back(end);
            end += elements(region);
        };
        if (shared) {
            place(box, ends[0]);
        } else {
            const std::vector<Block>& of = sent ? e.send : e.recv;
            for (size_t i = 0; i < of.size(); ++i)
                for (const Region& region : of[i]) place(region, ends[i]);
        }
        // What lies in the wire is there.
        if (tensors[k] == nullptr) continue;
        move_placed(device, queue, first.from.dtype, box, blocks, places, direction, tensors[k], wire);
    }
}

inline void pack(const Device& device, Queue queue, const Parcels& parcels, const Pointers& tensors, char* wire) {
    move_parcels(device, queue, parcels, tensors, Direction::ToWire, wire);
}

inline void exchange(const Device& device, Queue queue, const Parcels& parcels, char* from, char* to) {
    communicate(device, queue, device.transfer(parcels.front()), load_of(device, parcels), from, to);
}

inline void unpack(const Device& device, Queue queue, const Parcels& parcels, char* wire, const Pointers& tensors) {
    move_parcels(device, queue, parcels, tensors, Direction::FromWire, wire);
}

}  // namespace ithaca
