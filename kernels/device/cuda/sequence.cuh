// Positions of tokens, and which keys a query sees.
//
// A rank's tokens are counted from zero as they lie in memory; their positions in the sequence come in runs, in any order.
#pragma once

#include "numeric.cuh"

namespace ithaca::kernel {

// Three numbers for each run of tokens: the first token, its position, the number of tokens; ascending by token.
struct Sequence {
    const int64_t* runs;
    int64_t n;
};

__device__ inline int64_t position_of(const Sequence& sequence, int64_t token) {
    int64_t low = 0, high = sequence.n - 1;  // the last run that starts at or before the token
    while (low < high) {
        const int64_t middle = (low + high + 1) / 2;
        if (sequence.runs[3 * middle] <= token) low = middle;
        else high = middle - 1;
    }
    const int64_t* run = sequence.runs + 3 * low;
    return run[1] + (token - run[0]);
}

// Which keys a query sees: those in a band along the diagonal, or, where there is a table, those in its strips.
//
// The table starts with the number n of strips. Four numbers follow for each: the first query, the query behind the
// last, and which runs are its own. Four numbers follow for each run: it starts at a q + b and ends before c q + d.
// Strips are ascending, and so are the runs of each; a query in no strip sees nothing.
struct Mask {
    int64_t left, right;   // of the band; negative: unbounded
    int64_t chunk;         // tokens within which a band is; zero: it is not cut
    const double* strips;  // or none
};

// Runs of the query at `position`, as indices into the table's runs; one run, number 0, for a band.
struct Runs {
    int64_t first, last;
};

__device__ inline Runs runs_of(const Mask& mask, int64_t position) {
    if (mask.strips == nullptr) return {0, 1};
    const int64_t n = static_cast<int64_t>(mask.strips[0]);
    int64_t low = 0, high = n;  // the first strip that ends behind the position
    while (low < high) {
        const int64_t middle = (low + high) / 2;
        if (static_cast<int64_t>(mask.strips[1 + 4 * middle + 1]) > position) high = middle;
        else low = middle + 1;
    }
    const double* strip = mask.strips + 1 + 4 * low;
    if (low == n || static_cast<int64_t>(strip[0]) > position) return {0, 0};
    return {static_cast<int64_t>(strip[2]), static_cast<int64_t>(strip[3])};
}

// Narrows the keys `first .. last`, by position, to a run of the query at `position`.
__device__ inline void narrow_to_run(const Mask& mask, int64_t run, int64_t position, int64_t& first, int64_t& last) {
    int64_t start = first, end = last;
    if (mask.strips == nullptr) {
        if (mask.left >= 0) start = position - mask.left;
        if (mask.right >= 0) end = position + mask.right + 1;
        if (mask.chunk > 0) {
            const int64_t own = position / mask.chunk * mask.chunk;
            if (own > start) start = own;
            if (own + mask.chunk < end) end = own + mask.chunk;
        }
    } else {
        const double* bounds = mask.strips + 1 + 4 * static_cast<int64_t>(mask.strips[0]) + 4 * run;
        start = static_cast<int64_t>(bounds[0]) * position + static_cast<int64_t>(bounds[1]);
        end = static_cast<int64_t>(bounds[2]) * position + static_cast<int64_t>(bounds[3]);
    }
    if (start > first) first = start;
    if (end < last) last = end;
}

// Whether the query at `query` sees the key at `key`.
__device__ inline bool sees(const Mask& mask, int64_t query, int64_t key) {
    const Runs runs = runs_of(mask, query);
    for (int64_t run = runs.first; run < runs.last; ++run) {
        int64_t first = key, last = key + 1;
        narrow_to_run(mask, run, query, first, last);
        if (first < last) return true;
    }
    return false;
}

// Calls `body(key, position)` for every key held that the query at `query` sees; positions from `valid` on are padding.
template <typename Body>
__device__ inline void for_keys(const Mask& mask, const Sequence& keys, int64_t valid, int64_t query, const Body& body) {
    const Runs runs = runs_of(mask, query);
    for (int64_t run = runs.first; run < runs.last; ++run) {
        for (int64_t r = 0; r < keys.n; ++r) {
            const int64_t* held = keys.runs + 3 * r;
            int64_t first = held[1], last = held[1] + held[2] < valid ? held[1] + held[2] : valid;
            narrow_to_run(mask, run, query, first, last);
            for (int64_t position = first; position < last; ++position) body(held[0] + (position - held[1]), position);
        }
    }
}

}  // namespace ithaca::kernel
