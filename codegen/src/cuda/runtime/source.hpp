// Sources: from stored tensors, or from a seed, to the part of a weight or input that a rank holds.
#pragma once

#include <functional>
#include <limits>
#include <string>

#include "kernels/numeric.cuh"
#include "safetensors.hpp"
#include "space.hpp"

namespace ithaca {

enum class File { Weights, Inputs, States };

// What the names of states begin with; the rest is the weight's.
inline constexpr const char* kGradient = "grad.";
inline constexpr const char* kFirstMoment = "optimizer.exp_avg.";
inline constexpr const char* kSecondMoment = "optimizer.exp_avg_sq.";
inline constexpr const char* kMaster = "optimizer.master.";  // the weight in full precision

inline bool begins_with(const std::string& name, const char* prefix) { return name.rfind(prefix, 0) == 0; }

// Layers, and the ranks that run them.
struct Layers {
    int64_t start, end;
    At at = {};
};

// A weight, an input or a state. The stored tensor is seen as `view`, cut to `window` and read in row-major order as the dimensions of the type;
// `{layer}` in the name stands for the layer, `{expert}` for each index of the first stored dimension.
struct Source {
    const char* name;
    const Type& type;
    std::vector<int64_t> stored;  // empty: the shape of the type
    std::vector<int64_t> view;    // empty: as it is stored
    std::vector<Range> window;    // of the view; empty: all
    std::vector<Layers> layers;   // the layers it is loaded for; one layer 0..1 when the name has no {layer}
    File file;                    // a state is among the weights, or what it begins with
    bool is_written = false;      // by the program, which keeps it from step to step
    int64_t ahead = 0;            // an index of the last dimension reads what is stored so many places further on
    int64_t fill = 0;             // what is read in padding, and beyond the end
    int64_t below = -1;           // integers are not negative and lie below, or are `ignored`; -1: they may be any
    int64_t ignored = 0;
};

// The first layer, and one behind the last, that some rank has.
inline Range layers_of(const Source& source) {
    Range all = {source.layers.front().start, source.layers.front().end};
    for (const Layers& l : source.layers) all = {std::min(all.start, l.start), std::max(all.end, l.end)};
    return all;
}

// Whether a rank has the source of a layer.
inline bool has_layer(const Space& space, const Source& source, int64_t layer, int64_t rank) {
    return std::any_of(source.layers.begin(), source.layers.end(), [&](const Layers& l) {
        return l.start <= layer && layer < l.end && space.is_at(l.at, rank);
    });
}

inline std::string stored_name(const Source& source, int64_t layer) {
    std::string name = source.name;
    const std::string hole = "{layer}";
    for (size_t at; (at = name.find(hole)) != std::string::npos;) name.replace(at, hole.size(), std::to_string(layer));
    return name;
}

// The names of the n members of a stack, which `{expert}` tells apart; the name alone when it is no stack.
inline std::vector<std::string> members(const std::string& name, int64_t n) {
    const std::string hole = "{expert}";
    if (name.find(hole) == std::string::npos) return {name};
    std::vector<std::string> names;
    for (int64_t i = 0; i < n; ++i) {
        names.push_back(name);
        for (size_t at; (at = names.back().find(hole)) != std::string::npos;)
            names.back().replace(at, hole.size(), std::to_string(i));
    }
    return names;
}

// Where tensors come from: files, or a seed when it is not negative.
struct Tensors {
    TensorFiles weights, inputs;
    int64_t seed = -1;
    int64_t id_bound = 1;  // random integers lie below
};

inline uint64_t scramble(uint64_t x) {
    // splitmix64 (Steele, Lea and Flood, 2014).
    x += 0x9E3779B97F4A7C15u;
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
    x = (x ^ x >> 27) * 0x94D049BB133111EBu;
    return x ^ x >> 31;
}

inline double element_of(const StoredTensor& t, int64_t i) {
    auto read = [&](auto value) {
        std::memcpy(&value, t.data + i * static_cast<int64_t>(sizeof value), sizeof value);
        return value;
    };
    switch (t.dtype) {
        case Stored::F64: return read(double{});
        case Stored::F32: return read(float{});
        case Stored::F16: return widen(read(__half{}));
        case Stored::BF16: return widen(read(__nv_bfloat16{}));
        case Stored::I64: return static_cast<double>(read(int64_t{}));
        case Stored::I32: return read(int32_t{});
    }
    return 0;
}

inline void store_element(DType dtype, char* to, double value) {
    auto write = [&](auto stored) { std::memcpy(to, &stored, sizeof stored); };
    switch (dtype) {
        case DType::F64: return write(value);
        case DType::F32: return write(static_cast<float>(value));
        case DType::F16: return write(narrow<__half>(value));
        case DType::BF16: return write(narrow<__nv_bfloat16>(value));
        case DType::I32: return write(static_cast<int32_t>(value));
        case DType::Bool: return write(static_cast<uint8_t>(value != 0));
    }
}

inline double load_element(DType dtype, const char* from) {
    auto read = [&](auto value) {
        std::memcpy(&value, from, sizeof value);
        return value;
    };
    switch (dtype) {
        case DType::F64: return read(double{});
        case DType::F32: return read(float{});
        case DType::F16: return widen(read(__half{}));
        case DType::BF16: return widen(read(__nv_bfloat16{}));
        case DType::I32: return read(int32_t{});
        case DType::Bool: return read(uint8_t{});
    }
    return 0;
}

inline std::string show(const std::vector<int64_t>& shape) {
    std::string text = "[";
    for (size_t d = 0; d < shape.size(); ++d) text += (d ? " " : "") + std::to_string(shape[d]);
    return text + "]";
}

// What a file holds of each dimension: no padding, and a repeated element once.
inline std::vector<int64_t> held_of(const Space& space, const Type& type) {
    std::vector<int64_t> held;
    for (int d : type.dims) {
        const Dim& dim = space.dims[d];
        held.push_back((dim.copies < 0 ? dim : space.dims[dim.copies]).valid);
    }
    return held;
}

// The shape of the stored tensor.
inline std::vector<int64_t> stored_shape(const Space& space, const Source& source) {
    return source.stored.empty() ? held_of(space, source.type) : source.stored;
}

// The elements of the stored tensor before the program runs: of a file, or from the seed. Where the file has no state of that
// name, a weight in full precision begins as the weight, and any other state as zeros.
inline std::function<double(int64_t)> elements_before(const Space& space, const Source& source, int64_t layer,
                                                      const Tensors& tensors) {
    const Type& type = source.type;
    std::string name = stored_name(source, layer);
    const std::vector<int64_t> shape = stored_shape(space, source);
    const TensorFiles& files = source.file == File::Inputs ? tensors.inputs : tensors.weights;
    const int64_t n_members = shape.empty() ? 1 : shape.front();
    std::vector<std::string> names = members(name, n_members);
    if (source.file == File::States && (names.empty() || files.find(names.front()) == nullptr)) {
        if (!begins_with(name, kMaster)) return [](int64_t) { return 0.0; };
        name.erase(0, std::strlen(kMaster));
        names = members(name, n_members);
    }
    std::vector<const StoredTensor*> stored;
    for (const std::string& member : names)
        if (const StoredTensor* found = files.find(member)) stored.push_back(found);
    if (!names.empty() && stored.size() == names.size()) {
        const bool stack = names.front() != name;
        const std::vector<int64_t> each(shape.begin() + (stack ? 1 : 0), shape.end());
        int64_t size = 1;
        for (int64_t extent : each) size *= extent;
        for (size_t m = 0; m < names.size(); ++m) {
            if (stored[m]->shape != each)
                throw Error("tensor `" + names[m] + "` has shape " + show(stored[m]->shape) + ", but the model needs " + show(each));
            const bool integers = stored[m]->dtype == Stored::I64 || stored[m]->dtype == Stored::I32;
            if (integers != (type.dtype == DType::I32))
                throw Error("tensor `" + names[m] + "` holds " + (integers ? "integers" : "real numbers") +
                            ", but the model needs the other");
        }
        return [stored, size](int64_t i) { return element_of(*stored[static_cast<size_t>(i / size)], i % size); };
    }
    if (tensors.seed >= 0 && files.empty()) {
        uint64_t key = scramble(static_cast<uint64_t>(tensors.seed));
        for (char c : name) key = scramble(key ^ static_cast<unsigned char>(c));
        const bool vector = shape.size() == 1;
        return [key, vector, &type, &tensors](int64_t i) {
            const uint64_t bits = scramble(key + static_cast<uint64_t>(i));
            if (type.dtype == DType::I32)
                return static_cast<double>(bits % static_cast<uint64_t>(tensors.id_bound));
            const double uniform = static_cast<double>(bits >> 11) * 0x1p-52 - 1;
            // Vectors are gains or biases, matrices keep the size of what they multiply.
            return vector ? 1 + 0.1 * uniform : 0.05 * uniform;
        };
    }
    if (files.empty())
        throw Error(source.file == File::Inputs ? "inputs are needed: --inputs FILE" : "weights are needed: --weights FILE");
    throw Error("tensor `" + name + "` is not in the file of " + (source.file == File::Inputs ? "inputs" : "weights"));
}

// For each element that a rank holds of a source, dense and row-major, its place in the stored tensor; -1 for padding and what
// lies beyond the end.
inline std::vector<int64_t> stored_places(const Space& space, const Source& source, int64_t rank) {
    const Type& type = source.type;
    const size_t n_dims = type.dims.size();
    const std::vector<int64_t> held = held_of(space, type), shape = stored_shape(space, source);
    const std::vector<int64_t> view = source.view.empty() ? shape : source.view;
    std::vector<Range> window = source.window;
    if (window.empty()) {
        for (int64_t extent : view) window.push_back({0, extent});
    }
    std::vector<int64_t> cut;
    for (const Range& w : window) cut.push_back(w.size());
    const std::vector<int64_t> view_strides = row_major(view), held_strides = row_major(held);

    // Where the i-th element of the cut lies in the stored tensor.
    auto stored_index = [&](int64_t i) {
        int64_t at = 0;
        for (size_t d = cut.size(); d-- > 0;) {
            at += (window[d].start + i % cut[d]) * view_strides[d];
            i /= cut[d];
        }
        return at;
    };

    // Where the stored tensor has each index that the rank holds: by position, a copy where its original is.
    const Region box = space.local_box(type, rank);
    std::vector<std::vector<int64_t>> places;
    for (size_t d = 0; d < n_dims; ++d) {
        const int dim = type.dims[d], of = space.dims[dim].copies;
        if (of < 0) {
            places.push_back(space.own_positions(dim, box[d]));
            continue;
        }
        const int64_t copies = space.dims[dim].size / space.dims[of].size;
        const std::vector<int64_t> originals = space.own_positions(of, {0, space.dims[of].size});
        places.push_back({});
        for (int64_t i = box[d].start; i < box[d].end; ++i)
            places.back().push_back(originals[static_cast<size_t>(i / copies)]);
    }
    if (n_dims > 0)
        for (int64_t& place : places.back()) place += source.ahead;
    std::vector<int64_t> out(static_cast<size_t>(elements(box)), -1);
    std::vector<size_t> index(n_dims, 0);
    for (int64_t& out_place : out) {
        int64_t at = 0;
        bool padding = false;
        for (size_t d = 0; d < n_dims; ++d) {
            const int64_t place = places[d][index[d]];
            padding = padding || place >= held[d];
            at += place * held_strides[d];
        }
        if (!padding) out_place = stored_index(at);
        for (size_t d = n_dims; d-- > 0 && ++index[d] == places[d].size();) index[d] = 0;
    }
    return out;
}

// Refuses integers of a file that are not what the program takes. A kernel would take a row or a label that no rank has as one
// that another rank has, and nobody would notice.
inline void check_integers(const Space& space, const Source& source, int64_t layer, const Tensors& tensors) {
    if (source.type.dtype != DType::I32 || source.file != File::Inputs) return;
    const std::function<double(int64_t)> element = elements_before(space, source, layer, tensors);
    int64_t n = 1, last = 1;
    for (int64_t extent : stored_shape(space, source)) n *= last = extent;
    for (int64_t i = 0; i < n; ++i) {
        const double value = element(i);
        auto refuse = [&](const std::string& what) {
            throw Error("tensor `" + stored_name(source, layer) + "` holds " +
                        std::to_string(static_cast<long long>(value)) + " at " + std::to_string(i) + ", " + what);
        };
        if (value < std::numeric_limits<int32_t>::min() || value > std::numeric_limits<int32_t>::max())
            refuse("which is not a 32-bit integer");
        // What lies before the first that is read.
        if (source.below < 0 || i % last < source.ahead) continue;
        const bool inside = value >= 0 && value < static_cast<double>(source.below);
        if (!inside && (source.ignored == 0 || value != static_cast<double>(source.ignored)))
            refuse("but the model needs integers from 0 and below " + std::to_string(source.below) +
                   (source.ignored == 0 ? "" : ", or " + std::to_string(source.ignored)));
    }
}

// A rank's part of a source, dense and row-major, padding filled.
inline std::vector<char> load_source(const Space& space, const Source& source, int64_t layer, int64_t rank,
                                     const Tensors& tensors) {
    const std::function<double(int64_t)> element = elements_before(space, source, layer, tensors);
    check_integers(space, source, layer, tensors);
    const std::vector<int64_t> places = stored_places(space, source, rank);
    const size_t width = static_cast<size_t>(bytes_of(source.type.dtype));
    std::vector<char> out(places.size() * width, 0);
    for (size_t i = 0; i < places.size(); ++i) {
        const double value = places[i] >= 0 ? element(places[i]) : static_cast<double>(source.fill);
        store_element(source.type.dtype, out.data() + i * width, value);
    }
    return out;
}

}  // namespace ithaca
