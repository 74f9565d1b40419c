// Attention of few queries over many keys, as `split_attention.cuh` splits it, by products of tensor cores: for rows of 16-bit
// elements in packs of eight, and masks that are bands.
//
// A warp takes 16 keys at a time. Its lanes read keys and values from memory as the operands of a product lie in registers, so nothing
// goes through shared memory: sums over the columns of a key may take them in any order, and columns of values may come in any order.
#pragma once

#include "split_attention.cuh"
#include "tensor_core.cuh"

namespace ithaca::kernel {

constexpr int kTileKeys = 16;

// A key of a tile: its position, and where it and its value begin, in elements; negative where they are not read.
struct TileKey {
    int64_t position, k, v;
};

// Shared memory, behind the numbers by which teams sum: the block's rows; for each of them the exponents, weights and sums of warps.
template <int kRows, int kWidth>
struct SplitTiles {
    double of_teams[kSplitWarps];
    SplitRow rows[kRows];
    OfWarps<float> warps[kRows];
    // Four columns more, so that the rows of a warp are in different banks.
    float sums[kSplitWarps][kRows][kWidth + 4];
};

// Rows and columns are padded: kRows is 8 or 16, kWidth a multiple of 64.
template <typename T, typename O, int kRows, int kWidth>
__launch_bounds__(kSplitThreads, kRows == 8 && kWidth <= 128 ? 3 : 2) __global__ void split_products(const T* __restrict__ q, const T* __restrict__ k,
                                                                const T* __restrict__ v, O* __restrict__ o, float* __restrict__ lse,
                                                                float* __restrict__ parts, AttentionShape s, Splitting by, Paged pages,
                                                                int64_t n_blocks) {
    using Element = warp::Element<T>;
    // Rows l / 4 and l / 4 + 8 are those of lane l; chunks of 32 columns of keys, and of 64 columns of values.
    constexpr int kHalves = kRows / 8, kKeyChunks = kWidth / 32, kValueChunks = kWidth / 64;
    ITHACA_SHARED(memory);
    auto& shared = *reinterpret_cast<SplitTiles<kRows, kWidth>*>(memory);
    const int warp = static_cast<int>(threadIdx.x) / 32, group = static_cast<int>(threadIdx.x) % 32 / 4, place = static_cast<int>(threadIdx.x) % 4;
    const bool is_plain = !(s.softcap > 0) && s.bias.bounds == nullptr;
    const float scale = static_cast<float>(s.scale);
    const SplitResults<O, float> results{o, lse, parts, by.parts, s.front * s.queries * s.heads};

    for (int64_t block = blockIdx.x; block < n_blocks; block += gridDim.x) {
        __syncthreads();  // the block before has been read
        const SplitBlock of_block = split_block<kRows>(s, by, block, shared.rows);
        // Keys outside of the range that all rows together see are not read: their memory may hold NaN.
        int64_t first = s.valid_keys, last = 0;  // of positions
        ITHACA_UNROLL_BY(1)
        for (int r = 0; r < kRows; ++r) {
            const SplitRow& row = shared.rows[r];
            if (row.row < 0) continue;
            first = row.first < 0 ? 0 : row.first < first ? row.first : first;
            last = row.last > last ? row.last : last;
        }
        SplitRow own[kHalves];
        EightElements query[kHalves][kKeyChunks];
        float sum[8 * kValueChunks][2 * kHalves] = {}, row_max[kHalves], weights[kHalves];
        ITHACA_UNROLL
        for (int h = 0; h < kHalves; ++h) {
            own[h] = shared.rows[group + 8 * h];
            const bool is_there = own[h].row >= 0;
            const int64_t at_query = is_there ? s.q.at(of_block.front, own[h].row / s.heads % s.queries, own[h].head) : 0;
            ITHACA_UNROLL
            for (int j = 0; j < kKeyChunks; ++j) {
                const auto columns = columns_of(q + at_query, 32 * j + 8 * place, s.width, is_there, false);
                query[h][j] = *reinterpret_cast<const EightElements*>(&columns);
            }
            row_max[h] = neg_infinity<float>();
            weights[h] = 0;
        }

        // Each lane, of which there are two for a key, finds its own of a tile.
        const auto find = [&](int64_t base) {
            const int64_t key = base + warp * kTileKeys + static_cast<int>(threadIdx.x) % kTileKeys;
            TileKey found{position_in(s, of_block, key), -1, -1};
            if (found.position < first || found.position >= last) return found;
            const KeyPlace at = place_of(s, pages, of_block, key, found.position);
            return at.is_there ? TileKey{found.position, at.k, at.v} : found;
        };
        TileKey next = find(of_block.start);
        for (int64_t base = of_block.start; base < of_block.end; base += kSplitWarps * kTileKeys) {
            const TileKey now = next;
            EightElements keys[2][kKeyChunks], values[4][kValueChunks];
            int64_t positions[4];
            ITHACA_UNROLL
            for (int n = 0; n < 2; ++n) {
                const int64_t at = warp::from_lane(now.k, 8 * n + group);
                ITHACA_UNROLL
                for (int j = 0; j < kKeyChunks; ++j) keys[n][j] = eight_of(k + at, 32 * j + 8 * place, s.width, at >= 0);
            }
            ITHACA_UNROLL
            for (int u = 0; u < 4; ++u) {
                const int key = 8 * (u / 2) + 2 * place + u % 2;
                const int64_t at = warp::from_lane(now.v, key);
                positions[u] = warp::from_lane(now.position, key);
                ITHACA_UNROLL
                for (int i = 0; i < kValueChunks; ++i) values[u][i] = eight_of(v + at, 64 * i + 8 * group, s.value_width, at >= 0);
            }
            // While these are on their way.
            next = find(base + kSplitWarps * kTileKeys);

            float scores[2][4] = {};
            ITHACA_UNROLL
            for (int j = 0; j < kKeyChunks; ++j)
                ITHACA_UNROLL
                for (int half = 0; half < 4; half += 2) {
                    const uint32_t of_rows[4] = {query[0][j].words[half], kHalves > 1 ? query[kHalves - 1][j].words[half] : 0,
                                                 query[0][j].words[half + 1], kHalves > 1 ? query[kHalves - 1][j].words[half + 1] : 0};
                    ITHACA_UNROLL
                    for (int n = 0; n < 2; ++n) Element::multiply(scores[n], of_rows, keys[n][j].words[half], keys[n][j].words[half + 1]);
                }

            uint32_t of_keys[4] = {};
            ITHACA_UNROLL
            for (int h = 0; h < kHalves; ++h) {
                float x[4], most = row_max[h];
                ITHACA_UNROLL
                for (int u = 0; u < 4; ++u) {
                    x[u] = scores[u / 2][2 * h + u % 2];
                    x[u] = is_plain ? x[u] * scale : scored(s, x[u], own[h].head, own[h].position, positions[u]).value;
                    if (positions[u] < 0 || positions[u] < own[h].first || positions[u] >= own[h].last) x[u] = neg_infinity<float>();
                    most = x[u] > most ? x[u] : most;
                }
                for (int bits = 1; bits < 4; bits *= 2) {
                    const float other = warp::other_lane(most, bits);
                    most = other > most ? other : most;
                }
                const float from = most == neg_infinity<float>() ? 0.0f : most, shrink = share(row_max[h], from);
                row_max[h] = most;
                weights[h] *= shrink;
                ITHACA_UNROLL
                for (int u = 0; u < 4; ++u) {
                    x[u] = share(x[u], from);
                    weights[h] += x[u];
                }
                of_keys[h] = Element::pack(x[0], x[1]);
                of_keys[2 + h] = Element::pack(x[2], x[3]);
                if (shrink == 1.0f) continue;
                ITHACA_UNROLL
                for (int t = 0; t < 8 * kValueChunks; ++t) sum[t][2 * h] *= shrink, sum[t][2 * h + 1] *= shrink;
            }

            const auto add = [&](float (&to)[2 * kHalves], uint32_t b0, uint32_t b1) {
                float all[4] = {};
                ITHACA_UNROLL
                for (int x = 0; x < 2 * kHalves; ++x) all[x] = to[x];
                Element::multiply(all, of_keys, b0, b1);
                ITHACA_UNROLL
                for (int x = 0; x < 2 * kHalves; ++x) to[x] = all[x];
            };
            ITHACA_UNROLL
            for (int i = 0; i < kValueChunks; ++i)
                ITHACA_UNROLL
                for (int w = 0; w < 4; ++w) {
                    const uint32_t x[4] = {values[0][i].words[w], values[1][i].words[w], values[2][i].words[w], values[3][i].words[w]};
                    add(sum[8 * i + 2 * w], lower_halves(x[0], x[1]), lower_halves(x[2], x[3]));
                    add(sum[8 * i + 2 * w + 1], upper_halves(x[0], x[1]), upper_halves(x[2], x[3]));
                }
        }

        ITHACA_UNROLL
        for (int h = 0; h < kHalves; ++h) {
            const int row = group + 8 * h;
            for (int bits = 1; bits < 4; bits *= 2) weights[h] += warp::other_lane(weights[h], bits);
            if (place == 0) {
                shared.warps[row].row_max[warp] = row_max[h];
                shared.warps[row].weights[warp] = weights[h];
            }
            ITHACA_UNROLL
            for (int t = 0; t < 8 * kValueChunks; ++t) {
                float* const to = shared.sums[warp][row] + 64 * (t / 8) + 16 * place + t % 8;
                to[0] = sum[t][2 * h];
                to[8] = sum[t][2 * h + 1];
            }
        }
        __syncthreads();
        ITHACA_UNROLL_BY(1)
        for (int r = 0; r < kRows; ++r) {
            const SplitRow& row = shared.rows[r];
            if (row.row < 0) continue;
            const OfWarps<float>& warps = shared.warps[r];
            const float all = warps.most(), total = warps.total(all), inverse = total > 0 ? 1.0f / total : 0.0f;
            for (int64_t c = threadIdx.x; c < s.value_width; c += kSplitThreads) {
                float x = 0;
                for (int w = 0; w < kSplitWarps; ++w) x += shared.sums[w][r][c] * share(warps.row_max[w], all);
                results.put(s, of_block, row, c, x * inverse);
            }
            if (threadIdx.x == 0) results.put_log(s, of_block, row, all, total);
        }
    }
}

}  // namespace ithaca::kernel
