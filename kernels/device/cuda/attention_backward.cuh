// Gradients of attention, by the weights that the forward's lse gives back (FlashAttention-2, arXiv 2307.08691, algorithm
// 2): p = exp(score - lse), dv = sum p' d_o, ds = p (kept d_o.v - delta), dq = scale sum ds slope k, and dk likewise.
//
// Three kernels, so that no two threads add to one element: for queries, for keys and for the bias. Each computes scores
// again.
#pragma once

#include "score.cuh"

namespace ithaca::kernel {

// What the backward pass gets beside q, k and v: d_o where `Rows` says, the others one for each row of queries.
struct Gradient {
    Reals d_o, lse, delta;
};

// The weight of a query and a key, the gradient of scale q.k, and that of the score behind cap and bias.
template <typename A>
struct Pair {
    A weight, gradient, score;
};

// Where a query and a key lie.
struct Place {
    int64_t front, query, head, key, kv_head;
};

template <typename T>
__device__ inline Pair<Acc<T>> pair_of(const AttentionShape& s, const T* q, const T* k, const T* v, const Gradient& g,
                                       const Place& at, int64_t at_query, int64_t at_key) {
    using A = Acc<T>;
    const int64_t front = at.front, head = at.head, row = s.row(front, at.query, head);
    const A lse = static_cast<A>(g.lse[row]);
    if (lse == neg_infinity<A>()) return {A(0), A(0), A(0)};
    const T* key = k + s.k.at(front, at.key, at.kv_head);
    const Score<A> x = score(s, q + s.q.at(front, at.query, head), key, head, at_query, at_key);
    const int64_t d_o = s.d_o.at(front, at.query, head), value = s.v.at(front, at.key, at.kv_head);
    const A p = exponential(x.value - lse), kept = static_cast<A>(s.kept(front, head, at_query, at_key));
    A product = 0;
    for (int64_t c = 0; c < s.value_width; ++c)
        product += static_cast<A>(g.d_o[d_o + c]) * widen(v[value + c]);
    const A of_score = p * (kept * product - static_cast<A>(g.delta[row]));
    return {p * kept, static_cast<A>(s.scale) * x.slope * of_score, of_score};
}

template <typename T, typename O, int kTile>
__global__ void attention_backward_queries(const T* q, const T* k, const T* v, Gradient g, O* dq, AttentionShape s, int64_t n) {
    using A = Acc<T>;
    const int64_t tiles = (s.width + kTile - 1) / kTile;
    ITHACA_FOR(i, n) {
        const int64_t head = i % s.heads, column = i / s.heads % tiles * kTile;
        const int64_t query = i / s.heads / tiles % s.queries, front = i / s.heads / tiles / s.queries;
        const int64_t position = position_of(s.query_positions, query);
        const int64_t kv_head = s.served_by(head);
        const int columns = static_cast<int>(s.width - column < kTile ? s.width - column : kTile);
        A sum[kTile];
        for (int c = 0; c < kTile; ++c) sum[c] = 0;
        for_keys(s.mask, s.key_positions, s.valid_keys, position, [&](int64_t t, int64_t at_key) {
            const A gradient = pair_of(s, q, k, v, g, {front, query, head, t, kv_head}, position, at_key).gradient;
            const T* key = k + s.k.at(front, t, kv_head) + column;
            for (int c = 0; c < columns; ++c) sum[c] += gradient * widen(key[c]);
        });
        O* out = dq + s.dq.at(front, query, head) + column;
        for (int c = 0; c < columns; ++c) out[c] = narrow<O>(sum[c]);
    }
}

// A thread takes one key, one key/value head and `kTile` columns of both gradients.
template <typename T, typename O, int kTile>
__global__ void attention_backward_keys(const T* q, const T* k, const T* v, Gradient g, O* dk, O* dv, AttentionShape s,
                                        int64_t n) {
    using A = Acc<T>;
    const int64_t widest = s.width > s.value_width ? s.width : s.value_width, tiles = (widest + kTile - 1) / kTile;
    ITHACA_FOR(i, n) {
        const int64_t kv_head = i % s.kv_heads, column = i / s.kv_heads % tiles * kTile;
        const int64_t t = i / s.kv_heads / tiles % s.keys, front = i / s.kv_heads / tiles / s.keys;
        const int64_t at_key = position_of(s.key_positions, t);
        A sum_k[kTile], sum_v[kTile];
        for (int c = 0; c < kTile; ++c) sum_k[c] = sum_v[c] = 0;
        for (int64_t query = 0; query < s.queries && at_key < s.valid_keys; ++query) {
            const int64_t position = position_of(s.query_positions, query);
            if (!sees(s.mask, position, at_key)) continue;
            for (int64_t head = 0; head < s.heads; ++head) {
                if (s.served_by(head) != kv_head) continue;
                const Pair<A> x = pair_of(s, q, k, v, g, {front, query, head, t, kv_head}, position, at_key);
                const int64_t row = s.q.at(front, query, head) + column, d_o = s.d_o.at(front, query, head) + column;
                for (int c = 0; c < kTile && column + c < s.width; ++c) sum_k[c] += x.gradient * widen(q[row + c]);
                for (int c = 0; c < kTile && column + c < s.value_width; ++c)
                    sum_v[c] += x.weight * static_cast<A>(g.d_o[d_o + c]);
            }
        }
        O* const out_k = dk + s.dk.at(front, t, kv_head) + column;
        O* const out_v = dv + s.dv.at(front, t, kv_head) + column;
        for (int c = 0; c < kTile && column + c < s.width; ++c) out_k[c] = narrow<O>(sum_k[c]);
        for (int c = 0; c < kTile && column + c < s.value_width; ++c) out_v[c] = narrow<O>(sum_v[c]);
    }
}

// A thread takes a bucket of the bias and a head: the sum over every query and key held whose distance is in the bucket.
template <typename T>
__global__ void attention_backward_bias(const T* q, const T* k, const T* v, Gradient g, float* d_bias, AttentionShape s, int64_t n) {
    using A = Acc<T>;
    ITHACA_FOR(i, n) {
        const int64_t head = i % s.heads, bucket = i / s.heads, kv_head = s.served_by(head);
        A sum = 0;
        for (int64_t r = 0; r < s.front * s.queries; ++r) {
            const int64_t front = r / s.queries, query = r % s.queries;
            const int64_t position = position_of(s.query_positions, query);
            for_keys(s.mask, s.key_positions, s.valid_keys, position, [&](int64_t t, int64_t at_key) {
                if (s.bias.bucket(position, at_key) != bucket) return;
                sum += pair_of(s, q, k, v, g, {front, query, head, t, kv_head}, position, at_key).score;
            });
        }
        d_bias[i] = static_cast<float>(sum);
    }
}

}  // namespace ithaca::kernel
