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
    static constexpr bool kIsWide = kWidth > 192;
    static constexpr int kWarps = kIsWide ? 3 : 4, kThreads = 32 * kWarps, kRows = 16 * kWarps;
    static constexpr int kOthers = kWidth <= 128 ? 32 : 16;  // rows of what is walked over, in two buffers
    static constexpr int kParts = kWidth + kValueWidth > 320 ? 2 : 1;
};

template <typename T, int kWidth, int kValueWidth>
struct FlashBackwardShared {
    using Sizes = FlashBackwardTile<kWidth, kValueWidth>;
    // Rows that stay, q and d_o or k and v, and those that are walked over.
    T wide[Sizes::kRows * tile::pitch(kWidth)];
    T narrow[Sizes::kRows * tile::pitch(kValueWidth)];
    T others_wide[2][Sizes::kOthers * tile::pitch(kWidth)];
    T others_narrow[2][Sizes::kOthers * tile::pitch(kValueWidth)];
    Asked queries[Sizes::kRows];
    Asked other_queries[2][Sizes::kOthers];
    int64_t keys[Sizes::kRows];
    int64_t other_keys[2][Sizes::kOthers];
    Line at_wide, at_narrow;  // rows that are walked over, where they are keys
    float lse[2][Sizes::kOthers], delta[2][Sizes::kOthers];
    Seen tiles[Sizes::kThreads];
};

// lse as an exponent of two; a query that has seen nothing, or that is none, has weights of zero.
__device__ inline float exponent_of(float lse) { return lse == nothing<float>() ? INFINITY : lse * kLog2e; }

// From products q.k and d_o.v: the weights, and in `gradient` those of q.k without the scale. `kept` is what dropout
// makes of a weight.
template <int kN, typename Kept>
__device__ inline void weights_of(const Scoring& scoring, float (&score)[kN][4], float (&gradient)[kN][4], const float (&lse)[kN][4],
                                  const float (&delta)[kN][4], uint32_t hidden, const Kept& kept) {
    ITHACA_UNROLL
    for (int c = 0; c < kN; ++c) {
        ITHACA_UNROLL
        for (int i = 0; i < 4; ++i) {
            float x = score[c][i] * scoring.scale, slope = 1;
            if (scoring.softcap > 0) {
                const float bend = scoring.bend(score[c][i]);
                x = scoring.softcap * bend;
                slope = 1.0f - bend * bend;
            }
            float p = warp::power_of_two(x * kLog2e - lse[c][i]);
            if (hidden >> (4 * c + i) & 1) p = 0;
            const float by = kept(c, i);
            gradient[c][i] = p * (by * gradient[c][i] - delta[c][i]) * slope;
            score[c][i] = p * by;
        }
    }
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
    const Scoring scoring(s);
    const T* const d_o = static_cast<const T*>(g.d_o.data);

    for (int64_t block = blockIdx.x; block < n_blocks; block += gridDim.x) {
        const int64_t first = (row_blocks - 1 - block % row_blocks) * kRows, head = block / row_blocks % s.heads;
        const int64_t front = block / row_blocks / s.heads, kv_head = s.served_by(head);
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
        tile::fetch<T, kWidth, kRows, kThreads>(
            shared.wide, q, width, [&](int i) -> const T* { return i < n_rows ? q + at_query.at(first + i) : nullptr; });
        tile::fetch<T, kValueWidth, kRows, kThreads>(shared.narrow, d_o, value_width, [&](int i) -> const T* {
            return i < n_rows ? d_o + at_gradient.at(first + i) : nullptr;
        });
        float lse[2], delta[2];
        ITHACA_UNROLL
        for (int half = 0; half < 2; ++half) {
            const int i = first_row + half * 8 + lane / 4;
            lse[half] = i < n_rows ? exponent_of(static_cast<float>(g.lse[row_of(i)])) : INFINITY;
            delta[half] = i < n_rows ? static_cast<float>(g.delta[row_of(i)]) : 0.0f;
        }
        // Begins to bring tile t, and what is asked of it, to one of the buffers.
        const auto bring = [&](int64_t t, Seen seen, int buffer) {
            const bool is_padded = seen == Seen::Padded;
            const auto is_there = [&](int i) { return is_key(s, t * kKeys + i, is_padded); };
            tile::fetch<T, kWidth, kKeys, kThreads>(shared.others_wide[buffer], k, width, [&](int i) -> const T* {
                return is_there(i) ? k + shared.at_wide.at(t * kKeys + i) : nullptr;
            });
            tile::fetch<T, kValueWidth, kKeys, kThreads>(shared.others_narrow[buffer], v, value_width, [&](int i) -> const T* {
                return is_there(i) ? v + shared.at_narrow.at(t * kKeys + i) : nullptr;
            });
            const int64_t key = t * kKeys + threadIdx.x;
            if ((asks(seen) || drops.any) && threadIdx.x < kKeys)
                shared.other_keys[buffer][threadIdx.x] = key < s.keys ? position_of(s.key_positions, key) : -1;
        };

        float sum[1][kWidth / 8][4];
        tile::clear(sum);
        for (int64_t from = 0; from < key_tiles; from += kThreads) {
            const int n_tiles =
                find_seen(shared.tiles, from, key_tiles, [&](int64_t t) { return seen_of_tile<kKeys>(s, positions, t); });
            int t = next_seen(shared.tiles, -1, n_tiles), buffer = 0;
            if (t < n_tiles) bring(from + t, shared.tiles[t], buffer);
            warp::commit_copies();
            while (t < n_tiles) {
                const int then = next_seen(shared.tiles, t, n_tiles);
                if (then < n_tiles) bring(from + then, shared.tiles[then], 1 - buffer);
                warp::commit_copies();
                warp::wait_for_copies<1>();
                __syncthreads();

                float score[1][kN][4], gradient[1][kN][4];
                tile::multiply_rows<T, kWidth>(score, shared.wide + first_row * tile::pitch(kWidth), shared.others_wide[buffer]);
                tile::multiply_rows<T, kValueWidth>(gradient, shared.narrow + first_row * tile::pitch(kValueWidth),
                                                    shared.others_narrow[buffer]);
                const auto key = [&](int c, int i) { return shared.other_keys[buffer][c * 8 + lane % 4 * 2 + i % 2]; };
                uint32_t hidden = 0;
                if (asks(shared.tiles[t])) {
                    ITHACA_UNROLL
                    for (int half = 0; half < 2; ++half) {
                        const Asked& query = shared.queries[first_row + half * 8 + lane / 4];
                        const uint32_t seen =
                            seen_keys<2 * kN>(s.mask, s.valid_keys, query, [&](int i) { return key(i / 2, i % 2); });
                        ITHACA_UNROLL
                        for (int i = 0; i < 2 * kN; ++i) hidden |= (~seen >> i & 1) << (i / 2 * 4 + 2 * half + i % 2);
                    }
                }
                float of_lse[kN][4], of_delta[kN][4];
                ITHACA_UNROLL
                for (int c = 0; c < kN; ++c)
                    ITHACA_UNROLL
                    for (int i = 0; i < 4; ++i) {
                        of_lse[c][i] = lse[i / 2];
                        of_delta[c][i] = delta[i / 2];
                    }
                weights_of<kN>(scoring, score[0], gradient[0], of_lse, of_delta, hidden, [&](int c, int i) {
                    if (!drops.any) return 1.0f;
                    return drops.factor(shared.queries[first_row + i / 2 * 8 + lane / 4].position, key(c, i));
                });
                tile::add_weighed<T, kWidth>(sum, gradient, shared.others_wide[buffer]);
                __syncthreads();  // the tile has been read
                t = then;
                buffer = 1 - buffer;
            }
        }
        warp::wait_for_copies<0>();
        const Line at_result = line_of(s.dq, front, head);
        put_rows(dq, sum, n_rows, s.width, [&](int i) { return at_result.at(first + i); },
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
    const int64_t first = block % row_blocks * kRows, kv_head = block / row_blocks % s.kv_heads;
    const int64_t front = block / row_blocks / s.kv_heads;
    const int64_t n_rows = s.keys - first < kRows ? s.keys - first : kRows;
    const Span positions = span_of(s.key_positions, first, n_rows);

    __syncthreads();  // the block before has been read
    for (int i = threadIdx.x; i < kRows; i += kThreads)
        shared.keys[i] = i < n_rows ? position_of(s.key_positions, first + i) : -1;
    const bool is_padded = positions.last > s.valid_keys;
    const Line at_key = line_of(s.k, front, kv_head), at_value = line_of(s.v, front, kv_head);
    tile::fetch<T, kWidth, kRows, kThreads>(shared.wide, k, width, [&](int i) -> const T* {
        return i < n_rows && is_key(s, first + i, is_padded) ? k + at_key.at(first + i) : nullptr;
    });
    tile::fetch<T, kValueWidth, kRows, kThreads>(shared.narrow, v, value_width, [&](int i) -> const T* {
        return i < n_rows && is_key(s, first + i, is_padded) ? v + at_value.at(first + i) : nullptr;
    });
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
        // Begins to bring a tile of queries to one of the buffers; what each has beside its rows waits in registers.
        const auto bring = [&](int64_t head, int t, int buffer) {
            const int64_t query = (from + t) * kQueries;
            const Line queries = line_of(s.q, front, head), gradients = line_of(s.d_o, front, head);
            tile::fetch<T, kWidth, kQueries, kThreads>(shared.others_wide[buffer], q, width, [&](int i) -> const T* {
                return query + i < s.queries ? q + queries.at(query + i) : nullptr;
            });
            tile::fetch<T, kValueWidth, kQueries, kThreads>(shared.others_narrow[buffer], d_o, value_width, [&](int i) -> const T* {
                return query + i < s.queries ? d_o + gradients.at(query + i) : nullptr;
            });
            if (threadIdx.x >= kQueries) return;
            const bool is_there = query + threadIdx.x < s.queries;
            const int64_t row = s.row(front, query + threadIdx.x, head);
            lse = is_there ? static_cast<float>(g.lse[row]) : nothing<float>();
            delta = is_there ? static_cast<float>(g.delta[row]) : 0.0f;
            if (drops || asks(shared.tiles[t]))
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
        if (head < s.heads) {
            bring(head, t, buffer);
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
            if (then_head < s.heads) bring(then_head, then, 1 - buffer);
            warp::commit_copies();
            warp::wait_for_copies<1>();
            __syncthreads();

            // Rows are keys, columns are queries.
            float score[1][kN][4], gradient[1][kN][4];
            tile::multiply_rows<T, kWidth>(score, shared.wide + first_row * tile::pitch(kWidth), shared.others_wide[buffer]);
            if constexpr (kSums != Sums::Values)
                tile::multiply_rows<T, kValueWidth>(gradient, shared.narrow + first_row * tile::pitch(kValueWidth),
                                                    shared.others_narrow[buffer]);
            else
                tile::clear(gradient);
            const int64_t keys[2] = {shared.keys[first_row + lane / 4], shared.keys[first_row + lane / 4 + 8]};
            uint32_t hidden = 0;
            float of_lse[kN][4], of_delta[kN][4];
            ITHACA_UNROLL
            for (int c = 0; c < kN; ++c)
                ITHACA_UNROLL
                for (int i = 0; i < 2; ++i) {
                    const int column = c * 8 + lane % 4 * 2 + i;
                    of_lse[c][i] = of_lse[c][i + 2] = shared.lse[buffer][column];
                    of_delta[c][i] = of_delta[c][i + 2] = shared.delta[buffer][column];
                    if (!asks(shared.tiles[t])) continue;
                    const Asked& query = shared.other_queries[buffer][column];
                    const uint32_t seen = seen_keys<2>(s.mask, s.valid_keys, query, [&](int half) { return keys[half]; });
                    hidden |= (~seen & 1) << (4 * c + i) | (~seen >> 1 & 1) << (4 * c + i + 2);
                }
            const Drops of_head(s, front, head);
            weights_of<kN>(scoring, score[0], gradient[0], of_lse, of_delta, hidden, [&](int c, int i) {
                if (!of_head.any) return 1.0f;
                return of_head.factor(shared.other_queries[buffer][c * 8 + lane % 4 * 2 + i % 2].position, keys[i / 2]);
            });
            if constexpr (kSums != Sums::Keys) tile::add_weighed<T, kValueWidth>(sum_v, score, shared.others_narrow[buffer]);
            if constexpr (kSums != Sums::Values) tile::add_weighed<T, kWidth>(sum_k, gradient, shared.others_wide[buffer]);
            if (then_head < s.heads) leave(1 - buffer);
            __syncthreads();  // the tile has been read
            t = then;
            head = then_head;
            buffer = 1 - buffer;
        }
    }
    warp::wait_for_copies<0>();
    const Line at_dk = line_of(s.dk, front, kv_head), at_dv = line_of(s.dv, front, kv_head);
    if constexpr (kSums != Sums::Values)
        put_rows(dk, sum_k, n_rows, s.width, [&](int i) { return at_dk.at(first + i); },
                 [&](int, int) { return static_cast<float>(s.scale); });
    if constexpr (kSums != Sums::Keys)
        put_rows(dv, sum_v, n_rows, s.value_width, [&](int i) { return at_dv.at(first + i); },
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
