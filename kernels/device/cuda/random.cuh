// Numbers drawn at random: what is drawn for an element follows from a key, a seed and the element's positions, so that
// every rank and every layout draws the same. A thread takes an element.
#pragma once

#include "pack.cuh"
#include "sequence.cuh"

namespace ithaca::kernel {

// The finaliser of splitmix64 (Steele, Lea and Flood, 2014) over one more word.
__device__ inline uint64_t mix(uint64_t state, uint64_t word) {
    uint64_t x = (state ^ word) + 0x9E3779B97F4A7C15u;
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
    x = (x ^ x >> 27) * 0x94D049BB133111EBu;
    return x ^ x >> 31;
}

// Whether what was drawn lies in a share of all that can be.
__device__ inline bool is_below(uint64_t drawn, double rate) {
    return static_cast<double>(drawn >> 11) < rate * 9007199254740992.0;
}

// A key has 30 bits.
__device__ inline int32_t key_of(uint64_t drawn) { return static_cast<int32_t>(drawn >> 34); }

__device__ inline int32_t folded(int32_t key, int64_t number) {
    return key_of(mix(mix(0, static_cast<uint32_t>(key)), static_cast<uint64_t>(number)));
}

// The state from which what belongs to a key and a seed is drawn, position after position.
__device__ inline uint64_t drawn_from(int32_t key, uint64_t seed) { return mix(seed, static_cast<uint32_t>(key)); }

__global__ void first_key(uint64_t seed, int32_t* z, int64_t n) {
    ITHACA_FOR(i, n) { z[i] = key_of(mix(0, seed)); }
}

__global__ void fold_in(const int32_t* key, const int32_t* number, int32_t* z, int64_t n) {
    ITHACA_FOR(i, n) { z[i] = folded(key[i], number[i]); }
}

__global__ void fold_in_real(const int32_t* key, Reals number, int32_t* z, int64_t n) {
    ITHACA_FOR(i, n) { z[i] = folded(key[i], llround(number[i])); }
}

__global__ void layer_key(const int32_t* key, int64_t layer, int32_t* z, int64_t n) {
    ITHACA_FOR(i, n) { z[i] = folded(key[i], layer); }
}

// The dimensions of a tensor, outermost first, with the positions that a rank holds of each.
struct Places {
    int n = 0;
    int64_t extent[kMaxDims] = {}, stride[kMaxDims] = {};
    Sequence positions[kMaxDims] = {};
};

__global__ void dropout_mask(const int32_t* key, uint64_t seed, double rate, Places places, uint8_t* z, int64_t n) {
    ITHACA_FOR(i, n) {
        uint64_t state = drawn_from(key[0], seed);
        for (int d = 0; d < places.n; ++d) {
            const int64_t at = divide(divide(i, places.stride[d]).quotient, places.extent[d]).remainder;
            state = mix(state, static_cast<uint64_t>(position_of(places.positions[d], at)));
        }
        z[i] = is_below(state, rate) ? 0 : 1;
    }
}

template <typename T>
__global__ void dropout(const T* x, const uint8_t* mask, T* z, double factor, int64_t n) {
    constexpr int kN = kWide<T>;
    const bool is_wide = are_aligned(x, z) && reinterpret_cast<uint64_t>(mask) % kN == 0;
    for_packs<kN>(n, is_wide, [&](auto size, int64_t i) {
        constexpr int kEach = decltype(size)::value;
        const auto kept = *reinterpret_cast<const Pack<uint8_t, kEach>*>(mask + i);
        auto out = load<kEach>(x + i);
        ITHACA_UNROLL
        for (int k = 0; k < kEach; ++k) out.at[k] = kept.at[k] ? out.at[k] * static_cast<Acc<T>>(factor) : Acc<T>(0);
        store(z + i, out);
    });
}

}  // namespace ithaca::kernel
