// Sums of products: to cuBLAS where the dimensions merge into a batched matrix product, else to the general kernel.
#pragma once

#include <cmath>

#include "kernels/einsum.cuh"
#include "launch.hpp"

namespace ithaca {

// A loop of an einsum: its extent, and its strides in x, y and z, zero where the tensor lacks it.
struct Loop {
    int64_t extent, x, y, z;
};

// Joins neighbouring loops that run over memory as one; loops of one step vanish.
inline std::vector<Loop> merged(const std::vector<Loop>& loops) {
    std::vector<Loop> out;
    for (const Loop& l : loops) {
        if (l.extent == 1) continue;
        if (!out.empty()) {
            Loop& last = out.back();
            if (last.x == l.x * l.extent && last.y == l.y * l.extent && last.z == l.z * l.extent) {
                last = {last.extent * l.extent, l.x, l.y, l.z};
                continue;
            }
        }
        out.push_back(l);
    }
    return out;
}

// A matrix in memory, column-major as cuBLAS sees it: element (row, column) when `row` and `column` are strides.
struct Matrix {
    cublasOperation_t op;
    int64_t leading;
};

// False when neither stride is one or a leading dimension does not fit.
inline bool as_matrix(int64_t rows, int64_t columns, int64_t row, int64_t column, Matrix& m) {
    if (row == 1 || rows == 1) {
        m = {CUBLAS_OP_N, columns == 1 ? rows : column};
        if (m.leading >= rows) return true;
    }
    if (column == 1 || columns == 1) {
        m = {CUBLAS_OP_T, rows == 1 ? columns : row};
        return m.leading >= columns;
    }
    return false;
}

inline bool fits_int(int64_t n) { return n >= 0 && n <= INT32_MAX; }

template <typename T>
struct BlasType;
template <>
struct BlasType<double> {
    static constexpr cudaDataType_t data = CUDA_R_64F;
    static constexpr cublasComputeType_t compute = CUBLAS_COMPUTE_64F;
};
template <>
struct BlasType<float> {
    static constexpr cudaDataType_t data = CUDA_R_32F;
    static constexpr cublasComputeType_t compute = CUBLAS_COMPUTE_32F;
};
template <>
struct BlasType<__half> {
    static constexpr cudaDataType_t data = CUDA_R_16F;
    static constexpr cublasComputeType_t compute = CUBLAS_COMPUTE_32F;
};
template <>
struct BlasType<__nv_bfloat16> {
    static constexpr cudaDataType_t data = CUDA_R_16BF;
    static constexpr cublasComputeType_t compute = CUBLAS_COMPUTE_32F;
};

// z[batch, m, n] = sum over k of x[batch, m, k] y[batch, k, n], when it is one of cuBLAS's products.
template <typename T>
bool matrix_product(const Device& device, Queue queue, const std::vector<Loop>& batch, Loop m, Loop n, Loop k,
                    const T* x, const T* y, T* z) {
    // cuBLAS writes columns: the loop with stride one in z takes their place.
    if (n.z != 1 && n.extent != 1) {
        if (m.z != 1 && m.extent != 1) return false;
        std::swap(x, y);
        std::swap(m, n);
        std::swap(m.x, m.y);
        std::swap(n.x, n.y);
        std::swap(k.x, k.y);
        std::vector<Loop> swapped = batch;
        for (Loop& l : swapped) std::swap(l.x, l.y);
        return matrix_product(device, queue, swapped, m, n, k, x, y, z);
    }
    Matrix a{}, b{}, c{};
    if (!as_matrix(n.extent, k.extent, n.y, k.y, a) || !as_matrix(k.extent, m.extent, k.x, m.x, b)) return false;
    if (!as_matrix(n.extent, m.extent, n.z, m.z, c) || c.op != CUBLAS_OP_N) return false;
    const Loop inner = batch.empty() ? Loop{1, 0, 0, 0} : batch.back();
    for (int64_t extent : {m.extent, n.extent, k.extent, a.leading, b.leading, c.leading, inner.extent})
        if (!fits_int(extent)) return false;

    // The innermost batch loop is cuBLAS's own; those around it are loops here.
    int64_t outer = 1;
    for (size_t d = 0; d + 1 < batch.size(); ++d) outer *= batch[d].extent;
    if (outer > 4096) return false;
    const Acc<T> one = 1, zero = 0;
    for (int64_t i = 0; i < outer; ++i) {
        int64_t rest = i, dx = 0, dy = 0, dz = 0;
        for (size_t d = batch.size() > 0 ? batch.size() - 1 : 0; d-- > 0; rest /= batch[d].extent) {
            const int64_t j = rest % batch[d].extent;
            dx += j * batch[d].x;
            dy += j * batch[d].y;
            dz += j * batch[d].z;
        }
        ITHACA_CUBLAS(cublasGemmStridedBatchedEx(
            device.blas(queue), a.op, b.op, static_cast<int>(n.extent), static_cast<int>(m.extent),
            static_cast<int>(k.extent), &one, y + dy, BlasType<T>::data, static_cast<int>(a.leading), inner.y, x + dx,
            BlasType<T>::data, static_cast<int>(b.leading), inner.x, &zero, z + dz, BlasType<T>::data,
            static_cast<int>(c.leading), inner.z, static_cast<int>(inner.extent), BlasType<T>::compute,
            CUBLAS_GEMM_DEFAULT));
    }
    return true;
}

template <int K>
void add_loop(Walk<K>& walk, const Loop& l) {
    const int64_t strides[3] = {l.x, l.y, l.z};
    walk.extent[walk.n] = l.extent;
    for (int k = 0; k < K; ++k) walk.stride[k][walk.n] = strides[k];
    ++walk.n;
}

inline void einsum(const Device& device, Queue queue, View x, View y, View z) {
    const Local lx(device, x.type), ly(device, y.type), lz(device, z.type);
    auto loops = [&](int dim, int64_t extent) {
        std::vector<Loop> out;
        for (const Leg<3>& leg : legs<3>(device, dim, extent, {&x, &y, &z}))
            out.push_back({leg.steps, leg.strides[0], leg.strides[1], leg.strides[2]});
        return out;
    };
    auto add = [](std::vector<Loop>& to, const std::vector<Loop>& more) { to.insert(to.end(), more.begin(), more.end()); };
    std::vector<Loop> batch, m, n, k, kept, summed;
    bool product = true;
    for (size_t d = 0; d < z.type.dims.size(); ++d) {
        const int dim = z.type.dims[d];
        const bool in_x = position(x.type, dim) >= 0, in_y = position(y.type, dim) >= 0;
        const std::vector<Loop> found = loops(dim, lz.extents[d]);
        add(kept, found);
        add(in_x && in_y ? batch : in_x ? m : n, found);
    }
    for (size_t d = 0; d < x.type.dims.size(); ++d) {
        const int dim = x.type.dims[d];
        if (position(z.type, dim) >= 0) continue;
        const std::vector<Loop> found = loops(dim, lx.extents[d]);
        add(summed, found);
        product = product && position(y.type, dim) >= 0;
        add(k, found);
    }
    for (size_t d = 0; d < y.type.dims.size(); ++d) {
        const int dim = y.type.dims[d];
        if (position(z.type, dim) >= 0 || position(x.type, dim) >= 0) continue;
        add(summed, loops(dim, ly.extents[d]));
        product = false;
    }
    if (lz.size == 0) return;
    batch = merged(batch);
    m = merged(m);
    n = merged(n);
    k = merged(k);
    // An outer loop over m or n that does not merge becomes a batch: its stride in the other operand is zero.
    for (std::vector<Loop>* group : {&m, &n}) {
        while (group->size() > 1) {
            batch.insert(batch.begin(), group->front());
            group->erase(group->begin());
        }
        if (group->empty()) group->push_back({1, 0, 0, 0});
    }
    if (k.empty()) k.push_back({1, 0, 0, 0});
    product = product && k.size() == 1 && k[0].extent > 0;

    with_float(x.type.dtype, [&](auto t) {
        using T = decltype(t);
        if (product && matrix_product(device, queue, batch, m[0], n[0], k[0], as<T>(x.data), as<T>(y.data), as<T>(z.data)))
            return;
        Walk<3> over;
        for (const Loop& l : merged(kept)) add_loop(over, l);
        Walk<2> along;
        for (const Loop& l : merged(summed)) add_loop(along, l);
        launch(kernel::einsum<T>, lz.size, device.stream(queue), as<T>(x.data), as<T>(y.data), as<T>(z.data), over, along,
               lz.size, along.size());
    });
}

}  // namespace ithaca
