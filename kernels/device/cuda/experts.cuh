// Mixtures of experts: which experts a token goes to, the way there, and the way back.
//
// Tokens of a group lie in a row and share slots at each expert, which are dealt in order; without a capacity a token is
// a group of its own with one slot. Slots of an expert lie group by group.
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

// Where the tokens of a rank go: `groups` groups of `group` tokens, `slots` slots for each at an expert; the rank holds
// `held` experts from `first` on. Rows are `width` elements.
struct Slots {
    const int32_t* choices;
    int64_t top, groups, group, slots, first, held, width;

    // The row of slots of a token's choice; negative when it is dropped, or another rank has the expert.
    __device__ int64_t row(int64_t token, int64_t choice) const {
        const int64_t start = token / group * group * top, at = token * top + choice;
        const int64_t expert = choices[at] - first;
        if (expert < 0 || expert >= held) return -1;
        int64_t before = 0;
        for (int64_t i = start; i < at; ++i) before += choices[i] == choices[at];
        return before < slots ? (expert * groups + token / group) * slots + before : -1;
    }
};

// Threads that share a row of slots; choices are read once for all elements that a thread has.
constexpr int64_t kLanes = 32;

// Fills the slots of every expert and group: tokens in order, then zeros. kLanes threads take an expert and a group.
template <typename T>
__global__ void dispatch(Slots s, const T* x, const Reals gates, bool gated, T* z, int64_t n) {
    using A = Acc<T>;
    ITHACA_FOR(i, n) {
        const int64_t lane = i % kLanes, expert = i / kLanes / s.groups, group = i / kLanes % s.groups;
        T* row = z + (expert * s.groups + group) * s.slots * s.width;
        int64_t filled = 0;
        for (int64_t at = group * s.group * s.top; at < (group + 1) * s.group * s.top && filled < s.slots; ++at) {
            if (s.choices[at] != expert + s.first) continue;
            const T* token = x + at / s.top * s.width;
            const A gate = gated ? static_cast<A>(gates[at]) : A(1);
            for (int64_t m = lane; m < s.width; m += kLanes) row[m] = gated ? narrow<T>(widen(token[m]) * gate) : token[m];
            row += s.width;
            ++filled;
        }
        for (; filled < s.slots; ++filled, row += s.width)
            for (int64_t m = lane; m < s.width; m += kLanes) row[m] = narrow<T>(A(0));
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
