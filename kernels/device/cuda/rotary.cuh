// Rotary position embedding: elements of the first `width` turn in pairs.
#pragma once

#include "pack.cuh"

namespace ithaca::kernel {

// Rows are all dimensions of x but the rotated one. `turned` goes over those dimensions that have positions, `alike` over the
// others, whose rows turn alike: tensor 0 is x, tensor 1 the positions, tensor 2 the result, which may have its rows
// elsewhere. A thread takes some pairs, or as many elements behind `width`, which pass through, of `each` rows that turn
// alike. The elements of pair i are i and `apart` further, or 2 i and the next where they are 1 apart. Angles are taken in
// f64, as a position of 10^5 times a frequency leaves an f32 too few digits.
template <typename T>
__global__ void rotary(const T* __restrict__ x, const int32_t* __restrict__ positions, const double* __restrict__ frequencies,
                       T* __restrict__ z, Walk<3> turned, Walk<3> alike, int64_t n_turned, int64_t n_alike, int64_t each,
                       int64_t extent, int64_t stride, int64_t width, int64_t apart, double amplitude) {
    using A = Acc<T>;
    constexpr int kPacks = kWide<T>;
    const int64_t half = width / 2, slots = extent - half, chunks = (n_alike + each - 1) / each;
    const bool is_wide = stride == 1 && half % kPacks == 0 && slots % kPacks == 0 && are_aligned(x, z) &&
                         turned.is_multiple(0, kPacks) && turned.is_multiple(2, kPacks) && alike.is_multiple(0, kPacks) &&
                         alike.is_multiple(2, kPacks);
    in_packs<kPacks>(is_wide, [&](auto size) {
        constexpr int kN = decltype(size)::value;
        const int64_t packs = slots / kN;
        ITHACA_FOR(i, n_turned * chunks * packs) {
            const Division pack = divide(i, packs), row = divide(pack.quotient, chunks);
            const int64_t slot = pack.remainder * kN, start = row.remainder * each;
            int64_t at[3], along[3];
            turned.at(row.quotient, at);
            A c[kN] = {}, s[kN] = {};
            ITHACA_UNROLL
            for (int k = 0; k < kN && slot < half; ++k) {
                const double angle = positions[at[1]] * frequencies[slot + k];
                c[k] = static_cast<A>(cos(angle) * amplitude), s[k] = static_cast<A>(sin(angle) * amplitude);
            }
            const int64_t first = apart == 1 ? 2 * slot : slot, second = apart == 1 ? first + kN : first + apart;
            for (int64_t j = start; j < start + each && j < n_alike; ++j) {
                alike.at(j, along);
                const T* const from = x + at[0] + along[0];
                T* const to = z + at[2] + along[2];
                if (slot >= half) {
                    store(to, slot + half, stride, load<kN>(from, slot + half, stride));
                    continue;
                }
                Pack<A, kN> of[2] = {load<kN>(from, first, stride), load<kN>(from, second, stride)};
                const auto turn = [&](A& a, A& b, int k) {
                    const A before = a;
                    a = before * c[k] - b * s[k];
                    b = b * c[k] + before * s[k];
                };
                if (apart == 1) {
                    ITHACA_UNROLL
                    for (int k = 0; k < kN; ++k) turn(of[2 * k / kN].at[2 * k % kN], of[(2 * k + 1) / kN].at[(2 * k + 1) % kN], k);
                } else {
                    ITHACA_UNROLL
                    for (int k = 0; k < kN; ++k) turn(of[0].at[k], of[1].at[k], k);
                }
                store(to, first, stride, of[0]);
                store(to, second, stride, of[1]);
            }
        }
    });
}

}  // namespace ithaca::kernel
