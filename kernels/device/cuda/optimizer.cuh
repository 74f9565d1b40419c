// Steps of an optimizer, a thread for each element (AdamW: Loshchilov and Hutter, arXiv 1711.05101, algorithm 2).
#pragma once

#include "numeric.cuh"

namespace ithaca::kernel {

struct AdamW {
    double lr, beta1, beta2, eps, weight_decay;
};

// `step` and `clip` are scalars. Results may lie where weights and moments do.
template <typename T>
__global__ void adamw(AdamW c, const T* w, Reals g, const T* m, const T* v, Reals step, Reals clip, T* zw, T* zm, T* zv, int64_t n) {
    using A = Acc<T>;
    const double steps = step[0];
    const A bias1 = static_cast<A>(1 - pow(c.beta1, steps)), bias2 = static_cast<A>(sqrt(1 - pow(c.beta2, steps)));
    ITHACA_FOR(i, n) {
        const A gradient = static_cast<A>(g[i]) * static_cast<A>(clip[0]);
        const A first = static_cast<A>(c.beta1) * widen(m[i]) + static_cast<A>(1 - c.beta1) * gradient;
        const A second = static_cast<A>(c.beta2) * widen(v[i]) + static_cast<A>(1 - c.beta2) * gradient * gradient;
        const A kept = widen(w[i]) * static_cast<A>(1 - c.lr * c.weight_decay);
        const A root = square_root(second) / bias2 + static_cast<A>(c.eps);
        zw[i] = narrow<T>(kept - static_cast<A>(c.lr) * (first / bias1) / root);
        zm[i] = narrow<T>(first);
        zv[i] = narrow<T>(second);
    }
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
