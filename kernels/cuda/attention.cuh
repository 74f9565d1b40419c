// Scaled dot-product attention with grouped heads, masks at global positions and online softmax (Milakov and
// Gimelshein, arXiv 1805.02867; Dao et al., arXiv 2205.14135).
//
// A thread takes one query, one head and `kTile` columns of the values, and walks over the keys that its query sees:
// no score is stored, but keys and values are read from memory (or cache) for each query, and scores are computed
// again for each tile of columns. Right at any shape; not the speed of a tiled kernel.
#pragma once

#include "numeric.cuh"

namespace ithaca::kernel {

struct AttentionShape {
    int64_t front, queries, heads, keys, kv_heads, width, value_width;  // local extents
    int64_t query_start, key_start;                                     // global positions of the first ones
    int64_t valid_keys;                                                 // keys at global positions behind are padding
    int64_t left, right;                                                // the mask's band; negative: unbounded
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
        int64_t first = 0, last = s.keys;
        if (s.left >= 0 && position - s.left - s.key_start > first) first = position - s.left - s.key_start;
        if (s.right >= 0 && position + s.right + 1 - s.key_start < last) last = position + s.right + 1 - s.key_start;
        if (s.valid_keys - s.key_start < last) last = s.valid_keys - s.key_start;

        const T* query = q + (row * s.heads + head) * s.width;
        const int64_t column = tile * kTile;
        const int columns = static_cast<int>(s.value_width - column < kTile ? s.value_width - column : kTile);
        A sum[kTile];
        for (int c = 0; c < kTile; ++c) sum[c] = 0;
        A highest = 0, weights = 0;
        for (int64_t t = first; t < last; ++t) {
            const int64_t kv = (front * s.keys + t) * s.kv_heads + head / group;
            const T* key = k + kv * s.width;
            A score = 0;
            for (int64_t d = 0; d < s.width; ++d) score += widen(query[d]) * widen(key[d]);
            score *= static_cast<A>(s.scale);
            if (s.softcap > 0) score = static_cast<A>(s.softcap) * hyperbolic_tangent(score / static_cast<A>(s.softcap));
            if (t == first || score > highest) {
                const A shrink = t == first ? A(0) : exponential(highest - score);
                for (int c = 0; c < columns; ++c) sum[c] *= shrink;
                weights *= shrink;
                highest = score;
            }
            const A weight = exponential(score - highest);
            weights += weight;
            const T* value = v + kv * s.value_width + column;
            for (int c = 0; c < columns; ++c) sum[c] += weight * widen(value[c]);
        }
        // A query that sees no key gives zeros.
        const A inverse = weights > A(0) ? A(1) / weights : A(0);
        T* out = o + (row * s.heads + head) * s.value_width + column;
        for (int c = 0; c < columns; ++c) out[c] = narrow<T>(sum[c] * inverse);
    }
}

}  // namespace ithaca::kernel
