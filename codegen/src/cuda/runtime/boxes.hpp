// The geometry of collectives: which elements go from which rank to which.
#pragma once

#include "space.hpp"

namespace ithaca {

enum class Collective { AllToAll, AllGather, ReduceScatter, AllReduce, Travel, Relocate, Permute, Fetch, FetchSum };

// A collective with the types on both of its sides.
struct Transfer {
    Collective kind;
    std::vector<int> axes;  // along which ranks communicate; a permute runs over the whole mesh
    const Type& from;
    const Type& to;
    int fetched = -1;  // the dimension that is fetched, of a fetch and its adjoint

    bool sums() const { return kind == Collective::FetchSum; }
    bool is_fetch() const { return kind == Collective::Fetch || sums(); }
};

// The elements that go to or come from a member of a group: regions, one after another.
using Block = std::vector<Region>;

inline int64_t elements(const Block& block) {
    int64_t n = 0;
    for (const Region& region : block) n += elements(region);
    return n;
}

// What a rank sends to and receives from each member of its group, itself included, in order of members. What is sent
// are regions of the operand, what is received are regions of the result.
struct Exchange {
    std::vector<int64_t> group;
    std::vector<Block> send, recv;
    Region mine, wanted;
};

// A permute moves each block once: among the ranks that hold the same block, the n-th serves the n-th that wants it, a
// rank serving itself where it can. Returns the source of each rank.
inline std::vector<int64_t> permute_sources(const std::vector<Region>& have, const std::vector<Region>& want) {
    std::vector<int64_t> sources(have.size(), -1);
    for (size_t rank = 0; rank < have.size(); ++rank) {
        if (have[rank] == want[rank]) {
            sources[rank] = static_cast<int64_t>(rank);
            continue;
        }
        std::vector<size_t> holders;
        size_t nth = 0;
        for (size_t r = 0; r < have.size(); ++r) {
            if (have[r] == want[rank]) holders.push_back(r);
            if (r < rank && want[r] == want[rank] && !(have[r] == want[rank])) ++nth;
        }
        if (!holders.empty()) sources[rank] = static_cast<int64_t>(holders[nth % holders.size()]);
    }
    return sources;
}

inline Block block_of(const Region& region) { return elements(region) > 0 ? Block{region} : Block{}; }

// The block that `taker` needs of what `giver` holds: where it is, or where it lies once fetched.
enum class End { Source, Target };
inline Block fetched_block(const Space& space, const Type& held_as, const Type& fetched_as, int dim, int64_t giver,
                           int64_t taker, End end) {
    const size_t at = static_cast<size_t>(std::find(fetched_as.dims.begin(), fetched_as.dims.end(), dim) - fetched_as.dims.begin());
    const Fetched& fetched = space.dims[dim].fetched;
    const Region held = space.local_box(held_as, giver);
    const int64_t i = space.coordinate_along(taker, fetched_as.split[at]);
    int64_t first = fetched.part(i).start;
    Block block;
    for (const Range& r : fetched.parts[i]) {
        const int64_t start = std::max(r.start, held[at].start), stop = std::min(r.end, held[at].end);
        if (start < stop) {
            Region region = held;
            region[at] = end == End::Source ? Range{start, stop} : Range{first + start - r.start, first + stop - r.start};
            if (elements(region) > 0) block.push_back(region);
        }
        first += r.size();
    }
    return block;
}

inline Exchange exchange_of(const Space& space, const Transfer& x, int64_t rank) {
    Exchange e;
    e.mine = space.local_box(x.from, rank);
    e.wanted = space.local_box(x.to, rank);
    if (x.kind == Collective::Permute) {
        std::vector<Region> have, want;
        for (int64_t r = 0; r < space.ranks(); ++r) {
            e.group.push_back(r);
            have.push_back(space.local_box(x.from, r));
            want.push_back(space.local_box(x.to, r));
        }
        const std::vector<int64_t> sources = permute_sources(have, want);
        for (int64_t peer : e.group) {
            e.send.push_back(sources[peer] == rank ? block_of(want[peer]) : Block{});
            e.recv.push_back(sources[rank] == peer ? block_of(e.wanted) : Block{});
        }
        return e;
    }
    e.group = space.group(rank, x.axes);
    if (x.kind == Collective::Relocate) {
        // What the ranks of one place hold goes to those of another, or to all, each along its own line.
        auto block = [&](int64_t giver, int64_t taker) {
            const bool goes = space.holds(x.from, giver) && space.holds(x.to, taker);
            return goes ? block_of(space.local_box(x.from, giver)) : Block{};
        };
        for (int64_t peer : e.group) {
            e.send.push_back(block(rank, peer));
            e.recv.push_back(block(peer, rank));
        }
        return e;
    }
    if (x.kind == Collective::Travel) {
        // Each rank has one part that it sends, and one rank that it receives from.
        const int64_t gives = space.owner(x.from, rank), takes = space.owner(x.to, rank);
        const int64_t receiver = gives < 0 ? -1 : space.holder(x.to, gives);
        const int64_t sender = takes < 0 ? -1 : space.holder(x.from, takes);
        for (int64_t peer : e.group) {
            e.send.push_back(peer == receiver ? block_of(e.mine) : Block{});
            e.recv.push_back(peer == sender ? block_of(e.wanted) : Block{});
        }
        return e;
    }
    for (int64_t peer : e.group) {
        switch (x.kind) {
            case Collective::Fetch:
                e.send.push_back(fetched_block(space, x.from, x.to, x.fetched, rank, peer, End::Source));
                e.recv.push_back(fetched_block(space, x.from, x.to, x.fetched, peer, rank, End::Target));
                break;
            case Collective::FetchSum:
                e.send.push_back(fetched_block(space, x.to, x.from, x.fetched, peer, rank, End::Target));
                e.recv.push_back(fetched_block(space, x.to, x.from, x.fetched, rank, peer, End::Source));
                break;
            default:
                e.send.push_back(block_of(intersect(e.mine, space.local_box(x.to, peer))));
                e.recv.push_back(block_of(intersect(space.local_box(x.from, peer), e.wanted)));
        }
    }
    return e;
}

// The regions of blocks, one after another, as pieces of a tensor that lies in `box`: three numbers for each piece, where
// it lies on the wire, its first index along dimension `at` counted from the box, and its length there. Along all other
// dimensions a piece is as wide as the box.
inline std::vector<int64_t> pieces_of(const std::vector<Block>& blocks, const Region& box, size_t at) {
    std::vector<int64_t> out;
    int64_t on_wire = 0;
    for (const Block& block : blocks) {
        for (const Region& region : block) {
            out.insert(out.end(), {on_wire, region[at].start - box[at].start, region[at].size()});
            on_wire += elements(region);
        }
    }
    return out;
}

}  // namespace ithaca
