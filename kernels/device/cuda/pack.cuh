// Neighbours in memory that are read and written at once: packs of 16 bytes where all tensors start at multiples of 16.
#pragma once

#include "numeric.cuh"

namespace ithaca {

template <typename T, int kN>
struct alignas(sizeof(T) * kN < 16 ? sizeof(T) * kN : 16) Pack {
    T at[kN];
};

// Eight elements of 16 bits, from an even column on, two in each word; zeros behind the end of a row.
struct alignas(16) EightElements {
    uint32_t words[4];
};
template <typename T>
__device__ inline EightElements eight_of(const T* row, int64_t from, int64_t width, bool is_there) {
    return is_there && from < width ? *reinterpret_cast<const EightElements*>(row + from) : EightElements{};
}

// Of two words the lower halves, or the upper ones, the first below.
__device__ inline uint32_t lower_halves(uint32_t x, uint32_t y) { return (x & 0xFFFFu) | y << 16; }
__device__ inline uint32_t upper_halves(uint32_t x, uint32_t y) { return x >> 16 | (y & 0xFFFF0000u); }

// Elements of 16 bytes.
template <typename T>
constexpr int kWide = static_cast<int>(16 / sizeof(T));

template <int kN>
struct Size {
    static constexpr int value = kN;
};

template <int kN, typename T>
__device__ inline Pack<Acc<T>, kN> load(const T* from) {
    const Pack<T, kN> stored = *reinterpret_cast<const Pack<T, kN>*>(from);
    Pack<Acc<T>, kN> x;
    ITHACA_UNROLL
    for (int k = 0; k < kN; ++k) x.at[k] = widen(stored.at[k]);
    return x;
}

template <int kN, typename T, typename A>
__device__ inline void store(T* to, const Pack<A, kN>& x) {
    Pack<T, kN> stored;
    ITHACA_UNROLL
    for (int k = 0; k < kN; ++k) stored.at[k] = narrow<T>(x.at[k]);
    *reinterpret_cast<Pack<T, kN>*>(to) = stored;
}

// Whether all of these are multiples of 16; no tensor is one.
template <typename... T>
__device__ inline bool are_aligned(const T*... at) {
    return ((reinterpret_cast<uint64_t>(at) | ...) & 15) == 0;
}

// Calls body(size, i) for elements i .. i + size of n: for packs of kN where it `is_wide`, one by one for the rest.
template <int kN, typename Body>
__device__ inline void for_packs(int64_t n, bool is_wide, const Body& body) {
    const int64_t packs = is_wide ? n / kN : 0;
    ITHACA_FOR(i, packs) body(Size<kN>{}, i * kN);
    ITHACA_FOR(i, n - packs * kN) body(Size<1>{}, packs * kN + i);
}

// z = f(x, ...) for each element of dense tensors.
template <typename F, typename T, typename... X>
__device__ inline void map(int64_t n, const F& f, T* z, const X*... x) {
    constexpr int kN = kWide<T>;
    for_packs<kN>(n, are_aligned(z, x...), [&](auto size, int64_t i) {
        constexpr int kEach = decltype(size)::value;
        Pack<Acc<T>, kEach> out;
        const auto each = [&](const auto&... in) {
            ITHACA_UNROLL
            for (int k = 0; k < kEach; ++k) out.at[k] = f(in.at[k]...);
        };
        each(load<kEach>(x + i)...);
        store(z + i, out);
    });
}

// Calls body(size): packs of kN if it `is_wide`, else single elements.
template <int kN, typename Body>
__device__ inline void in_packs(bool is_wide, const Body& body) {
    if (is_wide) body(Size<kN>{});
    else body(Size<1>{});
}

// kN elements of a row from i on, which are `stride` apart: one, or neighbours.
template <int kN, typename T>
__device__ inline Pack<Acc<T>, kN> load(const T* row, int64_t i, int64_t stride) {
    return load<kN>(row + (kN == 1 ? i * stride : i));
}
template <int kN, typename T, typename A>
__device__ inline void store(T* row, int64_t i, int64_t stride, const Pack<A, kN>& x) {
    store(row + (kN == 1 ? i * stride : i), x);
}

}  // namespace ithaca
