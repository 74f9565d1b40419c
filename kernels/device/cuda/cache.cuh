// Steps that continue sequences: lengths, rows of caches, the choice of tokens. `start` is the number of tokens of a sequence
// before the step, `end` the number after it.
#pragma once

#include "pages.cuh"
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

// A cache [front, slots, inner] and the rows of a step [front, rows, inner]; the walk goes over the front: where lengths have
// its sequence.
struct Appended {
    const int32_t *start, *end;
    Walk<1> sequences;
    Sequence rows;
    Inverse slots;
    int64_t n_rows, n_slots, inner, capacity;
    bool wraps;  // a ring: the token at a position is at the position modulo the capacity
};

// Writes the new rows whose positions the rank has. Where a sequence has more tokens than the cache, the word at `overflow`
// becomes its highest bit, 2^32 times the tokens, and the capacity.
template <typename Bits>
__global__ void append(const Bits* x, Bits* cache, Appended a, unsigned long long* overflow, int64_t n) {
    ITHACA_FOR(i, n) {
        const Division at = divide(i, a.inner), row = divide(at.quotient, a.n_rows);
        int64_t sequence[1];
        a.sequences.at(row.quotient, sequence);
        const int64_t start = a.start[sequence[0]], end = a.end[sequence[0]];
        if (!a.wraps && end > a.capacity && at.remainder == 0 && row.remainder == 0)
            atomicMax(overflow, 1ull << 63 | static_cast<unsigned long long>(end << 32 | a.capacity));
        const int64_t position = start + position_of(a.rows, row.remainder);
        if (position >= end || (!a.wraps && position >= a.capacity)) continue;
        const int64_t slot = a.slots.token_at(a.wraps ? position % a.capacity : position);
        if (slot >= 0) cache[(row.quotient * a.n_slots + slot) * a.inner + at.remainder] = x[i];
    }
}

// Pages in host memory; the copy on the device lacks the tokens from `start` on. Nothing without a copy.
struct HostPages {
    Paged pages;
    const void *copy, *current;
    const int32_t* start;
};

// Writes the new rows [sequences, rows, inner] whose slots the rank has. Where a sequence has more tokens than entries of the
// table, `overflow` becomes what `append` makes of it; where a token has no page, its second highest bit, 2^32 times the
// position of the token, and the sequence.
template <typename Bits>
__global__ void append_pages(const Bits* x, Bits* cache, const int32_t* start, const int32_t* end, Sequence rows, Paged pages,
                             int64_t n_rows, int64_t inner, unsigned long long* overflow, int64_t n) {
    ITHACA_FOR(i, n) {
        const Division at = divide(i, inner), row = divide(at.quotient, n_rows);
        const int64_t sequence = row.quotient, last = end[sequence], capacity = pages.entries * pages.page_tokens;
        if (last > capacity && at.remainder == 0 && row.remainder == 0)
            atomicMax(overflow, 1ull << 63 | static_cast<unsigned long long>(last << 32 | capacity));
        const int64_t position = start[sequence] + position_of(rows, row.remainder);
        if (position >= last || position >= capacity) continue;
        const int64_t to = pages.row_of(sequence, position);
        if (to >= 0) cache[to * inner + at.remainder] = x[i];
        else if (to == Paged::kNoPage && at.remainder == 0)
            atomicMax(overflow, 1ull << 62 | static_cast<unsigned long long>(position << 32 | sequence));
    }
}

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
            A highest = nothing<A>();
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
