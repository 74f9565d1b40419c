// Scaled dot-product attention with grouped heads, masks by position and online softmax (Milakov and Gimelshein, arXiv
// 1805.02867; Dao et al., arXiv 2205.14135).
//
// A thread takes one query, one head and `kTile` columns of the values, and walks over the keys that its query sees:
// no score is stored, but keys and values are read from memory (or cache) for each query, and scores are computed
// again for each tile of columns. Right at any shape; not the speed of a tiled kernel.
#pragma once

#include "score.cuh"

namespace ithaca::kernel {

// A query that sees no key gives zeros, and minus infinity as `lse`. `O` is the storage of the output; `lse` may be none.
template <typename T, typename O, int kTile>
__global__ void attention(const T* q, const T* k, const T* v, O* o, float* lse, AttentionShape s, int64_t n) {
    using A = Acc<T>;
    const int64_t tiles = (s.value_width + kTile - 1) / kTile;
    ITHACA_FOR(i, n) {
        const int64_t head = i % s.heads, tile = i / s.heads % tiles;
        const int64_t query = i / s.heads / tiles % s.queries, front = i / s.heads / tiles / s.queries;
        const int64_t position = s.position(front, query);
        const int64_t row = s.row(front, query, head), kv_head = s.served_by(head), column = tile * kTile;
        const int64_t at_row = s.q.at(front, query, head);
        const int columns = static_cast<int>(s.value_width - column < kTile ? s.value_width - column : kTile);
        A sum[kTile];
        for (int c = 0; c < kTile; ++c) sum[c] = 0;
        A row_max = 0, weights = 0;
        bool none_yet = true;
        for_keys_of(s, front, position, [&](int64_t t, int64_t at_key) {
            const T* key = k + s.k.at(front, t, kv_head);
            const A x = score(s, q + at_row, key, head, position, at_key).value;
            if (none_yet || x > row_max) {
                const A shrink = none_yet ? A(0) : exponential(row_max - x);
                for (int c = 0; c < columns; ++c) sum[c] *= shrink;
                weights *= shrink;
                row_max = x;
                none_yet = false;
            }
            const A weight = exponential(x - row_max);
            weights += weight;
            const A kept = weight * static_cast<A>(s.kept(front, head, position, at_key));
            const T* value = v + s.v.at(front, t, kv_head) + column;
            for (int c = 0; c < columns; ++c) sum[c] += kept * widen(value[c]);
        });
        const A inverse = weights > A(0) ? A(1) / weights : A(0);
        O* out = o + s.o.at(front, query, head) + column;
        for (int c = 0; c < columns; ++c) out[c] = narrow<O>(sum[c] * inverse);
        if (lse != nullptr && tile == 0)
            lse[row] = static_cast<float>(weights > A(0) ? row_max + logarithm(weights) : neg_infinity<A>());
    }
}

// Scores of the keys held, in `columns` columns a row: minus infinity where the mask hides a key, and behind the keys.
template <typename T>
__global__ void scores(const T* q, const T* k, float* z, AttentionShape s, int64_t columns, int64_t n) {
    ITHACA_FOR(i, n) {
        const int64_t head = i % s.heads, query = i / s.heads % s.queries, front = i / s.heads / s.queries;
        const int64_t position = s.position(front, query), row = s.row(front, query, head);
        for (int64_t c = 0; c < columns; ++c) z[row * columns + c] = neg_infinity<float>();
        for_keys(s.mask, s.key_positions, s.valid_keys, position, [&](int64_t t, int64_t at_key) {
            const T* key = k + s.k.at(front, t, s.served_by(head));
            const T* at_row = q + s.q.at(front, query, head);
            z[row * columns + t] = static_cast<float>(score(s, at_row, key, head, position, at_key).value);
        });
    }
}

// The sum over the keys held of exp(score - lse) v, an element a thread; zero where lse is minus infinity.
template <typename T>
__global__ void weigh(Reals scores, Reals lse, const T* v, float* z, AttentionShape s, int64_t columns, int64_t n) {
    using A = Acc<T>;
    ITHACA_FOR(i, n) {
        const int64_t column = i % s.value_width, row = i / s.value_width;
        const int64_t head = row % s.heads, front = row / s.heads / s.queries;
        const A all = static_cast<A>(lse[row]);
        A sum = 0;
        for (int64_t t = 0; t < s.keys && all != neg_infinity<A>(); ++t) {
            const A weight = share(static_cast<A>(scores[row * columns + t]), all);
            sum += weight * widen(v[s.v.at(front, t, s.served_by(head)) + column]);
        }
        z[i] = static_cast<float>(sum);
    }
}

}  // namespace ithaca::kernel
