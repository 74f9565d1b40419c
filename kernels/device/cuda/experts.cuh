// Mixtures of experts: which experts a token goes to, the way there, and the way back.
//
// Tokens of a group share slots at each expert, dealt in order. Slots of an expert lie group by group.
#pragma once

#include "numeric.cuh"

namespace ithaca::kernel {

// How tokens choose.
struct Route {
    int64_t experts, top;
    bool sigmoid;            // else the softmax over all experts
    bool shares;             // gates are divided by their sum
    double scale;
    int64_t groups, kept;    // experts in groups, of which the best are kept; none when zero
};

// The score of expert i of a row of logits, whose largest is `most` and whose exponentials sum to `sum`.
template <typename A>
__device__ inline A score(const Route& route, A logit, A most, A sum) {
    return route.sigmoid ? A(1) / (A(1) + exponential(-logit)) : exponential(logit - most) / sum;
}

template <typename A, typename T>
__device__ inline void softmax_of(const Route& route, const T* logits, A& most, A& sum) {
    most = nothing<A>();
    sum = 0;
    if (route.sigmoid) return;
    for (int64_t i = 0; i < route.experts; ++i) most = widen(logits[i]) > most ? widen(logits[i]) : most;
    for (int64_t i = 0; i < route.experts; ++i) sum += exponential(widen(logits[i]) - most);
}

// Whether `i` is among the first `n` of `chosen`.
__device__ inline bool among(const int32_t* chosen, int64_t n, int64_t i) {
    for (int64_t j = 0; j < n; ++j)
        if (chosen[j] == i) return true;
    return false;
}

// What a group of experts is worth: its two best together.
template <typename A, typename T>
__device__ inline A worth_of_group(const Route& route, const T* logits, const T* bias, A most, A sum, int64_t group) {
    const int64_t size = route.experts / route.groups;
    A first = nothing<A>(), second = nothing<A>();
    for (int64_t i = group * size; i < (group + 1) * size; ++i) {
        const A value = score(route, widen(logits[i]), most, sum) + (bias == nullptr ? A(0) : widen(bias[i]));
        if (value > first) {
            second = first;
            first = value;
        } else if (value > second) {
            second = value;
        }
    }
    return first + second;
}

// Whether a group is among those that are kept: fewer than `kept` are better, or equal and before it.
template <typename A, typename T>
__device__ inline bool keeps(const Route& route, const T* logits, const T* bias, A most, A sum, int64_t group) {
    const A own = worth_of_group(route, logits, bias, most, sum, group);
    int64_t better = 0;
    for (int64_t g = 0; g < route.groups; ++g) {
        const A other = worth_of_group(route, logits, bias, most, sum, g);
        better += other > own || (other == own && g < group);
    }
    return better < route.kept;
}

// A thread takes a token.
template <typename T>
__global__ void route(Route route, const T* logits, const T* bias, T* gates, int32_t* choices, int64_t tokens) {
    using A = Acc<T>;
    ITHACA_FOR(token, tokens) {
        const T* row = logits + token * route.experts;
        int32_t* chosen = choices + token * route.top;
        A most, sum, all = 0;
        softmax_of(route, row, most, sum);
        for (int64_t j = 0; j < route.top; ++j) {
            int64_t best = -1;
            A best_worth = 0;
            bool kept = true;
            for (int64_t i = 0; i < route.experts; ++i) {
                if (route.groups > 0 && i % (route.experts / route.groups) == 0)
                    kept = keeps(route, row, bias, most, sum, i / (route.experts / route.groups));
                if (!kept || among(chosen, j, i)) continue;
                const A value = score(route, widen(row[i]), most, sum) + (bias == nullptr ? A(0) : widen(bias[i]));
                if (best < 0 || value > best_worth) {
                    best = i;
                    best_worth = value;
                }
            }
            chosen[j] = static_cast<int32_t>(best);
            all += score(route, widen(row[best]), most, sum);
        }
        const A divisor = route.shares ? all + static_cast<A>(1e-20) : A(1);
        for (int64_t j = 0; j < route.top; ++j)
            gates[token * route.top + j] =
                narrow<T>(score(route, widen(row[chosen[j]]), most, sum) / divisor * static_cast<A>(route.scale));
    }
}

// The gradient of the logits, the choice being fixed. A thread takes a token.
template <typename T>
__global__ void route_backward(Route route, const T* logits, const int32_t* choices, Reals d_gates, T* d_logits,
                               int64_t tokens) {
    using A = Acc<T>;
    ITHACA_FOR(token, tokens) {
        const T* row = logits + token * route.experts;
        const int32_t* chosen = choices + token * route.top;
        A most, sum, all = 0, taken = 0, mean = 0;
        softmax_of(route, row, most, sum);
        for (int64_t j = 0; j < route.top; ++j) all += score(route, widen(row[chosen[j]]), most, sum);
        const A divisor = route.shares ? all + static_cast<A>(1e-20) : A(1);
        for (int64_t j = 0; j < route.top && route.shares; ++j)
            taken += static_cast<A>(d_gates[token * route.top + j]) * score(route, widen(row[chosen[j]]), most, sum) / divisor;
        auto slope = [&](int64_t i) {
            A d = 0;
            for (int64_t j = 0; j < route.top; ++j)
                if (chosen[j] == i)
                    d += (static_cast<A>(d_gates[token * route.top + j]) - taken) / divisor * static_cast<A>(route.scale);
            return d;
        };
        if (!route.sigmoid)
            for (int64_t j = 0; j < route.top; ++j)
                mean += slope(chosen[j]) * score(route, widen(row[chosen[j]]), most, sum);
        for (int64_t i = 0; i < route.experts; ++i) {
            const A s = score(route, widen(row[i]), most, sum), d = slope(i);
            d_logits[token * route.experts + i] = narrow<T>(route.sigmoid ? d * s * (A(1) - s) : (d - mean) * s);
        }
    }
}

// The tokens of a rank, `sequences` of `tokens` each, in groups of `each_tokens` of `each_sequences`.
struct Groups {
    int64_t sequences, tokens, each_sequences, each_tokens;

    __device__ int64_t across() const { return tokens / each_tokens; }
    __device__ int64_t size() const { return each_sequences * each_tokens; }
    __device__ int64_t count() const { return sequences * tokens / size(); }
    __device__ int64_t of(int64_t token) const {
        return token / tokens / each_sequences * across() + token % tokens / each_tokens;
    }
    // Token i of a group.
    __device__ int64_t token(int64_t group, int64_t i) const {
        return (group / across() * each_sequences + i / each_tokens) * tokens + group % across() * each_tokens + i % each_tokens;
    }
};

// The place of each choice, `expert * slots + slot`; -1 where the slots of the expert are taken. Where `overflow` is not null,
// it becomes the most tokens that want slots of an expert with too few, times 2^32, and the expert. A thread takes a group and
// an expert.
__global__ void deal(const int32_t* choices, int32_t* places, Groups groups, int64_t top, int64_t experts, int64_t slots,
                     unsigned long long* overflow, int64_t n) {
    ITHACA_FOR(i, n) {
        const int64_t expert = i % experts, group = i / experts;
        int64_t taken = 0;
        for (int64_t k = 0; k < groups.size(); ++k) {
            const int64_t first = groups.token(group, k) * top;
            for (int64_t at = first; at < first + top; ++at) {
                if (choices[at] == expert) places[at] = static_cast<int32_t>(taken++ < slots ? expert * slots + taken - 1 : -1);
                else if (expert == 0 && (choices[at] < 0 || choices[at] >= experts)) places[at] = -1;
            }
        }
        if (overflow != nullptr && taken > slots) atomicMax(overflow, static_cast<unsigned long long>(taken << 32 | expert));
    }
}

// The destinations of a rank's tokens: `slots` slots for a group at an expert; the rank holds `held` experts from `first` on.
// Rows are `width` elements.
struct Slots {
    const int32_t* places;
    Groups groups;
    int64_t top, slots, first, held, width;

    // The row of slots of a token's choice; negative when it has none, or another rank has the expert.
    __device__ int64_t row(int64_t token, int64_t choice) const {
        const int64_t place = places[token * top + choice], expert = place / slots - first;
        if (place < 0 || expert < 0 || expert >= held) return -1;
        return (expert * groups.count() + groups.of(token)) * slots + place % slots;
    }
};

// Threads that share a row of slots; places are read once for all elements that a thread has.
constexpr int64_t kLanes = 32;

// Copies every token to its slots, which are zero before. kLanes threads take a token.
template <typename T>
__global__ void dispatch(Slots s, const T* x, const Reals gates, bool gated, T* z, int64_t n) {
    using A = Acc<T>;
    ITHACA_FOR(i, n) {
        const int64_t lane = i % kLanes, token = i / kLanes;
        const T* from = x + token * s.width;
        for (int64_t choice = 0; choice < s.top; ++choice) {
            const int64_t row = s.row(token, choice);
            if (row < 0) continue;
            const A gate = gated ? static_cast<A>(gates[token * s.top + choice]) : A(1);
            T* to = z + row * s.width;
            for (int64_t m = lane; m < s.width; m += kLanes) to[m] = gated ? narrow<T>(widen(from[m]) * gate) : from[m];
        }
    }
}

// Every token sums its slots. kLanes threads take a token.
template <typename T>
__global__ void combine(Slots s, const T* y, const Reals gates, bool gated, T* z, int64_t n) {
    using A = Acc<T>;
    ITHACA_FOR(i, n) {
        const int64_t lane = i % kLanes, token = i / kLanes;
        for (int64_t start = lane; start < s.width; start += kLanes * 16) {
            A sums[16] = {};
            for (int64_t choice = 0; choice < s.top; ++choice) {
                const int64_t row = s.row(token, choice);
                if (row < 0) continue;
                const A gate = gated ? static_cast<A>(gates[token * s.top + choice]) : A(1);
                for (int64_t k = 0; k < 16 && start + k * kLanes < s.width; ++k)
                    sums[k] += widen(y[row * s.width + start + k * kLanes]) * gate;
            }
            for (int64_t k = 0; k < 16 && start + k * kLanes < s.width; ++k)
                z[token * s.width + start + k * kLanes] = narrow<T>(sums[k]);
        }
    }
}

// No row of any run is filled. A thread takes a run.
__global__ void clear_counts(int32_t* counts, int64_t n) {
    ITHACA_FOR(i, n) counts[i] = 0;
}

// The rows of each run up to the last one with an element that is not zero. kLanes threads take a row, the last rows of runs
// first: the count is mostly known when filled rows ask for it.
template <typename T>
__global__ void filled_rows(const T* x, int32_t* counts, int64_t rows, int64_t width, int64_t n) {
    ITHACA_FOR(i, n) {
        const int64_t lane = i % kLanes, run = i / kLanes / rows, row = rows - 1 - i / kLanes % rows;
        const T* of = x + (run * rows + row) * width;
        for (int64_t m = lane; m < width; m += kLanes) {
            if (widen(of[m]) == 0) continue;
            if (counts[run] <= row) atomicMax(counts + run, static_cast<int32_t>(row + 1));
            break;
        }
    }
}

// Zero in the rows of each run that are not filled. kLanes threads take a row.
template <typename T>
__global__ void clear_rows(T* x, const int32_t* counts, int64_t rows, int64_t width, int64_t n) {
    ITHACA_FOR(i, n) {
        const int64_t lane = i % kLanes, row = i / kLanes;
        if (row % rows < counts[row / rows]) continue;
        for (int64_t m = lane; m < width; m += kLanes) x[row * width + m] = narrow<T>(0);
    }
}

// The product of a token with each of its slots, as wide as the arithmetic. A thread takes a choice.
template <typename T>
__global__ void slot_products(Slots s, const T* y, const T* x, Acc<T>* z, int64_t n) {
    ITHACA_FOR(i, n) {
        const int64_t token = i / s.top, row = s.row(token, i % s.top);
        Acc<T> sum = 0;
        for (int64_t m = 0; row >= 0 && m < s.width; ++m)
            sum += widen(x[token * s.width + m]) * widen(y[row * s.width + m]);
        z[i] = sum;
    }
}

// x, and behind it y, along the last dimension. The walk goes over rows: where y has each.
template <typename T>
__global__ void concat(const T* x, const T* y, T* z, Walk<1> rows, int64_t n, int64_t x_width, int64_t y_width) {
    const int64_t width = x_width + y_width;
    ITHACA_FOR(i, n) {
        const int64_t row = i / width, at = i % width;
        int64_t other[1];
        rows.at(row, other);
        z[i] = at < x_width ? x[row * x_width + at] : y[other[0] + at - x_width];
    }
}

// A window of the last dimension.
template <typename T>
__global__ void cut(const T* x, T* z, int64_t n, int64_t x_width, int64_t z_width, int64_t start) {
    ITHACA_FOR(i, n) z[i] = x[i / z_width * x_width + start + i % z_width];
}

}  // namespace ithaca::kernel
