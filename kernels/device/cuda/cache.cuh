// Steps that continue sequences: lengths, rows of caches, the choice of tokens. `start` is the number of tokens of a sequence
// before the step, `end` the number after it.
#pragma once

#include "pages.cuh"
#include "rotary.cuh"
#include "rows.cuh"

namespace ithaca::kernel {

__global__ void advance(const int32_t* start, const int32_t* more, int32_t* end, int64_t n) {
    ITHACA_FOR(i, n) end[i] = start[i] + more[i];
}

// The position of each of the step's tokens; zero behind the new ones.
__global__ void token_positions(const int32_t* start, const int32_t* end, int32_t* z, Sequence rows, int64_t tokens, int64_t n) {
    ITHACA_FOR(i, n) {
        const Division at = divide(i, tokens);
        const int64_t position = start[at.quotient] + position_of(rows, at.remainder);
        z[i] = position < end[at.quotient] ? static_cast<int32_t>(position) : 0;
    }
}

// The position of a token of a step, zero behind the new ones; and the row of a cache where it belongs, negative if the rank does
// not have it.
struct Token {
    int64_t position, row;
};

// A cache [front, slots] and the tokens of a step [front, rows]; the walk goes over the front: where lengths have its sequence.
struct Appended {
    const int32_t *start, *end;
    Walk<1> sequences;
    Sequence rows;
    Inverse slots;
    int64_t n_rows, n_slots, capacity;
    bool wraps;  // a ring: the token at a position is at the position modulo the capacity

    // Where a sequence has more tokens than the cache, the word at `overflow`, if there is one, becomes its highest bit, 2^32
    // times the tokens, and the capacity.
    __device__ Token token(int64_t n, unsigned long long* overflow) const {
        const Division row = divide(n, n_rows);
        int64_t sequence[1];
        sequences.at(row.quotient, sequence);
        const int64_t last = end[sequence[0]], position = start[sequence[0]] + position_of(rows, row.remainder);
        if (overflow != nullptr && !wraps && last > capacity && row.remainder == 0)
            atomicMax(overflow, 1ull << 63 | static_cast<unsigned long long>(last << 32 | capacity));
        if (position >= last) return {0, -1};
        const int64_t slot = wraps || position < capacity ? slots.token_at(wraps ? position % capacity : position) : -1;
        return {position, slot < 0 ? -1 : row.quotient * n_slots + slot};
    }
};

// Pages and the tokens of a step [sequences, rows].
struct AppendedPages {
    const int32_t *start, *end;
    Sequence rows;
    Paged pages;
    int64_t n_rows;

    // Where a sequence has more tokens than entries of the table, `overflow` becomes what `Appended` makes of it; where a token has
    // no page, its second highest bit, 2^32 times the position of the token, and the sequence.
    __device__ Token token(int64_t n, unsigned long long* overflow) const {
        const Division row = divide(n, n_rows);
        const int64_t sequence = row.quotient, last = end[sequence], capacity = pages.entries * pages.page_tokens;
        if (overflow != nullptr && last > capacity && row.remainder == 0)
            atomicMax(overflow, 1ull << 63 | static_cast<unsigned long long>(last << 32 | capacity));
        const int64_t position = start[sequence] + position_of(rows, row.remainder);
        if (position >= last) return {0, -1};
        const int64_t to = position < capacity ? pages.row_of(sequence, position) : Paged::kElsewhere;
        if (to == Paged::kNoPage && overflow != nullptr)
            atomicMax(overflow, 1ull << 62 | static_cast<unsigned long long>(position << 32 | sequence));
        return {position, to};
    }
};

// Writes the new tokens whose places the rank has, `inner` elements each.
template <typename Bits, typename Place>
__device__ inline void append_tokens(const Bits* x, Bits* cache, const Place& place, int64_t inner, unsigned long long* overflow,
                                     int64_t n) {
    ITHACA_FOR(i, n) {
        const Division at = divide(i, inner);
        const int64_t row = place.token(at.quotient, at.remainder == 0 ? overflow : nullptr).row;
        if (row >= 0) cache[row * inner + at.remainder] = x[i];
    }
}

template <typename Bits>
__global__ void append(const Bits* x, Bits* cache, Appended place, int64_t inner, unsigned long long* overflow, int64_t n) {
    append_tokens(x, cache, place, inner, overflow, n);
}

template <typename Bits>
__global__ void append_pages(const Bits* x, Bits* cache, AppendedPages place, int64_t inner, unsigned long long* overflow,
                             int64_t n) {
    append_tokens(x, cache, place, inner, overflow, n);
}

// The rotation of the heads of a token: `extent` elements each, of which the first `width` turn.
struct Rotation {
    const double* frequencies;
    int64_t extent, width, apart;
    double amplitude;
    int64_t kv_heads, heads;  // of keys and values, and of queries
    int64_t each;             // heads that a thread takes
};

// Writes new keys, rotated, and values, and rotates queries, all of them [tokens, heads, extent]. A thread takes some pairs of
// elements, or as many elements behind them, of `each` heads: first those of keys and values, then those of queries.
template <typename T, typename Place>
__device__ inline void rotate_append_tokens(const T* k, const T* v, const T* q, T* keys, T* values, T* z, const Place& place,
                                            const Rotation& rotation, unsigned long long* overflow, int64_t n) {
    constexpr int kPacks = kWide<T>;
    const int64_t extent = rotation.extent, half = rotation.width / 2, slots = extent - half;
    const int64_t heads = rotation.kv_heads + rotation.heads, chunks = (heads + rotation.each - 1) / rotation.each;
    const bool is_wide = half % kPacks == 0 && slots % kPacks == 0 && are_aligned(k, v, q, keys, values, z);
    in_packs<kPacks>(is_wide, [&](auto size) {
        constexpr int kN = decltype(size)::value;
        const int64_t packs = slots / kN;
        ITHACA_FOR(i, n * chunks * packs) {
            const Division pack = divide(i, packs), at = divide(pack.quotient, chunks);
            const int64_t slot = pack.remainder * kN, first = at.remainder * rotation.each;
            const Token token = place.token(at.quotient, slot == 0 && first == 0 ? overflow : nullptr);
            Angles<kN, Acc<T>> by;
            if (slot < half) by = angles_at<kN, Acc<T>>(token.position, rotation.frequencies + slot, rotation.amplitude);
            for (int64_t head = first; head < first + rotation.each && head < heads; ++head) {
                if (head >= rotation.kv_heads) {
                    const int64_t there = (at.quotient * rotation.heads + head - rotation.kv_heads) * extent;
                    rotate<kN>(q + there, z + there, slot, half, rotation.apart, 1, by);
                } else if (token.row >= 0) {
                    const int64_t from = (at.quotient * rotation.kv_heads + head) * extent;
                    const int64_t to = (token.row * rotation.kv_heads + head) * extent;
                    rotate<kN>(k + from, keys + to, slot, half, rotation.apart, 1, by);
                    store(values + to + half + slot, load<kN>(v + from + half + slot));
                    if (slot < half) store(values + to + slot, load<kN>(v + from + slot));
                }
            }
        }
    });
}

template <typename T>
__global__ void rotate_append(const T* k, const T* v, const T* q, T* keys, T* values, T* z, Appended place, Rotation rotation,
                              unsigned long long* overflow, int64_t n) {
    rotate_append_tokens(k, v, q, keys, values, z, place, rotation, overflow, n);
}

template <typename T>
__global__ void rotate_append_pages(const T* k, const T* v, const T* q, T* keys, T* values, T* z, AppendedPages place,
                                    Rotation rotation, unsigned long long* overflow, int64_t n) {
    rotate_append_tokens(k, v, q, keys, values, z, place, rotation, overflow, n);
}

// Pages in host memory; the copy on the device lacks the tokens from `start` on. Nothing without a copy.
struct HostPages {
    Paged pages;
    const void *copy, *current;
    const int32_t* start;
};

// The tokens of each sequence [sequences, tokens, inner], zero where it has no page.
template <typename Bits>
__global__ void gather_pages(const Bits* cache, Bits* z, Sequence tokens, Paged pages, HostPages host, int64_t n_tokens,
                             int64_t inner, int64_t n) {
    ITHACA_FOR(i, n) {
        const Division at = divide(i, inner), token = divide(at.quotient, n_tokens);
        const int64_t position = position_of(tokens, token.remainder);
        const Bits* of = cache;
        int64_t from = pages.row_of(token.quotient, position);
        if (from == Paged::kElsewhere && host.copy != nullptr) {
            from = host.pages.row_of(token.quotient, position);
            of = static_cast<const Bits*>(position < host.start[token.quotient] ? host.copy : host.current);
        }
        z[i] = from >= 0 ? of[from * inner + at.remainder] : Bits{};
    }
}

// The row of each sequence's last new token; zero without one, and where another rank has it. The walk goes over the result:
// where lengths and the first row of x are.
template <typename Bits>
__global__ void last_token(const Bits* x, const int32_t* start, const int32_t* end, Bits* z, Walk<2> walk, Inverse tokens,
                           int64_t stride, int64_t n) {
    ITHACA_FOR(i, n) {
        int64_t at[2];
        walk.at(i, at);
        const int64_t last = static_cast<int64_t>(end[at[0]]) - start[at[0]] - 1;
        const int64_t token = last < 0 ? -1 : tokens.token_at(last);
        z[i] = token >= 0 ? x[at[1] + token * stride] : Bits{};
    }
}

// The position of the largest element of each row that is no padding, the first of equal ones, and the element; with `places`
// what these have there. What is no number is passed over.
template <typename T>
__launch_bounds__(kMostLanes)
__global__ void argmax(const T* __restrict__ x, const int32_t* __restrict__ places, int32_t* __restrict__ z,
                       Acc<T>* __restrict__ largest, Walk<1> rows, Sequence positions, int64_t valid, int64_t width,
                       int64_t stride, int64_t n, int lanes) {
    using A = Acc<T>;
    constexpr int32_t kNowhere = 0x7fffffff;
    const bool is_wide = stride == 1 && width % kWide<T> == 0 && are_aligned(x) && rows.is_multiple(0, kWide<T>);
    in_packs<kWide<T>>(is_wide, [&](auto size) {
        constexpr int kN = decltype(size)::value;
        for_rows(n, lanes, width, [&](const Team& team, int64_t row, int64_t own, bool is_there) {
            int64_t at[1], found = -1;
            rows.at(row, at);
            A highest = neg_infinity<A>();
            int32_t first = kNowhere;
            for_row<kN>(team, own, [&](int64_t i) {
                const Pack<A, kN> value = load<kN>(x + at[0], i, stride);
                ITHACA_UNROLL
                for (int k = 0; k < kN; ++k) {
                    const int64_t position = position_of(positions, i + k);
                    if (position >= valid || value.at[k] != value.at[k]) continue;
                    const bool is_equal = value.at[k] == highest && position < first;
                    if (!(value.at[k] > highest || is_equal)) continue;
                    highest = value.at[k];
                    first = static_cast<int32_t>(position);
                    found = i + k;
                }
            });
            const A of_all = team.most(highest);
            const int32_t place = team.all(highest == of_all ? first : kNowhere, [](int32_t a, int32_t b) { return a < b ? a : b; });
            if (!is_there) return;
            if (found >= 0 && first == place) z[row] = places != nullptr ? places[at[0] + found * stride] : place;
            if (team.lane != 0) return;
            if (place == kNowhere) z[row] = 0;
            largest[row] = of_all;
        });
    });
}

// x where `which` is positive, else y.
__global__ void choose(const int32_t* which, const int32_t* x, const int32_t* y, int32_t* z, int64_t n) {
    ITHACA_FOR(i, n) z[i] = which[i] > 0 ? x[i] : y[i];
}

}  // namespace ithaca::kernel
