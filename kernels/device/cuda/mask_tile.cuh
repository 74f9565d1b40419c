// What a mask says of a tile of queries and keys: nothing is seen, all is, or each pair has to be asked. A tile is known
// by the least range that has all its positions, so an answer other than `Partial` is certain, and `Partial` is always
// right.
#pragma once

#include "score.cuh"
#include "tensor_core.cuh"

namespace ithaca::kernel {

// Positions `first .. last`.
struct Span {
    int64_t first, last;
};

// The least range that has the positions of `n` tokens from `token` on, at least one of them.
__device__ inline Span span_of(const Sequence& sequence, int64_t token, int64_t n) {
    int64_t low = 0, high = sequence.n - 1;  // the last run that starts at or before the token
    while (low < high) {
        const int64_t middle = (low + high + 1) / 2;
        if (sequence.runs[3 * middle] <= token) low = middle;
        else high = middle - 1;
    }
    Span span{};
    for (int64_t r = low; r < sequence.n && sequence.runs[3 * r] < token + n; ++r) {
        const int64_t* run = sequence.runs + 3 * r;
        const int64_t first = run[0] < token ? token - run[0] : 0, end = token + n - run[0];
        const int64_t last = end < run[2] ? end : run[2];
        if (r == low || run[1] + first < span.first) span.first = run[1] + first;
        if (r == low || run[1] + last > span.last) span.last = run[1] + last;
    }
    return span;
}

// `Padded` is `Partial` where some of the keys are padding.
enum class Seen : uint8_t { Nothing, Partial, Padded, All };

// Whether pairs of a tile have to be asked.
__device__ inline bool asks(Seen seen) { return seen == Seen::Partial || seen == Seen::Padded; }

// What the queries at `queries` see of the keys at `keys` through one run: the run moves with the query, so its ends are
// at the first or the last of them.
__device__ inline Seen seen_of_run(const Mask& mask, int64_t run, Span queries, Span keys) {
    Span at_first = keys, at_last = keys;
    narrow_to_run(mask, run, queries.first, at_first.first, at_first.last);
    narrow_to_run(mask, run, queries.last - 1, at_last.first, at_last.last);
    const auto is_all = [&](Span s) { return s.first == keys.first && s.last == keys.last; };
    if (is_all(at_first) && is_all(at_last)) return Seen::All;
    // Nothing at both ends is nothing between them only where both miss the keys on the same side.
    const bool before = at_first.last <= keys.first && at_last.last <= keys.first;
    const bool behind = at_first.first >= keys.last && at_last.first >= keys.last;
    return before || behind ? Seen::Nothing : Seen::Partial;
}

__device__ inline Seen seen_of(const Mask& mask, int64_t valid, Span queries, Span keys) {
    if (keys.first >= valid) return Seen::Nothing;
    const bool has_padding = keys.last > valid;
    if (has_padding) keys.last = valid;
    Seen seen = Seen::Nothing;
    if (mask.strips == nullptr) {
        seen = seen_of_run(mask, 0, queries, keys);
    } else {
        const int64_t n = static_cast<int64_t>(mask.strips[0]);
        int64_t low = 0, high = n;  // the first strip that ends behind the first query
        while (low < high) {
            const int64_t middle = (low + high) / 2;
            if (static_cast<int64_t>(mask.strips[1 + 4 * middle + 1]) > queries.first) high = middle;
            else low = middle + 1;
        }
        bool all = true, any = false;
        int64_t asked = queries.first;  // queries before this one are in strips that were asked
        for (int64_t i = low; i < n && asked < queries.last; ++i) {
            const double* strip = mask.strips + 1 + 4 * i;
            Span inside{static_cast<int64_t>(strip[0]), static_cast<int64_t>(strip[1])};
            if (inside.first >= queries.last) break;
            if (inside.first > asked) all = false;
            if (inside.first < asked) inside.first = asked;
            if (inside.last > queries.last) inside.last = queries.last;
            bool all_of_strip = false;
            for (int64_t run = static_cast<int64_t>(strip[2]); run < static_cast<int64_t>(strip[3]); ++run) {
                const Seen of_run = seen_of_run(mask, run, inside, keys);
                any |= of_run != Seen::Nothing;
                all_of_strip |= of_run == Seen::All;
            }
            all &= all_of_strip;
            asked = inside.last;
        }
        all &= asked >= queries.last;
        seen = all ? Seen::All : any ? Seen::Partial : Seen::Nothing;
    }
    return seen != Seen::Nothing && has_padding ? Seen::Padded : seen;
}

// Whether a key is one: the rank has as many, and it is no padding, of which only a tile that is `Padded` has any. What lies
// in padding may be no number, and zero times that is none either.
__device__ inline bool is_key(const AttentionShape& s, int64_t key, bool has_padding) {
    return key < s.keys && (!has_padding || position_of(s.key_positions, key) < s.valid_keys);
}

// A query as partial tiles ask it: its position, and which runs are its own.
struct Asked {
    int position, first_run, last_run;
};

__device__ inline Asked asked_of(const Mask& mask, int64_t position) {
    const Runs runs = runs_of(mask, position);
    return {static_cast<int>(position), static_cast<int>(runs.first), static_cast<int>(runs.last)};
}

// The position of a key in 31 bits; negative beyond the last key.
__device__ inline int position_in_tile(const AttentionShape& s, int64_t key) {
    return key < s.keys ? static_cast<int>(position_of(s.key_positions, key)) : -1;
}

// A bit for each of `kN` keys at positions `key(i)`, negative beyond the last key: whether the query sees it.
template <int kN, typename Key>
__device__ inline uint32_t seen_keys(const Mask& mask, int64_t valid, const Asked& query, const Key& key) {
    static_assert(kN <= 32, "a bit each");
    uint32_t seen = 0;
    for (int run = query.first_run; run < query.last_run; ++run) {
        int64_t from = 0, to = valid;
        narrow_to_run(mask, run, query.position, from, to);
        constexpr int64_t kMost = (int64_t{1} << 31) - 1;  // positions have 31 bits
        const int first = static_cast<int>(from < kMost ? from : kMost);
        const int last = static_cast<int>(to < 0 ? 0 : to < kMost ? to : kMost);
        ITHACA_UNROLL
        for (int i = 0; i < kN; ++i) seen |= static_cast<uint32_t>(key(i) >= first && key(i) < last) << i;
    }
    return seen;
}

}  // namespace ithaca::kernel
