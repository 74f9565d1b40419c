// What joins parts of an attention, each an output o [rows, width] and the logarithms lse [rows] of its sums of
// exponentials. A part of no keys is o = 0 and lse = minus infinity; what is merged with it stays as it was.
#pragma once

#include "numeric.cuh"

namespace ithaca::kernel {

// A thread takes an element of o; that of the first column writes lse.
template <typename T, typename L>
__global__ void merge(const T* o, const L* lse, const T* more_o, const L* more_lse, T* z, L* z_lse, int64_t width, int64_t n) {
    using A = Acc<L>;
    ITHACA_FOR(i, n) {
        const int64_t row = i / width;
        const A first = widen(lse[row]), second = widen(more_lse[row]), all = log_add_exp(first, second);
        z[i] = narrow<T>(share(first, all) * widen(o[i]) + share(second, all) * widen(more_o[i]));
        if (i % width == 0) z_lse[row] = narrow<L>(all);
    }
}

// The parts along the first of the dimensions [parts, rows, width].
template <typename T, typename L>
__global__ void merge_parts(const T* o, const L* lse, T* z, L* z_lse, int64_t parts, int64_t width, int64_t n) {
    using A = Acc<L>;
    const int64_t rows = n / width;
    ITHACA_FOR(i, n) {
        const int64_t row = i / width;
        A all = nothing<A>();
        for (int64_t p = 0; p < parts; ++p) all = log_add_exp(all, static_cast<A>(widen(lse[p * rows + row])));
        Acc<T> sum = 0;
        for (int64_t p = 0; p < parts; ++p)
            sum += static_cast<Acc<T>>(share(static_cast<A>(widen(lse[p * rows + row])), all)) * widen(o[p * n + i]);
        z[i] = narrow<T>(sum);
        if (i % width == 0) z_lse[row] = narrow<L>(all);
    }
}

// A logit for each head enters the denominator; the walk goes over rows and says where the logit of a row is.
template <typename T, typename L>
__global__ void sink(const T* o, const L* lse, Reals logits, T* z, L* z_lse, Walk<1> logit_of, int64_t width, int64_t n) {
    using A = Acc<L>;
    ITHACA_FOR(i, n) {
        const int64_t row = i / width;
        int64_t at[1];
        logit_of.at(row, at);
        const A before = widen(lse[row]), all = log_add_exp(before, static_cast<A>(logits[at[0]]));
        z[i] = narrow<T>(share(before, all) * widen(o[i]));
        if (i % width == 0) z_lse[row] = narrow<L>(all);
    }
}

}  // namespace ithaca::kernel
