// Steps of an optimizer (AdamW: Loshchilov and Hutter, arXiv 1711.05101, algorithm 2).
#pragma once

#include "pack.cuh"

namespace ithaca::kernel {

struct AdamW {
    double lr, beta1, beta2, eps, weight_decay;
};

// `step` and `clip` are scalars. Results may lie where weights and moments do.
template <typename T, typename G>
__global__ void adamw(AdamW c, const T* w, const G* g, const T* m, const T* v, Reals step, Reals clip, T* zw, T* zm, T* zv,
                      int64_t n) {
    using A = Acc<T>;
    const double steps = step[0];
    const A bias1 = static_cast<A>(1 - pow(c.beta1, steps)), bias2 = static_cast<A>(sqrt(1 - pow(c.beta2, steps)));
    const A factor = static_cast<A>(clip[0]), decay = static_cast<A>(1 - c.lr * c.weight_decay), lr = static_cast<A>(c.lr);
    for_packs<kWide<T>>(n, are_aligned(w, g, m, v, zw, zm, zv), [&](auto size, int64_t i) {
        constexpr int kN = decltype(size)::value;
        auto weight = load<kN>(w + i), first = load<kN>(m + i), second = load<kN>(v + i);
        const auto gradients = load<kN>(g + i);
        ITHACA_UNROLL
        for (int k = 0; k < kN; ++k) {
            const A gradient = static_cast<A>(gradients.at[k]) * factor;
            first.at[k] = static_cast<A>(c.beta1) * first.at[k] + static_cast<A>(1 - c.beta1) * gradient;
            second.at[k] = static_cast<A>(c.beta2) * second.at[k] + static_cast<A>(1 - c.beta2) * gradient * gradient;
            const A root = square_root(second.at[k]) / bias2 + static_cast<A>(c.eps);
            weight.at[k] = weight.at[k] * decay - lr * (first.at[k] / bias1) / root;
        }
        store(zw + i, weight);
        store(zm + i, first);
        store(zv + i, second);
    });
}

// min(1, max_norm / (sqrt(squares) + 1e-6)).
template <typename T>
__global__ void clip_factor(double max_norm, const T* squares, T* z, int64_t n) {
    using A = Acc<T>;
    ITHACA_FOR(i, n) {
        const A factor = static_cast<A>(max_norm) / (square_root(static_cast<A>(widen(squares[i]))) + A(1e-6));
        z[i] = narrow<T>(factor > A(1) ? A(1) : factor);
    }
}

}  // namespace ithaca::kernel
