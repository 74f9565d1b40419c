// What a query and a key of an attention give: their score, its slope, and whether dropout keeps the weight.
#pragma once

#include "random.cuh"

namespace ithaca::kernel {

// A bias learned by relative position (T5: Raffel et al., arXiv 1910.10683, section 2.1): a table [buckets, heads]. The
// bucket of a distance is the number of bounds at or below it, less one; keys after the query have buckets of their own
// where there are two sides, and else no distance.
struct Bias {
    const double* bounds;  // or none: no bias
    int64_t per_side;
    bool both_sides;
    Reals table;

    __device__ int64_t bucket(int64_t query, int64_t key) const {
        int64_t distance = query - key, side = 0;
        if (distance < 0) {
            side = both_sides ? per_side : 0;
            distance = both_sides ? -distance : 0;
        }
        int64_t low = 0, high = per_side - 1;  // the last bound at or below the distance
        while (low < high) {
            const int64_t middle = (low + high + 1) / 2;
            if (bounds[middle] <= static_cast<double>(distance)) low = middle;
            else high = middle - 1;
        }
        return side + low;
    }
    __device__ double at(int64_t query, int64_t key, int64_t head, int64_t heads) const {
        return table[bucket(query, key) * heads + head];
    }
};

// Dropout of weights, by sequence, head and positions: every layout drops the same.
struct Dropout {
    double rate = 0;  // zero: none
    uint64_t seed = 0;
    const int32_t* key = nullptr;  // or none: the seed alone

    // From which the weights of a head of a sequence are drawn.
    __device__ uint64_t state_of(int64_t sequence, int64_t head) const {
        const uint64_t first = key != nullptr ? drawn_from(*key, seed) : seed;
        return mix(mix(first, static_cast<uint64_t>(sequence)), static_cast<uint64_t>(head));
    }
    // Zero, or one over the share that is kept.
    __device__ double factor(int64_t sequence, int64_t head, int64_t query, int64_t at_key) const {
        if (!(rate > 0)) return 1;
        const uint64_t of_query = mix(state_of(sequence, head), static_cast<uint64_t>(query));
        return is_below(mix(of_query, static_cast<uint64_t>(at_key)), rate) ? 0.0 : 1.0 / (1.0 - rate);
    }
};

// Where the rows of a tensor [front, tokens, heads, width] begin, in elements; a row lies together. Dense, or in a wire,
// where tokens or heads are cut into blocks: as many neighbours as `run` says, then the next block.
struct Rows {
    int64_t front, token, head;      // distances
    int64_t token_run, token_block;  // a run of zero: not cut
    int64_t head_run, head_block;

    __device__ int64_t at(int64_t front_, int64_t token_, int64_t head_) const {
        int64_t place = front_ * front;
        if (token_run > 0) {
            place += token_ / token_run * token_block;
            token_ %= token_run;
        }
        if (head_run > 0) {
            place += head_ / head_run * head_block;
            head_ %= head_run;
        }
        return place + token_ * token + head_ * head;
    }
};

// What a rank holds of q [front, queries, heads, width], k [front, keys, kv_heads, width], v [front, keys, kv_heads,
// value_width], and how they score.
struct AttentionShape {
    int64_t front, queries, heads, keys, kv_heads, width, value_width;  // local extents
    int64_t first_head, first_kv_head, group;                           // among all ranks' heads; heads that share a key
    int64_t dropped_head;                                               // by which dropout knows the first head
    Walk<1> sequences;                                                  // from front to the number of the sequence
    int64_t first_sequence;
    Sequence query_positions, key_positions;
    const int32_t* starts;  // positions of the first queries, by front; none: zero
    const int32_t* ends;    // keys of each front that its queries may see; none: all
    int64_t valid_keys;  // keys at positions from here on are padding
    int64_t ring, step;  // tokens of a cache that is a ring of the last ones, and of the step; zero: it is none
    Mask mask;
    double scale;
    double softcap;  // bound of the scaled scores; zero: none
    Bias bias;
    Dropout dropout;
    // Where rows of operands and results begin; the backward pass has the last four.
    Rows q, k, v, o, d_o, dq, dk, dv;

    // Where lse and delta have a query, and explicit scores its row.
    __device__ int64_t row(int64_t front_, int64_t query, int64_t head) const {
        return (front_ * queries + query) * heads + head;
    }
    // Keys at positions from here on are not seen.
    __device__ int64_t end(int64_t front_) const {
        return ends != nullptr && ends[front_] < valid_keys ? ends[front_] : valid_keys;
    }
    // The position of the first query.
    __device__ int64_t start(int64_t front_) const { return starts != nullptr ? starts[front_] : 0; }
    __device__ int64_t position(int64_t front_, int64_t query) const {
        return start(front_) + position_of(query_positions, query);
    }
    // The position of the key that a ring has at `slot`, the last one before the end of the step; negative where there is none.
    __device__ int64_t in_ring(int64_t front_, int64_t slot) const {
        if (slot >= ring) return -1;
        const Division end = divide(start(front_) + step, ring);
        return slot + (slot < end.remainder ? end.quotient : end.quotient - 1) * ring;
    }
    // The local key/value head that serves a local head.
    __device__ int64_t served_by(int64_t head) const { return (first_head + head) / group - first_kv_head; }
    __device__ double kept(int64_t front_, int64_t head, int64_t query, int64_t key) const {
        if (!(dropout.rate > 0)) return 1;
        int64_t sequence[1];
        sequences.at(front_, sequence);
        return dropout.factor(first_sequence + sequence[0], dropped_head + head, query, key);
    }
};

// `for_keys` of a query of an attention; of a ring in order of its slots.
template <typename Body>
__device__ inline void for_keys_of(const AttentionShape& s, int64_t front, int64_t query, const Body& body) {
    if (s.ring == 0) return for_keys(s.mask, s.key_positions, s.end(front), query, body);
    for (int64_t t = 0; t < s.keys; ++t) {
        const int64_t position = s.in_ring(front, position_of(s.key_positions, t));
        if (position >= 0 && sees(s.mask, query, position)) body(t, position);
    }
}

// cap(scale q.k) + bias, and its derivative by scale q.k.
template <typename A>
struct Score {
    A value, slope;
};

template <typename A>
__device__ inline Score<A> scored(const AttentionShape& s, A product, int64_t head, int64_t at_query, int64_t at_key) {
    product *= static_cast<A>(s.scale);
    Score<A> out{product, A(1)};
    if (s.softcap > 0) {
        const A bend = hyperbolic_tangent(product / static_cast<A>(s.softcap));
        out = {static_cast<A>(s.softcap) * bend, A(1) - bend * bend};
    }
    if (s.bias.bounds != nullptr) out.value += static_cast<A>(s.bias.at(at_query, at_key, head, s.heads));
    return out;
}

template <typename T>
__device__ inline Score<Acc<T>> score(const AttentionShape& s, const T* query, const T* key, int64_t head, int64_t at_query,
                                      int64_t at_key) {
    Acc<T> product = 0;
    for (int64_t d = 0; d < s.width; ++d) product += widen(query[d]) * widen(key[d]);
    return scored(s, product, head, at_query, at_key);
}

}  // namespace ithaca::kernel
