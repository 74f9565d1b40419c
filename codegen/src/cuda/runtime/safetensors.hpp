// The safetensors format: 8 bytes with the length of a JSON header, the header, the data. A truncated or inconsistent file
// is an `Error`.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>

#include "check.hpp"
#include "kernels/numeric.cuh"

namespace ithaca {

enum class DType { F64, F32, F16, BF16, I32, Bool, I64 };  // I64 in files only

inline double widen(int64_t x) { return static_cast<double>(x); }

// An element type: its name in files, and conversions from and to f64, which holds all but 64-bit integers above 2^53.
struct ElementType {
    const char* name;
    int64_t bytes;
    double (*load)(const char* from);
    void (*store)(char* to, double value);
};

template <typename T>
constexpr ElementType element_type(const char* name) {
    constexpr auto load = [](const char* from) {
        T value;
        std::memcpy(&value, from, sizeof value);
        return static_cast<double>(widen(value));
    };
    constexpr auto store = [](char* to, double value) {
        const T stored = narrow<T>(value);
        std::memcpy(to, &stored, sizeof stored);
    };
    return {name, sizeof(T), load, store};
}

inline constexpr ElementType kTypes[] = {
    element_type<double>("F64"),          element_type<float>("F32"),    element_type<__half>("F16"),
    element_type<__nv_bfloat16>("BF16"), element_type<int32_t>("I32"), element_type<bool>("BOOL"),
    element_type<int64_t>("I64")};

inline int64_t bytes_of(DType dtype) { return kTypes[int(dtype)].bytes; }

inline double load_element(DType dtype, const char* from, int64_t i = 0) {
    return kTypes[int(dtype)].load(from + i * bytes_of(dtype));
}

inline int64_t product_of(const std::vector<int64_t>& shape) {
    int64_t n = 1;
    for (int64_t extent : shape) n *= extent;
    return n;
}

struct StoredTensor {
    DType dtype;
    std::vector<int64_t> shape;
    const char* data;
};

// The JSON of a header: objects of objects, strings and lists of numbers.
class Header {
  public:
    Header(const std::string& path, const char* text, size_t n) : path_(path), at_(text), end_(text + n) {}

    [[noreturn]] void fail(const std::string& why) const { throw Error(path_ + ": header: " + why); }
    // A character of punctuation, a number, or a string after a quote; empty at the end. Of an escape the backslash is dropped.
    std::string token() {
        while (at_ < end_ && std::strchr(" \n\t\r", *at_) != nullptr) ++at_;  // also zeros, which are padding
        if (at_ == end_) return "";
        const char* const start = at_++;
        const auto digit = [](char c) { return c >= '0' && c <= '9'; };
        while (digit(*start) && at_ < end_ && digit(*at_)) ++at_;
        std::string text(start, at_);
        if (*start != '"') return text;
        for (; at_ < end_ && *at_ != '"'; text += *at_++) if (*at_ == '\\' && at_ + 1 < end_) ++at_;
        if (at_++ == end_) fail("a string does not end");
        return text;
    }
    // Calls `item` with the first token of each item between brackets.
    template <typename Item>
    void items(const char* open, const char* close, const Item& item) {
        if (token() != open) fail(std::string("expected ") + open);
        for (std::string first = token(); first != close;) {
            item(first);
            const std::string next = token();
            if (next != "," && next != close) fail(next.empty() ? "it ends too early" : "expected , or " + std::string(close));
            first = next == "," ? token() : next;
        }
    }
    // Calls `value` with each key, at its value.
    template <typename Value>
    void object(const Value& value) {
        items("{", "}", [&](const std::string& key) {
            if (key.front() != '"' || token() != ":") fail("expected a key");
            value(key.substr(1));
        });
    }
    std::vector<int64_t> numbers() {
        std::vector<int64_t> out;
        items("[", "]", [&](const std::string& text) {
            if (text.find_first_not_of("0123456789") != std::string::npos) fail("expected a number");
            if (text.size() > 18) fail("a number is too large");
            out.push_back(std::stoll(text));
        });
        return out;
    }

  private:
    const std::string& path_;
    const char *at_, *end_;
};

// The tensors of several files, which stay mapped.
class TensorFiles {
  public:
    // Adds a file, or all files of a directory.
    void add(const std::string& path) {
        if (!std::filesystem::is_directory(path)) return add_file(path);
        std::vector<std::string> found;
        for (const auto& entry : std::filesystem::directory_iterator(path))
            if (entry.path().extension() == ".safetensors") found.push_back(entry.path().string());
        if (found.empty()) throw Error(path + ": no safetensors files");
        std::sort(found.begin(), found.end());
        for (const std::string& file : found) add_file(file);
    }
    // Adds a tensor of 32-bit integers, or replaces it; whoever calls keeps the data.
    void set(const std::string& name, const std::vector<int64_t>& shape, const std::vector<int32_t>& data) {
        tensors_[name] = {DType::I32, shape, reinterpret_cast<const char*>(data.data())};
    }
    bool empty() const { return maps_.empty(); }
    const std::map<std::string, StoredTensor>& tensors() const { return tensors_; }
    // Null if no file has it; that of the first file if several have it.
    const StoredTensor* find(const std::string& name) const {
        const auto found = tensors_.find(name);
        return found != tensors_.end() ? &found->second : nullptr;
    }

  private:
    void add_file(const std::string& path) {
        const int fd = ::open(path.c_str(), O_RDONLY);
        if (fd < 0) throw Error(path + ": " + std::strerror(errno));
        struct stat info{};
        const size_t size = ::fstat(fd, &info) == 0 && info.st_size >= 8 ? info.st_size : 0;
        void* mapped = size > 0 ? ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, fd, 0) : MAP_FAILED;
        ::close(fd);
        if (mapped == MAP_FAILED) throw Error(path + ": no safetensors file");
        maps_.emplace_back(static_cast<const char*>(mapped), [size](const char* p) { ::munmap(const_cast<char*>(p), size); });
        const char* const start = maps_.back().get() + 8;
        uint64_t n_header = 0;
        std::memcpy(&n_header, start - 8, 8);
        if (n_header > size - 8) throw Error(path + ": the header does not fit in the file");
        Header in(path, start, n_header);
        in.object([&](const std::string& name) {
            if (name == "__metadata__") in.object([&](const std::string&) { in.token(); });
            else add_tensor(in, name, static_cast<int64_t>(size - 8 - n_header), start + n_header);
        });
        if (!in.token().empty()) in.fail("something follows it");
    }
    void add_tensor(Header& in, const std::string& name, int64_t n_data, const char* data) {
        std::string dtype;
        std::vector<int64_t> shape, offsets;
        in.object([&](const std::string& key) {
            if (key == "dtype") dtype = in.token();
            else if (key == "shape") shape = in.numbers();
            else if (key == "data_offsets") offsets = in.numbers();
            else in.fail("`" + key + "` is not known");
        });
        const auto is_this = [&](const ElementType& type) { return dtype == '"' + std::string(type.name); };
        const auto known = std::find_if(std::begin(kTypes), std::end(kTypes), is_this);
        if (known == std::end(kTypes)) return;  // an error only if the program needs it
        if (offsets.size() != 2 || offsets[0] > offsets[1] || offsets[1] > n_data) in.fail("tensor `" + name + "` is not within the file");
        int64_t bytes = known->bytes;
        for (int64_t extent : shape) {
            if (extent != 0 && bytes > (int64_t{1} << 56) / extent) in.fail("tensor `" + name + "` is too large");
            bytes *= extent;
        }
        if (bytes != offsets[1] - offsets[0])
            in.fail("tensor `" + name + "` has " + std::to_string(offsets[1] - offsets[0]) + " bytes, not " + std::to_string(bytes));
        tensors_.emplace(name, StoredTensor{DType(known - kTypes), shape, data + offsets[0]});
    }

    std::vector<std::shared_ptr<const char>> maps_;
    std::map<std::string, StoredTensor> tensors_;
};

// A whole tensor on the host, in f64, which holds every element type exactly.
struct HostTensor {
    std::string name;
    DType dtype;
    std::vector<int64_t> shape;
    std::vector<double> values;
};

// The target of a chain of symbolic links, whether or not it exists.
inline std::string resolve_links(std::string path) {
    namespace fs = std::filesystem;
    std::error_code ignored;
    for (int i = 0; i < 40 && fs::is_symlink(fs::symlink_status(path, ignored)); ++i)
        path = (fs::path(path).parent_path() / fs::read_symlink(path, ignored)).string();
    return path;
}

// Writes a new file beside the old one and renames it, so that no partial file remains; links and permissions are kept. A
// pipe or a device is written to directly. f16 and bf16 are written as F32.
inline void write_tensors(const std::string& path, const std::vector<HostTensor>& tensors) {
    namespace fs = std::filesystem;
    std::string header = "{";
    int64_t offset = 0;
    const auto stored_as = [](DType t) { return kTypes[int(t == DType::F64 || t == DType::I32 ? t : DType::F32)]; };
    for (const HostTensor& t : tensors) {
        const ElementType type = stored_as(t.dtype);
        header += header.size() > 1 ? ",\"" : "\"";
        for (char c : t.name) header += c == '"' || c == '\\' ? std::string{'\\', c} : std::string{c};
        header += std::string("\":{\"dtype\":\"") + type.name + "\",\"shape\":[";
        for (size_t d = 0; d < t.shape.size(); ++d) header += (d ? "," : "") + std::to_string(t.shape[d]);
        const int64_t end = offset + type.bytes * static_cast<int64_t>(t.values.size());
        header += "],\"data_offsets\":[" + std::to_string(offset) + "," + std::to_string(end) + "]}";
        offset = end;
    }
    header += "}";
    header.resize((header.size() + 7) / 8 * 8, ' ');

    std::error_code ignored;
    const fs::file_status there = fs::status(path, ignored);
    const bool is_file = !fs::exists(there) || fs::is_regular_file(there);
    const std::string to = is_file ? resolve_links(path) : path, written = is_file ? to + ".new" : path;
    std::ofstream out(written, std::ios::binary);
    if (!out) throw Error(written + ": " + std::strerror(errno));
    if (is_file && fs::exists(there)) fs::permissions(written, there.permissions(), ignored);
    const uint64_t length = header.size();
    out.write(reinterpret_cast<const char*>(&length), 8) << header;
    for (const HostTensor& t : tensors)
        for (double value : t.values) {
            char element[8];
            stored_as(t.dtype).store(element, value);
            out.write(element, stored_as(t.dtype).bytes);
        }
    out.close();
    if (out && (!is_file || std::rename(written.c_str(), to.c_str()) == 0)) return;
    if (is_file) std::remove(written.c_str());
    throw Error(path + ": cannot be written");
}

}  // namespace ithaca
