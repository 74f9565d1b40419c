// The safetensors format: 8 bytes with the length of a JSON header, the header, the data. A file that is cut off or lies
// about itself is an `Error`.
#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>
#include <filesystem>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "check.hpp"
#include "space.hpp"

namespace ithaca {

enum class Stored { F64, F32, F16, BF16, I64, I32 };

inline int64_t bytes_of(Stored dtype) {
    switch (dtype) {
        case Stored::F64: case Stored::I64: return 8;
        case Stored::F32: case Stored::I32: return 4;
        case Stored::F16: case Stored::BF16: return 2;
    }
    return 0;
}

struct StoredTensor {
    Stored dtype;
    std::vector<int64_t> shape;
    const unsigned char* data;
};

// The part of JSON that a header uses.
class HeaderReader {
  public:
    HeaderReader(const std::string& path, const char* text, size_t n) : path_(path), at_(text), end_(text + n) {}

    [[noreturn]] void fail(const std::string& why) const { throw Error(path_ + ": header: " + why); }

    char peek() {
        while (at_ < end_ && (*at_ == ' ' || *at_ == '\n' || *at_ == '\t' || *at_ == '\r')) ++at_;
        if (at_ == end_) fail("it ends too early");
        return *at_;
    }
    bool accept(char c) {
        if (peek() != c) return false;
        ++at_;
        return true;
    }
    void expect(char c) {
        if (!accept(c)) fail(std::string("expected '") + c + "'");
    }
    bool at_end() {
        while (at_ < end_ && (*at_ == ' ' || *at_ == '\n' || *at_ == '\0')) ++at_;
        return at_ == end_;
    }

    std::string string() {
        expect('"');
        std::string out;
        for (;;) {
            if (at_ == end_) fail("a string does not end");
            char c = *at_++;
            if (c == '"') return out;
            if (c != '\\') {
                out.push_back(c);
                continue;
            }
            if (at_ == end_) fail("a string does not end");
            c = *at_++;
            switch (c) {
                case 'n': out.push_back('\n'); break;
                case 't': out.push_back('\t'); break;
                case 'r': out.push_back('\r'); break;
                case 'b': out.push_back('\b'); break;
                case 'f': out.push_back('\f'); break;
                case 'u': escape(out); break;
                default: out.push_back(c); break;
            }
        }
    }

    int64_t number() {
        peek();
        int64_t value = 0;
        const char* first = at_;
        for (; at_ < end_ && *at_ >= '0' && *at_ <= '9'; ++at_) {
            if (value > (std::numeric_limits<int64_t>::max() - 9) / 10) fail("a number is too large");
            value = value * 10 + (*at_ - '0');
        }
        if (at_ == first) fail("expected a number");
        return value;
    }

    std::vector<int64_t> numbers() {
        std::vector<int64_t> out;
        expect('[');
        if (accept(']')) return out;
        do out.push_back(number());
        while (accept(','));
        expect(']');
        return out;
    }

    // Passes over a value of any kind.
    void skip(int depth = 0) {
        if (depth > 64) fail("it is nested too deeply");
        const char c = peek();
        if (c == '"') {
            string();
        } else if (c == '{' || c == '[') {
            const char close = c == '{' ? '}' : ']';
            ++at_;
            if (accept(close)) return;
            do {
                if (c == '{') {
                    string();
                    expect(':');
                }
                skip(depth + 1);
            } while (accept(','));
            expect(close);
        } else {
            const char* first = at_;
            while (at_ < end_ && (std::strchr("+-.", *at_) != nullptr || (*at_ >= '0' && *at_ <= '9') ||
                                  (*at_ >= 'a' && *at_ <= 'z') || (*at_ >= 'A' && *at_ <= 'Z')))
                ++at_;
            if (at_ == first) fail("expected a value");
        }
    }

  private:
    void escape(std::string& out) {
        unsigned code = 0;
        for (int i = 0; i < 4; ++i) {
            if (at_ == end_) fail("a string does not end");
            const char c = *at_++;
            const int digit = c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10
                              : c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
            if (digit < 0) fail("a \\u escape is not hexadecimal");
            code = code * 16 + static_cast<unsigned>(digit);
        }
        if (code < 0x80) {
            out.push_back(static_cast<char>(code));
        } else if (code < 0x800) {
            out.push_back(static_cast<char>(0xC0 | code >> 6));
            out.push_back(static_cast<char>(0x80 | (code & 0x3F)));
        } else {
            out.push_back(static_cast<char>(0xE0 | code >> 12));
            out.push_back(static_cast<char>(0x80 | (code >> 6 & 0x3F)));
            out.push_back(static_cast<char>(0x80 | (code & 0x3F)));
        }
    }

    const std::string& path_;
    const char* at_;
    const char* end_;
};

// One mapped file.
class TensorFile {
  public:
    explicit TensorFile(const std::string& path) {
        const int fd = ::open(path.c_str(), O_RDONLY);
        if (fd < 0) throw Error(path + ": " + std::strerror(errno));
        struct stat info{};
        const bool known = ::fstat(fd, &info) == 0 && info.st_size >= 8;
        size_ = known ? static_cast<size_t>(info.st_size) : 0;
        void* map = known ? ::mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, fd, 0) : MAP_FAILED;
        ::close(fd);
        if (map == MAP_FAILED) throw Error(path + ": no safetensors file");
        map_ = static_cast<const unsigned char*>(map);
        try {
            read(path);
        } catch (...) {
            ::munmap(map, size_);
            throw;
        }
    }
    ~TensorFile() { ::munmap(const_cast<unsigned char*>(map_), size_); }
    TensorFile(const TensorFile&) = delete;
    TensorFile& operator=(const TensorFile&) = delete;

    std::map<std::string, StoredTensor> tensors;

  private:
    void read(const std::string& path) {
        uint64_t n_header = 0;
        for (int i = 7; i >= 0; --i) n_header = n_header << 8 | map_[i];
        if (n_header > size_ - 8) throw Error(path + ": the header does not fit in the file");
        const uint64_t n_data = size_ - 8 - n_header;
        HeaderReader in(path, reinterpret_cast<const char*>(map_) + 8, n_header);
        in.expect('{');
        if (!in.accept('}')) {
            do {
                const std::string name = in.string();
                in.expect(':');
                if (name == "__metadata__") {
                    in.skip();
                } else {
                    tensor(in, name, n_data, map_ + 8 + n_header);
                }
            } while (in.accept(','));
            in.expect('}');
        }
        if (!in.at_end()) in.fail("something follows it");
    }

    void tensor(HeaderReader& in, const std::string& name, uint64_t n_data, const unsigned char* data) {
        static const std::map<std::string, Stored> names = {
            {"F64", Stored::F64}, {"F32", Stored::F32}, {"F16", Stored::F16},
            {"BF16", Stored::BF16}, {"I64", Stored::I64}, {"I32", Stored::I32},
        };
        std::string dtype;
        std::vector<int64_t> shape, offsets;
        in.expect('{');
        do {
            const std::string key = in.string();
            in.expect(':');
            if (key == "dtype") dtype = in.string();
            else if (key == "shape") shape = in.numbers();
            else if (key == "data_offsets") offsets = in.numbers();
            else in.skip();
        } while (in.accept(','));
        in.expect('}');
        const auto known = names.find(dtype);
        // A tensor of another type is an error only when somebody asks for it.
        if (known == names.end()) return;
        if (offsets.size() != 2 || offsets[0] > offsets[1] || static_cast<uint64_t>(offsets[1]) > n_data)
            in.fail("tensor `" + name + "` does not lie in the file");
        int64_t bytes = bytes_of(known->second);
        for (int64_t extent : shape) {
            if (extent != 0 && bytes > (int64_t{1} << 56) / extent) in.fail("tensor `" + name + "` is too large");
            bytes *= extent;
        }
        if (bytes != offsets[1] - offsets[0])
            in.fail("tensor `" + name + "` has " + std::to_string(offsets[1] - offsets[0]) + " bytes, not " +
                    std::to_string(bytes));
        tensors[name] = {known->second, shape, data + offsets[0]};
    }

    const unsigned char* map_ = nullptr;
    size_t size_ = 0;
};

// The tensors of several files; a directory stands for the files in it.
class TensorFiles {
  public:
    void add(const std::string& path) {
        if (!std::filesystem::is_directory(path)) return open(path);
        std::vector<std::string> found;
        for (const auto& entry : std::filesystem::directory_iterator(path))
            if (entry.path().extension() == ".safetensors") found.push_back(entry.path().string());
        if (found.empty()) throw Error(path + ": no safetensors files");
        std::sort(found.begin(), found.end());
        for (const std::string& file : found) open(file);
    }

    bool empty() const { return files_.empty(); }

    // Null when no file has it.
    const StoredTensor* find(const std::string& name) const {
        for (const auto& file : files_) {
            const auto found = file->tensors.find(name);
            if (found != file->tensors.end()) return &found->second;
        }
        return nullptr;
    }

  private:
    void open(const std::string& path) { files_.push_back(std::make_unique<TensorFile>(path)); }
    std::vector<std::unique_ptr<TensorFile>> files_;
};

// A whole tensor on the host, in f64, which holds every element type exactly.
struct HostTensor {
    std::string name;
    DType dtype;
    std::vector<int64_t> shape;
    std::vector<double> values;
};

// Where symbolic links lead, whether or not anything is there.
inline std::string behind_links(std::string path) {
    namespace fs = std::filesystem;
    std::error_code none;
    // As many as the system follows.
    for (int i = 0; i < 40 && fs::is_symlink(fs::symlink_status(path, none)); ++i) {
        const fs::path to = fs::read_symlink(path, none);
        if (to.empty()) break;
        path = (fs::path(path).parent_path() / to).string();
    }
    return path;
}

// Writes a file beside and renames, so that no partial one is left, and links and permissions stay; what is there and no file, as
// a device or a pipe, is written into. f16 and bf16 are written as F32.
inline void write_tensors(const std::string& path, const std::vector<HostTensor>& tensors) {
    std::string header = "{";
    int64_t offset = 0;
    auto width = [](DType dtype) -> int64_t { return dtype == DType::F64 ? 8 : 4; };
    for (const HostTensor& t : tensors) {
        const char* dtype = t.dtype == DType::F64 ? "F64" : t.dtype == DType::I32 ? "I32" : "F32";
        header += header.size() > 1 ? ",\"" : "\"";
        for (char c : t.name) {
            if (c == '"' || c == '\\') header.push_back('\\');
            header.push_back(c);
        }
        header += std::string("\":{\"dtype\":\"") + dtype + "\",\"shape\":[";
        for (size_t d = 0; d < t.shape.size(); ++d) header += (d ? "," : "") + std::to_string(t.shape[d]);
        const int64_t end = offset + width(t.dtype) * static_cast<int64_t>(t.values.size());
        header += "],\"data_offsets\":[" + std::to_string(offset) + "," + std::to_string(end) + "]}";
        offset = end;
    }
    header += "}";
    header.resize((header.size() + 7) / 8 * 8, ' ');

    std::error_code none;
    const std::filesystem::file_status there = std::filesystem::status(path, none);
    const bool is_file = !std::filesystem::exists(there) || std::filesystem::is_regular_file(there);
    const std::string to = is_file ? behind_links(path) : path, written = is_file ? to + ".new" : path;
    std::FILE* out = std::fopen(written.c_str(), "wb");
    if (out == nullptr) throw Error(written + ": " + std::strerror(errno));
    if (is_file && std::filesystem::exists(there)) std::filesystem::permissions(written, there.permissions(), none);
    bool good = true;
    auto put = [&](const void* data, size_t n) { good = good && std::fwrite(data, 1, n, out) == n; };
    unsigned char length[8];
    for (int i = 0; i < 8; ++i) length[i] = static_cast<unsigned char>(static_cast<uint64_t>(header.size()) >> 8 * i);
    put(length, sizeof length);
    put(header.data(), header.size());
    for (const HostTensor& t : tensors) {
        for (double value : t.values) {
            const float single = static_cast<float>(value);
            const int32_t integer = t.dtype == DType::I32 ? static_cast<int32_t>(value) : 0;
            if (t.dtype == DType::F64) put(&value, 8);
            else if (t.dtype == DType::I32) put(&integer, 4);
            else put(&single, 4);
        }
    }
    good = std::fclose(out) == 0 && good;
    if (good && (!is_file || std::rename(written.c_str(), to.c_str()) == 0)) return;
    if (is_file) std::remove(written.c_str());
    throw Error(path + ": cannot be written");
}

}  // namespace ithaca
