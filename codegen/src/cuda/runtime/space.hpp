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

enum class DType { F64, F32, F16, BF16, I32, Bool };

inline int64_t bytes_of(DType dtype) {
    switch (dtype) {
        case DType::F64: return 8;
        case DType::F32: case DType::I32: return 4;
        case DType::F16: case DType::BF16: return 2;
        case DType::Bool: return 1;
    }
    return 0;
}

struct Range {
    int64_t start, end;
    int64_t size() const { return end > start ? end - start : 0; }
    bool operator==(const Range& other) const { return start == other.start && end == other.end; }
};
using Ranges = std::vector<Range>;
// One range per dimension.
using Region = std::vector<Range>;

// Neighbouring indices that have neighbouring positions.
struct Run {
    int64_t index, position, len;
};

// The position that each index of a dimension has.
struct Order {
    enum Kind { Contiguous, Zigzag, Striped, Table } kind = Contiguous;
    int64_t parts = 1, block = 1;
    Ranges table = {};  // runs of positions, in order of index

    // The whole run in which `index` lies, for orders that are no table.
    Run run_at(int64_t size, int64_t index) const {
        if (kind == Zigzag) {
            const int64_t len = size / (2 * parts), i = index / len;
            return {i * len, (i % 2 == 0 ? i / 2 : 2 * parts - 1 - i / 2) * len, len};
        }
        if (kind == Striped) {
            const int64_t stripes = size / (parts * block), i = index / block;
            return {i * block, (i % stripes * parts + i / stripes) * block, block};
        }
        return {0, 0, size};
    }
};
inline Order zigzag(int64_t parts) { return {Order::Zigzag, parts, 1, {}}; }
inline Order striped(int64_t parts, int64_t block) { return {Order::Striped, parts, block, {}}; }
inline Order table(const Ranges& runs) { return {Order::Table, 1, 1, runs}; }

// The tokens that each rank needs of a sequence, as ranges of its indices.
struct Fetched {
    int of = -1;  // the sequence; -1: the dimension is not fetched
    std::vector<Ranges> parts = {};

    // Where a part lies in the fetched dimension.
    Range part(int64_t i) const {
        int64_t start = 0;
        for (int64_t p = 0; p < i; ++p)
            for (const Range& r : parts[p]) start += r.size();
        int64_t end = start;
        for (const Range& r : parts[i]) end += r.size();
        return {start, end};
    }
};

// One of several equal parts of another dimension: that one is [runs, count, size / (runs * count)].
struct Part {
    int of = -1;  // the dimension; -1: this one is no part
    int64_t index = 0, count = 1, runs = 1;
};

struct Dim {
    const char* name;
    int64_t size, granule, valid;
    int copies;  // the dimension of which this one repeats each element, or -1
    Order order = {};
    Fetched fetched = {};
    Part part = {};
};

struct Axis {
    const char* name;
    int64_t size;
};

// Parts that have travelled: the rank at coordinate c of the axis holds the part of coordinate c + by, around the ring;
// only coordinates first .. last hold anything.
struct Move {
    int axis;
    int64_t by, first, last;
};

// The only ranks that have a part in something: those with one coordinate along an axis, such as a stage of a pipeline.
struct At {
    int axis = -1;  // -1: all ranks
    int64_t coordinate = 0;
};

struct Type {
    DType dtype;
    std::vector<int> dims;                // outermost first
    std::vector<std::vector<int>> split;  // for each dimension the mesh axes that split it, major to minor
    std::vector<int> partial;             // mesh axes over which the value is a sum still to be taken
    std::vector<Move> moved = {};         // at most one for an axis
    At at = {};                           // the ranks that hold it
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

    bool is_at(const At& at, int64_t rank) const { return at.axis < 0 || coordinate(rank, at.axis) == at.coordinate; }
    // Whether a rank holds a tensor of this type; of a scalar its box does not tell.
    bool holds(const Type& type, int64_t rank) const { return is_at(type.at, rank); }

    // The rank that differs from `rank` in having `coordinate` along an axis.
    int64_t with_coordinate(int64_t rank, int axis, int64_t coordinate) const {
        return rank + (coordinate - this->coordinate(rank, axis)) * stride(axis);
    }
    // The coordinate along several axes together, the first counting most.
    int64_t coordinate_along(int64_t rank, const std::vector<int>& by) const {
        int64_t c = 0;
        for (int axis : by) c = c * axes[axis].size + coordinate(rank, axis);
        return c;
    }

    // The ranks that differ from `rank` along these axes only, by coordinate along them.
    std::vector<int64_t> group(int64_t rank, const std::vector<int>& along) const {
        std::vector<int64_t> out = {rank};
        for (int axis : along) {
            std::vector<int64_t> wider;
            for (int64_t r : out)
                for (int64_t c = 0; c < axes[axis].size; ++c) wider.push_back(with_coordinate(r, axis, c));
            out = wider;
        }
        return out;
    }

    // The index of the dimension that `dim` is a part of which is its `index`; the same where it is no part.
    int64_t origin(int dim, int64_t index) const {
        const Part& part = dims[dim].part;
        if (part.of < 0) return index;
        const int64_t each = dims[dim].size / part.runs;
        return (index / each * part.count + part.index) * each + index % each;
    }

    // The rank whose part `rank` holds; -1 when it holds nothing.
    int64_t owner(const Type& type, int64_t rank) const {
        int64_t owner = rank;
        for (const Move& m : type.moved) {
            const int64_t c = coordinate(rank, m.axis);
            if (c < m.first || c >= m.last) return -1;
            owner = with_coordinate(owner, m.axis, (c + m.by) % axes[m.axis].size);
        }
        return owner;
    }
    // The rank that holds the part of `owner`; -1 when none does.
    int64_t holder(const Type& type, int64_t owner) const {
        int64_t holder = owner;
        for (const Move& m : type.moved) {
            const int64_t n = axes[m.axis].size, c = (coordinate(owner, m.axis) + n - m.by % n) % n;
            if (c < m.first || c >= m.last) return -1;
            holder = with_coordinate(holder, m.axis, c);
        }
        return holder;
    }

    // The elements of a dimension that a rank holds: each axis deals whole granules of what the axes before it left,
    // the first ranks getting one more when the count does not divide. Of what is fetched a rank holds its part.
    Range range(int dim, const std::vector<int>& by, int64_t rank) const {
        const Dim& d = dims[dim];
        if (d.fetched.of >= 0 && !by.empty()) return d.fetched.part(coordinate_along(rank, by));
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
        if (!holds(type, rank)) return Region(type.dims.size(), Range{0, 0});
        const int64_t from = owner(type, rank);
        Region box;
        for (size_t i = 0; i < type.dims.size(); ++i) {
            auto travels = [&](int axis) {
                return std::any_of(type.moved.begin(), type.moved.end(), [&](const Move& m) { return m.axis == axis; });
            };
            // What has moved away is gone along the dimension that the axis splits.
            const bool gone = from < 0 && std::any_of(type.split[i].begin(), type.split[i].end(), travels);
            box.push_back(gone ? Range{0, 0} : range(type.dims[i], type.split[i], from < 0 ? rank : from));
        }
        return box;
    }

    // The dimension whose positions a dimension has: where it is fetched from, or itself.
    int sequence(int dim) const { return dims[dim].fetched.of >= 0 ? dims[dim].fetched.of : dim; }

    // The positions of indices by the dimension's own order, as runs in order of index.
    std::vector<Run> own_runs(int dim, Range indices) const {
        const Dim& d = dims[dim];
        std::vector<Run> out;
        auto add = [&](Run run) {
            const int64_t from = std::max(run.index, indices.start), to = std::min(run.index + run.len, indices.end);
            if (from >= to) return;
            const int64_t position = run.position + (from - run.index);
            if (!out.empty() && out.back().position + out.back().len == position) out.back().len += to - from;
            else out.push_back({from, position, to - from});
        };
        if (d.order.kind == Order::Table) {
            int64_t index = 0;
            for (const Range& r : d.order.table) {
                add({index, r.start, r.size()});
                index += r.size();
            }
            return out;
        }
        for (int64_t at = indices.start; at < indices.end;) {
            const Run run = d.order.run_at(d.size, at);
            add(run);
            at = run.index + run.len;
        }
        return out;
    }

    // The same, what is fetched having the positions that it has where it comes from.
    std::vector<Run> position_runs(int dim, Range indices) const {
        const Fetched& fetched = dims[dim].fetched;
        if (fetched.of < 0) return own_runs(dim, indices);
        std::vector<Run> out;
        int64_t first = 0;
        for (const Ranges& part : fetched.parts) {
            for (const Range& r : part) {
                const int64_t start = std::max(indices.start, first), end = std::min(indices.end, first + r.size());
                if (start < end) {
                    const Range of = {r.start + (start - first), r.start + (end - first)};
                    for (const Run& run : position_runs(fetched.of, of))
                        out.push_back({start + (run.index - of.start), run.position, run.len});
                }
                first += r.size();
            }
        }
        return out;
    }

    // The position of each of the indices, by the dimension's own order.
    std::vector<int64_t> own_positions(int dim, Range indices) const {
        std::vector<int64_t> out;
        for (const Run& run : own_runs(dim, indices))
            for (int64_t i = 0; i < run.len; ++i) out.push_back(run.position + i);
        return out;
    }
};

}  // namespace ithaca
