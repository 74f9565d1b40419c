// The space: named dimensions, the mesh, layouts, and what follows from them for a rank.
//
// Nothing that depends on the rank is stored in the program: extents, strides and the geometry of collectives are
// computed here from (dimension, mesh axes, rank), so the source is the same for 2 and for 1024 ranks.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace ithaca {

enum class DType { F64, F32, F16, BF16, I32 };

inline int64_t bytes_of(DType dtype) {
    switch (dtype) {
        case DType::F64: return 8;
        case DType::F32: case DType::I32: return 4;
        case DType::F16: case DType::BF16: return 2;
    }
    return 0;
}

struct Dim {
    const char* name;
    int64_t size, granule, valid;
    int copies;  // the dimension of which this one repeats each element, or -1
};

struct Axis {
    const char* name;
    int64_t size;
};

struct Range {
    int64_t start, end;
    int64_t size() const { return end > start ? end - start : 0; }
    bool operator==(const Range& other) const { return start == other.start && end == other.end; }
};
// One range per dimension.
using Region = std::vector<Range>;

struct Type {
    DType dtype;
    std::vector<int> dims;                // outermost first
    std::vector<std::vector<int>> split;  // for each dimension the mesh axes that split it, major to minor
    std::vector<int> partial;             // mesh axes over which the value is a sum still to be taken
};

inline int64_t elements(const Region& region) {
    int64_t n = 1;
    for (const Range& r : region) n *= r.size();
    return n;
}

inline Region intersect(const Region& a, const Region& b) {
    Region out;
    for (size_t d = 0; d < a.size(); ++d) {
        const int64_t start = std::max(a[d].start, b[d].start);
        out.push_back({start, std::max(start, std::min(a[d].end, b[d].end))});
    }
    return out;
}

// Strides of a dense row-major tensor with these extents, in elements.
inline std::vector<int64_t> row_major(const std::vector<int64_t>& extents) {
    std::vector<int64_t> strides(extents.size(), 1);
    for (size_t d = extents.size(); d-- > 1;) strides[d - 1] = strides[d] * extents[d];
    return strides;
}

struct Space {
    std::vector<Dim> dims;
    std::vector<Axis> axes;  // major to minor

    int64_t ranks() const {
        int64_t n = 1;
        for (const Axis& a : axes) n *= a.size;
        return n;
    }
    // Distance in rank numbers between neighbours along an axis.
    int64_t stride(int axis) const {
        int64_t n = 1;
        for (size_t a = axis + 1; a < axes.size(); ++a) n *= axes[a].size;
        return n;
    }
    int64_t coordinate(int64_t rank, int axis) const { return rank / stride(axis) % axes[axis].size; }

    // The ranks that differ from `rank` along `axis` only, by coordinate.
    std::vector<int64_t> group(int64_t rank, int axis) const {
        const int64_t first = rank - coordinate(rank, axis) * stride(axis);
        std::vector<int64_t> out;
        for (int64_t i = 0; i < axes[axis].size; ++i) out.push_back(first + i * stride(axis));
        return out;
    }

    // The elements of a dimension that a rank holds: each axis deals whole granules of what the axes before it left,
    // the first ranks getting one more when the count does not divide.
    Range range(int dim, const std::vector<int>& by, int64_t rank) const {
        const Dim& d = dims[dim];
        int64_t start = 0, len = (d.size + d.granule - 1) / d.granule;
        for (int axis : by) {
            const int64_t n = axes[axis].size, i = coordinate(rank, axis);
            const int64_t each = len / n, more = len % n;
            start += i * each + std::min(i, more);
            len = each + (i < more ? 1 : 0);
        }
        return {std::min(start * d.granule, d.size), std::min((start + len) * d.granule, d.size)};
    }

    Region local_box(const Type& type, int64_t rank) const {
        Region box;
        for (size_t i = 0; i < type.dims.size(); ++i) box.push_back(range(type.dims[i], type.split[i], rank));
        return box;
    }
};

enum class Collective { AllToAll, AllGather, ReduceScatter, AllReduce, Permute };

// A collective with the types on both of its sides; `axis` is -1 for a permute, which runs over the whole mesh.
struct Transfer {
    Collective kind;
    int axis;
    const Type& from;
    const Type& to;
};

// What a rank sends to and receives from each member of its group, itself included, in order of members.
struct Exchange {
    std::vector<int64_t> group;
    std::vector<Region> send, recv;
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
        const Region nothing(e.mine.size(), Range{0, 0});
        for (int64_t peer : e.group) {
            e.send.push_back(sources[peer] == rank ? want[peer] : nothing);
            e.recv.push_back(sources[rank] == peer ? e.wanted : nothing);
        }
        return e;
    }
    e.group = space.group(rank, x.axis);
    for (int64_t peer : e.group) {
        e.send.push_back(intersect(e.mine, space.local_box(x.to, peer)));
        e.recv.push_back(intersect(space.local_box(x.from, peer), e.wanted));
    }
    return e;
}

}  // namespace ithaca
