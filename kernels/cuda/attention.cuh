// Scaled dot-product attention with grouped heads, masks at global positions and online softmax (Milakov and
// Gimelshein, arXiv 1805.02867; Dao et al., arXiv 2205.14135).
//
// A thread takes one query, one head and `kTile` columns of the values, and walks over the keys that its query sees:
// no score is stored, but keys and values are read from memory (or cache) for each query, and scores are computed
// again for each tile of columns. Right at any shape; not the speed of a tiled kernel.
#pragma once

#include "numeric.cuh"

namespace ithaca::kernel {

// Which keys a query sees: those in a band along the diagonal, or, where there is a table, those in its strips.
//
// The table starts with the number n of strips. Four numbers follow for each: the first query, the query behind the
// last, and which runs are its own. Four numbers follow for each run: it starts at a q + b and ends before c q + d.
// Strips are ascending, and so are the runs of each; a query in no strip sees nothing.
struct Mask {
    int64_t left, right;   // of the band; negative: unbounded
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
    } else {
        const double* bounds = mask.strips + 1 + 4 * static_cast<int64_t>(mask.strips[0]) + 4 * run;
        start = static_cast<int64_t>(bounds[0]) * position + static_cast<int64_t>(bounds[1]);
        end = static_cast<int64_t>(bounds[2]) * position + static_cast<int64_t>(bounds[3]);
    }
    if (start > first) first = start;
    if (end < last) last = end;
}

struct AttentionShape {
    int64_t front, queries, heads, keys, kv_heads, width, value_width;  // local extents
    int64_t query_start, key_start;                                     // global positions of the first ones
    int64_t valid_keys;                                                 // keys at global positions behind are padding
    Mask mask;
    double scale;
    double softcap;  // bound of the scaled scores; zero: none
};

template <typename T, int kTile>
__global__ void attention(const T* q, const T* k, const T* v, T* o, AttentionShape s, int64_t n) {
    using A = Acc<T>;
    const int64_t tiles = (s.value_width + kTile - 1) / kTile;
    const int64_t group = s.heads / s.kv_heads;
    ITHACA_FOR(i, n) {
        const int64_t head = i % s.heads;
        const int64_t tile = i / s.heads % tiles;
        const int64_t row = i / s.heads / tiles;  // front and query
        const int64_t position = s.query_start + row % s.queries;
        const int64_t front = row / s.queries;
        const int64_t held = s.key_start + s.keys;
        const int64_t held_end = s.valid_keys < held ? s.valid_keys : held;
        const Runs runs = runs_of(s.mask, position);

        const T* query = q + (row * s.heads + head) * s.width;
        const int64_t column = tile * kTile;
        const int columns = static_cast<int>(s.value_width - column < kTile ? s.value_width - column : kTile);
        A sum[kTile];
        for (int c = 0; c < kTile; ++c) sum[c] = 0;
        A highest = 0, weights = 0;
        bool none_yet = true;
        for (int64_t run = runs.first; run < runs.last; ++run) {
            int64_t first = s.key_start, last = held_end;
            narrow_to_run(s.mask, run, position, first, last);
            for (int64_t t = first - s.key_start; t < last - s.key_start; ++t) {
                const int64_t kv = (front * s.keys + t) * s.kv_heads + head / group;
                const T* key = k + kv * s.width;
                A score = 0;
                for (int64_t d = 0; d < s.width; ++d) score += widen(query[d]) * widen(key[d]);
                score *= static_cast<A>(s.scale);
                if (s.softcap > 0) score = static_cast<A>(s.softcap) * hyperbolic_tangent(score / static_cast<A>(s.softcap));
                if (none_yet || score > highest) {
                    const A shrink = none_yet ? A(0) : exponential(highest - score);
                    for (int c = 0; c < columns; ++c) sum[c] *= shrink;
                    weights *= shrink;
                    highest = score;
                    none_yet = false;
                }
                const A weight = exponential(score - highest);
                weights += weight;
                const T* value = v + kv * s.value_width + column;
                for (int c = 0; c < columns; ++c) sum[c] += weight * widen(value[c]);
            }
        }
        // A query that sees no key gives zeros.
        const A inverse = weights > A(0) ? A(1) / weights : A(0);
        T* out = o + (row * s.heads + head) * s.value_width + column;
        for (int c = 0; c < columns; ++c) out[c] = narrow<T>(sum[c] * inverse);
    }
}

}  // namespace ithaca::kernel
