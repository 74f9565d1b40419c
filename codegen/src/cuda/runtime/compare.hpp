// Outputs and updated tensors, whole on rank 0, and the self-check: their distances from those of one GPU.
//
// An optimizer such as AdamW makes whole steps of a gradient, however small it is. Where a gradient is rounding alone, a
// weight may move either way, and is compared by the distance that the steps allow.
#pragma once

#include <cmath>
#include <limits>

#include "device.hpp"

namespace ithaca {

// The bytes at `mine` of a rank, on rank 0; nothing on other ranks.
inline std::vector<char> fetch_part(Device& device, int64_t rank, Address mine, size_t count) {
    Address at = mine;
    if (rank != 0 && (device.rank == 0 || device.rank == rank)) {
        const ncclComm_t comm = device.communicators.all[kWorld].comm;
        const cudaStream_t stream = device.streams[kCompute];
        if (device.rank == 0) ITHACA_CUDA(cudaMalloc(reinterpret_cast<void**>(&at.at), count));
        if (device.rank == 0) ITHACA_NCCL(ncclRecv(at, count, ncclInt8, static_cast<int>(rank), comm, stream));
        else ITHACA_NCCL(ncclSend(at, count, ncclInt8, 0, comm, stream));
        device.watch.settle(comm), device.synchronize();
    }
    std::vector<char> host(device.rank == 0 ? count : 0);
    if (device.rank == 0) ITHACA_CUDA(cudaMemcpy(host.data(), at, count, cudaMemcpyDeviceToHost));
    if (at.at != mine.at) ITHACA_CUDA(cudaFree(at));
    return host;
}

// Fetches each distinct part of a tensor from the first rank that holds it, and calls `put` on rank 0 with the place and the
// value of each element.
template <typename Holds, typename Runs, typename Put>
void gather_parts(Device& device, const Tensor& tensor, Address mine, const Holds& holds, const Runs& runs_of, const Put& put) {
    const Mesh& mesh = device.program.mesh;
    for (int64_t rank = 0; rank < mesh.ranks(); ++rank) {
        bool is_first = holds(rank);
        for (int axis : tensor.copies)
            for (int64_t c = mesh.coordinate(rank, axis), before = rank; c-- > 0;) is_first &= !holds(before -= mesh.stride(axis));
        const std::vector<PlaceRun> runs = is_first ? runs_of(rank) : std::vector<PlaceRun>{};
        if (runs.empty()) continue;
        int64_t n = 0;
        for (const PlaceRun& run : runs) n += run.n;
        const std::vector<char> host = fetch_part(device, rank, mine, n * bytes_of(tensor.dtype));
        int64_t at = 0;
        for (const PlaceRun& run : runs) for (int64_t i = 0; i < run.n; ++i, ++at)
                if (run.place >= 0 && device.rank == 0) put(run.place + i, load_element(tensor.dtype, host.data(), at));
    }
}

// The stored tensors that the program updates, by name, if it has the prefix. Elements that no part covers keep their initial
// value.
inline std::vector<HostTensor> gather_updated(Device& device, const Tensors& tensors, const char* prefix = "") {
    const Program& program = device.program;
    std::map<std::string, HostTensor> updated;
    for (size_t s = 0; s < program.sources.size(); ++s) {
        const Source& source = program.sources[s];
        if (!source.is_written || !has_prefix(source.name, prefix)) continue;
        for (int64_t layer = source.start; layer < source.end; ++layer) {
            const auto holds = [&](int64_t rank) { return source.is_held(rank, layer); };
            int64_t holder = 0;
            while (holder < program.mesh.ranks() && !holds(holder)) ++holder;
            if (holder == program.mesh.ranks()) continue;
            HostTensor& whole = updated[stored_name(source, layer)];
            const auto initial = initial_elements(source, layer, tensors);
            if (whole.name.empty()) whole = {stored_name(source, layer), source.tensor.dtype, source.stored_shape(), {}};
            for (auto i = static_cast<int64_t>(whole.values.size()); device.rank == 0 && i < product_of(whole.shape); ++i)
                whole.values.push_back(element_at(initial, i));
            gather_parts(device, source.tensor, device.source(s, layer), holds, [&](int64_t rank) { return stored_runs(source, rank); },
                         [&](size_t place, double value) { whole.values[place] = value; });
        }
    }
    std::vector<HostTensor> out;
    for (auto& [name, tensor] : updated) {
        // A stack has its members in a row. Only rank 0 has values.
        const std::vector<std::string> names = members(name, tensor.shape);
        if (!names.empty() && names.front() != name) tensor.shape.erase(tensor.shape.begin());
        const auto size = static_cast<std::ptrdiff_t>(tensor.values.size() / std::max<size_t>(names.size(), 1));
        auto first = tensor.values.begin();
        for (size_t m = 0; m < names.size(); ++m, first += size) out.push_back({names[m], tensor.dtype, tensor.shape, {first, first + size}});
    }
    return out;
}

// An output, without padding and with partial sums added.
inline HostTensor gather_output(Device& device, const Output& output) {
    const Tensor& tensor = output.tensor;
    HostTensor out{output.name, tensor.dtype, tensor.shape, {}};
    if (device.rank == 0) out.values.assign(product_of(tensor.shape), 0);
    gather_parts(
        device, tensor, device.arena() + output.offset(device.rank),
        [&](int64_t rank) { return output.offset(rank) >= 0; },
        [&](int64_t rank) { return runs_of(tensor.part(rank), tensor.shape); },
        [&](size_t place, double value) { out.values[place] += value; });
    return out;
}

// Outputs, then updated tensors.
inline std::vector<HostTensor> gather(Device& device, const Tensors& tensors) {
    std::vector<HostTensor> out;
    for (const Output& output : device.program.outputs) out.push_back(gather_output(device, output));
    for (HostTensor& tensor : gather_updated(device, tensors)) out.push_back(std::move(tensor));
    return out;
}

// Gradients below this part of the largest of all gradients are rounding.
inline constexpr double kNoise = 1e-5;
// Elements of rounding count as at least this part of the largest of their kind.
inline constexpr double kFloor = 1e-4;
// The part of the allowed distance from which a difference is reported.
inline constexpr double kVisible = 1e-3;

// Half the relative distance of neighbouring numbers, by element type.
inline constexpr double kRounding[] = {0x1p-53, 0x1p-24, 0x1p-11, 0x1p-8, 0, 0, 0};

// The largest finite magnitude in all tensors whose names have a prefix.
inline double largest_of(const std::vector<HostTensor>& tensors, const char* prefix) {
    double largest = 0;
    for (const HostTensor& t : tensors) for (double value : t.values)
            if (has_prefix(t.name, prefix) && std::isfinite(value)) largest = std::max(largest, std::fabs(value));
    return largest;
}

struct Verdict {
    double largest = 0, relative = 0;
    int64_t by_reach = 0;  // elements that are compared by the reach of the steps, and differ visibly
};

// The outputs of the reference, and its gradients in every step.
class Judge {
  public:
    // The gradients that a step of the reference left.
    void after(const std::vector<HostTensor>& step) {
        const double largest = largest_of(step, kGradient);
        for (const HostTensor& gradient : step) {
            if (!has_prefix(gradient.name, kGradient)) continue;
            std::vector<double>& parts = smallest_[gradient.name.substr(std::strlen(kGradient))];
            parts.resize(gradient.values.size(), std::numeric_limits<double>::infinity());
            for (size_t i = 0; i < parts.size(); ++i)
                parts[i] = std::fmin(parts[i], largest > 0 ? std::fabs(gradient.values[i]) / largest : 0);
        }
    }
    // `reach` is the largest distance by which the optimizer moves an element in all steps; zero without one.
    void expect(std::vector<HostTensor> reference, double reach) {
        reference_ = std::move(reference), reach_ = reach;
        const auto floor = [&](const char* kind) { return kFloor * largest_of(reference_, kind); };
        kinds_ = {{kSecondMoment, kFloor * floor(kSecondMoment)}, {kFirstMoment, std::min(floor(kFirstMoment), kNoise)},
                  {kGradient, std::min(floor(kGradient), kNoise)}, {kMaster, 0}};
    }
    // Compares two tensors of one name and shape.
    Verdict compare(const HostTensor& ours, const HostTensor& theirs) const {
        const auto kind = std::find_if(kinds_.begin(), kinds_.end(), [&](const auto& k) { return has_prefix(ours.name, k.first); });
        const bool is_state = kind != kinds_.end(), moves = !is_state || kind->first == kMaster;  // with the steps
        const auto smallest = smallest_.find(is_state ? ours.name.substr(std::strlen(kind->first)) : ours.name);
        const double floor = is_state ? kind->second : 0;  // the size of elements of rounding
        Verdict verdict;
        double error = 0, error_of_rounding = 0, norm = 0;
        for (size_t i = 0; i < ours.values.size(); ++i) {
            const double a = ours.values[i], b = theirs.values[i];
            if (std::isinf(a) && a < 0 && a == b) continue;  // the logarithm of an empty sum
            norm += b * b;
            const double apart = std::fabs(a - b);
            const bool is_rounding = smallest != smallest_.end() && i < smallest->second.size() && smallest->second[i] <= kNoise;
            // Both may have moved all the way, in opposite directions, and were rounded afterwards.
            const double bound = 2 * reach_ + kRounding[int(ours.dtype)] * (std::fabs(a) + std::fabs(b));
            if (is_rounding && moves && apart <= bound) {
                verdict.by_reach += apart > kVisible * reach_;
                continue;
            }
            if (!std::isnan(verdict.largest) && !(apart <= verdict.largest)) verdict.largest = apart;  // NaN stays the largest
            (is_rounding ? error_of_rounding : error) += apart * apart;
        }
        const double noise = floor * floor * static_cast<double>(ours.values.size());
        const auto part = [](double x, double of) { return x == 0 ? 0 : x / of; };
        verdict.relative = std::sqrt(part(error, norm) + part(error_of_rounding, std::max(norm, noise)));
        return verdict;
    }
    // Prints the errors of each tensor; whether all are within the tolerance, which is that of their types if it is negative.
    bool agrees(const std::vector<HostTensor>& outputs, double tolerance, const double (&tolerances)[4]) const {
        bool good = outputs.size() == reference_.size();
        long long elements = 0, tensors = 0;
        for (const HostTensor& ours : outputs) {
            const auto theirs = std::find_if(reference_.begin(), reference_.end(),
                                             [&](const HostTensor& t) { return t.name == ours.name && t.shape == ours.shape; });
            if (theirs == reference_.end()) {
                std::printf("self-check %s: the reference has no such tensor\n", ours.name.c_str());
                good = false;
                continue;
            }
            const Verdict verdict = compare(ours, *theirs);
            const double bound = tolerance >= 0 ? tolerance : int(ours.dtype) < 4 ? tolerances[int(ours.dtype)] : 0;
            const bool close = verdict.relative <= bound;  // false for NaN
            std::printf("self-check %s: max error %.3e, relative error %.3e, tolerance %.1e: %s\n", ours.name.c_str(),
                        verdict.largest, verdict.relative, bound, close ? "ok" : "FAILED");
            good = good && close;
            elements += verdict.by_reach;
            tensors += verdict.by_reach > 0;
        }
        if (elements > 0)
            std::printf("self-check: %lld elements of %lld weights were judged by how far steps can take them, %.1e: their gradients "
                        "are rounding alone, and the optimizer makes whole steps of them\n", elements, tensors, reach_);
        return good;
    }

  private:
    std::vector<HostTensor> reference_;
    double reach_ = 0;
    std::map<std::string, std::vector<double>> smallest_;  // of each element in any step, as a part of the step's largest
    std::vector<std::pair<const char*, double>> kinds_;
};

}  // namespace ithaca
