// Rotary position embedding: elements of the first `width` turn in pairs.
#pragma once

#include "pack.cuh"

namespace ithaca::kernel {

// The cosine and the sine of an angle. A position of 10^5 times a frequency leaves an f32 too few digits, so the angle is taken in
// f64; within an eighth of a turn of an axis single precision is enough.
__device__ inline void turn(double angle, double& cosine, double& sine) { cosine = cos(angle), sine = sin(angle); }
__device__ inline void turn(double angle, float& cosine, float& sine) {
    constexpr double kQuarter = 1.5707963267948966;
    const double quarters = rint(angle * (1 / kQuarter));
    const float rest = static_cast<float>(angle - quarters * kQuarter), c = cosf(rest), s = sinf(rest);
    const int quadrant = static_cast<int>(static_cast<int64_t>(quarters) & 3);
    cosine = quadrant == 0 ? c : quadrant == 1 ? -s : quadrant == 2 ? -c : s;
    sine = quadrant == 0 ? s : quadrant == 1 ? c : quadrant == 2 ? -s : -c;
}

// Cosines and sines.
template <int kN, typename A>
struct Angles {
    A c[kN] = {}, s[kN] = {};
};

// Those of kN pairs at a position, times `amplitude`; the first has the first of the frequencies.
template <int kN, typename A>
__device__ inline Angles<kN, A> angles_at(int64_t position, const double* frequencies, double amplitude) {
    Angles<kN, A> by;
    ITHACA_UNROLL
    for (int k = 0; k < kN; ++k) {
        turn(static_cast<double>(position) * frequencies[k], by.c[k], by.s[k]);
        by.c[k] *= static_cast<A>(amplitude), by.s[k] *= static_cast<A>(amplitude);
    }
    return by;
}

// Rotates kN of the `half` pairs of a row from `slot` on; with a `slot` behind the pairs copies as many elements behind them.
// The elements of pair i are i and `apart` further, or 2 i and the next where they are 1 apart.
template <int kN, typename T>
__device__ inline void rotate(const T* from, T* to, int64_t slot, int64_t half, int64_t apart, int64_t stride,
                              const Angles<kN, Acc<T>>& by) {
    using A = Acc<T>;
    if (slot >= half) return store(to, slot + half, stride, load<kN>(from, slot + half, stride));
    const int64_t first = apart == 1 ? 2 * slot : slot, second = apart == 1 ? first + kN : first + apart;
    Pack<A, kN> of[2] = {load<kN>(from, first, stride), load<kN>(from, second, stride)};
    const auto pair = [&](A& a, A& b, int k) {
        const A before = a;
        a = before * by.c[k] - b * by.s[k];
        b = b * by.c[k] + before * by.s[k];
    };
    if (apart == 1) {
        ITHACA_UNROLL
        for (int k = 0; k < kN; ++k) pair(of[2 * k / kN].at[2 * k % kN], of[(2 * k + 1) / kN].at[(2 * k + 1) % kN], k);
    } else {
        ITHACA_UNROLL
        for (int k = 0; k < kN; ++k) pair(of[0].at[k], of[1].at[k], k);
    }
    store(to, first, stride, of[0]);
    store(to, second, stride, of[1]);
}

// Rows are all dimensions of x but the rotated one. `turned` goes over those dimensions that have positions, `alike` over the
// others, whose rows turn alike: tensor 0 is x, tensor 1 the positions, tensor 2 the result, which may have its rows
// elsewhere. A thread takes some pairs, or as many elements behind `width`, which pass through, of `each` rows that turn
// alike.
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
            Angles<kN, A> by;
            if (slot < half) by = angles_at<kN, A>(positions[at[1]], frequencies + slot, amplitude);
            for (int64_t j = start; j < start + each && j < n_alike; ++j) {
                alike.at(j, along);
                rotate<kN>(x + at[0] + along[0], z + at[2] + along[2], slot, half, apart, stride, by);
            }
        }
    });
}

}  // namespace ithaca::kernel
