// The self-check: distances between the outputs and those of one GPU. The rules and constants are those of the compiler's
// kernels/src/compare.rs, except that tensors above the noise are measured by their own norm only.
//
// An optimizer such as AdamW makes whole steps of a gradient, however small it is. Where a gradient is rounding alone, a
// weight may move either way, and is compared by the distance that the steps allow.
#pragma once

#include <cmath>

#include "gather.hpp"

namespace ithaca {

// Gradients below this part of the largest of all gradients are rounding; `NOISE` of the compiler.
inline constexpr double kNoise = 1e-5;
// Elements of rounding count as at least this part of the largest of their kind; `FLOOR` of the compiler.
inline constexpr double kFloor = 1e-4;
// The part of the allowed distance from which a difference is reported; `VISIBLE` of the compiler.
inline constexpr double kVisible = 1e-3;

// The tolerance of a tensor: by the narrowest type of the program, whose rounding every result went through.
inline double tolerance_of(DType dtype, const std::vector<DType>& all) {
    const auto has = [&](DType t) { return std::count(all.begin(), all.end(), t) > 0; };
    const double halves = has(DType::BF16) ? 5e-2 : has(DType::F16) ? 1e-2 : 0;
    switch (dtype) {
        // Parts of attention and their lse are in single precision for every operand type.
        case DType::F64: return std::max(halves, has(DType::F32) ? 1e-5 : 1e-10);
        case DType::F32: return std::max(halves, 1e-4);
        case DType::F16: case DType::BF16: return halves;
        default: return 0;
    }
}

// Half the relative distance of neighbouring numbers.
inline double rounding_of(DType dtype) {
    static constexpr double rounding[] = {0x1p-53, 0x1p-24, 0x1p-11, 0x1p-8, 0, 0, 0};
    return rounding[static_cast<size_t>(dtype)];
}

// The largest magnitude that is finite of all tensors whose names begin so.
inline double largest_of(const std::vector<HostTensor>& tensors, const char* prefix) {
    double largest = 0;
    for (const HostTensor& t : tensors) {
        if (!has_prefix(t.name, prefix)) continue;
        for (double value : t.values)
            if (std::isfinite(value)) largest = std::max(largest, std::fabs(value));
    }
    return largest;
}

// For each weight and each of its elements the smallest magnitude that its gradient had in any step, in parts of the largest
// element of all gradients of that step.
class SmallestGradients {
  public:
    // Takes a step's gradients into account, among whatever else there is.
    void after(const std::vector<HostTensor>& step) {
        const double largest = largest_of(step, kGradient);
        for (const HostTensor& gradient : step) {
            if (!has_prefix(gradient.name, kGradient)) continue;
            std::vector<double>& parts = parts_[gradient.name.substr(std::strlen(kGradient))];
            if (parts.empty()) parts.assign(gradient.values.size(), std::numeric_limits<double>::infinity());
            for (size_t i = 0; i < parts.size(); ++i)
                parts[i] = std::fmin(parts[i], largest > 0 ? std::fabs(gradient.values[i]) / largest : 0);
        }
    }

    // Whether an element of a weight, or of what is kept for it, has a gradient that is rounding alone.
    bool is_rounding(const std::string& weight, size_t i) const {
        const auto found = parts_.find(weight);
        return found != parts_.end() && i < found->second.size() && found->second[i] <= kNoise;
    }

  private:
    std::map<std::string, std::vector<double>> parts_;
};

struct Verdict {
    double largest = 0, relative = 0;
    // Elements that are judged by what steps can do, and differ visibly.
    int64_t by_reach = 0;
};

// How outputs are judged.
class Judge {
  public:
    // `reach` is how far an optimizer may have moved an element of a weight in all steps; zero without one.
    Judge(const std::vector<HostTensor>& reference, double reach, const SmallestGradients& smallest)
        : reach_(reach),
          smallest_(smallest),
          kinds_{
              {kSecondMoment, kFloor * kFloor * largest_of(reference, kSecondMoment)},
              {kFirstMoment, std::min(kFloor * largest_of(reference, kFirstMoment), kNoise)},
              {kGradient, std::min(kFloor * largest_of(reference, kGradient), kNoise)},
              {kMaster, 0},
          } {}

    // Compares two tensors of one name and shape.
    Verdict compare(const HostTensor& ours, const HostTensor& theirs) const {
        std::string weight = ours.name;
        double floor = 0;
        bool moves = true;  // as steps of an optimizer do
        for (const auto& [prefix, of_kind] : kinds_) {
            if (!has_prefix(ours.name, prefix)) continue;
            weight.erase(0, std::strlen(prefix));
            floor = of_kind;
            moves = prefix == kMaster;
            break;
        }
        Verdict verdict;
        double error = 0, error_of_rounding = 0, norm = 0;
        for (size_t i = 0; i < ours.values.size(); ++i) {
            const double a = ours.values[i], b = theirs.values[i];
            // The logarithm of a sum of nothing.
            if (std::isinf(a) && a < 0 && a == b) continue;
            norm += b * b;
            const double apart = std::fabs(a - b);
            const bool is_rounding = smallest_.is_rounding(weight, i);
            // Both may have gone all the way, in opposite directions, and were rounded then.
            const double bound = 2 * reach_ + rounding_of(ours.dtype) * (std::fabs(a) + std::fabs(b));
            if (is_rounding && moves && apart <= bound) {
                verdict.by_reach += apart > kVisible * reach_;
                continue;
            }
            // What is not a number stays the largest.
            if (!std::isnan(verdict.largest) && !(apart <= verdict.largest)) verdict.largest = apart;
            (is_rounding ? error_of_rounding : error) += apart * apart;
        }
        const double noise = floor * floor * static_cast<double>(ours.values.size());
        auto parts = [](double x, double of) { return x == 0 ? 0 : x / of; };
        verdict.relative = std::sqrt(parts(error, norm) + parts(error_of_rounding, std::max(norm, noise)));
        return verdict;
    }

  private:
    struct Kind {
        const char* prefix;
        double floor;  // the size of elements that are rounding
    };
    double reach_;
    const SmallestGradients& smallest_;
    std::vector<Kind> kinds_;
};

// Prints the errors of each tensor; true when all are within the tolerance, that of their types where it is negative.
inline bool agree(const std::vector<HostTensor>& outputs, const std::vector<HostTensor>& reference, double reach,
                  const SmallestGradients& smallest, double tolerance, const std::vector<DType>& dtypes) {
    bool good = outputs.size() == reference.size();
    int64_t elements = 0, tensors = 0;
    const Judge judge(reference, reach, smallest);
    for (const HostTensor& ours : outputs) {
        const auto theirs = std::find_if(reference.begin(), reference.end(),
                                         [&](const HostTensor& t) { return t.name == ours.name && t.shape == ours.shape; });
        if (theirs == reference.end()) {
            std::printf("self-check %s: the reference has no such tensor\n", ours.name.c_str());
            good = false;
            continue;
        }
        const Verdict verdict = judge.compare(ours, *theirs);
        const double bound = tolerance >= 0 ? tolerance : tolerance_of(ours.dtype, dtypes);
        const bool close = verdict.relative <= bound;  // false for what is not a number
        std::printf("self-check %s: max error %.3e, relative error %.3e, tolerance %.1e: %s\n", ours.name.c_str(),
                    verdict.largest, verdict.relative, bound, close ? "ok" : "FAILED");
        good = good && close;
        elements += verdict.by_reach;
        tensors += verdict.by_reach > 0;
    }
    if (elements > 0)
        std::printf("self-check: %lld elements of %lld weights were judged by how far steps can take them, %.1e: their gradients are "
                    "rounding alone, of which the optimizer makes whole steps\n",
                    static_cast<long long>(elements), static_cast<long long>(tensors), reach);
    return good;
}

}  // namespace ithaca
