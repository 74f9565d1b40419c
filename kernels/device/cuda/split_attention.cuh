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

// Of a row, for each warp of the block: the largest exponent, and the sum of weights relative to it.
template <typename A>
struct OfWarps {
    A row_max[kSplitWarps], weights[kSplitWarps];

    __device__ A most() const {
        A all = neg_infinity<A>();
        for (int w = 0; w < kSplitWarps; ++w) all = row_max[w] > all ? row_max[w] : all;
        return all;
    }
    __device__ A total(A all) const {
        A sum = 0;
        for (int w = 0; w < kSplitWarps; ++w) sum += weights[w] * share(row_max[w], all);
        return sum;
    }
};

// Shared memory, behind the numbers by which teams sum: the block's rows; sums of one of them, of each warp.
template <typename A>
struct SplitShared {
    double of_teams[kSplitWarps];
    SplitRow rows[kMostRows];
    A sums[kSplitWarps][kWidest];
    OfWarps<A> warps;
};

// The work of a block: a part of the keys, by token, of a key/value head.
struct SplitBlock {
    int64_t part, front, kv_head, start, end;
};

// A block's rows, which all threads write, and its keys: an equal part of those that any row sees.
template <int kRows>
__device__ inline SplitBlock split_block(const AttentionShape& s, const Splitting& by, int64_t block, SplitRow* rows) {
    SplitBlock own{block % by.parts, block / by.parts / by.row_blocks / s.kv_heads, block / by.parts / by.row_blocks % s.kv_heads, 0, 0};
    // The heads that the key/value head serves, of those held.
    const int64_t served = (s.first_kv_head + own.kv_head) * s.group - s.first_head;
    const int64_t first_head = served > 0 ? served : 0;
    const int64_t n_heads = (served + s.group < s.heads ? served + s.group : s.heads) - first_head;
    if (threadIdx.x < kRows) {
        const int64_t i = block / by.parts % by.row_blocks * kRows + threadIdx.x;
        SplitRow row{-1, 0, 0, 0, -1};
        if (n_heads > 0 && i < s.queries * n_heads) {
            const Division at = divide(i, n_heads);
            row = {s.position(own.front, at.quotient), 0, s.valid_keys, first_head + at.remainder, 0};
            row.row = s.row(own.front, at.quotient, row.head);
            if (s.mask.strips == nullptr) narrow_to_run(s.mask, 0, row.position, row.first, row.last);
        }
        rows[threadIdx.x] = row;
    }
    __syncthreads();
    int64_t low = s.keys, high = 0;  // keys of which any are seen
    ITHACA_UNROLL_BY(1)
    for (int r = 0; r < kRows; ++r) {
        const SplitRow& row = rows[r];
        if (row.row < 0 || (r > 0 && row.position == rows[r - 1].position)) continue;
        const Runs runs = runs_of(s.mask, row.position);
        for (int64_t run = runs.first; run < runs.last; ++run)
            for (int64_t j = threadIdx.x; j < s.key_positions.n; j += kSplitThreads) {
                const int64_t* const held = s.key_positions.runs + 3 * j;
                int64_t first = held[1], last = held[1] + held[2] < s.valid_keys ? held[1] + held[2] : s.valid_keys;
                narrow_to_run(s.mask, run, row.position, first, last);
                if (first >= last) continue;
                const int64_t from = held[0] + (first - held[1]), to = held[0] + (last - held[1]);
                if (from < low) low = from;
                if (to > high) high = to;
            }
    }
    if (s.ring > 0) low = 0, high = s.keys;
    const Team team{kSplitThreads, static_cast<int>(threadIdx.x)};
    low = team.all(low, [](int64_t a, int64_t b) { return a < b ? a : b; });
    high = team.most(high);
    const int64_t each = high > low ? (high - low + by.parts - 1) / by.parts : 0;
    own.start = low + own.part * each;
    own.end = own.start + each < high ? own.start + each : high;
    return own;
}

// The position of a key; negative for one behind the end of the block's part, and for a free slot of a ring.
__device__ inline int64_t position_in(const AttentionShape& s, const SplitBlock& own, int64_t key) {
    if (key >= own.end) return -1;
    const int64_t position = position_of(s.key_positions, key);
    return s.ring > 0 ? s.in_ring(own.front, position) : position;
}

// Where a key and its value are, in elements; false of one without a page, which is zero.
struct KeyPlace {
    bool is_there;
    int64_t k, v;
};
__device__ inline KeyPlace place_of(const AttentionShape& s, const Paged& pages, const SplitBlock& own, int64_t key, int64_t position) {
    if (pages.table == nullptr) return {true, s.k.at(own.front, key, own.kv_head), s.v.at(own.front, key, own.kv_head)};
    const int64_t row = pages.row_of(own.front, position);
    if (row < 0) return {false, 0, 0};
    return {true, row * s.k.token + own.kv_head * s.k.head, row * s.v.token + own.kv_head * s.v.head};
}

// Where results of a block go: to the output, or, of one of several parts, where `merge_splits` reads them.
template <typename O, typename A>
struct SplitResults {
    O* o;
    float* lse;
    A* parts;
    int64_t n_parts, n_rows;

    __device__ void put(const AttentionShape& s, const SplitBlock& own, const SplitRow& row, int64_t column, A x) const {
        if (n_parts == 1) o[s.o.at(own.front, row.row / s.heads % s.queries, row.head) + column] = narrow<O>(x);
        else parts[(own.part * n_rows + row.row) * s.value_width + column] = x;
    }
    __device__ void put_log(const AttentionShape& s, const SplitBlock& own, const SplitRow& row, A most, A total) const {
        const A log = total > 0 ? most + logarithm(total) : neg_infinity<A>();
        if (n_parts > 1) parts[n_parts * n_rows * s.value_width + own.part * n_rows + row.row] = log;
        else if (lse != nullptr) lse[row.row] = static_cast<float>(log);
    }
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
    const int lane = static_cast<int>(threadIdx.x) % by.lanes, team = static_cast<int>(threadIdx.x) / by.lanes;
    const int teams = kSplitThreads / by.lanes, warp = static_cast<int>(threadIdx.x) / 32;
    const int64_t column = static_cast<int64_t>(lane) * kColumns;
    const SplitResults<O, A> results{o, lse, parts, by.parts, s.front * s.queries * s.heads};
    const bool is_band = s.mask.strips == nullptr;

    for (int64_t block = blockIdx.x; block < n_blocks; block += gridDim.x) {
        __syncthreads();  // the block before has been read
        const SplitBlock of_block = split_block<kRows>(s, by, block, shared.rows);
        A query[kRows][kColumns], sum[kRows][kColumns], row_max[kRows], weights[kRows];
        ITHACA_UNROLL
        for (int r = 0; r < kRows; ++r) {
            const SplitRow own = shared.rows[r];
            const bool is_there = own.row >= 0;
            const int64_t at_query = is_there ? s.q.at(of_block.front, own.row / s.heads % s.queries, own.head) : 0;
            const auto columns = columns_of(q + at_query, column, s.width, is_there, false);
            row_max[r] = neg_infinity<A>();
            weights[r] = 0;
            ITHACA_UNROLL
            for (int c = 0; c < kColumns; ++c) {
                query[r][c] = widen(columns.at[c]);
                sum[r][c] = 0;
            }
        }

        for (int64_t base = of_block.start; base < of_block.end; base += kAhead * teams) {
            Pack<T, kColumns> keys[kAhead], values[kAhead];
            int64_t at_key[kAhead];
            uint32_t seen = 0;  // a bit for each row and key
            ITHACA_UNROLL
            for (int u = 0; u < kAhead; ++u) {
                const int64_t key = base + u * teams + team;
                bool any = false;
                at_key[u] = position_in(s, of_block, key);
                ITHACA_UNROLL
                for (int r = 0; r < kRows; ++r) {
                    const SplitRow& of = shared.rows[r];
                    bool own = at_key[u] >= 0 && at_key[u] >= of.first && at_key[u] < of.last;
                    if (own && !is_band) own = sees(s.mask, of.position, at_key[u]);
                    seen |= static_cast<uint32_t>(own) << (u * kRows + r);
                    any = any || own;
                }
                // A key that no row sees is not read: its memory may hold NaN.
                const KeyPlace place = any ? place_of(s, pages, of_block, key, at_key[u]) : KeyPlace{};
                keys[u] = columns_of(k + place.k, column, s.width, place.is_there, by.is_wide);
                values[u] = columns_of(v + place.v, column, s.value_width, place.is_there, by.is_wide);
            }
            ITHACA_UNROLL
            for (int r = 0; r < kRows; ++r) {
                A score[kAhead], most = row_max[r];
                ITHACA_UNROLL
                for (int u = 0; u < kAhead; ++u) {
                    A product = 0;
                    ITHACA_UNROLL
                    for (int c = 0; c < kColumns; ++c) product += query[r][c] * widen(keys[u].at[c]);
                    for (int bits = by.lanes / 2; bits > 0; bits /= 2) product += warp::other_lane(product, bits);
                    const bool own = seen >> (u * kRows + r) & 1;
                    score[u] = own ? scored(s, product, shared.rows[r].head, shared.rows[r].position, at_key[u]).value : neg_infinity<A>();
                    if (score[u] > most) most = score[u];
                }
                if (most == neg_infinity<A>()) continue;
                const A shrink = share(row_max[r], most);
                row_max[r] = most;
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
            A most = row_max[r];
            for (int bits = by.lanes; bits < 32; bits *= 2) {
                const A other = warp::other_lane(most, bits);
                if (other > most) most = other;
            }
            const A shrink = share(row_max[r], most);
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
                shared.warps.row_max[warp] = most;
                shared.warps.weights[warp] = weight;
            }
            __syncthreads();
            const SplitRow own = shared.rows[r];
            if (own.row < 0) continue;
            const A all = shared.warps.most(), total = shared.warps.total(all), inverse = total > 0 ? A(1) / total : A(0);
            for (int64_t c = threadIdx.x; c < s.value_width; c += kSplitThreads) {
                A x = 0;
                for (int w = 0; w < kSplitWarps; ++w) x += shared.sums[w][c] * share(shared.warps.row_max[w], all);
                results.put(s, of_block, own, c, x * inverse);
            }
            if (threadIdx.x == 0) results.put_log(s, of_block, own, all, total);
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
        const auto log = [&](int64_t p) { return logs[p * n_rows + at.quotient]; };
        A most = neg_infinity<A>(), total = 0, sum = 0;
        for (int64_t p = 0; p < n_parts; ++p) most = log(p) > most ? log(p) : most;
        for (int64_t p = 0; p < n_parts; ++p) {
            const A weight = share(log(p), most);
            total += weight;
            sum += weight * parts[p * n + i];
        }
        o[s.o.at(token.quotient, token.remainder, row.remainder) + at.remainder] = narrow<O>(total > 0 ? sum / total : A(0));
        if (lse != nullptr && at.remainder == 0) lse[at.quotient] = static_cast<float>(total > 0 ? most + logarithm(total) : most);
    }
}

}  // namespace ithaca::kernel
