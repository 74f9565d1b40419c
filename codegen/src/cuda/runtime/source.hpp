// Stored tensors and the part of each that a rank holds.
#pragma once

#include <cstring>

#include <algorithm>
#include <functional>
#include <future>
#include <thread>
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

// Elements that a thread loads at once, and the most threads that help the first one.
inline constexpr int64_t kPiece = int64_t{1} << 20;
inline constexpr unsigned kMostHelpers = 8;

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

// Writes elements of a stored tensor, so many from one on, as those of a type.
using Elements = std::function<void(int64_t first, int64_t n, DType dtype, char* out)>;
inline double element_at(const Elements& elements, int64_t i) {
    double x = 0;
    elements(i, 1, DType::F64, reinterpret_cast<char*>(&x));
    return x;
}
template <typename F>
Elements one_by_one(F element) {
    return [element](int64_t first, int64_t n, DType dtype, char* out) {
        const auto [bytes, store] = std::pair(bytes_of(dtype), kTypes[int(dtype)].store);
        for (int64_t i = 0; i < n; ++i) store(out + i * bytes, element(first + i));
    };
}

// The elements of the stored tensor before the program runs, from a file or from the seed. For a state that the file lacks, a
// master weight begins as the weight, any other state as zeros.
inline Elements initial_elements(const Source& source, int64_t layer, const Tensors& tensors) {
    const bool is_input = source.file == File::Inputs, is_integer = source.tensor.dtype == DType::I32;
    const std::vector<int64_t>& shape = source.stored_shape();
    const TensorFiles& files = is_input ? tensors.inputs : tensors.weights;
    std::string name = stored_name(source, layer);
    std::vector<std::string> names = members(name, shape);
    if (source.file == File::States && (names.empty() || files.find(names.front()) == nullptr)) {
        if (!has_prefix(name, kMaster)) return [](int64_t, int64_t n, DType dtype, char* out) { std::memset(out, 0, n * bytes_of(dtype)); };
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
        return [stored, each_has = product_of(each)](int64_t first, int64_t n, DType dtype, char* out) {
            const int64_t bytes = bytes_of(dtype);
            const auto store = kTypes[int(dtype)].store;
            for (int64_t done = 0, count; done < n; done += count) {
                const StoredTensor& member = *stored[(first + done) / each_has];
                const int64_t from = (first + done) % each_has;
                count = std::min(n - done, each_has - from);
                if (member.dtype == dtype) std::memcpy(out + done * bytes, member.data + from * bytes, count * bytes);
                else for (int64_t i = 0; i < count; ++i) store(out + (done + i) * bytes, load_element(member.dtype, member.data, from + i));
            }
        };
    }
    if (!files.empty()) throw Error("tensor `" + name + "` is not in the file of " + (is_input ? "inputs" : "weights"));
    if (tensors.seed < 0) throw Error(is_input ? "inputs are needed: --inputs FILE" : "weights are needed: --weights FILE");
    uint64_t key = scramble(static_cast<uint64_t>(tensors.seed));
    for (char c : name) key = scramble(key ^ static_cast<unsigned char>(c));
    return one_by_one([key, is_integer, is_vector = shape.size() == 1, bound = static_cast<uint64_t>(tensors.id_bound)](int64_t i) {
        const uint64_t bits = scramble(key + static_cast<uint64_t>(i));
        if (is_integer) return static_cast<double>(bits % bound);
        const double uniform = static_cast<double>(bits >> 11) * 0x1p-52 - 1;
        // Vectors are gains or biases; matrices keep the size of their operand.
        return is_vector ? 1 + 0.1 * uniform : 0.05 * uniform;
    });
}

// Elements of a part, dense and row-major, that are neighbours in a row-major tensor: the index of the first there, and their
// number. Negative for padding, and for positions beyond the end.
struct PlaceRun {
    int64_t place, n;
};
inline void append(std::vector<PlaceRun>& runs, PlaceRun run) {
    if (!runs.empty() && (run.place < 0 ? runs.back().place < 0 : runs.back().place >= 0 && runs.back().place + runs.back().n == run.place))
        runs.back().n += run.n;
    else runs.push_back(run);
}
inline std::vector<int64_t> places_in(const std::vector<PlaceRun>& runs) {
    std::vector<int64_t> places;
    for (const PlaceRun& run : runs) for (int64_t i = 0; i < run.n; ++i) places.push_back(run.place < 0 ? -1 : run.place + i);
    return places;
}

// The runs of a part in a tensor of this shape, where `ahead` is added to positions of the last dimension.
inline std::vector<PlaceRun> runs_of(const Part& part, const std::vector<int64_t>& shape, int64_t ahead = 0) {
    std::vector<PlaceRun> rows = {{0, 1}};
    for (size_t d = 0; d < part.size(); ++d) {
        const bool is_last = d + 1 == part.size();
        std::vector<PlaceRun> row, next;
        for (int64_t position : part[d].positions()) {
            const int64_t at = position + (is_last ? ahead : 0);
            append(row, {at < shape[d] ? at : -1, 1});
        }
        for (const PlaceRun& before : rows) for (int64_t i = 0; i < before.n; ++i) for (const PlaceRun& run : row) {
                    const bool is_there = before.place >= 0 && run.place >= 0;
                    append(next, {is_there ? (before.place + i) * shape[d] + run.place : -1, run.n});
                }
        rows = std::move(next);
    }
    return rows;
}

// The same in the stored tensor of a source.
inline std::vector<PlaceRun> stored_runs(const Source& source, int64_t rank) {
    const std::vector<PlaceRun> runs = runs_of(source.tensor.part(rank), source.tensor.shape, source.ahead);
    if (source.window.empty()) return runs;
    const std::vector<int64_t> seen = places_in(runs_of(source.window, source.view));
    std::vector<PlaceRun> out;
    for (const PlaceRun& run : runs) {
        if (run.place < 0) append(out, run);
        else for (int64_t i = 0; i < run.n; ++i) append(out, {seen[run.place + i], 1});
    }
    return out;
}

// Refuses integers of inputs that have no meaning: a kernel would treat a row or label that no rank has as another rank's.
inline void check_integers(const Source& source, int64_t layer, const Elements& elements) {
    const std::vector<int64_t>& shape = source.stored_shape();
    const std::string ignored = source.ignored == 0 ? "" : ", or " + std::to_string(source.ignored);
    for (int64_t i = 0; i < product_of(shape); ++i) {
        const auto value = static_cast<int64_t>(element_at(elements, i));
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

// A rank's part of a source, dense and row-major. Half of the host's threads help with large ones.
inline std::vector<char> load_source(const Source& source, int64_t layer, int64_t rank, const Tensors& tensors) {
    const Elements elements = initial_elements(source, layer, tensors);
    const DType dtype = source.tensor.dtype;
    if (dtype == DType::I32 && source.file == File::Inputs) check_integers(source, layer, elements);
    const int64_t bytes = bytes_of(dtype);
    struct Piece {
        PlaceRun run;
        int64_t at;
    };
    std::vector<Piece> pieces;
    int64_t n = 0;
    for (const PlaceRun& run : stored_runs(source, rank))
        for (int64_t i = 0; i < run.n; i += kPiece, n += pieces.back().run.n)
            pieces.push_back({{run.place < 0 ? -1 : run.place + i, std::min(kPiece, run.n - i)}, n});
    std::vector<char> out(n * bytes);
    const auto load = [&](size_t first, size_t step) {
        for (size_t p = first; p < pieces.size(); p += step) {
            const auto& [run, at] = pieces[p];
            char* const to = out.data() + at * bytes;
            if (run.place >= 0) elements(run.place, run.n, dtype, to);
            else one_by_one([&](int64_t) { return static_cast<double>(source.fill); })(0, run.n, dtype, to);
        }
    };
    const size_t helpers = n < kPiece ? 0 : std::min(std::thread::hardware_concurrency() / 2, kMostHelpers);
    std::vector<std::future<void>> others;
    for (size_t i = 0; i < helpers; ++i) others.push_back(std::async(std::launch::async, load, i + 1, helpers + 1));
    load(0, helpers + 1);
    for (std::future<void>& other : others) other.get();
    return out;
}

}  // namespace ithaca
