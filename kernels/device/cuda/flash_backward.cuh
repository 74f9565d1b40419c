// Gradients of attention on tensor cores (FlashAttention-2, arXiv 2307.08691, algorithm 2), for operands as `flash` takes
// them. Two kernels, so that no two blocks add to one element and sums have one order: one for blocks of queries, which
// walks over keys and gives dq, one for blocks of keys, which walks over the queries of every head that they serve and
// gives dk and dv. Each computes scores again. Weights and the gradients of scores are rounded to the operands' type.
#pragma once

#include "attention_backward.cuh"
#include "flash.cuh"

namespace ithaca::kernel {

// Sizes of the backward kernels for these widths. A warp has 16 rows: with more, sums would not fit in registers; where
// dk and dv together do not, a block has one of them, and there are twice as many blocks.
template <int kWidth, int kValueWidth>
struct FlashBackwardTile {
    static constexpr int kWarps = 4, kThreads = 32 * kWarps, kRows = 16 * kWarps;
    static constexpr int kOthers = kWidth <= 128 ? 64 : kWidth <= 192 ? 32 : 16;  // rows of what is walked over, in two buffers
    static constexpr int kParts = kWidth + kValueWidth > 320 ? 2 : 1;
};

template <typename T, int kWidth, int kValueWidth>
struct FlashBackwardShared {
    using Sizes = FlashBackwardTile<kWidth, kValueWidth>;
    // Rows that stay, q and d_o or k and v, and those that are walked over.
    T wide[tile::elements(Sizes::kRows, kWidth)];
    T narrow[tile::elements(Sizes::kRows, kValueWidth)];
    T others_wide[2][tile::elements(Sizes::kOthers, kWidth)];
    T others_narrow[2][tile::elements(Sizes::kOthers, kValueWidth)];
    union {
        struct {  // of blocks of queries
            Asked queries[Sizes::kRows];
            int other_keys[2][Sizes::kOthers];  // positions
            Line at_wide, at_narrow;            // of keys and values
        };
        struct {  // of blocks of keys
            Asked other_queries[2][Sizes::kOthers];
            int keys[Sizes::kRows];  // positions
            float lse[2][Sizes::kOthers], delta[2][Sizes::kOthers];
        };
    };
    Seen tiles[Sizes::kThreads];
};

// lse as an exponent of two; a query that has seen nothing, or that is none, has weights of zero.
__device__ inline float exponent_of(float lse) { return lse == neg_infinity<float>() ? INFINITY : lse * kLog2e; }

// From products q.k and d_o.v: the weights, and in `gradient` those of q.k without the scale. `lse(c, i)` and `delta(c, i)` are
// those of the query, `hidden` and `dropped` have a bit for each pair.
template <int kN, typename Lse, typename Delta>
__device__ inline void weights_of(const Scoring& scoring, float (&score)[kN][4], float (&gradient)[kN][4], const Lse& lse,
                                  const Delta& delta, uint32_t hidden, const Drops& drops, uint32_t dropped) {
    const auto each = [&](const auto& body) {
        ITHACA_UNROLL
        for (int c = 0; c < kN; ++c)
            ITHACA_UNROLL
            for (int i = 0; i < 4; ++i) body(c, i);
    };
    const auto kept = [&](int c, int i) { return dropped >> (4 * c + i) & 1 ? 0.0f : drops.kept; };
    if (ITHACA_UNLIKELY(drops.any)) each([&](int c, int i) { gradient[c][i] *= kept(c, i); });
    each([&](int c, int i) { gradient[c][i] -= delta(c, i); });
    if (ITHACA_UNLIKELY(scoring.softcap > 0)) {
        each([&](int c, int i) {
            score[c][i] = scoring.bend(score[c][i]);
            gradient[c][i] *= 1.0f - score[c][i] * score[c][i];
        });
    }
    const auto shown = [&](int c, int i) { return hidden >> (4 * c + i) & 1 ? neg_infinity<float>() : score[c][i]; };
    if (ITHACA_UNLIKELY(hidden != 0)) each([&](int c, int i) { score[c][i] = shown(c, i); });
    const float exponent = scoring.exponent();
    each([&](int c, int i) {
        score[c][i] = warp::power_of_two(score[c][i] * exponent - lse(c, i));
        gradient[c][i] *= score[c][i];
    });
    if (ITHACA_UNLIKELY(drops.any)) each([&](int c, int i) { score[c][i] *= kept(c, i); });
}

template <typename T, int kWidth, int kValueWidth>
__launch_bounds__(FlashBackwardTile<kWidth, kValueWidth>::kThreads) __global__ void flash_backward_queries(
    const T* q, const T* k, const T* v, Gradient g, Written dq, AttentionShape s, int64_t n_blocks) {
    using Sizes = FlashBackwardTile<kWidth, kValueWidth>;
    constexpr int kRows = Sizes::kRows, kKeys = Sizes::kOthers, kThreads = Sizes::kThreads, kN = kKeys / 8;
    ITHACA_SHARED(memory);
    auto& shared = *reinterpret_cast<FlashBackwardShared<T, kWidth, kValueWidth>*>(memory);
    const int lane = threadIdx.x % 32, first_row = threadIdx.x / 32 * 16;
    const int width = static_cast<int>(s.width), value_width = static_cast<int>(s.value_width);
    const int64_t row_blocks = (s.queries + kRows - 1) / kRows, key_tiles = (s.keys + kKeys - 1) / kKeys;
    const int64_t bytes = s.keys * (s.width + s.value_width) * static_cast<int64_t>(sizeof(T)) / s.group;
    const Scoring scoring(s);
    const T* const d_o = static_cast<const T*>(g.d_o.data);

    for (int64_t block = blockIdx.x; block < n_blocks; block += gridDim.x) {
        const Share share = share_of(block, s.front * s.heads, row_blocks, bytes);
        const int64_t first = (row_blocks - 1 - share.block) * kRows, head = share.line % s.heads, front = share.line / s.heads;
        const int64_t kv_head = s.served_by(head);
        const int64_t n_rows = s.queries - first < kRows ? s.queries - first : kRows;
        const Span positions = span_of(s.query_positions, first, n_rows);
        const Drops drops(s, front, head);
        const Line at_query = line_of(s.q, front, head), at_gradient = line_of(s.d_o, front, head);
        const auto row_of = [&](int i) { return s.row(front, first + i, head); };

        __syncthreads();  // the block before has been read
        if (threadIdx.x == 0) {
            shared.at_wide = line_of(s.k, front, kv_head);
            shared.at_narrow = line_of(s.v, front, kv_head);
        }
        for (int i = threadIdx.x; i < kRows; i += kThreads)
            shared.queries[i] = i < n_rows ? asked_of(s.mask, position_of(s.query_positions, first + i)) : Asked{0, 0, 0};
        fetch_line<T, kWidth, kRows, kThreads>(shared.wide, q, at_query, first, n_rows, width);
        fetch_line<T, kValueWidth, kRows, kThreads>(shared.narrow, d_o, at_gradient, first, n_rows, value_width);
        float lse[2], delta[2];
        ITHACA_UNROLL
        for (int half = 0; half < 2; ++half) {
            const int i = first_row + half * 8 + lane / 4;
            lse[half] = i < n_rows ? exponent_of(g.lse.single(row_of(i))) : INFINITY;
            delta[half] = i < n_rows ? g.delta.single(row_of(i)) : 0.0f;
        }
        // Starts to copy the requested parts of tile t to one of the buffers.
        const auto prefetch_tile = [&](int64_t t, Seen seen, int buffer) {
            const bool is_padded = seen == Seen::Padded;
            fetch_keys_of<T, kWidth, kKeys, kThreads>(shared.others_wide[buffer], k, shared.at_wide, s, t * kKeys, is_padded, width);
            fetch_keys_of<T, kValueWidth, kKeys, kThreads>(shared.others_narrow[buffer], v, shared.at_narrow, s, t * kKeys, is_padded,
                                                          value_width);
            if (ITHACA_UNLIKELY((asks(seen) || drops.any) && threadIdx.x < kKeys))
                shared.other_keys[buffer][threadIdx.x] = position_in_tile(s, t * kKeys + threadIdx.x);
        };

        float sum[1][kWidth / 8][4];
        tile::clear(sum);
        for (int64_t from = 0; from < key_tiles; from += kThreads) {
            const int n_tiles =
                find_seen(shared.tiles, from, key_tiles, [&](int64_t t) { return seen_of_tile<kKeys>(s, positions, t); });
            int t = next_seen(shared.tiles, -1, n_tiles), buffer = 0;
            Seen seen = seen_at(shared.tiles, t, n_tiles);
            if (t < n_tiles) prefetch_tile(from + t, seen, buffer);
            warp::commit_copies();
            while (warp::uniform(t < n_tiles)) {
                const int then = next_seen(shared.tiles, t, n_tiles);
                const Seen then_seen = seen_at(shared.tiles, then, n_tiles);
                warp::wait_for_copies<0>();
                __syncthreads();  // the tile is there, and the one before has been read
                if (warp::uniform(then < n_tiles)) prefetch_tile(from + then, then_seen, 1 - buffer);
                warp::commit_copies();

                float score[1][kN][4], gradient[1][kN][4];
                tile::begin_rows<T, kWidth, kRows, kKeys>(score, shared.wide, shared.others_wide[buffer]);
                tile::begin_rows<T, kValueWidth, kRows, kKeys>(gradient, shared.narrow, shared.others_narrow[buffer]);
                const int* const keys = shared.other_keys[buffer] + lane % 4 * 2;
                const auto query = [&](int half) -> const Asked& { return shared.queries[first_row + half * 8 + lane / 4]; };
                uint32_t hidden = 0;
                if (ITHACA_UNLIKELY(asks(seen))) {
                    ITHACA_UNROLL
                    for (int half = 0; half < 2; ++half) {
                        const uint32_t bits = seen_keys<2 * kN>(s.mask, s.valid_keys, query(half),
                                                                [&](int i) { return keys[i / 2 * 8 + i % 2]; });
                        ITHACA_UNROLL
                        for (int i = 0; i < 2 * kN; ++i) hidden |= (~bits >> i & 1) << (i / 2 * 4 + 2 * half + i % 2);
                    }
                }
                const uint32_t dropped = drops.template dropped<4 * kN>([&](int i) { return query(i % 4 / 2).position; },
                                                                       [&](int i) { return keys[i / 4 * 8 + i % 2]; });
                tile::wait<0>(score[0]);
                tile::wait<0>(gradient[0]);
                weights_of<kN>(scoring, score[0], gradient[0], [&](int, int i) { return lse[i / 2]; },
                               [&](int, int i) { return delta[i / 2]; }, hidden, drops, dropped);
                tile::begin_weighed<T, kWidth>(sum, gradient, 0, shared.others_wide[buffer]);
                tile::wait<0>(sum[0]);
                t = then;
                seen = then_seen;
                buffer = 1 - buffer;
            }
        }
        warp::wait_for_copies<0>();
        const Line at_result = line_of(s.dq, front, head);
        put_rows<Sizes::kWarps>(dq, sum, n_rows, s.width, [&](int i) { return at_result.at(first + i); },
                 [&](int, int) { return static_cast<float>(s.scale); });
    }
}

// Of what a block of keys gives, what is asked for.
enum class Sums { Both, Keys, Values };

template <Sums kSums, typename T, int kWidth, int kValueWidth>
__device__ inline void flash_backward_of_keys(const T* q, const T* k, const T* v, const Gradient& g, const Written& dk,
                                              const Written& dv, const AttentionShape& s, int64_t block,
                                              FlashBackwardShared<T, kWidth, kValueWidth>& shared) {
    using Sizes = FlashBackwardTile<kWidth, kValueWidth>;
    constexpr int kRows = Sizes::kRows, kQueries = Sizes::kOthers, kThreads = Sizes::kThreads, kN = kQueries / 8;
    const int lane = threadIdx.x % 32, first_row = threadIdx.x / 32 * 16;
    const int width = static_cast<int>(s.width), value_width = static_cast<int>(s.value_width);
    const int64_t row_blocks = (s.keys + kRows - 1) / kRows, query_tiles = (s.queries + kQueries - 1) / kQueries;
    const Scoring scoring(s);
    const T* const d_o = static_cast<const T*>(g.d_o.data);
    const int64_t bytes = s.queries * (s.width + s.value_width) * static_cast<int64_t>(sizeof(T)) * s.group;
    const Share share = share_of(block, s.front * s.kv_heads, row_blocks, bytes);
    const int64_t first = share.block * kRows, kv_head = share.line % s.kv_heads, front = share.line / s.kv_heads;
    const int64_t n_rows = s.keys - first < kRows ? s.keys - first : kRows;
    const Span positions = span_of(s.key_positions, first, n_rows);

    __syncthreads();  // the block before has been read
    for (int i = threadIdx.x; i < kRows; i += kThreads)
        shared.keys[i] = i < n_rows ? position_in_tile(s, first + i) : -1;
    const bool is_padded = positions.last > s.valid_keys;
    const Line at_key = line_of(s.k, front, kv_head), at_value = line_of(s.v, front, kv_head);
    fetch_keys_of<T, kWidth, kRows, kThreads>(shared.wide, k, at_key, s, first, is_padded, width);
    fetch_keys_of<T, kValueWidth, kRows, kThreads>(shared.narrow, v, at_value, s, first, is_padded, value_width);
    const auto next_head = [&](int64_t head) {
        do ++head;
        while (head < s.heads && s.served_by(head) != kv_head);
        return head;
    };

    float sum_k[1][kSums == Sums::Values ? 2 : kWidth / 8][4], sum_v[1][kSums == Sums::Keys ? 2 : kValueWidth / 8][4];
    tile::clear(sum_k);
    tile::clear(sum_v);
    for (int64_t from = 0; from < query_tiles; from += kThreads) {
        const int n_tiles = find_seen(shared.tiles, from, query_tiles, [&](int64_t t) {
            const int64_t query = t * kQueries, n = s.queries - query < kQueries ? s.queries - query : kQueries;
            return seen_of(s.mask, s.valid_keys, span_of(s.query_positions, query, n), positions);
        });
        const int first_tile = next_seen(shared.tiles, -1, n_tiles);
        if (first_tile == n_tiles) continue;
        const bool drops = s.dropout.rate > 0;
        float lse = 0, delta = 0;
        Asked asked{};
        // Starts to copy a tile of queries to one of the buffers; the values of each beside its rows wait in registers.
        const auto prefetch_tile = [&](int64_t head, int t, Seen seen, int buffer) {
            const int64_t query = (from + t) * kQueries;
            const Line queries = line_of(s.q, front, head), gradients = line_of(s.d_o, front, head);
            const int64_t n = s.queries - query < kQueries ? s.queries - query : kQueries;
            fetch_line<T, kWidth, kQueries, kThreads>(shared.others_wide[buffer], q, queries, query, n, width);
            fetch_line<T, kValueWidth, kQueries, kThreads>(shared.others_narrow[buffer], d_o, gradients, query, n, value_width);
            if (threadIdx.x >= kQueries) return;
            const bool is_there = query + threadIdx.x < s.queries;
            const int64_t row = s.row(front, query + threadIdx.x, head);
            lse = is_there ? g.lse.single(row) : neg_infinity<float>();
            delta = is_there ? g.delta.single(row) : 0.0f;
            if (ITHACA_UNLIKELY(drops || asks(seen)))
                asked = is_there ? asked_of(s.mask, position_of(s.query_positions, query + threadIdx.x)) : Asked{0, 0, 0};
        };
        const auto leave = [&](int buffer) {
            if (threadIdx.x >= kQueries) return;
            shared.lse[buffer][threadIdx.x] = exponent_of(lse);
            shared.delta[buffer][threadIdx.x] = delta;
            shared.other_queries[buffer][threadIdx.x] = asked;
        };
        int64_t head = next_head(-1);
        int t = first_tile, buffer = 0;
        Seen seen = shared.tiles[t];
        if (head < s.heads) {
            prefetch_tile(head, t, seen, buffer);
            leave(buffer);
        }
        warp::commit_copies();
        while (head < s.heads) {
            int then = next_seen(shared.tiles, t, n_tiles);
            int64_t then_head = head;
            if (then == n_tiles) {
                then = first_tile;
                then_head = next_head(head);
            }
            const Seen then_seen = shared.tiles[then];
            const Drops of_head = warp::uniform(drops) ? Drops(s, front, head) : Drops();
            warp::wait_for_copies<0>();
            __syncthreads();  // the tile is there, and the one before has been read
            if (warp::uniform(then_head < s.heads)) prefetch_tile(then_head, then, then_seen, 1 - buffer);
            warp::commit_copies();

            // Rows are keys, columns are queries.
            float score[1][kN][4], gradient[1][kN][4];
            tile::begin_rows<T, kWidth, kRows, kQueries>(score, shared.wide, shared.others_wide[buffer]);
            if constexpr (kSums != Sums::Values)
                tile::begin_rows<T, kValueWidth, kRows, kQueries>(gradient, shared.narrow, shared.others_narrow[buffer]);
            else
                tile::clear(gradient);
            const int keys[2] = {shared.keys[first_row + lane / 4], shared.keys[first_row + lane / 4 + 8]};
            const int columns = lane % 4 * 2;
            uint32_t hidden = 0;
            if (ITHACA_UNLIKELY(asks(seen))) {
                ITHACA_UNROLL
                for (int i = 0; i < 2 * kN; ++i) {
                    const Asked& query = shared.other_queries[buffer][columns + i / 2 * 8 + i % 2];
                    const uint32_t bits = ~seen_keys<2>(s.mask, s.valid_keys, query, [&](int half) { return keys[half]; });
                    hidden |= (bits & 1) << (i / 2 * 4 + i % 2) | (bits >> 1 & 1) << (i / 2 * 4 + i % 2 + 2);
                }
            }
            const uint32_t dropped = of_head.template dropped<4 * kN>(
                [&](int i) { return shared.other_queries[buffer][columns + i / 4 * 8 + i % 2].position; },
                [&](int i) { return keys[i % 4 / 2]; });
            tile::wait<0>(score[0]);
            tile::wait<0>(gradient[0]);
            weights_of<kN>(scoring, score[0], gradient[0], [&](int c, int i) { return shared.lse[buffer][columns + c * 8 + i % 2]; },
                           [&](int c, int i) { return shared.delta[buffer][columns + c * 8 + i % 2]; }, hidden, of_head, dropped);
            if constexpr (kSums != Sums::Keys) tile::begin_weighed<T, kValueWidth>(sum_v, score, 0, shared.others_narrow[buffer]);
            if constexpr (kSums != Sums::Values) tile::begin_weighed<T, kWidth>(sum_k, gradient, 0, shared.others_wide[buffer]);
            if (then_head < s.heads) leave(1 - buffer);
            if constexpr (kSums != Sums::Keys) tile::wait<0>(sum_v[0]);
            if constexpr (kSums != Sums::Values) tile::wait<0>(sum_k[0]);
            t = then;
            head = then_head;
            seen = then_seen;
            buffer = 1 - buffer;
        }
    }
    warp::wait_for_copies<0>();
    const Line at_dk = line_of(s.dk, front, kv_head), at_dv = line_of(s.dv, front, kv_head);
    if constexpr (kSums != Sums::Values)
        put_rows<Sizes::kWarps>(dk, sum_k, n_rows, s.width, [&](int i) { return at_dk.at(first + i); },
                 [&](int, int) { return static_cast<float>(s.scale); });
    if constexpr (kSums != Sums::Keys)
        put_rows<Sizes::kWarps>(dv, sum_v, n_rows, s.value_width, [&](int i) { return at_dv.at(first + i); },
                 [&](int, int) { return 1.0f; });
}

template <typename T, int kWidth, int kValueWidth>
__launch_bounds__(FlashBackwardTile<kWidth, kValueWidth>::kThreads) __global__ void flash_backward_keys(
    const T* q, const T* k, const T* v, Gradient g, Written dk, Written dv, AttentionShape s, int64_t n_blocks) {
    ITHACA_SHARED(memory);
    auto& shared = *reinterpret_cast<FlashBackwardShared<T, kWidth, kValueWidth>*>(memory);
    for (int64_t block = blockIdx.x; block < n_blocks; block += gridDim.x) {
        if constexpr (FlashBackwardTile<kWidth, kValueWidth>::kParts == 1) {
            flash_backward_of_keys<Sums::Both, T, kWidth, kValueWidth>(q, k, v, g, dk, dv, s, block, shared);
        } else if (block % 2 == 0) {
            flash_backward_of_keys<Sums::Keys, T, kWidth, kValueWidth>(q, k, v, g, dk, dv, s, block / 2, shared);
        } else {
            flash_backward_of_keys<Sums::Values, T, kWidth, kValueWidth>(q, k, v, g, dk, dv, s, block / 2, shared);
        }
    }
}

}  // namespace ithaca::kernel
