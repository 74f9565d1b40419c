// Stored tensors and the part of each that a rank holds.
#pragma once

#include <cstring>

#include <functional>
#include <tuple>

#include "ranks.hpp"
#include "safetensors.hpp"

namespace ithaca {

enum class File { Weights, Inputs, States };

// Prefixes of the names of states; the rest is the name of the weight.
inline constexpr const char* kGradient = "grad.";
inline constexpr const char* kFirstMoment = "optimizer.exp_avg.";
inline constexpr const char* kSecondMoment = "optimizer.exp_avg_sq.";
inline constexpr const char* kMaster = "optimizer.master.";  // the weight in full precision

inline bool has_prefix(const std::string& name, const char* prefix) { return name.rfind(prefix, 0) == 0; }

// The indices `start..end` of a dimension. Each position is repeated `copies` times in a row. `runs` has three numbers for each
// run of positions that is not in order: index, position, length.
struct DimPart {
    int64_t start, end, copies = 1;
    std::vector<int64_t> runs = {};

    bool operator==(const DimPart& other) const {
        return std::tie(start, end, copies, runs) == std::tie(other.start, other.end, other.copies, other.runs);
    }
    std::vector<int64_t> positions() const {
        std::vector<int64_t> out;
        size_t r = 0;
        for (int64_t i = start; i < end; ++i) {
            const int64_t index = i / copies;
            while (r < runs.size() && index >= runs[r] + runs[r + 2]) r += 3;
            out.push_back(r < runs.size() && index >= runs[r] ? index - runs[r] + runs[r + 1] : index);
        }
        return out;
    }
};

// The part of a tensor that a rank holds.
using Part = std::vector<DimPart>;

// n triples, each the one before plus a step.
inline std::vector<int64_t> progression(int64_t n, const std::vector<int64_t>& first, const std::vector<int64_t>& step) {
    std::vector<int64_t> out;
    for (int64_t i = 0; i < 3 * n; ++i) out.push_back(first[i % 3] + i / 3 * step[i % 3]);
    return out;
}

// A tensor of which ranks hold parts. Ranks that differ along the axes `copies` only hold the same part.
struct Tensor {
    DType dtype;
    std::vector<int64_t> shape;  // without padding and copies
    std::vector<int> copies;
    Part (*part)(int64_t rank);
};

// A weight, an input or a state. The stored tensor, reshaped to `view` and cut to `window`, has the elements of `tensor` in
// row-major order. `{layer}` in the name stands for the layer, `{expert}` for each index of the first stored dimension.
struct Source {
    const char* name;
    Tensor tensor;
    std::vector<int64_t> stored;  // empty: the shape of the tensor
    std::vector<int64_t> view;    // empty without a window
    Part window;                  // empty: all
    int64_t start, end;           // layers; 0 and 1 if the name has no {layer}
    bool (*is_held)(int64_t rank, int64_t layer);
    File file;                    // a state is among the weights, or has a default
    bool is_written = false;      // the program updates it
    int64_t ahead = 0;            // an index of the last dimension reads the position so much further on
    int64_t fill = 0;             // the value of padding and beyond the end
    int64_t below = -1;           // inputs are in 0..below, or `ignored`; -1: any
    int64_t ignored = 0;
    bool is_on_host = false;      // a state in pinned memory of the host

    const std::vector<int64_t>& stored_shape() const { return stored.empty() ? tensor.shape : stored; }
};

// Whether two sources, of different programs, give these ranks the same numbers.
inline bool is_same(const Source& a, int64_t rank_of_a, const Source& b, int64_t rank_of_b) {
    return std::strcmp(a.name, b.name) == 0 && a.file == b.file && a.tensor.dtype == b.tensor.dtype &&
           a.tensor.part(rank_of_a) == b.tensor.part(rank_of_b) && a.tensor.shape == b.tensor.shape && a.stored == b.stored &&
           a.view == b.view && a.window == b.window && a.ahead == b.ahead && a.fill == b.fill;
}

inline std::string replaced(std::string text, const std::string& hole, const std::string& by) {
    for (size_t at; (at = text.find(hole)) != std::string::npos;) text.replace(at, hole.size(), by);
    return text;
}
inline std::string replaced(const std::string& text, const std::string& hole, int64_t number) {
    return replaced(text, hole, std::to_string(number));
}
inline std::string stored_name(const Source& source, int64_t layer) { return replaced(source.name, "{layer}", layer); }

// The names of the members of a stack; the name alone if it is none.
inline std::vector<std::string> members(const std::string& name, const std::vector<int64_t>& shape) {
    if (name.find("{expert}") == std::string::npos) return {name};
    std::vector<std::string> names;
    for (int64_t i = 0; i < (shape.empty() ? 1 : shape.front()); ++i) names.push_back(replaced(name, "{expert}", i));
    return names;
}

// Files, or a seed if it is not negative.
struct Tensors {
    TensorFiles weights, inputs;
    int64_t seed = -1;
    int64_t id_bound = 1;  // of random integers
};

inline uint64_t scramble(uint64_t x) {
    // splitmix64 (Steele, Lea and Flood, 2014).
    x += 0x9E3779B97F4A7C15u;
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
    x = (x ^ x >> 27) * 0x94D049BB133111EBu;
    return x ^ x >> 31;
}

inline std::string show(const std::vector<int64_t>& shape) {
    std::string text = "[";
    for (size_t d = 0; d < shape.size(); ++d) text += (d ? " " : "") + std::to_string(shape[d]);
    return text + "]";
}

// The elements of the stored tensor before the program runs, from a file or from the seed. For a state that the file lacks, a
// master weight begins as the weight, any other state as zeros.
inline std::function<double(int64_t)> initial_elements(const Source& source, int64_t layer, const Tensors& tensors) {
    const bool is_input = source.file == File::Inputs, is_integer = source.tensor.dtype == DType::I32;
    const std::vector<int64_t>& shape = source.stored_shape();
    const TensorFiles& files = is_input ? tensors.inputs : tensors.weights;
    std::string name = stored_name(source, layer);
    std::vector<std::string> names = members(name, shape);
    if (source.file == File::States && (names.empty() || files.find(names.front()) == nullptr)) {
        if (!has_prefix(name, kMaster)) return [](int64_t) { return 0.0; };
        name.erase(0, std::strlen(kMaster));
        names = members(name, shape);
    }
    std::vector<const StoredTensor*> stored;
    for (const std::string& member : names) if (const StoredTensor* found = files.find(member)) stored.push_back(found);
    if (!names.empty() && stored.size() == names.size()) {
        const std::vector<int64_t> each(shape.begin() + (names.front() != name ? 1 : 0), shape.end());
        for (size_t m = 0; m < names.size(); ++m) {
            if (stored[m]->shape != each)
                throw Error("tensor `" + names[m] + "` has shape " + show(stored[m]->shape) + ", but the model needs " + show(each));
            const bool integers = stored[m]->dtype == DType::I64 || stored[m]->dtype == DType::I32;
            if (integers != is_integer)
                throw Error("tensor `" + names[m] + "` holds " + (integers ? "integers" : "real numbers") +
                            ", but the model needs the other");
        }
        return [stored, n = product_of(each)](int64_t i) {
            const StoredTensor& member = *stored[i / n];
            return load_element(member.dtype, member.data, i % n);
        };
    }
    if (!files.empty()) throw Error("tensor `" + name + "` is not in the file of " + (is_input ? "inputs" : "weights"));
    if (tensors.seed < 0) throw Error(is_input ? "inputs are needed: --inputs FILE" : "weights are needed: --weights FILE");
    uint64_t key = scramble(static_cast<uint64_t>(tensors.seed));
    for (char c : name) key = scramble(key ^ static_cast<unsigned char>(c));
    return [key, is_integer, is_vector = shape.size() == 1, bound = static_cast<uint64_t>(tensors.id_bound)](int64_t i) {
        const uint64_t bits = scramble(key + static_cast<uint64_t>(i));
        if (is_integer) return static_cast<double>(bits % bound);
        const double uniform = static_cast<double>(bits >> 11) * 0x1p-52 - 1;
        // Vectors are gains or biases; matrices keep the size of their operand.
        return is_vector ? 1 + 0.1 * uniform : 0.05 * uniform;
    };
}

// For each element of a part, dense and row-major, its index in a row-major tensor of this shape; -1 for padding, and for
// positions beyond the end after `ahead` is added to those of the last dimension.
inline std::vector<int64_t> places_of(const Part& part, const std::vector<int64_t>& shape, int64_t ahead = 0) {
    std::vector<int64_t> places = {0};
    for (size_t d = 0; d < part.size(); ++d) {
        const std::vector<int64_t> positions = part[d].positions();
        std::vector<int64_t> next;
        for (int64_t before : places) for (int64_t position : positions) {
                const int64_t at = position + (d + 1 == part.size() ? ahead : 0);
                next.push_back(before >= 0 && at < shape[d] ? before * shape[d] + at : -1);
            }
        places = std::move(next);
    }
    return places;
}

// The same in the stored tensor of a source.
inline std::vector<int64_t> stored_places(const Source& source, int64_t rank) {
    std::vector<int64_t> places = places_of(source.tensor.part(rank), source.tensor.shape, source.ahead);
    if (source.window.empty()) return places;
    const std::vector<int64_t> seen = places_of(source.window, source.view);
    for (int64_t& place : places) if (place >= 0) place = seen[place];
    return places;
}

// Refuses integers of inputs that have no meaning: a kernel would treat a row or label that no rank has as another rank's.
inline void check_integers(const Source& source, int64_t layer, const std::function<double(int64_t)>& element) {
    const std::vector<int64_t>& shape = source.stored_shape();
    const std::string ignored = source.ignored == 0 ? "" : ", or " + std::to_string(source.ignored);
    for (int64_t i = 0; i < product_of(shape); ++i) {
        const auto value = static_cast<int64_t>(element(i));
        const bool fits = value == static_cast<int32_t>(value);
        const bool is_ignored = source.ignored != 0 && value == source.ignored;
        const bool is_read = source.below >= 0 && (shape.empty() || i % shape.back() >= source.ahead);
        if (fits && (!is_read || is_ignored || (value >= 0 && value < source.below))) continue;
        throw Error("tensor `" + stored_name(source, layer) + "` holds " + std::to_string(value) + " at " +
                    std::to_string(i) +
                    (fits ? ", but the model needs integers from 0 and below " + std::to_string(source.below) + ignored
                          : ", which is not a 32-bit integer"));
    }
}

// A rank's part of a source, dense and row-major.
inline std::vector<char> load_source(const Source& source, int64_t layer, int64_t rank, const Tensors& tensors) {
    const std::function<double(int64_t)> element = initial_elements(source, layer, tensors);
    if (source.tensor.dtype == DType::I32 && source.file == File::Inputs) check_integers(source, layer, element);
    const std::vector<int64_t> places = stored_places(source, rank);
    const size_t width = bytes_of(source.tensor.dtype);
    std::vector<char> out(places.size() * width);
    for (size_t i = 0; i < places.size(); ++i) {
        const double value = places[i] >= 0 ? element(places[i]) : static_cast<double>(source.fill);
        kTypes[int(source.tensor.dtype)].store(out.data() + i * width, value);
    }
    return out;
}

}  // namespace ithaca
