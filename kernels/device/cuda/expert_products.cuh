// Products of the slots of experts with their weights where an expert has few slots, as in decoding: bound by the bytes of the weights,
// of which only those of experts with a filled slot are read. For rows of 16-bit elements in packs of eight.
//
// A block takes 16 slots and 64 columns. Its warps share the sum: each takes every eighth chunk of it, and their sums are added in
// order. Lanes read weights from memory as the operands of a product lie in registers; the terms of a sum, and columns, may come in
// any order.
#pragma once

#include "rows.cuh"
#include "tensor_core.cuh"

namespace ithaca::kernel {

constexpr int kExpertThreads = 256, kExpertWarps = kExpertThreads / 32, kExpertRows = 16, kExpertColumns = 64;

// A product for each expert, z[row, column] = sum over i of x[row, i] y[column, i]. Elements between experts, rows and columns; between
// neighbours in a row, and in a column of y if not in its rows, there is one.
struct ExpertProducts {
    int64_t rows, columns, inner;
    int64_t x_expert, x_row, y_expert, y_step, z_expert, z_row;
};

// Whether each warp has found an element that is not zero; the sums of warps. Four columns more, so that rows are in different banks.
struct ExpertShared {
    uint32_t found[kExpertWarps];
    float sums[kExpertWarps][kExpertRows][kExpertColumns + 4];
};

// Whether any of the rows has an element that is not zero, the same for all threads. Slots are filled from the front, so the
// first elements mostly tell.
template <typename T>
__device__ inline bool is_filled(ExpertShared& shared, const T* x, int64_t rows, int64_t row_step, int64_t width) {
    constexpr int kAhead = 4;
    const int64_t of_row = width / 8, packs = rows * of_row;
    for (int64_t base = 0; base < packs; base += kAhead * kExpertThreads) {
        uint32_t bits = 0;
        ITHACA_UNROLL
        for (int u = 0; u < kAhead; ++u) {
            const int64_t i = base + u * kExpertThreads + static_cast<int64_t>(threadIdx.x);
            const EightElements pack = eight_of(x + i / of_row * row_step, i % of_row * 8, width, i < packs);
            bits |= pack.words[0] | pack.words[1] | pack.words[2] | pack.words[3];
        }
        const uint32_t votes = warp::ballot(bits != 0);
        __syncthreads();  // the votes before have been read
        if (threadIdx.x % 32 == 0) shared.found[threadIdx.x / 32] = votes;
        __syncthreads();
        for (int w = 0; w < kExpertWarps; ++w)
            if (shared.found[w] != 0) return true;
    }
    return false;
}

// kInRows: the elements of a row of y, which the sum goes over, are neighbours and its rows y_step apart; otherwise columns are
// neighbours.
template <typename T, bool kInRows>
__launch_bounds__(kExpertThreads, 2) __global__ void expert_products(const T* __restrict__ x, const T* __restrict__ y, T* __restrict__ z,
                                                                  ExpertProducts s, int64_t n_blocks) {
    using Element = warp::Element<T>;
    // Elements of a sum that a warp takes at a time; 16 of them are one product of tensor cores.
    constexpr int kChunk = kInRows ? 32 : 64, kTiles = kExpertColumns / 8;
    ITHACA_SHARED(memory);
    auto& shared = *reinterpret_cast<ExpertShared*>(memory);
    const int warp = static_cast<int>(threadIdx.x) / 32, group = static_cast<int>(threadIdx.x) % 32 / 4, place = static_cast<int>(threadIdx.x) % 4;
    const int64_t row_blocks = (s.rows + kExpertRows - 1) / kExpertRows, strips = (s.columns + kExpertColumns - 1) / kExpertColumns;

    for (int64_t block = blockIdx.x; block < n_blocks; block += gridDim.x) {
        const int64_t expert = block / row_blocks / strips, column = block / row_blocks % strips * kExpertColumns;
        const int64_t row = block % row_blocks * kExpertRows, rows = s.rows - row < kExpertRows ? s.rows - row : kExpertRows;
        const T* const own_x = x + expert * s.x_expert + row * s.x_row;
        const T* const own_y = y + expert * s.y_expert;
        T* const own_z = z + expert * s.z_expert + row * s.z_row;
        const bool is_read = is_filled(shared, own_x, rows, s.x_row, s.inner);

        float sum[kTiles][4] = {};
        const bool has_upper = group < rows, has_lower = group + 8 < rows;
        for (int64_t from = is_read ? warp * kChunk : s.inner; from < s.inner; from += kExpertWarps * kChunk) {
            if constexpr (kInRows) {
                EightElements of_y[kTiles];
                ITHACA_UNROLL
                for (int n = 0; n < kTiles; ++n) {
                    const int64_t at = column + 8 * n + group;
                    of_y[n] = eight_of(own_y + at * s.y_step, from + 8 * place, s.inner, at < s.columns);
                }
                const EightElements upper = eight_of(own_x + group * s.x_row, from + 8 * place, s.inner, has_upper);
                const EightElements lower = eight_of(own_x + (group + 8) * s.x_row, from + 8 * place, s.inner, has_lower);
                ITHACA_UNROLL
                for (int half = 0; half < 4; half += 2) {
                    const uint32_t of_x[4] = {upper.words[half], lower.words[half], upper.words[half + 1], lower.words[half + 1]};
                    ITHACA_UNROLL
                    for (int n = 0; n < kTiles; ++n) Element::multiply(sum[n], of_x, of_y[n].words[half], of_y[n].words[half + 1]);
                }
            } else {
                ITHACA_UNROLL
                for (int part = 0; part < 2; ++part) {
                    const int64_t at = from + 16 * place + 8 * part;
                    const EightElements upper = eight_of(own_x + group * s.x_row, at, s.inner, has_upper);
                    const EightElements lower = eight_of(own_x + (group + 8) * s.x_row, at, s.inner, has_lower);
                    EightElements of_y[8];
                    ITHACA_UNROLL
                    for (int i = 0; i < 8; ++i)
                        of_y[i] = eight_of(own_y + (at + i) * s.y_step, column + 8 * group, s.columns, at + i < s.inner);
                    ITHACA_UNROLL
                    for (int half = 0; half < 4; half += 2) {
                        const uint32_t of_x[4] = {upper.words[half], lower.words[half], upper.words[half + 1], lower.words[half + 1]};
                        const EightElements* const four = of_y + 2 * half;
                        ITHACA_UNROLL
                        for (int w = 0; w < 4; ++w) {
                            Element::multiply(sum[2 * w], of_x, lower_halves(four[0].words[w], four[1].words[w]),
                                              lower_halves(four[2].words[w], four[3].words[w]));
                            Element::multiply(sum[2 * w + 1], of_x, upper_halves(four[0].words[w], four[1].words[w]),
                                              upper_halves(four[2].words[w], four[3].words[w]));
                        }
                    }
                }
            }
        }

        // Of tile n a lane has two sums of each of its rows: of neighbouring columns, or of columns eight apart.
        ITHACA_UNROLL
        for (int n = 0; n < kTiles; ++n)
            ITHACA_UNROLL
            for (int i = 0; i < 4; ++i) {
                const int at = kInRows ? 8 * n + 2 * place + i % 2 : 8 * (2 * place + i % 2) + n;
                shared.sums[warp][group + i / 2 * 8][at] = sum[n][i];
            }
        __syncthreads();
        for (int i = static_cast<int>(threadIdx.x); i < kExpertRows * kExpertColumns; i += kExpertThreads) {
            const int r = i / kExpertColumns, c = i % kExpertColumns;
            if (r >= rows || column + c >= s.columns) continue;
            float all = 0;
            for (int w = 0; w < kExpertWarps; ++w) all += shared.sums[w][r][c];
            own_z[r * s.z_row + column + c] = narrow<T>(all);
        }
        __syncthreads();  // before the sums of another block are written
    }
}

}  // namespace ithaca::kernel
