// Attention of few queries over many keys, as of a token over a cache: blocks share the keys of a head, and their results are
// merged (Flash-Decoding: Dao, Haziza, Massa and Sizov, 2023).
//
// A block takes rows, queries of the heads that one key/value head serves, and an equal part of the keys that these see. What
// they see is known on the device, so parts are equal whatever the length of a sequence is. The block's threads are teams; a
// team takes a key, and each thread of it eight columns: a key and a value are read once for all rows of the block. Keys in pages
// are read where they are; without a table of pages the keys of a sequence are in a row.
#pragma once

#include "pages.cuh"
#include "rows.cuh"
#include "score.cuh"

namespace ithaca::kernel {

constexpr int kSplitThreads = 128, kSplitWarps = kSplitThreads / 32, kColumns = 8, kMostRows = 8;
// The widest rows that a warp takes.
constexpr int kWidest = 32 * kColumns;

// How the work is split: parts of the keys, blocks of the rows of a key/value head, threads of a team; and whether all columns
// of a thread are read at once.
struct Splitting {
    int64_t parts, row_blocks;
    int lanes;
    bool is_wide;
};

// A row of a block: a query and its head. Through a band it sees keys at positions `first .. last`; a table of strips is asked
// key by key. Without a query it sees nothing.
struct SplitRow {
    int64_t position, first, last, head, row;
};

// Shared memory, behind the numbers by which teams sum: the block's rows; sums of one of them, their largest exponent and their
// weight, of each warp.
template <typename A>
struct SplitShared {
    double of_teams[kSplitWarps];
    SplitRow rows[kMostRows];
    A sums[kSplitWarps][kWidest], highest[kSplitWarps], weights[kSplitWarps];
};

// Columns of a row from `from` on; those behind its end are zero.
template <typename T>
__device__ inline Pack<T, kColumns> columns_of(const T* row, int64_t from, int64_t width, bool is_there, bool is_wide) {
    Pack<T, kColumns> x;
    if (is_there && is_wide && from < width) return *reinterpret_cast<const Pack<T, kColumns>*>(row + from);
    ITHACA_UNROLL
    for (int c = 0; c < kColumns; ++c) x.at[c] = is_there && from + c < width ? row[from + c] : narrow<T>(0.0f);
    return x;
}

template <typename T, typename O, int kRows>
__launch_bounds__(kSplitThreads) __global__ void split_attention(const T* __restrict__ q, const T* __restrict__ k,
                                                                 const T* __restrict__ v, O* __restrict__ o,
                                                                 float* __restrict__ lse, Acc<T>* __restrict__ parts,
                                                                 AttentionShape s, Splitting by, Paged pages,
                                                                 int64_t n_blocks) {
    using A = Acc<T>;
    constexpr int kAhead = kRows > 4 ? 2 : 4;  // keys of a team that are on their way together
    ITHACA_SHARED(memory);
    auto& shared = *reinterpret_cast<SplitShared<A>*>(memory);
    const Team block_team{kSplitThreads, static_cast<int>(threadIdx.x)};
    const int lane = static_cast<int>(threadIdx.x) % by.lanes, team = static_cast<int>(threadIdx.x) / by.lanes;
    const int teams = kSplitThreads / by.lanes, warp = static_cast<int>(threadIdx.x) / 32;
    const int64_t column = static_cast<int64_t>(lane) * kColumns, n_rows = s.front * s.queries * s.heads;
    const bool is_band = s.mask.strips == nullptr;

    for (int64_t block = blockIdx.x; block < n_blocks; block += gridDim.x) {
        const int64_t part = block % by.parts, row_block = block / by.parts % by.row_blocks;
        const int64_t kv_head = block / by.parts / by.row_blocks % s.kv_heads;
        const int64_t front = block / by.parts / by.row_blocks / s.kv_heads;
        // The heads that the key/value head serves, of those held.
        const int64_t served = (s.first_kv_head + kv_head) * s.group - s.first_head;
        const int64_t first_head = served > 0 ? served : 0;
        const int64_t n_heads = (served + s.group < s.heads ? served + s.group : s.heads) - first_head;

        __syncthreads();  // the block before has been read
        if (threadIdx.x < kRows) {
            const int64_t i = row_block * kRows + threadIdx.x;
            SplitRow own{-1, 0, 0, 0, -1};
            if (n_heads > 0 && i < s.queries * n_heads) {
                const Division at = divide(i, n_heads);
                own = {s.position(front, at.quotient), 0, s.valid_keys, first_head + at.remainder, 0};
                own.row = s.row(front, at.quotient, own.head);
                if (is_band) narrow_to_run(s.mask, 0, own.position, own.first, own.last);
            }
            shared.rows[threadIdx.x] = own;
        }
        __syncthreads();
        A query[kRows][kColumns], sum[kRows][kColumns], highest[kRows], weights[kRows];
        int64_t low = s.keys, high = 0;  // keys of which any are seen
        ITHACA_UNROLL
        for (int r = 0; r < kRows; ++r) {
            const SplitRow own = shared.rows[r];
            const bool is_there = own.row >= 0;
            const int64_t at_query = is_there ? s.q.at(front, own.row / s.heads % s.queries, own.head) : 0;
            const auto columns = columns_of(q + at_query, column, s.width, is_there, false);
            highest[r] = nothing<A>();
            weights[r] = 0;
            ITHACA_UNROLL
            for (int c = 0; c < kColumns; ++c) {
                query[r][c] = widen(columns.at[c]);
                sum[r][c] = 0;
            }
            if (!is_there || (r > 0 && own.position == shared.rows[r - 1].position)) continue;
            const Runs runs = runs_of(s.mask, own.position);
            for (int64_t run = runs.first; run < runs.last; ++run)
                for (int64_t j = threadIdx.x; j < s.key_positions.n; j += kSplitThreads) {
                    const int64_t* const held = s.key_positions.runs + 3 * j;
                    int64_t first = held[1], last = held[1] + held[2] < s.valid_keys ? held[1] + held[2] : s.valid_keys;
                    narrow_to_run(s.mask, run, own.position, first, last);
                    if (first >= last) continue;
                    const int64_t from = held[0] + (first - held[1]), to = held[0] + (last - held[1]);
                    if (from < low) low = from;
                    if (to > high) high = to;
                }
        }
        if (s.ring > 0) low = 0, high = s.keys;
        low = block_team.all(low, [](int64_t a, int64_t b) { return a < b ? a : b; });
        high = block_team.most(high);
        const int64_t each = high > low ? (high - low + by.parts - 1) / by.parts : 0, start = low + part * each;
        const int64_t end = start + each < high ? start + each : high;

        for (int64_t base = start; base < end; base += kAhead * teams) {
            Pack<T, kColumns> keys[kAhead], values[kAhead];
            int64_t at_key[kAhead];
            uint32_t seen = 0;  // a bit for each row and key
            ITHACA_UNROLL
            for (int u = 0; u < kAhead; ++u) {
                const int64_t key = base + u * teams + team;
                bool any = false;
                at_key[u] = key < end ? position_of(s.key_positions, key) : -1;
                if (s.ring > 0 && key < end) at_key[u] = s.in_ring(front, at_key[u]);
                ITHACA_UNROLL
                for (int r = 0; r < kRows; ++r) {
                    const SplitRow& of = shared.rows[r];
                    bool own = at_key[u] >= 0 && at_key[u] >= of.first && at_key[u] < of.last;
                    if (own && !is_band) own = sees(s.mask, of.position, at_key[u]);
                    seen |= static_cast<uint32_t>(own) << (u * kRows + r);
                    any = any || own;
                }
                // A key that no row sees is not read: its memory may hold NaN. A key without a page is zero.
                int64_t at_k = 0, at_v = 0;
                if (any && pages.table != nullptr) {
                    const int64_t row = pages.row_of(front, at_key[u]);
                    any = row >= 0;
                    at_k = any ? row * s.k.token + kv_head * s.k.head : 0;
                    at_v = any ? row * s.v.token + kv_head * s.v.head : 0;
                } else if (any) {
                    at_k = s.k.at(front, key, kv_head);
                    at_v = s.v.at(front, key, kv_head);
                }
                keys[u] = columns_of(k + at_k, column, s.width, any, by.is_wide);
                values[u] = columns_of(v + at_v, column, s.value_width, any, by.is_wide);
            }
            ITHACA_UNROLL
            for (int r = 0; r < kRows; ++r) {
                A score[kAhead], most = highest[r];
                ITHACA_UNROLL
                for (int u = 0; u < kAhead; ++u) {
                    A product = 0;
                    ITHACA_UNROLL
                    for (int c = 0; c < kColumns; ++c) product += query[r][c] * widen(keys[u].at[c]);
                    for (int bits = by.lanes / 2; bits > 0; bits /= 2) product += warp::other_lane(product, bits);
                    const bool own = seen >> (u * kRows + r) & 1;
                    score[u] = own ? scored(s, product, shared.rows[r].head, shared.rows[r].position, at_key[u]).value : nothing<A>();
                    if (score[u] > most) most = score[u];
                }
                if (most == nothing<A>()) continue;
                const A shrink = share(highest[r], most);
                highest[r] = most;
                weights[r] *= shrink;
                ITHACA_UNROLL
                for (int c = 0; c < kColumns; ++c) sum[r][c] *= shrink;
                ITHACA_UNROLL
                for (int u = 0; u < kAhead; ++u) {
                    const A weight = share(score[u], most);
                    if (!(weight > 0)) continue;
                    weights[r] += weight;
                    ITHACA_UNROLL
                    for (int c = 0; c < kColumns; ++c) sum[r][c] += weight * widen(values[u].at[c]);
                }
            }
        }

        // Teams of a warp, then warps.
        ITHACA_UNROLL
        for (int r = 0; r < kRows; ++r) {
            A most = highest[r];
            for (int bits = by.lanes; bits < 32; bits *= 2) {
                const A other = warp::other_lane(most, bits);
                if (other > most) most = other;
            }
            const A shrink = share(highest[r], most);
            A weight = weights[r] * shrink;
            for (int bits = by.lanes; bits < 32; bits *= 2) weight += warp::other_lane(weight, bits);
            __syncthreads();  // the row before has been read
            ITHACA_UNROLL
            for (int c = 0; c < kColumns; ++c) {
                A of_team = sum[r][c] * shrink;
                for (int bits = by.lanes; bits < 32; bits *= 2) of_team += warp::other_lane(of_team, bits);
                if (threadIdx.x % 32 < static_cast<unsigned>(by.lanes)) shared.sums[warp][column + c] = of_team;
            }
            if (threadIdx.x % 32 == 0) {
                shared.highest[warp] = most;
                shared.weights[warp] = weight;
            }
            __syncthreads();
            const SplitRow own = shared.rows[r];
            if (own.row < 0) continue;
            A all = nothing<A>(), total = 0;
            for (int w = 0; w < kSplitWarps; ++w) all = shared.highest[w] > all ? shared.highest[w] : all;
            for (int w = 0; w < kSplitWarps; ++w) total += shared.weights[w] * share(shared.highest[w], all);
            const A inverse = total > 0 ? A(1) / total : A(0);
            for (int64_t c = threadIdx.x; c < s.value_width; c += kSplitThreads) {
                A x = 0;
                for (int w = 0; w < kSplitWarps; ++w) x += shared.sums[w][c] * share(shared.highest[w], all);
                if (by.parts == 1) o[s.o.at(front, own.row / s.heads % s.queries, own.head) + c] = narrow<O>(x * inverse);
                else parts[(part * n_rows + own.row) * s.value_width + c] = x * inverse;
            }
            if (threadIdx.x != 0) continue;
            const A log = total > 0 ? all + logarithm(total) : nothing<A>();
            if (by.parts > 1) parts[by.parts * n_rows * s.value_width + part * n_rows + own.row] = log;
            else if (lse != nullptr) lse[own.row] = static_cast<float>(log);
        }
    }
}

// Merges what blocks found in their parts of the keys: outputs [parts, rows, width], then logarithms [parts, rows].
template <typename A, typename O>
__global__ void merge_splits(const A* __restrict__ parts, O* __restrict__ o, float* __restrict__ lse, AttentionShape s,
                             int64_t n_parts, int64_t n) {
    const int64_t n_rows = s.front * s.queries * s.heads;
    const A* const logs = parts + n_parts * n;
    ITHACA_FOR(i, n) {
        const Division at = divide(i, s.value_width), row = divide(at.quotient, s.heads), token = divide(row.quotient, s.queries);
        A all = nothing<A>(), sum = 0;
        for (int64_t p = 0; p < n_parts; ++p) all = log_add_exp(all, logs[p * n_rows + at.quotient]);
        for (int64_t p = 0; p < n_parts; ++p) sum += share(logs[p * n_rows + at.quotient], all) * parts[p * n + i];
        o[s.o.at(token.quotient, token.remainder, row.remainder) + at.remainder] = narrow<O>(sum);
        if (lse != nullptr && at.remainder == 0) lse[at.quotient] = static_cast<float>(all);
    }
}

}  // namespace ithaca::kernel
