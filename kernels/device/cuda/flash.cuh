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
template <int kWarps, int kM, int kN, typename Row, typename Factor>
__device__ inline void put_rows(const Written& z, const float (&sum)[kM][kN][4], int64_t n, int64_t width, const Row& row,
                                const Factor& factor) {
    const int lane = threadIdx.x % 32;
    ITHACA_UNROLL
    for (int m = 0; m < kM; ++m) {
        ITHACA_UNROLL
        for (int half = 0; half < 2; ++half) {
            const int i = tile::row_of<kWarps>(m) + half * 8 + lane / 4;
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

    // The factor that turns a product, or the result of `bend`, into an exponent of two.
    __device__ float exponent() const { return (softcap > 0 ? softcap : scale) * kLog2e; }
    // As tanh(x) = 1 - 2 / (1 + e^2x): its error is one of rounding, for a score is `softcap` times this.
    __device__ float bend(float product) const {
        return 1.0f - 2.0f * warp::reciprocal(1.0f + warp::power_of_two(product * scale * (2.0f * kLog2e)));
    }
};

// Dropout of the weights of one head of one sequence.
struct Drops {
    bool any;
    uint64_t state;
    double rate;
    float kept;  // the factor of what is kept

    __device__ Drops() : any(false), state(0), rate(0), kept(1) {}
    __device__ Drops(const AttentionShape& s, int64_t front, int64_t head) : any(s.dropout.rate > 0), state(0), rate(0), kept(1) {
        if (!any) return;
        int64_t sequence[1];
        s.sequences.at(front, sequence);
        state = s.dropout.state_of(s.first_sequence + sequence[0], s.dropped_head + head);
        rate = s.dropout.rate;
        kept = static_cast<float>(1.0 / (1.0 - rate));
    }
    // A bit for each of `kN` pairs of positions `query(i)` and `key(i)`: whether dropout drops the weight.
    template <int kN, typename Query, typename Key>
    __device__ uint32_t dropped(const Query& query, const Key& key) const {
        uint32_t bits = 0;
        if (!ITHACA_UNLIKELY(any)) return bits;
        ITHACA_UNROLL_BY(1)
        for (int i = 0; i < kN; ++i) {
            const uint64_t of_query = mix(state, static_cast<uint64_t>(query(i)));
            bits |= static_cast<uint32_t>(is_below(mix(of_query, static_cast<uint64_t>(key(i))), rate)) << i;
        }
        return bits;
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

// Begins to copy the rows of `n` tokens from `first` on to shared memory.
template <typename T, int kWidth, int kRows, int kThreads>
__device__ inline void fetch_line(T* to, const T* x, const Line& line, int64_t first, int64_t n, int width) {
    if (!ITHACA_UNLIKELY(line.run != 0))
        return tile::fetch_rows<T, kWidth, kRows, kThreads>(to, x + line.at(first), line.token, static_cast<int>(n), width);
    tile::fetch<T, kWidth, kRows, kThreads>(
        to, x, width, [&](int i) -> const T* { return i < n ? x + line.at(first + i) : nullptr; });
}

// The same of keys or values, as many as there are; padding is zero.
template <typename T, int kWidth, int kRows, int kThreads>
__device__ inline void fetch_keys_of(T* to, const T* x, const Line& line, const AttentionShape& s, int64_t first, bool is_padded,
                                     int width) {
    const int64_t n = s.keys - first < kRows ? s.keys - first : kRows;
    if (!ITHACA_UNLIKELY(is_padded)) return fetch_line<T, kWidth, kRows, kThreads>(to, x, line, first, n, width);
    tile::fetch<T, kWidth, kRows, kThreads>(
        to, x, width, [&](int i) -> const T* { return is_key(s, first + i, true) ? x + line.at(first + i) : nullptr; });
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

// The block of rows that a thread block computes, and its line: a head of a sequence.
struct Share {
    int64_t line, block;
};

// Lines of `bytes` of operands each are taken in sections that fit in the L2 cache together. Within a section the first blocks of
// all lines come first, so that callers can order blocks by decreasing work.
__device__ inline Share share_of(int64_t number, int64_t lines, int64_t blocks, int64_t bytes) {
    constexpr int64_t kCache = int64_t{64} << 20;  // a causal mask hides half of it
    const int64_t together = bytes <= 0 ? kCache : bytes < kCache ? kCache / bytes : 1, first = number / (together * blocks) * together;
    const int64_t n = lines - first < together ? lines - first : together, rest = number - first * blocks;
    return {first + rest % n, rest / n};
}

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

// How much of tile `t` of `n` is seen.
__device__ inline Seen seen_at(const Seen* tiles, int t, int n) { return t < n ? tiles[t] : Seen::Nothing; }

// The tile behind tile `t` of which anything is seen, or `n`.
__device__ inline int next_seen(const Seen* tiles, int t, int n) {
    do ++t;
    while (t < n && tiles[t] == Seen::Nothing);
    return t;
}

template <typename T, int kWidth, int kValueWidth>
struct FlashShared {
    using Sizes = FlashTile<kWidth, kValueWidth>;
    T q[tile::elements(Sizes::kRows, kWidth)];
    T k[2][tile::elements(Sizes::kKeys, kWidth)];
    T v[tile::elements(Sizes::kKeys, kValueWidth)];
    Asked queries[Sizes::kRows];
    int keys[2][Sizes::kKeys];  // positions
    Line at_key, at_value;
    Seen tiles[Sizes::kThreads];
};

// Whether a tile has no mask, softcap or dropout, as a compile-time constant.
template <bool kIs>
struct Plain {
    static constexpr bool value = kIs;
};

// Online softmax of a tile: turns products into weights and updates the maximum and the sum of each row; earlier sums are to be
// multiplied by `shrink`. `keys` has the positions of this lane's keys, two of every eight; `query(half)` is the mask's view of a row.
template <bool kIsPlain, int kN, typename Query>
__device__ inline void weigh(const Scoring& scoring, const AttentionShape& s, const Drops& drops, Seen seen, const Query& query,
                             const int* keys, float (&score)[kN][4], float (&row_max)[2], float (&weights)[2], float (&shrink)[2]) {
    const auto x = [&](int half, int i) -> float& { return score[i / 2][2 * half + i % 2]; };
    const auto key = [&](int i) { return keys[i / 2 * 8 + i % 2]; };
    const auto each = [&](const auto& body) {
        ITHACA_UNROLL
        for (int i = 0; i < 2 * kN; ++i)
            ITHACA_UNROLL
            for (int half = 0; half < 2; ++half) body(half, i);
    };
    if (!kIsPlain && scoring.softcap > 0) each([&](int half, int i) { x(half, i) = scoring.bend(x(half, i)); });
    if (!kIsPlain && asks(seen)) {
        uint32_t bits[2];
        ITHACA_UNROLL
        for (int half = 0; half < 2; ++half) bits[half] = seen_keys<2 * kN>(s.mask, s.valid_keys, query(half), key);
        each([&](int half, int i) { x(half, i) = bits[half] >> i & 1 ? x(half, i) : neg_infinity<float>(); });
    }
    // Two independent chains for each row hide the latency of an instruction.
    float high[2][2] = {{row_max[0], neg_infinity<float>()}, {row_max[1], neg_infinity<float>()}}, base[2], sum[2][2] = {};
    each([&](int half, int i) { high[half][i % 2] = fmaxf(high[half][i % 2], x(half, i)); });
    const float exponent = scoring.exponent();
    ITHACA_UNROLL
    for (int half = 0; half < 2; ++half) {
        const float most = tile::highest_of_row(fmaxf(high[half][0], high[half][1]));
        // A row that has seen no key yet is compared with zero, so that it stays at minus infinity.
        base[half] = most == neg_infinity<float>() ? 0.0f : most * exponent;
        shrink[half] = warp::power_of_two(row_max[half] * exponent - base[half]);
        row_max[half] = most;
    }
    each([&](int half, int i) {
        x(half, i) = warp::power_of_two(x(half, i) * exponent - base[half]);
        sum[half][i % 2] += x(half, i);
    });
    ITHACA_UNROLL
    for (int half = 0; half < 2; ++half) weights[half] = weights[half] * shrink[half] + (sum[half][0] + sum[half][1]);
    if (!kIsPlain && drops.any) {
        uint32_t dropped[2];
        ITHACA_UNROLL
        for (int half = 0; half < 2; ++half)
            dropped[half] = drops.template dropped<2 * kN>([&](int) { return query(half).position; }, key);
        each([&](int half, int i) { x(half, i) *= dropped[half] >> i & 1 ? 0.0f : drops.kept; });
    }
}

template <typename T, int kWidth, int kValueWidth>
__launch_bounds__(FlashTile<kWidth, kValueWidth>::kThreads) __global__ void flash(
    const T* q, const T* k, const T* v, Written o, float* lse, AttentionShape s, int64_t n_blocks) {
    using Sizes = FlashTile<kWidth, kValueWidth>;
    constexpr int kM = Sizes::kM, kRows = Sizes::kRows, kKeys = Sizes::kKeys, kThreads = Sizes::kThreads;
    ITHACA_SHARED(memory);
    auto& shared = *reinterpret_cast<FlashShared<T, kWidth, kValueWidth>*>(memory);
    const int lane = threadIdx.x % 32;
    const int width = static_cast<int>(s.width), value_width = static_cast<int>(s.value_width);
    const int64_t row_blocks = (s.queries + kRows - 1) / kRows, key_tiles = (s.keys + kKeys - 1) / kKeys;
    const int64_t bytes = s.keys * (s.width + s.value_width) * static_cast<int64_t>(sizeof(T)) / s.group;
    const Scoring scoring(s);

    for (int64_t block = blockIdx.x; block < n_blocks; block += gridDim.x) {
        // Where the mask is causal the last queries have most to do: they come first.
        const Share share = share_of(block, s.front * s.heads, row_blocks, bytes);
        const int64_t first = (row_blocks - 1 - share.block) * kRows, head = share.line % s.heads, front = share.line / s.heads;
        const int64_t kv_head = s.served_by(head);
        const int64_t n_rows = s.queries - first < kRows ? s.queries - first : kRows;
        const int64_t start = s.start(front);
        Span positions = span_of(s.query_positions, first, n_rows);
        positions.first += start;
        positions.last += start;
        const Drops drops(s, front, head);
        const bool is_plain = !drops.any && scoring.softcap <= 0;

        __syncthreads();  // the block before has been read
        if (threadIdx.x == 0) {
            shared.at_key = line_of(s.k, front, kv_head);
            shared.at_value = line_of(s.v, front, kv_head);
        }
        for (int i = threadIdx.x; i < kRows; i += kThreads)
            shared.queries[i] = i < n_rows ? asked_of(s.mask, s.position(front, first + i)) : Asked{0, 0, 0};
        const Line at_query = line_of(s.q, front, head);
        fetch_line<T, kWidth, kRows, kThreads>(shared.q, q, at_query, first, n_rows, width);
        warp::commit_copies();
        // Begins to bring the keys of tile t to one of the buffers.
        const auto fetch_keys = [&](int64_t t, Seen seen, int buffer) {
            fetch_keys_of<T, kWidth, kKeys, kThreads>(shared.k[buffer], k, shared.at_key, s, t * kKeys, seen == Seen::Padded, width);
            if (ITHACA_UNLIKELY((asks(seen) || drops.any) && threadIdx.x < kKeys))
                shared.keys[buffer][threadIdx.x] = position_in_tile(s, t * kKeys + threadIdx.x);
        };

        float sum[kM][kValueWidth / 8][4], row_max[kM][2], weights[kM][2];
        tile::clear(sum);
        ITHACA_UNROLL
        for (int m = 0; m < kM; ++m)
            ITHACA_UNROLL
            for (int half = 0; half < 2; ++half) {
                row_max[m][half] = neg_infinity<float>();
                weights[m][half] = 0;
            }

        // What is seen of tiles is found for as many at a time as there are threads.
        for (int64_t from = 0; from < key_tiles; from += kThreads) {
            const int n_tiles =
                find_seen(shared.tiles, from, key_tiles, [&](int64_t t) { return seen_of_tile<kKeys>(s, positions, t); });
            int t = next_seen(shared.tiles, -1, n_tiles), buffer = 0;
            Seen seen = seen_at(shared.tiles, t, n_tiles);
            if (t < n_tiles) fetch_keys(from + t, seen, buffer);
            warp::commit_copies();
            const auto add_tile = [&](auto plain, int then, Seen then_seen) {
                fetch_keys_of<T, kValueWidth, kKeys, kThreads>(shared.v, v, shared.at_value, s, (from + t) * kKeys, seen == Seen::Padded,
                                                               value_width);
                warp::commit_copies();
                const int* const keys = shared.keys[buffer] + lane % 4 * 2;
                float score[kM][kKeys / 8][4];
                tile::begin_rows<T, kWidth, kRows, kKeys>(score, shared.q, shared.k[buffer]);
                if (warp::uniform(then < n_tiles)) fetch_keys(from + then, then_seen, 1 - buffer);
                warp::commit_copies();
                ITHACA_UNROLL
                for (int m = 0; m < kM; ++m) {
                    tile::wait<kM - 1>(score[m]);
                    const auto query = [&](int half) -> const Asked& {
                        return shared.queries[tile::row_of<Sizes::kWarps>(m) + half * 8 + lane / 4];
                    };
                    float shrink[2];
                    weigh<decltype(plain)::value>(scoring, s, drops, seen, query, keys, score[m], row_max[m], weights[m], shrink);
                    // The maximum of a row rarely changes after the first tiles.
                    if (warp::ballot(shrink[0] < 1 || shrink[1] < 1) != 0) {
                        ITHACA_UNROLL
                        for (int c = 0; c < kValueWidth / 8; ++c)
                            ITHACA_UNROLL
                            for (int i = 0; i < 4; ++i) sum[m][c][i] *= shrink[i / 2];
                    }
                    if (m == 0) {
                        warp::wait_for_copies<1>();
                        __syncthreads();  // values are there
                    }
                    tile::begin_weighed<T, kValueWidth>(sum, score, m, shared.v);
                }
                ITHACA_UNROLL
                for (int m = 0; m < kM; ++m) tile::wait<0>(sum[m]);
            };
            while (warp::uniform(t < n_tiles)) {
                const int then = next_seen(shared.tiles, t, n_tiles);
                const Seen then_seen = seen_at(shared.tiles, then, n_tiles);
                warp::wait_for_copies<0>();
                __syncthreads();  // keys are there, and the values and keys before have been read
                if (warp::uniform(is_plain && seen == Seen::All)) add_tile(Plain<true>{}, then, then_seen);
                else add_tile(Plain<false>{}, then, then_seen);
                t = then;
                seen = then_seen;
                buffer = 1 - buffer;
            }
        }
        warp::wait_for_copies<0>();

        ITHACA_UNROLL
        for (int m = 0; m < kM; ++m)
            ITHACA_UNROLL
            for (int half = 0; half < 2; ++half) weights[m][half] = tile::sum_of_row(weights[m][half]);
        const Line at_output = line_of(s.o, front, head);
        put_rows<Sizes::kWarps>(o, sum, n_rows, s.value_width, [&](int i) { return at_output.at(first + i); },
                 [&](int m, int half) { return weights[m][half] > 0 ? 1.0f / weights[m][half] : 0.0f; });
        if (lse == nullptr || lane % 4 != 0) continue;
        ITHACA_UNROLL
        for (int m = 0; m < kM; ++m)
            ITHACA_UNROLL
            for (int half = 0; half < 2; ++half) {
                const int i = tile::row_of<Sizes::kWarps>(m) + half * 8 + lane / 4;
                const float w = weights[m][half];
                if (i >= n_rows) continue;
                const float most = row_max[m][half] * scoring.exponent() * kLn2;
                lse[s.row(front, first + i, head)] = w > 0 ? most + logarithm(w) : neg_infinity<float>();
            }
    }
}

}  // namespace ithaca::kernel
