// Attention on tensor cores, forward (FlashAttention-2, arXiv 2307.08691, algorithm 1): a block has some queries of one
// head in shared memory and walks over tiles of keys; scores, their exponentials and the output stay in registers. The
// result is that of `attention`, weights rounded to the operands' type.
//
// Operands are bf16 or f16, rows of them start at multiples of 16 bytes, and nothing is added to scores. Widths are at
// most those that a kernel is made for; columns behind them count as zero.
#pragma once

#include "mask_tile.cuh"
#include "tile.cuh"

namespace ithaca::kernel {

// Results whose storage is known when the kernel runs only: f32, f16 or bf16.
struct Written {
    void* data;
    Storage storage;

    // Two neighbours, the first of even number.
    __device__ void put(int64_t i, float x, float y) const {
        switch (storage) {
            case Storage::F32: {
                float* const z = static_cast<float*>(data) + i;
                z[0] = x;
                z[1] = y;
                return;
            }
            case Storage::F16: {
                *reinterpret_cast<uint32_t*>(static_cast<__half*>(data) + i) = warp::Element<__half>::pack(x, y);
                return;
            }
            case Storage::BF16: {
                *reinterpret_cast<uint32_t*>(static_cast<__nv_bfloat16*>(data) + i) = warp::Element<__nv_bfloat16>::pack(x, y);
                return;
            }
            case Storage::F64: return;
        }
    }
};

// A warp's rows of a result, times a factor for each: row `first + i` goes to `row(i)`, in elements.
template <int kM, int kN, typename Row, typename Factor>
__device__ inline void put_rows(const Written& z, const float (&sum)[kM][kN][4], int64_t n, int64_t width, const Row& row,
                                const Factor& factor) {
    const int lane = threadIdx.x % 32, first = threadIdx.x / 32 * 16 * kM + lane / 4;
    ITHACA_UNROLL
    for (int m = 0; m < kM; ++m) {
        ITHACA_UNROLL
        for (int half = 0; half < 2; ++half) {
            const int i = first + m * 16 + half * 8;
            if (i >= n) continue;
            const int64_t at = row(i);
            const float by = factor(m, half);
            ITHACA_UNROLL
            for (int c = 0; c < kN; ++c) {
                const int column = c * 8 + lane % 4 * 2;
                if (column < width) z.put(at + column, sum[m][c][2 * half] * by, sum[m][c][2 * half + 1] * by);
            }
        }
    }
}

constexpr float kLog2e = 1.4426950408889634f, kLn2 = 0.6931471805599453f;

// What a product of a query and a key becomes before it is an exponent of two.
struct Scoring {
    float scale, softcap;  // softcap: zero is none

    __device__ explicit Scoring(const AttentionShape& s)
        : scale(static_cast<float>(s.softcap > 0 ? s.scale / s.softcap : s.scale)), softcap(static_cast<float>(s.softcap)) {}

    // As tanh(x) = 1 - 2 / (1 + e^2x): its error is one of rounding, for a score is `softcap` times this.
    __device__ float bend(float product) const {
        return 1.0f - 2.0f / (1.0f + warp::power_of_two(product * scale * (2.0f * kLog2e)));
    }
};

// Dropout of the weights of one head of one sequence.
struct Drops {
    bool any;
    uint64_t state;
    double rate;
    float kept;  // the factor of what is kept

    __device__ Drops(const AttentionShape& s, int64_t front, int64_t head) : any(s.dropout.rate > 0), state(0), rate(0), kept(1) {
        if (!any) return;
        int64_t sequence[1];
        s.sequences.at(front, sequence);
        state = s.dropout.state_of(s.first_sequence + sequence[0], s.dropped_head + head);
        rate = s.dropout.rate;
        kept = static_cast<float>(1.0 / (1.0 - rate));
    }
    __device__ float factor(int64_t query, int64_t key) const {
        return is_below(mix(mix(state, static_cast<uint64_t>(query)), static_cast<uint64_t>(key)), rate) ? 0.0f : kept;
    }
};

// The widths that a kernel is made for.
struct FlashWidths {
    int width, value_width;
};

// Of the widths that there are kernels for, the least that have room for rows of these; zero where there are none, and for
// rows that are no multiple of 16 bytes.
__host__ __device__ constexpr FlashWidths flash_widths(int64_t width, int64_t value_width) {
    const FlashWidths all[] = {{64, 64}, {96, 96}, {128, 128}, {192, 128}, {192, 192}, {256, 256}};
    if (width <= 0 || value_width <= 0 || width % 8 != 0 || value_width % 8 != 0) return {0, 0};
    for (const FlashWidths& w : all)
        if (width <= w.width && value_width <= w.value_width) return w;
    return {0, 0};
}

// Where the rows of one head lie, by token. It waits in shared memory, for registers are full of sums. A rank has fewer than
// 2^32 tokens and heads, and numbers of 32 bits are divided without a call.
struct Line {
    int64_t first, token, block;
    uint32_t run;  // zero: not cut

    __device__ int64_t at(int64_t t) const {
        if (run == 0) return first + t * token;
        const uint32_t number = static_cast<uint32_t>(t);
        return first + number / run * block + number % run * token;
    }
};
__device__ inline Line line_of(const Rows& rows, int64_t front, int64_t head) {
    const Line of_heads{front * rows.front, rows.head, rows.head_block, static_cast<uint32_t>(rows.head_run)};
    return {of_heads.at(head), rows.token, rows.token_block, static_cast<uint32_t>(rows.token_run)};
}

// Sizes of the forward kernel for these widths: shared memory below the 99 KiB that every GPU from sm_80 on has, for the
// same kernel is to run on all.
template <int kWidth, int kValueWidth>
struct FlashTile {
    static constexpr int kWarps = 4, kThreads = 32 * kWarps;
    static constexpr int kM = kWidth <= 128 && kValueWidth <= 128 ? 2 : 1;  // times 16 queries a warp
    static constexpr int kRows = 16 * kM * kWarps;
    static constexpr int kKeys = kWidth <= 192 ? 64 : 32;
};

// What is seen of tile `t` of keys by queries at these positions; a tile that is not full is asked key by key.
template <int kKeys>
__device__ inline Seen seen_of_tile(const AttentionShape& s, const Span& positions, int64_t t) {
    const int64_t key = t * kKeys, n = s.keys - key < kKeys ? s.keys - key : kKeys;
    const Seen seen = seen_of(s.mask, s.valid_keys, positions, span_of(s.key_positions, key, n));
    return seen == Seen::All && n < kKeys ? Seen::Partial : seen;
}

// Finds for all of a block what is seen of the tiles from tile `from` on, a tile by each thread, as `of(t)` says; gives how
// many tiles these are.
template <int kThreads, typename Of>
__device__ inline int find_seen(Seen (&tiles)[kThreads], int64_t from, int64_t all, const Of& of) {
    const int n = static_cast<int>(all - from < kThreads ? all - from : kThreads);
    __syncthreads();  // those before have been read
    if (static_cast<int>(threadIdx.x) < n) tiles[threadIdx.x] = of(from + threadIdx.x);
    __syncthreads();
    return n;
}

// The tile behind tile `t` of which anything is seen, or `n`.
__device__ inline int next_seen(const Seen* tiles, int t, int n) {
    do ++t;
    while (t < n && tiles[t] == Seen::Nothing);
    return t;
}

template <typename T, int kWidth, int kValueWidth>
struct FlashShared {
    using Sizes = FlashTile<kWidth, kValueWidth>;
    T q[Sizes::kRows * tile::pitch(kWidth)];
    T k[Sizes::kKeys * tile::pitch(kWidth)];
    T v[Sizes::kKeys * tile::pitch(kValueWidth)];
    Asked queries[Sizes::kRows];
    int64_t keys[Sizes::kKeys];
    Line at_key, at_value;
    Seen tiles[Sizes::kThreads];
};

template <typename T, int kWidth, int kValueWidth>
__launch_bounds__(FlashTile<kWidth, kValueWidth>::kThreads) __global__ void flash(
    const T* q, const T* k, const T* v, Written o, float* lse, AttentionShape s, int64_t n_blocks) {
    using Sizes = FlashTile<kWidth, kValueWidth>;
    constexpr int kM = Sizes::kM, kRows = Sizes::kRows, kKeys = Sizes::kKeys, kThreads = Sizes::kThreads;
    ITHACA_SHARED(memory);
    auto& shared = *reinterpret_cast<FlashShared<T, kWidth, kValueWidth>*>(memory);
    const int lane = threadIdx.x % 32, first_row = threadIdx.x / 32 * 16 * kM;
    const int width = static_cast<int>(s.width), value_width = static_cast<int>(s.value_width);
    const int64_t row_blocks = (s.queries + kRows - 1) / kRows, key_tiles = (s.keys + kKeys - 1) / kKeys;
    const Scoring scoring(s);

    for (int64_t block = blockIdx.x; block < n_blocks; block += gridDim.x) {
        // Where the mask is causal the last queries have most to do: they come first.
        const int64_t first = (row_blocks - 1 - block % row_blocks) * kRows, head = block / row_blocks % s.heads;
        const int64_t front = block / row_blocks / s.heads, kv_head = s.served_by(head);
        const int64_t n_rows = s.queries - first < kRows ? s.queries - first : kRows;
        const int64_t start = s.start(front);
        Span positions = span_of(s.query_positions, first, n_rows);
        positions.first += start;
        positions.last += start;
        const Drops drops(s, front, head);

        __syncthreads();  // the block before has been read
        if (threadIdx.x == 0) {
            shared.at_key = line_of(s.k, front, kv_head);
            shared.at_value = line_of(s.v, front, kv_head);
        }
        for (int i = threadIdx.x; i < kRows; i += kThreads)
            shared.queries[i] = i < n_rows ? asked_of(s.mask, s.position(front, first + i)) : Asked{0, 0, 0};
        const Line at_query = line_of(s.q, front, head);
        tile::fetch<T, kWidth, kRows, kThreads>(shared.q, q, width, [&](int i) -> const T* {
            return i < n_rows ? q + at_query.at(first + i) : nullptr;
        });
        warp::commit_copies();
        const auto fetch_keys = [&](int64_t t, bool is_padded) {
            tile::fetch<T, kWidth, kKeys, kThreads>(shared.k, k, width, [&](int i) -> const T* {
                const int64_t key = t * kKeys + i;
                return is_key(s, key, is_padded) ? k + shared.at_key.at(key) : nullptr;
            });
            warp::commit_copies();
        };
        const auto fetch_values = [&](int64_t t, bool is_padded) {
            tile::fetch<T, kValueWidth, kKeys, kThreads>(shared.v, v, value_width, [&](int i) -> const T* {
                const int64_t key = t * kKeys + i;
                return is_key(s, key, is_padded) ? v + shared.at_value.at(key) : nullptr;
            });
            warp::commit_copies();
        };

        float sum[kM][kValueWidth / 8][4], highest[kM][2], weights[kM][2];
        tile::clear(sum);
        ITHACA_UNROLL
        for (int m = 0; m < kM; ++m)
            ITHACA_UNROLL
            for (int half = 0; half < 2; ++half) {
                highest[m][half] = nothing<float>();
                weights[m][half] = 0;
            }

        // What is seen of tiles is found for as many at a time as there are threads.
        for (int64_t from = 0; from < key_tiles; from += kThreads) {
            const int n_tiles =
                find_seen(shared.tiles, from, key_tiles, [&](int64_t t) { return seen_of_tile<kKeys>(s, positions, t); });
            int t = next_seen(shared.tiles, -1, n_tiles);
            if (t < n_tiles) fetch_keys(from + t, shared.tiles[t] == Seen::Padded);
            while (t < n_tiles) {
                const bool is_partial = asks(shared.tiles[t]);
                if ((is_partial || drops.any) && threadIdx.x < kKeys) {
                    const int64_t key = (from + t) * kKeys + threadIdx.x;
                    shared.keys[threadIdx.x] = key < s.keys ? position_of(s.key_positions, key) : -1;
                }
                warp::wait_for_copies<0>();
                __syncthreads();  // keys are there, and the values before have been read
                fetch_values(from + t, shared.tiles[t] == Seen::Padded);

                float score[kM][kKeys / 8][4];
                tile::multiply_rows<T, kWidth>(score, shared.q + first_row * tile::pitch(kWidth), shared.k);
                const float factor = scoring.softcap > 0 ? scoring.softcap * kLog2e : scoring.scale * kLog2e;
                ITHACA_UNROLL
                for (int m = 0; m < kM; ++m) {
                    if (scoring.softcap > 0) {
                        ITHACA_UNROLL
                        for (int c = 0; c < kKeys / 8; ++c)
                            ITHACA_UNROLL
                            for (int i = 0; i < 4; ++i) score[m][c][i] = scoring.bend(score[m][c][i]);
                    }
                    ITHACA_UNROLL
                    for (int half = 0; half < 2; ++half) {
                        const int row = first_row + m * 16 + half * 8 + lane / 4;
                        if (is_partial) {
                            const auto key = [&](int i) { return shared.keys[i / 2 * 8 + lane % 4 * 2 + i % 2]; };
                            const uint32_t seen = seen_keys<kKeys / 4>(s.mask, s.valid_keys, shared.queries[row], key);
                            ITHACA_UNROLL
                            for (int i = 0; i < kKeys / 4; ++i)
                                score[m][i / 2][2 * half + i % 2] =
                                    seen >> i & 1 ? score[m][i / 2][2 * half + i % 2] * factor : nothing<float>();
                        } else {
                            ITHACA_UNROLL
                            for (int i = 0; i < kKeys / 4; ++i) score[m][i / 2][2 * half + i % 2] *= factor;
                        }
                        float high = highest[m][half];
                        ITHACA_UNROLL
                        for (int i = 0; i < kKeys / 4; ++i) high = fmaxf(high, score[m][i / 2][2 * half + i % 2]);
                        high = tile::highest_of_row(high);
                        // A row that has seen nothing yet is compared with zero, so that nothing stays nothing.
                        const float base = high == nothing<float>() ? 0.0f : high;
                        const float shrink = warp::power_of_two(highest[m][half] - base);
                        highest[m][half] = high;
                        weights[m][half] *= shrink;
                        ITHACA_UNROLL
                        for (int c = 0; c < kValueWidth / 8; ++c) {
                            sum[m][c][2 * half] *= shrink;
                            sum[m][c][2 * half + 1] *= shrink;
                        }
                        ITHACA_UNROLL
                        for (int i = 0; i < kKeys / 4; ++i) {
                            float& x = score[m][i / 2][2 * half + i % 2];
                            x = warp::power_of_two(x - base);
                            weights[m][half] += x;
                        }
                        if (drops.any) {
                            const int64_t at = shared.queries[row].position;
                            ITHACA_UNROLL
                            for (int c = 0; c < kKeys / 8; ++c)
                                ITHACA_UNROLL
                                for (int i = 0; i < 2; ++i)
                                    score[m][c][2 * half + i] *= drops.factor(at, shared.keys[c * 8 + lane % 4 * 2 + i]);
                        }
                    }
                }

                warp::wait_for_copies<0>();
                __syncthreads();  // values are there, and the keys have been read
                t = next_seen(shared.tiles, t, n_tiles);
                if (t < n_tiles) fetch_keys(from + t, shared.tiles[t] == Seen::Padded);
                tile::add_weighed<T, kValueWidth>(sum, score, shared.v);
            }
        }
        warp::wait_for_copies<0>();

        ITHACA_UNROLL
        for (int m = 0; m < kM; ++m)
            ITHACA_UNROLL
            for (int half = 0; half < 2; ++half) weights[m][half] = tile::sum_of_row(weights[m][half]);
        const Line at_output = line_of(s.o, front, head);
        put_rows(o, sum, n_rows, s.value_width, [&](int i) { return at_output.at(first + i); },
                 [&](int m, int half) { return weights[m][half] > 0 ? 1.0f / weights[m][half] : 0.0f; });
        if (lse == nullptr || lane % 4 != 0) continue;
        ITHACA_UNROLL
        for (int m = 0; m < kM; ++m)
            ITHACA_UNROLL
            for (int half = 0; half < 2; ++half) {
                const int i = first_row + m * 16 + half * 8 + lane / 4;
                const float w = weights[m][half];
                if (i < n_rows) lse[s.row(front, first + i, head)] = w > 0 ? highest[m][half] * kLn2 + logarithm(w) : nothing<float>();
            }
    }
}

}  // namespace ithaca::kernel
