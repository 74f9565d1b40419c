// Mixtures of experts: which experts a token goes to, the way there, and the way back.
//
// Tokens of a group share slots at each expert, dealt in order. Slots of an expert lie group by group.
#pragma once

#include "rows.cuh"

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
    most = neg_infinity<A>();
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
    A first = neg_infinity<A>(), second = neg_infinity<A>();
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

    __device__ int64_t across() const { return divide(tokens, each_tokens).quotient; }
    __device__ int64_t size() const { return each_sequences * each_tokens; }
    __device__ int64_t count() const { return divide(sequences * tokens, size()).quotient; }
    __device__ int64_t of(int64_t token) const {
        const Division at = divide(token, tokens);
        return divide(at.quotient, each_sequences).quotient * across() + divide(at.remainder, each_tokens).quotient;
    }
    // Token i of a group.
    __device__ int64_t token(int64_t group, int64_t i) const {
        const Division of = divide(group, across()), at = divide(i, each_tokens);
        return (of.quotient * each_sequences + at.quotient) * tokens + of.remainder * each_tokens + at.remainder;
    }
};

// The place of each choice, `expert * slots + slot`; -1 where the slots of the expert are taken. Where `overflow` is not null,
// it becomes the most tokens that want slots of an expert with too few, times 2^32, and the expert. A warp takes a group and
// an expert, and 32 choices at a time: a choice comes behind those of the lanes before it.
__global__ void deal(const int32_t* choices, int32_t* places, Groups groups, int64_t top, int64_t experts, int64_t slots,
                     unsigned long long* overflow, int64_t n) {
    const int64_t lane = threadIdx.x % 32, warps = blockDim.x / 32, wanted = groups.size() * top;
    for (int64_t first = blockIdx.x * warps; first < n; first += gridDim.x * warps) {
        const int64_t i = first + threadIdx.x / 32;
        const Division at = divide(i < n ? i : 0, experts);
        const int64_t expert = at.remainder, group = at.quotient;
        int64_t taken = 0;
        for (int64_t start = 0; start < wanted; start += 32) {
            const bool is_there = i < n && start + lane < wanted;
            const Division choice = divide(is_there ? start + lane : 0, top);
            const int64_t place = groups.token(group, choice.quotient) * top + choice.remainder;
            const int64_t chosen = is_there ? choices[place] : expert;
            const uint32_t same = warp::ballot(is_there && chosen == expert);
            const int64_t slot = taken + __popc(same & ((1u << lane) - 1));
            if (is_there && chosen == expert) places[place] = static_cast<int32_t>(slot < slots ? expert * slots + slot : -1);
            else if (is_there && expert == 0 && (chosen < 0 || chosen >= experts)) places[place] = -1;
            taken += __popc(same);
        }
        if (overflow != nullptr && taken > slots && lane == 0)
            atomicMax(overflow, static_cast<unsigned long long>(taken << 32 | expert));
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
        const int64_t place = places[token * top + choice];
        if (place < 0) return -1;
        const Division at = divide(place, slots);
        const int64_t expert = at.quotient - first;
        if (expert < 0 || expert >= held) return -1;
        return (expert * groups.count() + groups.of(token)) * slots + at.remainder;
    }
};

// Copies every token to its slots, which are zero before.
template <typename T>
__launch_bounds__(kMostLanes)
__global__ void dispatch(Slots s, const T* __restrict__ x, const Reals gates, bool gated, T* __restrict__ z, int64_t n,
                         int lanes) {
    using A = Acc<T>;
    in_packs<kWide<T>>(s.width % kWide<T> == 0 && are_aligned(x, z), [&](auto size) {
        constexpr int kN = decltype(size)::value;
        for_rows(n, lanes, s.width, [&](const Team& team, int64_t token, int64_t own, bool) {
            for (int64_t choice = 0; choice < s.top; ++choice) {
                const int64_t row = own > 0 ? s.row(token, choice) : -1;
                if (row < 0) continue;
                const A gate = gated ? static_cast<A>(gates[token * s.top + choice]) : A(1);
                for_row<kN>(team, own, [&](int64_t i) {
                    auto value = load<kN>(x + token * s.width + i);
                    ITHACA_UNROLL
                    for (int k = 0; k < kN; ++k) value.at[k] *= gate;
                    store(z + row * s.width + i, value);
                });
            }
        });
    });
}

// The places of the runs of members' blocks: of `runs` runs of a member `adjacent` are side by side, and the next ones `again`
// runs after those; the next member's are `member` runs further.
struct MemberRuns {
    int64_t runs, adjacent, again, member;

    __device__ int64_t of(int64_t run) const {
        const Division by_member = divide(run, runs), by_place = divide(by_member.remainder, adjacent);
        return by_member.quotient * member + by_place.quotient * again + by_place.remainder;
    }
};

// Threads that share a row of a run.
constexpr int64_t kLanes = 32;

// No row of any run is filled. A thread takes a run.
__global__ void clear_counts(int32_t* counts, int64_t n) {
    ITHACA_FOR(i, n) counts[i] = 0;
}

// The rows of each run up to the last one with an element that is not zero. kLanes threads take a row, the last rows of runs
// first: the count is mostly known when filled rows ask for it.
template <typename T>
__global__ void filled_rows(const T* x, int32_t* counts, const MemberRuns places, int64_t rows, int64_t width, int64_t n) {
    ITHACA_FOR(i, n) {
        const int64_t lane = i % kLanes, run = i / kLanes / rows, row = rows - 1 - i / kLanes % rows;
        const T* of = x + (places.of(run) * rows + row) * width;
        for (int64_t m = lane; m < width; m += kLanes) {
            if (widen(of[m]) == 0) continue;
            if (counts[run] <= row) atomicMax(counts + run, static_cast<int32_t>(row + 1));
            break;
        }
    }
}

// Zero in the rows of each run that are not filled. kLanes threads take a row.
template <typename T>
__global__ void clear_rows(T* x, const int32_t* counts, const MemberRuns places, int64_t rows, int64_t width, int64_t n) {
    ITHACA_FOR(i, n) {
        const int64_t lane = i % kLanes, run = i / kLanes / rows, row = i / kLanes % rows;
        if (row < counts[run]) continue;
        T* of = x + (places.of(run) * rows + row) * width;
        for (int64_t m = lane; m < width; m += kLanes) of[m] = narrow<T>(0);
    }
}

// Every token sums its slots.
template <typename T>
__launch_bounds__(kMostLanes)
__global__ void combine(Slots s, const T* __restrict__ y, const Reals gates, bool gated, T* __restrict__ z, int64_t n,
                        int lanes) {
    using A = Acc<T>;
    in_packs<kWide<T>>(s.width % kWide<T> == 0 && are_aligned(y, z), [&](auto size) {
        constexpr int kN = decltype(size)::value;
        for_rows(n, lanes, s.width, [&](const Team& team, int64_t token, int64_t own, bool) {
            for_row<kN>(team, own, [&](int64_t i) {
                Pack<A, kN> sum = {};
                for (int64_t choice = 0; choice < s.top; ++choice) {
                    const int64_t row = s.row(token, choice);
                    if (row < 0) continue;
                    const A gate = gated ? static_cast<A>(gates[token * s.top + choice]) : A(1);
                    const auto one = load<kN>(y + row * s.width + i);
                    ITHACA_UNROLL
                    for (int k = 0; k < kN; ++k) sum.at[k] += one.at[k] * gate;
                }
                store(z + token * s.width + i, sum);
            });
        });
    });
}

// The product of a token with each of its slots, as wide as the arithmetic. A row is a choice.
template <typename T>
__launch_bounds__(kMostLanes)
__global__ void slot_products(Slots s, const T* __restrict__ y, const T* __restrict__ x, Acc<T>* __restrict__ z, int64_t n,
                              int lanes) {
    in_packs<kWide<T>>(s.width % kWide<T> == 0 && are_aligned(x, y), [&](auto size) {
        constexpr int kN = decltype(size)::value;
        for_rows(n, lanes, s.width, [&](const Team& team, int64_t i, int64_t own, bool is_there) {
            const Division at = divide(i, s.top);
            const int64_t row = s.row(at.quotient, at.remainder);
            Acc<T> sum = 0;
            for_row<kN>(team, row < 0 ? 0 : own, [&](int64_t m) {
                const auto token = load<kN>(x + at.quotient * s.width + m), slot = load<kN>(y + row * s.width + m);
                ITHACA_UNROLL
                for (int k = 0; k < kN; ++k) sum += token.at[k] * slot.at[k];
            });
            sum = team.sum(sum);
            if (is_there && team.lane == 0) z[i] = sum;
        });
    });
}

// x, and behind it y, along the last dimension. The walk goes over rows: where y has each.
template <typename T>
__global__ void concat(const T* x, const T* y, T* z, Walk<1> rows, int64_t n, int64_t x_width, int64_t y_width) {
    const int64_t width = x_width + y_width;
    ITHACA_FOR(i, n) {
        const Division at = divide(i, width);
        int64_t other[1];
        rows.at(at.quotient, other);
        z[i] = at.remainder < x_width ? x[at.quotient * x_width + at.remainder] : y[other[0] + at.remainder - x_width];
    }
}

// A window of the last dimension.
template <typename T>
__global__ void cut(const T* x, T* z, int64_t n, int64_t x_width, int64_t z_width, int64_t start) {
    ITHACA_FOR(i, n) {
        const Division at = divide(i, z_width);
        z[i] = x[at.quotient * x_width + start + at.remainder];
    }
}

}  // namespace ithaca::kernel
